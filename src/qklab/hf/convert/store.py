"""Saving and loading converted models, by Transformers' own doors.

A converted model keeps its classes; its configuration gets a subclass of its family's, which writes config.json with
the type "qklab-converted", the record of the conversion under "qklab", and a sentence where a number belongs. So
`load_converted`, and every Auto class once `qklab.hf` is imported, gives the model back, while a plain class of the
family stops at that sentence instead of loading weights that mean something else. The same holds for a converted part
of a larger model, whose configuration stands inside the other's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qklab.hf.convert.attention import ConvertedAttention
from qklab.hf.convert.layers import find_rotary, insert_stages, reshape_projections
from qklab.hf.convert.record import read_record
from qklab.hf.families import find_convertible
from qklab.hf.paged import hold_one_tensor
from qklab.hf.remote import name_loader, write_loader

CONVERTED = "qklab-converted"
STOP_FIELD, KEPT = "initializer_range", "qklab_initializer_range"  # a number that all configurations have and check
NOT_THE_FAMILYS = (STOP_FIELD, KEPT, "model_type", "auto_map")
STOP = "this folder holds a model converted by qklab: load it by qklab.hf.load_converted"
AUTO_MAPPINGS = [found for found in vars(modeling_auto).values() if isinstance(found, type(MODEL_MAPPING))]


class ConvertedConfig(PreTrainedConfig):
    """What AutoConfig finds under "qklab-converted"; it makes the configuration of the family instead."""

    model_type = CONVERTED

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: Transformers would copy this class's source beside every config.json."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        base = CONFIG_MAPPING[read_record(config_dict.get("qklab")).family]
        open_auto_classes(base)
        return converted_config_class(base).from_dict(config_dict, **kwargs)


class WritesConversion:
    """Of a configuration: what makes it that of a converted model, or of one with a converted part."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found, unused = cast(Any, super()).get_config_dict(*args, **kwargs)
        if found.get("model_type") == CONVERTED:
            found = {**found, "model_type": cast(Any, cls).model_type}
        return found, unused

    def to_dict(self) -> dict[str, Any]:
        found = cast(Any, super()).to_dict()
        return found | ({STOP_FIELD: STOP, KEPT: found.get(STOP_FIELD)} if found.get("qklab") else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """As it is written: `to_dict` keeps the family's type, by which PEFT and others know what they have."""
        found = cast(Any, super()).to_diff_dict()
        return found | ({"model_type": CONVERTED, **name_loader(ConvertedConfig)} if found.get("qklab") else {})

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        if getattr(self, "qklab", None):
            write_loader(save_directory, ConvertedConfig)
        cast(Any, super()).save_pretrained(save_directory, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore_config, (plain_config_class(cast(Any, type(self))),), self.__dict__


@functools.cache
def converted_config_class(base: type[PreTrainedConfig]) -> Any:
    """`base` for converted models, under its own name, by which Transformers finds what belongs to it."""

    def build(self: Any, **values: Any) -> None:
        parts = {name: part for name, part in values.items() if is_converted_dict(part)}
        values |= {name: remove_stop(part) for name, part in parts.items()}
        base.__init__(self, **remove_stop(values))
        for name in parts:
            mark_converted(getattr(self, name))

    return type(base.__name__, (WritesConversion, base), {"__init__": build, "__module__": __name__})


def plain_config_class(cls: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The class that `converted_config_class` was given, or `cls` itself."""
    return cast(Any, cls.__mro__[2]) if issubclass(cls, WritesConversion) else cls


def restore_config(base: type[PreTrainedConfig]) -> Any:
    """What copying and unpickling begin with."""
    kind = converted_config_class(base)
    return kind.__new__(kind)


def mark_converted(config: Any) -> None:
    """Let a configuration with a record be written as that of a converted model."""
    base = plain_config_class(type(config))
    open_auto_classes(base)
    config.__class__ = converted_config_class(base)


@functools.cache
def open_auto_classes(base: type[PreTrainedConfig]) -> None:
    """Let every Auto class that knows the models of a configuration build and load them converted."""
    for mapping in AUTO_MAPPINGS:
        found = mapping.get(base, None)
        if isinstance(found, type):
            mapping.register(converted_config_class(base), loading_class(cast(Any, found)), exist_ok=True)


def is_converted_dict(values: Any) -> bool:
    return isinstance(values, dict) and values.get(STOP_FIELD) == STOP


def remove_stop(values: dict[str, Any]) -> dict[str, Any]:
    if not is_converted_dict(values):
        return values
    rest = {name: value for name, value in values.items() if name not in NOT_THE_FAMILYS}
    return rest if values.get(KEPT) is None else {**rest, STOP_FIELD: values[KEPT]}


def load_converted(folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The converted model that `model.save_pretrained(folder)` wrote, here or on the hub. `kwargs` are those of
    `from_pretrained`."""
    try:
        saved, _ = PreTrainedConfig.get_config_dict(folder, **kwargs)
    except OSError:
        saved = {}
    if not saved:
        raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    records = [part["qklab"] for part in (saved, *saved.values()) if isinstance(part, dict) and "qklab" in part]
    if not records:
        raise ValueError(f"{folder} holds no converted model; load it with Transformers and convert it.")
    conversion = read_record(records[0])
    name = (saved.get("architectures") or ["none"])[0]
    cls = getattr(conversion.layout.source, name, None) or getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"{folder} names the class {name!r}, which {conversion.layout.title} does not have.")
    return (loading_class(cls) if conversion.structural else cls).from_pretrained(folder, **kwargs)


@functools.cache
def loading_class(cls: type[PreTrainedModel]) -> Any:
    """`cls` that gives itself the shape its configuration asks for before weights are loaded, and then is a `cls`."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for name, layer in list(find_unshaped_layers(self)):
            conversion = read_record(layer.config.qklab)
            hold_one_tensor(self, conversion.share is not None)
            reshape_projections(layer, conversion)
            insert_stages(name, layer, conversion, find_rotary(self, name), seed=0)

    def initialize_weights(self: Any) -> None:
        draw_missing(self)
        super(made, self).initialize_weights()

    def from_pretrained(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("quantization_config") is not None:
            raise ValueError("a converted model cannot be loaded quantised; load it without quantization_config.")
        loaded = super(made, kind).from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).__class__ = cls
        return loaded

    def from_config(kind: Any, *args: Any, **kwargs: Any) -> Any:
        model = super(made, kind)._from_config(*args, **kwargs)
        model.__class__ = cls
        return model

    members: dict[str, Any] = {
        "__init__": build,
        "initialize_weights": initialize_weights,
        "from_pretrained": classmethod(from_pretrained),
        "_from_config": classmethod(from_config),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "config_class": converted_config_class(plain_config_class(cast(Any, cls.config_class))),
    }
    made: Any = type(cls.__name__, (cls,), members)
    return made


@torch.no_grad()
def draw_missing(model: nn.Module) -> None:
    """Draw what was inserted and no checkpoint brought, which Transformers marks."""
    for layer in model.modules():
        for part in (layer.couple, layer.normalise) if isinstance(layer, ConvertedAttention) else ():
            for module in reversed(list(part.modules())) if part is not None else ():
                own = list(module.parameters(recurse=False))
                if not all(getattr(value, "_is_hf_initialized", False) for value in own):
                    cast(Any, module).reset()


def find_unshaped_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The attention layers whose configuration says that they are converted and which are not yet."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, WritesConversion) and getattr(config, "qklab", None) is not None:
            family = find_convertible(cast(Any, config).model_type)
            unshaped = isinstance(module, family.attention_class) and not isinstance(module, ConvertedAttention)
            if unshaped and family.has_keys(module):
                yield name, module


def register_converted_classes() -> None:
    """Let the Auto classes load converted models."""
    AutoConfig.register(CONVERTED, ConvertedConfig, exist_ok=True)
