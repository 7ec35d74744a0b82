"""Which modules an adapter_config.json says are adapted, by PEFT's rules for their names."""

from __future__ import annotations

import dataclasses
import re

from model.config import ModelConfig
from model.config_reader import ConfigReader
from model.errors import AdapterError
from model.lora_adapter import MODULES

ALL_LINEAR = "all-linear"
EMBEDDINGS = ("model.embed_tokens", "lm_head")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """`modules` and `excluded` are a regular expression for a whole name, or endings of names.

    With endings, `layers` (empty: all) bounds the layers, whose index follows one of `layer_lists` (empty: any) in a
    name; a module that is listed by its whole name is a target whatever its layer.
    """

    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int]
    layer_lists: tuple[str, ...]

    def resolve(self, config: ModelConfig) -> set[tuple[int, str]]:
        """The targets as (layer, module).

        Raises:
            AdapterError: embeddings or head are targets, or a listed module is none of this model's.
        """
        names = {
            module_name(layer, module): (layer, module)
            for layer in range(config.num_hidden_layers)
            for module in MODULES
        }
        self._check_known([*names, *EMBEDDINGS])
        for name in EMBEDDINGS:
            if self.modules != ALL_LINEAR and self._has(name):
                raise AdapterError(f"target_modules {self._said} takes in {name}, whose adapters are not supported.")
        return {place for name, place in names.items() if self._has(name)}

    @property
    def _said(self) -> object:
        return self.modules if isinstance(self.modules, str) else sorted(self.modules)

    def _check_known(self, names: list[str]) -> None:
        for module in () if isinstance(self.modules, str) else self.modules:
            if not any(_ends(name, (module,)) for name in names):
                raise AdapterError(f"target_modules names {module!r}, which this model does not have.")

    def _has(self, name: str) -> bool:
        if _fits(name, self.excluded):
            return False
        if isinstance(self.modules, str):
            return self.modules == ALL_LINEAR or re.fullmatch(self.modules, name) is not None
        if name in self.modules:
            return True
        return _ends(name, self.modules) and (not self.layers or self._layer_index(name) in self.layers)

    def _layer_index(self, name: str) -> int | None:
        """The number after the first list of layers in a name."""
        for layer_list in self.layer_lists or (r"[^.]*",):
            start = r".*?\." if not self.layer_lists else r"(?:^|.*?\.)"
            found = re.match(rf"{start}{layer_list}\.(?P<index>\d+)\.", name)
            if found:
                return int(found["index"])
        return None


def module_name(layer: int, module: str) -> str:
    """The name that transformers gives one of MODULES in a Cohere model."""
    return f"model.layers.{layer}.{parent_of(module)}.{module}"


def parent_of(module: str) -> str:
    """The part of a layer that one of MODULES belongs to."""
    return "mlp" if module in MLP_MODULES else "self_attn"


def read_targets(reader: ConfigReader) -> Targets:
    """From an adapter_config.json; raises AdapterError for values that PEFT would not take either."""
    modules, excluded = _names(reader, "target_modules"), _names(reader, "exclude_modules")
    if not modules:
        raise AdapterError("target_modules is missing; it must say which modules the adapter changes.")
    if isinstance(modules, str) and modules.lower() == ALL_LINEAR:
        modules = ALL_LINEAR
    layers, layer_lists = reader.get("layers_to_transform"), _names(reader, "layers_pattern")
    if isinstance(modules, str) and (layers is not None or layer_lists):
        raise AdapterError("layers_to_transform and layers_pattern go with a list of target_modules only.")
    indices = [] if layers is None else layers if isinstance(layers, list) else [layers]
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise AdapterError(f"layers_to_transform must be layer indices, not {index!r}.")
    if layer_lists and layers is None:
        raise AdapterError("layers_pattern is given without layers_to_transform.")
    for key, value in (("target_modules", modules), ("exclude_modules", excluded)):
        if isinstance(value, str):
            check_expression(key, value)
    lists = (layer_lists,) if isinstance(layer_lists, str) else layer_lists
    for pattern in lists:
        check_expression("layers_pattern", pattern)
    return Targets(modules, excluded, frozenset(indices), lists)


def check_expression(key: str, pattern: str) -> None:
    """Raises AdapterError where a regular expression of `key` has no meaning."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{key} has {pattern!r}, which is no regular expression: {error}.") from None


def _names(reader: ConfigReader, key: str) -> str | tuple[str, ...]:
    value = reader.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{key} must be a string or a list of strings, not {value!r}.")
    return tuple(value)


def _fits(name: str, modules: str | tuple[str, ...]) -> bool:
    if isinstance(modules, str):
        return bool(modules) and re.fullmatch(modules, name) is not None
    return _ends(name, modules)


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    """Whether a name is one of the endings, or ends with one after a dot."""
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)
