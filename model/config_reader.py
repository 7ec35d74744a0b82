"""Typed reading of one JSON object of a config.json, where null means missing."""

from __future__ import annotations

from typing import Any, overload

from model.errors import ModelError


class ConfigReader:
    """Reads keys with their defaults; every error names the key, with `prefix` for a nested object."""

    def __init__(self, raw: dict[str, Any], prefix: str = "") -> None:
        """Wraps `raw`; `prefix` is such as "rope_parameters."."""
        self._raw = raw
        self._prefix = prefix

    def get(self, key: str) -> Any:  # noqa: ANN401
        """The value as written, None where it is missing or null."""
        return self._raw.get(key)

    @overload
    def integer(self, key: str, default: int) -> int: ...
    @overload
    def integer(self, key: str, default: None) -> int | None: ...
    def integer(self, key: str, default: int | None) -> int | None:
        """A whole number of at least 1."""
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._prefix}{key} must be a whole number of at least 1, not {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self._prefix}{key} must be a number above 0, not {value!r}.")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{key} must be true or false, not {value!r}.")
        return value

    def text(self, key: str, default: str | None) -> str | None:
        """A string."""
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self._prefix}{key} must be a string, not {value!r}.")
        return value

    def refuse_unless(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raises ModelError where the key is given with a value that is not in `allowed`."""
        value = self._raw.get(key)
        if value is not None and value not in allowed:
            hint = f"only {allowed[0]!r} is" if allowed else "remove it or use an unquantised checkpoint"
            raise ModelError(f"{self._prefix}{key} {value!r} is not supported; {hint}.")
