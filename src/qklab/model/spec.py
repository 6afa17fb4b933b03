"""DecoderSpec: a stack of attention layers and MLPs, and what it costs."""

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import torch

from qklab.attention.spec import AttentionSpec
from qklab.schema import Rule, Spec, boolean_field, choice_field, integer_field, number_field, spec_pattern_field

MLP_MATRICES = {"swiglu": 3, "gelu": 2}


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(Spec):
    """Pre-norm transformer: x ← x + Attention(norm(x)); x ← x + MLP(norm(x)); logits = W_out norm(x); or post-norm:
    x ← norm(x + Attention(x)); x ← norm(x + MLP(x)); logits = W_out x (`norm_place`).

    `attention` is the spec of all layers, or several that repeat over them: (a, a, b) is a, a, b, a, a, b, …
    `mlp_ratio` is hidden width over model width; `bias` concerns MLP and LayerNorm (attention has its own);
    `dropout`, in training, the embeddings and what attention and MLP add to the residual stream.
    """

    vocab: int = integer_field()
    width: int = integer_field()
    layers: int = integer_field(at_most=10_000)
    attention: AttentionSpec | tuple[AttentionSpec, ...] = spec_pattern_field(AttentionSpec)
    mlp: Literal["swiglu", "gelu"] = choice_field("swiglu", MLP_MATRICES)
    mlp_ratio: float = number_field(4.0, above=0.0, at_most=1024.0)
    norm: Literal["rms", "layer"] = choice_field("rms", ("rms", "layer"))
    norm_place: Literal["pre", "post"] = choice_field("pre", ("pre", "post"))
    norm_eps: float = number_field(1e-5, above=0.0, at_most=1.0)
    bias: bool = boolean_field(False)
    tied: bool = boolean_field(True)
    context: int = integer_field(1024)
    dropout: float = number_field(0.0, at_least=0.0, at_most=0.9)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "attention",
            lambda s: len({spec.width for spec in s.pattern}) > 1,
            lambda s: "all layers of a model have one width",
            lambda s: {"attention": s.pattern[0]},
        ),
        Rule(
            "attention",
            lambda s: len({spec.causal for spec in s.pattern}) > 1,
            lambda s: "either all layers of a model are causal or none is",
            lambda s: {"attention": s.pattern[0]},
        ),
        Rule(
            "attention",
            lambda s: len({spec.position == "learned" for spec in s.pattern}) > 1,
            lambda s: "learned positions are added once, before the first layer, so all layers have them or none",
            lambda s: {"attention": s.pattern[0]},
        ),
        Rule(
            "layers",
            lambda s: len(s.pattern) > s.layers,
            lambda s: f"the pattern of attention is {len(s.pattern)} layers long",
            lambda s: {"layers": len(s.pattern)},
        ),
        Rule(
            "width",
            lambda s: s.width != s.pattern[0].width,
            lambda s: f"the attention spec has width={s.pattern[0].width}, and the two must agree",
            lambda s: {"width": s.pattern[0].width},
        ),
        Rule(
            "mlp_ratio",
            lambda s: round(s.width * s.mlp_ratio) < 1,
            lambda s: f"it leaves no hidden unit at width={s.width}",
            lambda s: {"mlp_ratio": 1.0},
        ),
    )

    @property
    def pattern(self) -> tuple[AttentionSpec, ...]:
        """The attention of the first layers, which repeats."""
        return self.attention if isinstance(self.attention, tuple) else (self.attention,)

    def attention_of(self, layer: int) -> AttentionSpec:
        return self.pattern[layer % len(self.pattern)]

    @property
    def attentions(self) -> list[AttentionSpec]:
        """Of every layer."""
        return [self.attention_of(layer) for layer in range(self.layers)]

    @property
    def causal(self) -> bool:
        """Whether a token sees only itself and earlier ones."""
        return self.pattern[0].causal

    @property
    def learns_positions(self) -> bool:
        """Whether positions are learned and added before the first layer."""
        return self.pattern[0].position == "learned"

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return round(self.width * self.mlp_ratio)

    def parameters(self) -> int:
        """Learned numbers in the whole model; a tied embedding counts once."""
        norm = self.width * (2 if self.norm == "layer" and self.bias else 1)
        hidden_bias = self.hidden * (MLP_MATRICES[self.mlp] - 1) + self.width
        mlp = MLP_MATRICES[self.mlp] * self.width * self.hidden + self.bias * hidden_bias
        attention = sum(spec.parameters() for spec in self.attentions)
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        positions = self.context * self.width * self.learns_positions
        return embeddings + positions + attention + self.layers * (mlp + 2 * norm) + norm * (self.norm_place == "pre")

    def flops_per_token(self, context: int | None = None) -> int:
        """Forward matrix-product FLOPs per token of a sequence of `context` tokens (the spec's own by default).

        Training costs about three times as much.
        """
        context = self.context if context is None else context
        attention = sum(spec.flops_per_token(context) for spec in self.attentions)
        mlp = 2 * MLP_MATRICES[self.mlp] * self.width * self.hidden
        return attention + self.layers * mlp + 2 * self.vocab * self.width

    def cache_bytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes all layers cache for one sequence of `tokens` tokens."""
        return sum(spec.cache_bytes(tokens, dtype) for spec in self.attentions)

    def cache_bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes that one more token adds."""
        return sum(spec.cache_bytes_per_token(dtype) for spec in self.attentions)

    @property
    def name(self) -> str:
        runs = [(name, len(list(same))) for name, same in groupby(spec.name for spec in self.pattern)]
        attention = " | ".join(f"{count}× {name}" if count > 1 else name for name, count in runs)
        place = " post-norm" * (self.norm_place == "post")
        return f"{self.layers}×{self.width} {self.mlp}{place} · {attention}"
