"""Stage 1, project: x [B, T, width] → q [B, T, H, D], k and v [B, T, G, D]; v is None where the value is the key.

"The value is the key" means the key after coupling, normalisation and rotation, so that one cached tensor serves both;
that is why a shared value is not made here but read back from the key in stage 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab.ops.norm import rms_norm

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec

ProjectedTensors = tuple[Tensor, Tensor, Tensor | None]


class Projection(nn.Module):
    """Which of query, key and value have a matrix of their own."""

    tuple_name: ClassVar[str]
    formula: ClassVar[str]
    own_query: ClassVar[bool] = True
    own_value: ClassVar[bool] = True
    folds_to: ClassVar[str]  # the sharing that remains once a linear coupling is folded into the weights

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.head_width = spec.head_width
        self.key = nn.Linear(spec.width, spec.kv_heads * spec.head_width, bias=spec.bias)
        self.query, self.value = None, None
        if self.own_query:
            self.query = nn.Linear(spec.width, spec.query_heads * spec.head_width, bias=spec.bias)
        if self.own_value:
            self.value = nn.Linear(spec.width, spec.kv_heads * spec.head_width, bias=spec.bias)

    def forward(self, x: Tensor) -> ProjectedTensors:
        k = self.heads(self.key(x))
        q = k if self.query is None else self.heads(self.query(x))
        v = None if self.value is None else self.heads(self.value(x))
        return q, k, v

    def heads(self, flat: Tensor) -> Tensor:
        """[B, T, heads·D] → [B, T, heads, D]."""
        return flat.unflatten(-1, (-1, self.head_width))

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return cls.formula

    def read_columns(self) -> tuple[Tensor, Tensor]:
        """W_q and W_k (a bias as one more column) as if each column were a token: [1, width (+1), heads, D]."""
        k = self.heads(read_linear_columns(self.key))
        return (k if self.query is None else self.heads(read_linear_columns(self.query))), k

    @torch.no_grad()
    def set_columns(self, q: Tensor, k: Tensor) -> None:
        """Take W_q and W_k in the form `read_columns` gives them."""
        assert self.query is not None
        for linear, columns in ((self.query, q), (self.key, k)):
            rows = columns.flatten(2)[0].mT  # [heads·D, width (+1)]
            linear.weight.copy_(rows[:, : linear.in_features])
            if linear.bias is not None:
                linear.bias.copy_(rows[:, linear.in_features])

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return (spec.width + spec.bias) * cls.rows(spec)

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 2 * spec.width * cls.rows(spec)

    @classmethod
    def rows(cls, spec: AttentionSpec) -> int:
        heads = spec.kv_heads * (1 + cls.own_value) + spec.query_heads * cls.own_query
        return heads * spec.head_width


def read_linear_columns(linear: nn.Linear) -> Tensor:
    """The columns of a linear layer, its bias last: [1, inputs (+1), outputs]."""
    rows = linear.weight if linear.bias is None else torch.cat([linear.weight, linear.bias[:, None]], 1)
    return rows.mT[None]


class QueryKeyValue(Projection):
    """(Q,K,V): three matrices; G < H gives grouped-query, G = 1 multi-query attention."""

    tuple_name = "(Q,K,V)"
    formula = "q = W_q x ; k = W_k x ; v = W_v x"
    folds_to = "none"


class SharedKeyValue(Projection):
    """(Q,K=V): the key is also the value. The cache halves."""

    tuple_name = "(Q,K=V)"
    formula = "q = W_q x ; k = W_k x ; v = k"
    own_value = False
    folds_to = "k=v"


class SharedQueryKey(Projection):
    """(Q=K,V): one matrix for query and key. Scores are symmetric unless coupling, unequal gains under RoPE or the 2-D
    asymmetry break it."""

    tuple_name = "(Q=K,V)"
    formula = "q = k = W_k x ; v = W_v x"
    own_query = False
    folds_to = "none"


class SharedAll(Projection):
    """(Q=K=V): one matrix for all three."""

    tuple_name = "(Q=K=V)"
    formula = "q = k = v = W_k x"
    own_query = False
    own_value = False
    folds_to = "k=v"


class Latent(nn.Module):
    """MLA: c_q = W_dq x, q = [W_uq c_q ; W_qr c_q]; the key is the latent [c ; W_kr x], c = W_dkv x, of all heads.

    q [B, T, H, D + d_rope], k [B, T, 1, d_c + d_rope]. Stage 4 rotates the last d_rope entries of both; stage 5 owns
    the up-projections W_uk, W_uv of the latent, because only there is it known whether to expand or to absorb them.
    With `norm`, c_q and c pass through RMSNorm.
    """

    tuple_name: ClassVar[str] = "MLA"
    members: int | None = None  # of a stacked model, whose gains have one more axis in front

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.heads, self.eps, self.rope_width = spec.heads, spec.norm_eps, latent.rope_width
        self.down_query = nn.Linear(spec.width, latent.query_rank, bias=spec.bias)
        self.down_key_value = nn.Linear(spec.width, latent.kv_rank, bias=spec.bias)
        self.up_query = nn.Linear(latent.query_rank, spec.heads * spec.head_width, bias=False)
        self.rope_query, self.rope_key = None, None
        if latent.rope_width:
            self.rope_query = nn.Linear(latent.query_rank, spec.heads * latent.rope_width, bias=False)
            self.rope_key = nn.Linear(spec.width, latent.rope_width, bias=spec.bias)
        self.query_gain = nn.Parameter(torch.ones(latent.query_rank)) if latent.norm else None
        self.key_value_gain = nn.Parameter(torch.ones(latent.kv_rank)) if latent.norm else None

    def reset(self, generator: torch.Generator | None = None) -> None:
        for gain in (self.query_gain, self.key_value_gain):
            if gain is not None:
                nn.init.ones_(gain)

    def forward(self, x: Tensor) -> ProjectedTensors:
        return self.expand(*self.compress(x), x)

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latents c_q and c of the tokens x."""
        c_q = self.normalise(self.down_query(x), self.query_gain)
        return c_q, self.normalise(self.down_key_value(x), self.key_value_gain)

    def expand(self, c_q: Tensor, c: Tensor, x: Tensor) -> ProjectedTensors:
        """What becomes of the latents, which a coupling may have moved."""
        q = self.up_query(c_q).unflatten(-1, (self.heads, -1))
        if self.rope_query is not None and self.rope_key is not None:
            q = torch.cat([q, self.rope_query(c_q).unflatten(-1, (self.heads, -1))], -1)
            c = torch.cat([c, self.rope_key(x)], -1)
        return q, c.unsqueeze(2), None

    def normalise(self, latent: Tensor, gain: Tensor | None) -> Tensor:
        return latent if gain is None else rms_norm(latent, gain, self.eps)

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        latent = spec.latent
        assert latent is not None
        norm = "norm(W_{} x)" if latent.norm else "W_{} x"
        q, k = ("[W_uq c_q ; W_qr c_q]", "[W_uk c ; W_kr x]") if latent.rope_width else ("W_uq c_q", "W_uk c")
        return f"c_q = {norm.format('dq')} ; q = {q} ; c = {norm.format('dkv')} ; k = {k} ; v = W_uv c"

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        latent = spec.latent
        assert latent is not None
        down = latent.query_rank + latent.kv_rank + latent.rope_width
        up = latent.query_rank * spec.heads * (spec.head_width + latent.rope_width)
        return (spec.width + spec.bias) * down + up + latent.norm * (latent.query_rank + latent.kv_rank)

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        latent = spec.latent
        assert latent is not None
        down = spec.width * (latent.query_rank + latent.kv_rank + latent.rope_width)
        return 2 * (down + latent.query_rank * spec.heads * (spec.head_width + latent.rope_width))


PROJECTIONS: dict[str, type[Projection]] = {
    "none": QueryKeyValue,
    "k=v": SharedKeyValue,
    "q=k": SharedQueryKey,
    "q=k=v": SharedAll,
}
