"""The exceptions of this package."""


class ModelError(Exception):
    """A checkpoint, configuration or option that cannot be served; the text names it and what would help."""


class AdapterError(ModelError):
    """An adapter folder that cannot be applied exactly; the text names the tensor or key and the reason."""
