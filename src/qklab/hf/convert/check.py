"""What `convert` refuses, each in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.hf.convert.attention import ConvertedAttention
from qklab.hf.convert.record import MERGES, TRAINABLE, Conversion, find_conversion
from qklab.hf.families import text_config
from qklab.hf.layout import ConvertibleFamily
from qklab.schema import suggest_name

GROWING_ROPE = ("dynamic", "longrope")


def read_coupling(given: CouplingSpec | str | Mapping[str, Any] | None) -> CouplingSpec | None:
    if given is None or isinstance(given, CouplingSpec):
        return given
    if isinstance(given, Mapping):
        return CouplingSpec.from_dict({"init": "identity", **given})
    if given not in register.coupling:
        known, close = ", ".join(map(repr, register.coupling)), suggest_name(given, register.coupling)
        raise ValueError(f"coupling must be a CouplingSpec or one of {known}{close}, but {given!r} came.")
    return CouplingSpec(kind=given, init="identity")


def read_merge(merge: Any, kv_heads: int | None) -> Any:
    if kv_heads is None and merge is not None:
        raise ValueError(f"merge={merge!r} says how to merge key/value heads; say with kv_heads= how many are to stay.")
    if merge is not None and merge not in MERGES:
        raise ValueError(f"merge must be one of {', '.join(map(repr, MERGES))}, but {merge!r} came.")
    return None if kv_heads is None else merge or "least-squares"


def refuse_converted(model: PreTrainedModel, family: ConvertibleFamily) -> None:
    layers = list(family.layers(model).values())
    done = sum(isinstance(layer, ConvertedAttention) for layer in layers)
    conversion = find_conversion(model)
    if done not in (0, len(layers)) or (done and conversion is None):
        raise ValueError(
            f"{done} of the {len(layers)} attention layers of this model are converted; it was left half-way, so load "
            "the original again and convert it in one call."
        )
    if done and conversion is not None:
        raise ValueError(
            f"this model is already converted ({conversion.name}); revert it first, or ask for everything in one call."
        )


def refuse_unfit_model(model: PreTrainedModel, family: ConvertibleFamily, conversion: Conversion) -> None:
    config = text_config(model)
    layers = family.layers(model)
    if not layers:
        raise ValueError(f"no {family.attention_class.__name__} layers were found in this {type(model).__name__}.")
    if getattr(config, "quantization_config", None) is not None or getattr(model, "is_quantized", False):
        raise ValueError("a quantised model cannot be converted; load it without quantization_config and convert that.")
    for option, why in family.list_refusals(next(iter(layers.values()))).items():
        if getattr(conversion, option) is not None:
            raise ValueError(f"{family.title} {why}; leave {option} out.")
    for name, layer in layers.items():
        if "forward" in layer.__dict__:
            raise ValueError(
                f"{name} has a forward of its own instead of its class's, as device_map's hooks give it; load the "
                "model on one device, convert it, and spread it afterwards."
            )
        for part in family.projections:
            module = getattr(layer, part, None)
            if module is not None and type(module) not in (nn.Linear, Conv1D):
                raise ValueError(
                    f"{name}.{part} is a {type(module).__name__}, not a plain linear layer; convert before quantising "
                    "or attaching adapters."
                )
    if getattr(config, "add_cross_attention", False):
        raise ValueError("a model with cross-attention cannot be converted; only plain decoders can.")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn is not supported here; load with reorder_and_upcast_attn=False.")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in [rope, *rope.values()] if isinstance(part, Mapping)}
    if conversion.share and kinds & set(GROWING_ROPE):
        raise ValueError(
            f"share cannot go with rope_type {', '.join(sorted(kinds & set(GROWING_ROPE)))!r}: its angles change with "
            "the length, and the cached keys are turned when they are read."
        )
    meta = any(parameter.is_meta for layer in layers.values() for parameter in layer.parameters())
    if meta and (conversion.overwrites or conversion.norm):
        raise ValueError("share, norm and kv_heads need the weights, but this model has none yet (meta device).")
    counts = {family.count_kv_heads(layer) for layer in layers.values()}
    if conversion.kv_heads is not None and len(counts) > 1:
        found = ", ".join(map(str, sorted(counts)))
        raise ValueError(
            f"layers of this model differ in their number of key/value heads ({found}), so they cannot be merged to "
            "one number; leave kv_heads out."
        )
    G = counts.pop()
    if conversion.kv_heads is not None and (G % conversion.kv_heads or conversion.kv_heads == G):
        fewer = [n for n in range(1, G) if G % n == 0]
        raise ValueError(
            f"kv_heads must divide the model's {G} key/value heads and be fewer "
            f"({', '.join(map(str, fewer)) or 'none are'}), but {conversion.kv_heads} came."
        )


def check_options(conversion: Conversion, calibration: object, weight: float, trainable: object) -> None:
    if not (conversion.structural or conversion.overwrites):
        raise ValueError("nothing was asked for; give coupling=, share=, norm= or kv_heads=.")
    if calibration is not None and not (conversion.overwrites or conversion.norm):
        raise ValueError("calibration is for what share, norm and kv_heads fit; nothing is fitted here: leave it out.")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1:
        raise ValueError(f"weight must lie between 0 and 1, the ends excluded, but {weight!r} came.")
    if trainable is not None and trainable not in TRAINABLE:
        known = ", ".join(map(repr, TRAINABLE))
        raise ValueError(f"trainable must be one of {known} or None, but {trainable!r} came.")
    if trainable == "coupling" and conversion.coupling is None:
        raise ValueError("trainable='coupling' needs a coupling to train; give coupling=.")
    if trainable == "inserted" and conversion.coupling is None and conversion.norm is None:
        raise ValueError("trainable='inserted' needs something inserted; give coupling= or norm=.")
