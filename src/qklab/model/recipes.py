"""Model sizes as functions: each returns a complete DecoderSpec, with the attention choices handed in.

recipe("60m", share="k=v", kv_heads=2)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from qklab.attention.spec import AttentionSpec
from qklab.model.spec import DecoderSpec
from qklab.schema import SpecError, format_value, suggest_name

GPT2_VOCAB = 50_304  # GPT-2's 50,257 entries, rounded up to a multiple of 64


def modern(
    layers: int, width: int, mlp: Literal["swiglu", "gelu"], vocab: int, context: int, attention: dict[str, Any]
) -> DecoderSpec:
    """Bias-free, tied, RMSNorm, RoPE, heads of 64: the family of the coupling papers and of our speed benchmarks."""
    chosen: dict[str, Any] = {"heads": width // 64} | attention
    spec = AttentionSpec.from_dict({"width": width} | chosen)
    return DecoderSpec(vocab=vocab, width=width, layers=layers, attention=spec, mlp=mlp, context=context)


def classic(layers: int, width: int, vocab: int, context: int, attention: dict[str, Any]) -> DecoderSpec:
    """GPT-2's family, as in arXiv 2606.04032: LayerNorm, biases, GELU, learned positions, tied."""
    chosen: dict[str, Any] = {"heads": width // 64, "position": "learned", "bias": True} | attention
    spec = AttentionSpec.from_dict({"width": width} | chosen)
    return DecoderSpec(
        vocab=vocab, width=width, layers=layers, attention=spec, mlp="gelu", norm="layer", bias=True, context=context
    )


def nano(*, vocab: int = 4096, context: int = 256, **attention: Any) -> DecoderSpec:
    """4 × 128, SwiGLU 4d, 1.6M parameters: trains on a laptop."""
    chosen = {"heads": 4} | attention
    return modern(4, 128, "swiglu", vocab, context, chosen)


def micro(*, vocab: int = 8192, context: int = 512, **attention: Any) -> DecoderSpec:
    """6 × 256, GELU 4d, 6.8M parameters: the second rung of the ladder from nano to 51m."""
    return modern(6, 256, "gelu", vocab, context, attention)


def mini(*, vocab: int = 16_384, context: int = 512, **attention: Any) -> DecoderSpec:
    """6 × 384, GELU 4d, 16.9M parameters."""
    return modern(6, 384, "gelu", vocab, context, attention)


def size_34m(*, vocab: int = 16_384, context: int = 512, **attention: Any) -> DecoderSpec:
    """8 × 512, GELU 4d, 33.6M parameters: 51m's layers, with a smaller vocabulary."""
    return modern(8, 512, "gelu", vocab, context, attention)


def size_60m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """8 × 512, SwiGLU 4d, 59.3M parameters (arXiv 2604.01683's 60M)."""
    return modern(8, 512, "swiglu", vocab, context, attention)


def size_150m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """12 × 768, SwiGLU 4d, 151.9M parameters (arXiv 2604.01683's 150M)."""
    return modern(12, 768, "swiglu", vocab, context, attention)


def size_455m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """24 × 1024, SwiGLU 4d, 454M parameters (arXiv 2604.01683's 455M)."""
    return modern(24, 1024, "swiglu", vocab, context, attention)


def size_350m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """24 × 1024, GELU 4d, 353.6M parameters (arXiv 2604.01683's 350M)."""
    return modern(24, 1024, "gelu", vocab, context, attention)


def size_51m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """8 × 512, GELU 4d, 50.9M parameters: the speed benchmarks' small model."""
    return modern(8, 512, "gelu", vocab, context, attention)


def size_124m(*, vocab: int = GPT2_VOCAB, context: int = 1024, **attention: Any) -> DecoderSpec:
    """12 × 768, GELU 4d, 123.6M parameters: the speed benchmarks' GPT-2-sized model."""
    return modern(12, 768, "gelu", vocab, context, attention)


def size_300m(*, vocab: int = GPT2_VOCAB, context: int = 2048, **attention: Any) -> DecoderSpec:
    """20 × 1024, 16 heads (arXiv 2606.04032's 300M)."""
    return classic(20, 1024, vocab, context, attention)


def size_1200m(*, vocab: int = GPT2_VOCAB, context: int = 2048, **attention: Any) -> DecoderSpec:
    """22 × 2048, 32 heads (arXiv 2606.04032's 1.2B)."""
    return classic(22, 2048, vocab, context, attention)


RECIPES: dict[str, Callable[..., DecoderSpec]] = {
    "nano": nano,
    "micro": micro,
    "mini": mini,
    "34m": size_34m,
    "51m": size_51m,
    "60m": size_60m,
    "124m": size_124m,
    "150m": size_150m,
    "300m": size_300m,
    "350m": size_350m,
    "455m": size_455m,
    "1.2b": size_1200m,
}


# choices of the model, not of its attention; where both have a field of a name, it means attention's
DECODER_CHOICES = DecoderSpec.__dataclass_fields__.keys() - AttentionSpec.__dataclass_fields__.keys() - {"attention"}


def recipe(name: str, **choices: Any) -> DecoderSpec:
    """The named size with these attention choices; `vocab`, `context`, `layers`, `mlp`, `mlp_ratio` and `tied` may be
    changed too.

    `attention`, a list of further choices, makes a pattern of layers that repeats:
    recipe("nano", kv_heads=2, attention=[{}, {}, {"share": "k=v"}]).
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}{suggest_name(name, RECIPES)}, but {name!r} came.")
    if "width" in choices:
        raise SpecError(f"width is what the recipe {name} sets; build a DecoderSpec for another one.", "width")
    decoder = {key: choices.pop(key) for key in DECODER_CHOICES & choices.keys()}
    pattern = choices.pop("attention", [{}])
    if not isinstance(pattern, list | tuple) or not pattern or not all(isinstance(one, Mapping) for one in pattern):
        raise SpecError(
            f"attention must be a list of choices for each layer of a pattern, but {format_value(pattern)} came.",
            "attention",
        )
    specs = [RECIPES[name](**choices | one) for one in pattern]
    attention = [one for spec in specs for one in spec.pattern]
    return specs[0].replace(**decoder, attention=attention)
