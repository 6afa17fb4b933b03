"""Saving and loading: a converted model as a whole, and what was inserted alone (an adapter).

A folder with a converted model has a config.json of the type "qklab-converted", with the family's configuration under
"base" and the conversion under "qklab". `load`, or an Auto class once `qklab.hf` is imported, gives the model back; a
plain class of the family stops at the configuration instead of loading weights that mean something else.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from qklab.hf.convert.apply import Unconverted, convert, freeze_parameters, list_inserted_parameters
from qklab.hf.convert.check import check_options
from qklab.hf.convert.layers import find_rotary, insert_stages, reshape_projections
from qklab.hf.convert.record import Conversion, ConversionReport, find_conversion
from qklab.hf.families import find_family
from qklab.runs.files import write_json, write_tensors

CONVERTED = "qklab-converted"
STOP = "this folder holds a model converted by qklab: import qklab.hf and load it by load_converted or an Auto class"
RECORD, WEIGHTS = "qklab_adapter.json", "qklab_adapter.safetensors"


class SavesConverted:
    """A model that writes the configuration of a converted one when it is saved."""

    config: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As Transformers saves, with a config.json that only a loader of converted models accepts."""
        if kwargs.get("push_to_hub"):
            raise ValueError("a converted model is saved to a folder first; push that folder afterwards.")
        cast(Any, super()).save_pretrained(save_directory, *args, **kwargs)
        path = Path(save_directory) / "config.json"
        if kwargs.get("is_main_process", args[0] if args else True) and path.exists():
            write_json(path, wrap_config(json.loads(path.read_text())), sort_keys=True)


def wrap_config(config: dict[str, Any]) -> dict[str, Any]:
    """A family's configuration as that of a converted model."""
    if config.get("model_type") == CONVERTED:
        return config
    record = config.pop("qklab")
    config.pop("model_type")
    return {
        "architectures": config.get("architectures"),
        "base": config,
        "model_type": CONVERTED,
        "qklab": record,
        "vocab_size": STOP,
    }


@functools.cache
def saving_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`cls` with our `save_pretrained`. It keeps its name, by which Transformers finds losses and output recorders."""
    if issubclass(cls, SavesConverted):
        return cls
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return cast(Any, type(cls.__name__, (SavesConverted, cls), members))


def plain_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class that `saving_class` was given."""
    return cast(Any, cls.__mro__[2]) if issubclass(cls, SavesConverted) else cls


class ConvertedConfig(PreTrainedConfig):
    """The configuration of a saved converted model: `base` is its family's, `qklab` what was done to it."""

    model_type = CONVERTED


class Loader:
    """Stands for every converted model where an Auto class looks for a class; `classes` maps a family's configuration
    to the class that this Auto class gives for it."""

    config_class = ConvertedConfig
    classes: ClassVar[Any] = MODEL_MAPPING

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any) -> Any:
        return load_converted_as(folder, cls.classes, kwargs)


class CausalLMLoader(Loader):
    classes = MODEL_FOR_CAUSAL_LM_MAPPING


class SequenceClassificationLoader(Loader):
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def register_converted_classes() -> None:
    """Let the Auto classes load converted models."""
    AutoConfig.register(CONVERTED, ConvertedConfig, exist_ok=True)
    pairs = (
        (AutoModel, Loader),
        (AutoModelForCausalLM, CausalLMLoader),
        (AutoModelForSequenceClassification, SequenceClassificationLoader),
    )
    for auto, loader in pairs:
        auto.register(ConvertedConfig, cast(Any, loader), exist_ok=True)


def load_converted(folder: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """The converted model that `model.save_pretrained(folder)` wrote. `kwargs` are those of `from_pretrained`."""
    return load_converted_as(folder, None, kwargs)


def load_converted_as(folder: str | os.PathLike[str], classes: Any, kwargs: dict[str, Any]) -> PreTrainedModel:
    """As the class it was saved from, or the one that `classes` has for its family."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    saved = json.loads(path.read_text())
    record = saved.get("qklab")
    if record is None:
        raise ValueError(f"{folder} holds no converted model; load it with Transformers and convert it.")
    conversion = Conversion.from_dict(record)
    family = conversion.layout
    cls = getattr(family.source, str(conversion.model), None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"{folder} names the class {conversion.model!r}, which {family.title} does not have.")
    if saved.get("model_type") != CONVERTED:
        return cls.from_pretrained(folder, **kwargs)
    if kwargs.get("quantization_config") is not None:
        raise ValueError("a converted model cannot be loaded quantised; load it without quantization_config.")
    config_class = cast(Any, cls.config_class)
    if classes is not None:
        cls = classes[config_class]
    config = config_class.from_dict(
        {
            **saved["base"],
            "model_type": conversion.family,
            "qklab": conversion.replace(model=cls.__name__).to_dict(),
        }
    )
    model = loading_class(cls).from_pretrained(folder, config=config, **kwargs)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__class__ = saving_class(cls if module is model else type(module))
    return model


@functools.cache
def loading_class(cls: type[PreTrainedModel]) -> Any:
    """`cls` that gives itself the shape its configuration's conversion asks for before weights are loaded."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        conversion = Conversion.from_dict(config.qklab)
        rotary = find_rotary(self)
        for name, layer in conversion.layout.layers(self).items():
            reshape_projections(layer, conversion)
            insert_stages(name, layer, conversion, conversion.layout.kv_heads(config), rotary, seed=0)

    members = {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


def describe_adapter(model: PreTrainedModel) -> dict[str, Any]:
    """What an adapter must fit: the conversion and the model's shape."""
    conversion = find_conversion(model)
    if conversion is None or not list_inserted_parameters(model):
        raise ValueError("this model has no inserted coupling or norm to save; convert it with coupling= or norm=.")
    family = conversion.layout
    layers = family.layers(model)
    return {
        "conversion": {**conversion.to_dict(), "model": None},
        "layers": len(layers),
        "heads": model.config.num_attention_heads,
        "kv_heads": family.kv_heads(model.config),
        "head_width": family.width(next(iter(layers.values()))),
    }


def save_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write what was inserted, coupling and norm, without the model: qklab_adapter.safetensors and .json."""
    record = describe_adapter(model)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    base = len(find_base_prefix(model))
    tensors = {name[base:]: value.detach().cpu().contiguous() for name, value in list_inserted_parameters(model)}
    write_tensors(path / WEIGHTS, tensors)
    write_json(path / RECORD, record, sort_keys=True)


def load_adapter(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, trainable: Any = None
) -> ConversionReport | None:
    """Insert what `save_adapter` wrote into a model of the same shape, converting it where it is not yet converted.

    An adapter of a model whose weights were replaced as well (share, kv_heads) fits only a model converted that way.
    """
    path = Path(folder)
    if not (path / RECORD).is_file() or not (path / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no adapter; it needs {RECORD} and {WEIGHTS}, which save_adapter writes.")
    record = json.loads((path / RECORD).read_text())
    wanted = Conversion.from_dict(record["conversion"])
    family = find_family(model)
    report = None
    if wanted.family != model.config.model_type:
        raise ValueError(f"this adapter is for {wanted.layout.title}, but the model is {family.title}.")
    check_adapter_shape(model, record)
    check_options(wanted, None, 0.5, trainable)
    tensors = load_file(path / WEIGHTS)
    if find_conversion(model) is None:
        if wanted.overwrites:
            raise ValueError(
                f"this adapter belongs to a model whose weights were replaced ({wanted.name}); convert or load that "
                "model first."
            )
        report = convert(
            model, coupling=wanted.coupling, norm=wanted.norm, norm_eps=wanted.norm_eps, trainable=trainable
        )
    elif describe_adapter(model) != record:
        have = find_conversion(model)
        raise ValueError(
            f"this adapter is of {wanted.name}, but the model is converted to {have.name if have else 'nothing'}."
        )
    else:
        model.__dict__.setdefault("qklab_before", Unconverted()).frozen += freeze_parameters(model, trainable)
    base = len(find_base_prefix(model))
    own = {name[base:]: value for name, value in list_inserted_parameters(model)}
    if own.keys() != tensors.keys():
        raise ValueError(f"the adapter in {folder} does not have the parameters that its record promises.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    return report


def check_adapter_shape(model: PreTrainedModel, record: dict[str, Any]) -> None:
    family = find_family(model)
    layers = family.layers(model)
    have = {
        "layers": len(layers),
        "heads": model.config.num_attention_heads,
        "kv_heads": family.kv_heads(model.config),
        "head_width": family.width(next(iter(layers.values()))),
    }
    for name, value in have.items():
        if record.get(name) != value:
            raise ValueError(f"the adapter is for {name}={record.get(name)}, but this model has {name}={value}.")


def find_base_prefix(model: PreTrainedModel) -> str:
    """The part of parameter names that comes from the head around the base model, so that adapters fit any head."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."
