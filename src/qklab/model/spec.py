"""DecoderSpec: a stack of attention layers and MLPs, and what it costs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from qklab.attention.spec import AttentionSpec
from qklab.schema import Rule, Spec, boolean_field, choice_field, integer_field, number_field, spec_field

MLP_MATRICES = {"swiglu": 3, "gelu": 2}


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(Spec):
    """Pre-norm transformer: x ← x + Attention(norm(x)); x ← x + MLP(norm(x)); logits = W_out norm(x).

    `mlp_ratio` is hidden width over model width; `bias` concerns MLP and LayerNorm (attention has its own);
    `dropout`, in training, the embeddings and what attention and MLP add to the residual stream.
    """

    vocab: int = integer_field()
    width: int = integer_field()
    layers: int = integer_field(at_most=10_000)
    attention: AttentionSpec = spec_field(AttentionSpec)
    mlp: Literal["swiglu", "gelu"] = choice_field("swiglu", MLP_MATRICES)
    mlp_ratio: float = number_field(4.0, above=0.0, at_most=1024.0)
    norm: Literal["rms", "layer"] = choice_field("rms", ("rms", "layer"))
    norm_eps: float = number_field(1e-5, above=0.0, at_most=1.0)
    bias: bool = boolean_field(False)
    tied: bool = boolean_field(True)
    context: int = integer_field(1024)
    dropout: float = number_field(0.0, at_least=0.0, at_most=0.9)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "width",
            lambda s: s.width != s.attention.width,
            lambda s: f"the attention spec has width={s.attention.width}, and the two must agree",
            lambda s: {"width": s.attention.width},
        ),
        Rule(
            "mlp_ratio",
            lambda s: round(s.width * s.mlp_ratio) < 1,
            lambda s: f"it leaves no hidden unit at width={s.width}",
            lambda s: {"mlp_ratio": 1.0},
        ),
    )

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return round(self.width * self.mlp_ratio)

    def parameters(self) -> int:
        """Learned numbers in the whole model; a tied embedding counts once."""
        norm = self.width * (2 if self.norm == "layer" and self.bias else 1)
        hidden_bias = self.hidden * (MLP_MATRICES[self.mlp] - 1) + self.width
        mlp = MLP_MATRICES[self.mlp] * self.width * self.hidden + self.bias * hidden_bias
        block = self.attention.parameters() + mlp + 2 * norm
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        positions = self.context * self.width * (self.attention.position == "learned")
        return embeddings + positions + self.layers * block + norm

    def flops_per_token(self, context: int | None = None) -> int:
        """Forward matrix-product FLOPs per token of a sequence of `context` tokens (the spec's own by default).

        Training costs about three times as much.
        """
        attention = self.attention.flops_per_token(self.context if context is None else context)
        mlp = 2 * MLP_MATRICES[self.mlp] * self.width * self.hidden
        return self.layers * (attention + mlp) + 2 * self.vocab * self.width

    def cache_bytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes all layers cache for one sequence of `tokens` tokens."""
        return self.layers * self.attention.cache_bytes(tokens, dtype)

    @property
    def name(self) -> str:
        return f"{self.layers}×{self.width} {self.mlp} · {self.attention.name}"
