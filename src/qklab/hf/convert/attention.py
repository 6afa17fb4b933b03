"""The converted attention layer: the family's own projections and attention function, our stages between them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qklab.attention.couple import Coupling
from qklab.attention.norm import QKNorm
from qklab.hf.convert.cache import POSITION, share_layer
from qklab.hf.families import ConvertibleFamily
from qklab.ops.norm import rms_norm
from qklab.ops.rope import apply_rope_without_gradient

BACKENDS = ("eager", "sdpa")


def check_backend(config: Any) -> str:
    """The attention implementation of a configuration, refused by name where it cannot be used."""
    chosen = config._attn_implementation
    if chosen not in BACKENDS:
        raise ValueError(
            f"a converted model runs with attn_implementation 'sdpa' or 'eager', but {chosen!r} was requested; "
            "load it with one of those, or call model.set_attn_implementation('sdpa')."
        )
    return chosen


class ConvertedAttention(nn.Module):
    """project → couple → normalise → rotate → mix → output, with `couple` and `normalise` where they were inserted.

    Instances are the model's own attention layers, whose class was changed to a subclass of this and of their own.
    Where key and value are one tensor s: key_j = R_j norm(s_j), value_j = s_j, and the cache holds s_j.
    """

    family: ConvertibleFamily
    couple: Coupling | None
    normalise: QKNorm | None
    rotary: tuple[Any, ...]  # the model's rotary module, in a tuple so that it is not registered a second time
    config: Any
    layer_idx: int
    scaling: float
    eager: Any
    rotate: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        backend = check_backend(self.config)
        cache = layer_past if past_key_values is None else past_key_values
        q, k, v = self.family.project(self, hidden_states)
        if self.couple is not None:
            q, k = self.couple(q, k)
        if v is None:
            q, k, v = self.read_shared(q, k, position_embeddings, kwargs.get("position_ids"), cache)
        else:
            q, k = self.normalise_heads(q, self.query_norm), self.normalise_heads(k, self.key_norm)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if position_embeddings is not None:
                q, k = self.rotate(q, k, *position_embeddings)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, self.eager)
        options = self.family.attention_options(self)
        o, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **options, **kwargs)
        o = o.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.family.finish(self, o), weights

    def read_shared(
        self,
        q: Tensor,
        s: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        position_ids: Tensor | None,
        cache: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D] and s [B, T, G, D] → queries, keys and values [B, heads, slots, D], keys turned on reading."""
        q, s = self.normalise_heads(q, self.query_norm).transpose(1, 2), s.transpose(1, 2)
        angles = position_embeddings
        if cache is not None:
            share_layer(cache, self.layer_idx)
            s, positions = cache.update(s, self.make_positions(s, position_ids), self.layer_idx)
            if position_embeddings is not None:
                angles = self.compute_angles(positions[:, 0, :, 0], position_embeddings, cache)
        k = self.normalise_heads(s, self.key_norm)
        if position_embeddings is not None and angles is not None:
            q = self.rotate(q, q[:, :0], *position_embeddings)[0]
            k = self.rotate_keys(k, angles)
        return q, k, s

    def rotate_keys(self, k: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """R_j k_j: k [B, G, slots, D] by cos, sin [B, slots, r], whose halves are the same."""
        if not self.family.rotates_halves or not rotates_without_gradient(k, angles[0]):
            return self.rotate(k, k[:, :0], *angles)[0]
        cos, sin = (table[:, None, :, : table.shape[-1] // 2] for table in angles)
        return apply_rope_without_gradient(k, (cos, sin))

    def make_positions(self, s: Tensor, position_ids: Tensor | None) -> Tensor:
        """[B or 1, T] → [B, 1, T, 1], as the cache keeps them."""
        if position_ids is None:
            raise ValueError("a layer whose keys and values are one tensor needs position_ids to write to a cache.")
        return position_ids.to(POSITION).expand(s.shape[0], -1)[:, None, :, None]

    def compute_angles(self, positions: Tensor, now: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
        """cos and sin at the positions [B, slots] of everything cached, in the precision of the queries' own, `now`.

        The layers of one pass have the same positions, so the first of each kind computes them for the others; a
        compiler sees every layer's own computation and fuses it into the rotation.
        """
        kind = getattr(self, "layer_type", None)
        arguments = (now[0], positions, kind) if self.family.rotary_by_kind else (now[0], positions)
        if torch.compiler.is_compiling():
            return self.rotary[0](*arguments)
        known = cache.__dict__.setdefault("qklab_angles", {})
        found = known.get(kind)
        if found is None or found[0] is not now[0] or found[1] != positions.shape:
            found = (now[0], positions.shape, self.rotary[0](*arguments))
            known[kind] = found
        return found[2]

    @property
    def query_norm(self) -> Any:
        return self.q_norm if self.family.normed else self.normalise and self.normalise.query_gain

    @property
    def key_norm(self) -> Any:
        return self.k_norm if self.family.normed else self.normalise and self.normalise.key_gain

    def normalise_heads(self, u: Tensor, norm: Any) -> Tensor:
        """The family's own norm, or the inserted one with the gain `norm`, over the last axis."""
        if self.family.normed:
            return norm(u)
        return u if self.normalise is None else rms_norm(u, norm, self.normalise.eps)


def rotates_without_gradient(k: Tensor, cos: Tensor) -> bool:
    """Whether nobody needs the rotation's gradient, no compiler fuses its steps and no precisions are mixed."""
    wanted = torch.is_grad_enabled() and k.requires_grad
    return not (wanted or torch.compiler.is_compiling()) and k.dtype == cos.dtype


@functools.cache
def converted_class(kind: type[ConvertibleFamily]) -> type[ConvertedAttention]:
    """The family's attention class with our forward."""
    family = kind()
    members = {
        "family": family,
        "eager": staticmethod(family.source.eager_attention_forward),
        "rotate": staticmethod(family.source.apply_rotary_pos_emb) if family.rotated else None,
    }
    return type(f"Converted{family.attention_class.__name__}", (ConvertedAttention, family.attention_class), members)
