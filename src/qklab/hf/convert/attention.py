"""The converted attention layer: the family's own projections and attention function, our stages between them."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qklab.attention.couple import Coupling
from qklab.attention.norm import QKNorm
from qklab.hf.convert.cache import POSITION, share_layer
from qklab.hf.families import find_convertible
from qklab.hf.layout import ConvertibleFamily
from qklab.hf.paged import find_key_positions, holds_one_tensor, update_pages
from qklab.ops.rope import apply_rope_without_gradient


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore_layer, (self.config.model_type,), self.__dict__

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        shared_kv_states: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = layer_past if past_key_values is None else past_key_values
        angles = position_embeddings if self.family.rotates(self) else None
        q, k, v, gate = self.family.project(self, hidden_states)
        if self.couple is not None:
            q, k = self.couple(q, k)
        shared, key_angles = v is None, None
        attention = self.config._attn_implementation
        if shared and holds_one_tensor(kwargs.get("cache")):
            k, key_angles = self.page_shared(k, angles, kwargs)
            attention = attention.removeprefix("paged|")  # which would write to pages itself
        elif shared and cache is not None:
            k, key_angles = self.store_shared(k, angles, kwargs.get("position_ids"), cache)
        stored = self.family.normalise_value(self, k if v is None else v)
        q, k = self.normalise_heads(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), stored.transpose(1, 2)
        q, k = self.rotate_heads(q, k, angles, key_angles)
        q = self.family.scale_queries(self, q, kwargs.get("position_ids"))
        if not shared and cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        self.family.lend_keys(self, k, v, shared_kv_states)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention, self.family.source.eager_attention_forward)
        options = self.family.attention_options(self)
        o, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **options, **kwargs)
        o = o.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.family.finish(self, o if gate is None else o * torch.sigmoid(gate.flatten(2))), weights

    def store_shared(
        self, s: Tensor, angles: tuple[Tensor, Tensor] | None, position_ids: Tensor | None, cache: Any
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """s [B, T, G, D] of the new tokens → [B, S, G, D] of all, and the angles that turn its keys."""
        share_layer(cache, self.layer_idx)
        if angles is None and position_ids is None:
            position_ids = torch.zeros(1, s.shape[1], dtype=POSITION, device=s.device)  # nobody asks for them
        s, positions = cache.update(s.transpose(1, 2), self.make_positions(s, position_ids), self.layer_idx)
        every = None if angles is None else self.compute_angles(positions[:, 0, :, 0], angles, cache)
        return s.transpose(1, 2), every

    def page_shared(
        self, s: Tensor, angles: tuple[Tensor, Tensor] | None, given: dict[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """`store_shared` in the pages of a continuous batch, which are taken out of what is given to the layer."""
        pages, positions = given.pop("cache"), given["position_ids"]
        (s,) = update_pages(pages, self.layer_idx, [s], given)
        if angles is None:
            return s, None
        every = find_key_positions(positions, s.shape[1], given["cu_seq_lens_q"], given["cu_seq_lens_k"])
        return s, self.compute_angles(every, angles, pages)

    def normalise_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D] and k [B, S, G, D] by the inserted norm, or by the family's own."""
        if self.normalise is not None:
            return self.normalise(q, k)
        return self.family.normalise(self, q, k) if self.family.has_norms(self) else (q, k)

    def rotate_heads(
        self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None, key_angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """R_i q_i and R_j k_j: q [B, H, T, D], k [B, G, S, D]; keys that were stored unturned have their own angles."""
        if angles is None:
            return q, k
        if key_angles is None:
            return self.family.rotate(self, q, k, angles)
        q = self.family.rotate(self, q, q[:, :0], angles)[0]
        family = self.family
        plain = family.repeats_angles and not family.interleaved and not family.shares_already  # whose bits must stay
        if not plain or not rotates_without_gradient(k, key_angles[0]):
            return q, self.family.rotate(self, k, k[:, :0], key_angles)[0]
        cos, sin = (table[:, None, :, : table.shape[-1] // 2] for table in key_angles)
        return q, apply_rope_without_gradient(k, (cos, sin))

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
        kind = self.config.layer_types[self.layer_idx] if self.family.rotary_by_kind else None
        arguments = (now[0], positions) if kind is None else (now[0], positions, kind)
        if torch.compiler.is_compiling():
            return self.rotary[0](*arguments)
        known = cache.__dict__.setdefault("qklab_angles", {})
        found = known.get(kind)
        if found is None or found[0] is not now[0] or found[1] != positions.shape:
            found = (now[0], positions.shape, self.rotary[0](*arguments))
            known[kind] = found
        return found[2]


class ConvertedLatentAttention(ConvertedAttention):
    """MLA: compress → couple → expand, rotate → mix → output. The cache holds the coupled latent, small as before."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        shared_kv_states: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert position_embeddings is not None
        query_latent, latent, turned = self.family.compress(self, hidden_states)
        if self.couple is not None:
            query_latent, latent = self.couple(query_latent, latent)
        q, latent, turned = self.family.expand(self, query_latent, latent, turned, position_embeddings)
        if past_key_values is not None:
            latent, turned = past_key_values.update(latent, turned, self.layer_idx)
        k, v = cast(Any, self).expand_kv(latent, turned)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(  # here, where watching looks for it
            self.config._attn_implementation, self.family.source.eager_attention_forward
        )
        options = self.family.attention_options(self)
        o, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **options, **kwargs)
        return self.family.finish(self, o.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def rotates_without_gradient(k: Tensor, cos: Tensor) -> bool:
    """Whether nobody needs the rotation's gradient, no compiler fuses its steps and no precisions are mixed."""
    wanted = torch.is_grad_enabled() and k.requires_grad
    return not (wanted or torch.compiler.is_compiling()) and k.dtype == cos.dtype


@functools.cache
def converted_class(kind: type[ConvertibleFamily]) -> type[ConvertedAttention]:
    """The family's attention class with our forward."""
    family, ours = kind(), ConvertedLatentAttention if kind.latent else ConvertedAttention
    bases: Any = (ours, family.attention_class)
    return type(f"Converted{bases[1].__name__}", bases, {"family": family})


def restore_layer(model_type: str) -> ConvertedAttention:
    """What copying and unpickling begin with."""
    made = converted_class(type(find_convertible(model_type)))
    return made.__new__(made)
