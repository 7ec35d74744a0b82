"""The one exception of this package."""


class ModelError(Exception):
    """A checkpoint, configuration or option that cannot be served; the text names it and what would help."""
