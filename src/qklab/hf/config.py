"""QKLabConfig: a decoder's spec as Transformers keeps it, in config.json."""

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from qklab.attention.project import PROJECTIONS
from qklab.attention.spec import AttentionSpec
from qklab.hf.remote import name_loader, write_loader
from qklab.model.spec import DecoderSpec
from qklab.schema import format_value, suggest_name

# What Transformers' tools read, and what of the spec it is.
DERIVED: dict[str, Callable[[DecoderSpec], Any]] = {
    "vocab_size": lambda spec: spec.vocab,
    "hidden_size": lambda spec: spec.width,
    "intermediate_size": lambda spec: spec.hidden,
    "num_hidden_layers": lambda spec: spec.layers,
    "num_attention_heads": lambda spec: spec.pattern[0].heads,
    "num_key_value_heads": lambda spec: spec.pattern[0].kv_heads,
    "head_dim": lambda spec: spec.pattern[0].head_width,
    "max_position_embeddings": lambda spec: spec.context,
    "tie_word_embeddings": lambda spec: spec.tied,
}
# Those that Transformers changes itself: resizing the vocabulary, untying the head.
CHANGED = {"vocab_size": "vocab", "tie_word_embeddings": "tied"}
# Keys of the base class that are neither its fields nor generation settings.
BASE_KEYS = {
    "model_type",
    "num_labels",
    "torch_dtype",
    "name_or_path",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "tokenizer_class",
    "auto_map",
}


class QKLabConfig(PreTrainedConfig):
    """The configuration of a qklab decoder: `spec`, a `DecoderSpec` or its dict, says everything about the model.

    `vocab_size`, `hidden_size` and the like follow from it and are written to config.json for tools that look for
    them there; given together with a spec they must agree with it. Unknown keys are errors.
    """

    model_type: ClassVar[str] = "qklab"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    has_no_defaults_at_init: ClassVar[bool] = True

    spec: Any = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_other_models(kwargs.get("model_type"), kwargs.get("quantization_config"))
        refuse_unknown(type(self), kwargs)
        if self.spec is None:
            raise ValueError(
                "QKLabConfig needs spec, a DecoderSpec or its dict, e.g. QKLabConfig(spec=qklab.recipe('nano'))."
            )
        spec = self.spec if isinstance(self.spec, DecoderSpec) else DecoderSpec.from_dict(check_mapping(self.spec))
        for name, value in DERIVED.items():
            given = self.__dict__.get(name)
            if given is not None and given != value(spec):
                raise ValueError(
                    f"{name}={format_value(given)} came beside a spec in which it is {format_value(value(spec))}; "
                    f"leave {name} out or change the spec."
                )
        self.set_spec(spec)
        super().__post_init__(**kwargs)

    @property
    def decoder_spec(self) -> DecoderSpec:
        return DecoderSpec.from_dict(self.spec)

    @property
    def lora_targets(self) -> list[str]:
        """Names of the linear layers around the queries, keys, values and outputs of this model's attention, as PEFT's
        `target_modules`.

        A latent's up-projections are not among them: decoding multiplies their weights into the queries and never
        calls the layers, so an adapter on them would be left out.
        """
        found = [name for spec in self.decoder_spec.pattern for name in name_projections(spec)]
        return [*dict.fromkeys(found), "output"]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: Transformers would copy this class's source beside every config.json."""

    def to_diff_dict(self) -> dict[str, Any]:
        return super().to_diff_dict() | name_loader(QKLabConfig)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        write_loader(save_directory, QKLabConfig)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def set_spec(self, spec: DecoderSpec) -> None:
        """Take this spec, and everything that follows from it."""
        values = {"spec": spec.to_dict()} | {name: value(spec) for name, value in DERIVED.items()}
        self.__dict__.update(values)

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in DERIVED or not isinstance(self.__dict__.get("spec"), dict) or "_name_or_path" not in vars(self):
            super().__setattr__(key, value)
        elif key in CHANGED:
            self.set_spec(self.decoder_spec.replace(**{CHANGED[key]: value}))
        elif value != self.__dict__[key]:
            raise ValueError(
                f"{key} follows from the spec and is {format_value(self.__dict__[key])} there, but "
                f"{format_value(value)} came; make a QKLabConfig from another spec."
            )


def name_projections(spec: AttentionSpec) -> list[str]:
    if spec.latent is not None:
        rope = ["rope_query", "rope_key"] if spec.latent.rope_width else []
        return ["down_query", "up_query", "down_key_value", *rope]
    kind = PROJECTIONS[spec.share]
    return [*["query"] * kind.own_query, "key", *["value"] * kind.own_value]


def check_mapping(spec: Any) -> Mapping[str, Any]:
    if not isinstance(spec, Mapping):
        raise ValueError(f"spec must be a DecoderSpec or its dict, but {format_value(spec)} came.")
    return spec


def refuse_other_models(model_type: Any, quantization: Any) -> None:
    if model_type not in (None, QKLabConfig.model_type):
        raise ValueError(
            f"this is the configuration of a {model_type!r} model, and QKLabConfig reads 'qklab' ones; load it with "
            "transformers.AutoConfig, and see qklab.hf.convert for changing a model of another family in place."
        )
    if quantization is not None:
        raise ValueError(QUANTISED)


QUANTISED = (
    "a quantised qklab model cannot be loaded, since decoding reads the weights of some layers themselves; leave "
    "quantization_config out and use dtype=torch.bfloat16 to halve the memory."
)


def refuse_unknown(kind: type[QKLabConfig], keys: Mapping[str, Any]) -> None:
    known = {*kind.__dataclass_fields__, *BASE_KEYS}
    settings = GenerationConfig().to_dict().keys()  # Transformers drops these itself
    for key in keys:
        if key in known or key in settings or key.startswith("_"):
            continue
        inside = key in DecoderSpec.__dataclass_fields__
        hint = " (it belongs to spec)" if inside else suggest_name(key, known)
        raise ValueError(f"QKLabConfig has no field {format_value(key)}{hint}.")
