"""Adapters: what was inserted into a model, coupling and norm, saved and loaded without the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from qklab.hf.convert.apply import Unconverted, convert, freeze_parameters, list_inserted_parameters
from qklab.hf.convert.check import check_options
from qklab.hf.convert.record import Conversion, ConversionReport, find_conversion, read_record
from qklab.hf.families import find_family, text_config
from qklab.runs.files import write_json, write_tensors

RECORD, WEIGHTS = "qklab_adapter.json", "qklab_adapter.safetensors"


def describe_adapted_shape(model: PreTrainedModel) -> dict[str, Any]:
    """What an adapter must fit."""
    family, config = find_family(model), text_config(model)
    layers = list(family.layers(model).values())
    return {
        "layers": len(layers),
        "heads": config.num_attention_heads,
        "kv_heads": family.count_kv_heads(layers[0]),
        "head_width": family.width(layers[0]),
    }


def save_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write what was inserted, coupling and norm, without the model: qklab_adapter.safetensors and .json."""
    conversion = find_conversion(model)
    inserted = list_inserted_parameters(model)
    if conversion is None or not inserted:
        raise ValueError("this model has no inserted coupling or norm to save; convert it with coupling= or norm=.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    base = len(find_base_prefix(model))
    write_tensors(path / WEIGHTS, {name[base:]: value.detach().cpu().contiguous() for name, value in inserted})
    write_json(path / RECORD, {"conversion": conversion.to_record(), **describe_adapted_shape(model)}, sort_keys=True)


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
    wanted, have = read_record(record["conversion"]), find_conversion(model)
    if wanted.family != text_config(model).model_type:
        raise ValueError(f"this adapter is for {wanted.layout.title}, but the model is {find_family(model).title}.")
    refuse_other_weights(wanted, have)
    check_adapter_shape(model, record)
    check_options(wanted, None, 0.5, trainable)
    tensors = load_file(path / WEIGHTS)
    report = None
    if have is None or not have.structural:
        report = convert(
            model, coupling=wanted.coupling, norm=wanted.norm, norm_eps=wanted.norm_eps, trainable=trainable
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


def refuse_other_weights(wanted: Conversion, have: Conversion | None) -> None:
    """An adapter belongs to the weights it was trained with: those of the family, or those a conversion left."""
    if have is None or not have.structural:
        merged = (None, None) if have is None else (have.kv_heads, have.merge)
        if wanted.share or (wanted.kv_heads is not None and merged != (wanted.kv_heads, wanted.merge)):
            raise ValueError(
                f"this adapter belongs to a model whose weights were replaced ({wanted.name}); convert or load that "
                "model first."
            )
    elif have != wanted:
        raise ValueError(f"this adapter is of {wanted.name}, but the model is converted to {have.name}.")


def check_adapter_shape(model: PreTrainedModel, record: dict[str, Any]) -> None:
    for name, value in describe_adapted_shape(model).items():
        if record.get(name) != value:
            raise ValueError(f"the adapter is for {name}={record.get(name)}, but this model has {name}={value}.")


def find_base_prefix(model: PreTrainedModel) -> str:
    """The part of parameter names that comes from the head around the base model, so that adapters fit any head."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."
