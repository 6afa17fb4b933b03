"""Model sizes: each makes a complete DecoderSpec of the attention choices handed in.

recipe("60m", share="k=v", kv_heads=2)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qklab.attention.spec import AttentionSpec
from qklab.model.spec import DecoderSpec
from qklab.schema import SpecError, format_value, suggest_name

GPT2_VOCAB = 50_304  # GPT-2's 50,257 entries, rounded up to a multiple of 64


@dataclass(frozen=True)
class Recipe:
    """A size: bias-free, tied, RMSNorm, RoPE, heads of 64, the family of the coupling papers and of our speed
    benchmarks; or, if `classic`, GPT-2's as in arXiv 2606.04032: LayerNorm, biases, GELU, learned positions, tied."""

    layers: int
    width: int
    mlp: Literal["swiglu", "gelu"]
    vocab: int = GPT2_VOCAB
    context: int = 1024
    heads: int | None = None  # where they are not of 64
    classic: bool = False

    def __call__(self, *, vocab: int | None = None, context: int | None = None, **attention: Any) -> DecoderSpec:
        """The complete spec, with these attention choices."""
        chosen: dict[str, Any] = {"width": self.width, "heads": self.heads or self.width // 64}
        norm: dict[str, Any] = {"norm": "layer", "bias": True} if self.classic else {}
        chosen |= {"position": "learned", "bias": True} if self.classic else {}
        return DecoderSpec(
            vocab=self.vocab if vocab is None else vocab,
            width=self.width,
            layers=self.layers,
            attention=AttentionSpec.from_dict(chosen | attention),
            mlp=self.mlp,
            context=self.context if context is None else context,
            **norm,
        )


RECIPES: dict[str, Recipe] = {
    "nano": Recipe(4, 128, "swiglu", 4096, 256, heads=4),  # 1.6M parameters: trains on a laptop
    "micro": Recipe(6, 256, "gelu", 8192, 512),  # 6.8M, the second rung of the ladder from nano to 51m
    "mini": Recipe(6, 384, "gelu", 16_384, 512),  # 16.9M
    "34m": Recipe(8, 512, "gelu", 16_384, 512),  # 33.6M, 51m's layers with a smaller vocabulary
    "51m": Recipe(8, 512, "gelu"),  # 50.9M, the speed benchmarks' small model
    "60m": Recipe(8, 512, "swiglu"),  # 59.3M, arXiv 2604.01683's 60M
    "124m": Recipe(12, 768, "gelu"),  # 123.6M, the speed benchmarks' GPT-2-sized model
    "150m": Recipe(12, 768, "swiglu"),  # 151.9M, arXiv 2604.01683's 150M
    "300m": Recipe(20, 1024, "gelu", context=2048, classic=True),  # arXiv 2606.04032's 300M
    "350m": Recipe(24, 1024, "gelu"),  # 353.6M, arXiv 2604.01683's 350M
    "455m": Recipe(24, 1024, "swiglu"),  # 454M, arXiv 2604.01683's 455M
    "1.2b": Recipe(22, 2048, "gelu", context=2048, classic=True),  # arXiv 2606.04032's 1.2B
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
