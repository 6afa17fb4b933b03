"""Families: the only place that knows how other people's models keep their attention, before and after conversion.

A family says where its attention layers keep queries, keys and values. Conversion, logit control and watching all read
that from here, so they agree on every model, converted or not. Names of existing weights stay as they are, so that
tools which find modules by name go on working.

@register.family("llama")          # the `model_type` of its configuration
class Llama(SeparateProjections):
    title = "Llama"
    attention = "transformers.models.llama.modeling_llama.LlamaAttention"
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from qklab import register
from qklab.hf.families.alike import ALIKE, REFUSED
from qklab.hf.layout import ConvertibleFamily
from qklab.schema import suggest_name

__all__ = ["ALIKE", "REFUSED", "convertible_families", "find_convertible", "find_family", "text_config"]


def convertible_families() -> dict[str, ConvertibleFamily]:
    """Model type → family, for those that can be converted."""
    return {name: kind() for name, kind in register.family.items() if issubclass(kind, ConvertibleFamily)}


def find_convertible(model_type: str) -> ConvertibleFamily:
    families = convertible_families()
    if model_type not in families:
        known = ", ".join(family.title for family in families.values())
        why = f", as {REFUSED[model_type]}" if model_type in REFUSED else suggest_name(model_type, families)
        raise ValueError(
            f"models of type {model_type!r} cannot be converted{why}; the families known here are {known}."
        )
    return families[model_type]


def find_family(model: object) -> ConvertibleFamily:
    """The family of a loaded model, or a sentence that says why it has none here."""
    if not isinstance(model, PreTrainedModel):
        known = ", ".join(family.title for family in convertible_families().values())
        raise ValueError(
            f"a loaded Transformers model was expected ({known}), but a {type(model).__name__} came; "
            "wrappers such as PEFT, DDP or a compiled model go around the model after its conversion."
        )
    return find_convertible(str(text_config(model).model_type))


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of a model's decoder of text: its own, or that of the text part of a larger model."""
    config: Any = model.config
    return config if config.model_type in register.family else config.get_text_config()
