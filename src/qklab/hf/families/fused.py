"""Families that make queries, keys and values by one projection, or of latents (MLA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qklab import register
from qklab.attention.spec import LatentSpec
from qklab.hf.families.apart import Mistral
from qklab.hf.layout import MODELS, ConvertibleFamily, has_modules
from qklab.optim.roles import CouplingLinearity, Rows


@register.family("phi3")
class Phi3(Mistral):
    """One linear layer makes all queries, then all keys, then all values. Phi-4 is of this type too."""

    title = "Phi-3"
    attention = f"{MODELS}.phi3.modeling_phi3.Phi3Attention"
    inputs = {"qkv_proj": "qkv"}  # noqa: RUF012

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        heads = y.unflatten(-1, (-1, layer.head_dim))
        queries = layer.config.num_attention_heads
        keys = queries // layer.num_key_value_groups
        values = heads.shape[-2] - queries - keys  # none where the key is the value
        return dict(zip("qkv", heads.split([queries, keys, *[keys] * (values > 0)], -2), strict=False))


@register.family("gpt2")
class GPT2(ConvertibleFamily):
    """One Conv1D makes all queries, then all keys, then all values."""

    title = "GPT-2"
    attention = f"{MODELS}.gpt2.modeling_gpt2.GPT2Attention"
    inputs = {"c_attn": "qkv"}  # noqa: RUF012
    output = "c_proj"
    rotated, grouped = False, False

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        parts = y.unflatten(-1, (-1, layer.config.num_attention_heads, layer.head_dim)).unbind(-3)
        return dict(zip("qkv", parts, strict=False))

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return {"dropout": layer.attn_dropout.p if layer.training else 0.0}

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        return layer.resid_dropout(layer.c_proj(heads))

    def rows(self, layer: Any) -> dict[str, Rows]:
        if getattr(layer, "is_cross_attention", False):
            raise ValueError("GPT-2's cross-attention is not known to attention_roles; pass a mapping of its layers.")
        return super().rows(layer)

    def watch(self, layer: Any, largest: Tensor) -> None:
        if layer.reorder_and_upcast_attn and layer.config._attn_implementation == "eager":
            raise ValueError(
                "the logits of GPT-2 cannot be watched under reorder_and_upcast_attn with eager attention; set it to "
                "False, or use sdpa."
            )
        super().watch(layer, largest)


@register.family("gpt_neox")
class GPTNeoX(ConvertibleFamily):
    """One linear layer makes the query, the key and the value of the first head, then of the second, …"""

    title = "GPT-NeoX"
    attention = f"{MODELS}.gpt_neox.modeling_gpt_neox.GPTNeoXAttention"
    inputs = {"query_key_value": "qkv"}  # noqa: RUF012
    output = "dense"
    grouped = False

    def width(self, layer: Any) -> int:
        return layer.head_size

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        parts = y.unflatten(-1, (layer.config.num_attention_heads, -1, layer.head_size)).unbind(-2)
        return dict(zip("qkv", parts, strict=False))


@register.family("deepseek_v3")
class DeepSeek(ConvertibleFamily):
    """MLA as in DeepSeek-V2 and V3: fused up-projections, and the rotary key fused with the latent."""

    title = "DeepSeek-V3"
    attention = f"{MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention"
    inputs = dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "")
    output = "o_proj"
    latent = True

    def list_refusals(self, layer: Any) -> dict[str, str]:
        found = {
            "share": "keeps keys and values as one latent already",
            "kv_heads": "makes the keys and values of all heads of one latent, so there are none to merge",
            "norm": "makes keys of a cached latent, on which its norm lies",
        }
        if layer.q_lora_rank is None:
            found["coupling"] = "couples latents, and this model has none for queries (q_lora_rank)"
        return found

    def width(self, layer: Any) -> int:
        return layer.qk_nope_head_dim

    def count_kv_heads(self, layer: Any) -> int:
        return layer.num_heads

    def read_latent(self, layer: Any) -> LatentSpec:
        return LatentSpec(query_rank=layer.q_lora_rank, kv_rank=layer.kv_lora_rank, rope_width=0)

    def compress(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, turned = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
        return layer.q_a_layernorm(layer.q_a_proj(x)), layer.kv_a_layernorm(latent), turned

    def expand(
        self, layer: Any, query_latent: Tensor, latent: Tensor, turned: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = layer.q_b_proj(query_latent).unflatten(-1, (-1, layer.qk_head_dim)).transpose(1, 2)
        plain, q_turned = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        rotate = "apply_rotary_pos_emb" + "_interleave" * bool(layer.config.rope_interleave)
        q_turned, turned = getattr(self.source, rotate)(q_turned, turned[:, None], *angles)
        return torch.cat([plain, q_turned], -1), latent[:, None], turned

    def is_attention(self, module: nn.Module) -> bool:
        return has_modules(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")

    def normalises(self, layer: nn.Module) -> bool:
        return False  # its norms lie on the latents

    def find_coupling(self, layer: Any) -> CouplingLinearity:
        return "none"  # it moves what goes into uq and uk

    def shares_value(self, layer: Any) -> bool:
        return False

    def rows(self, layer: Any) -> dict[str, Rows]:
        heads, nope, rank = layer.num_heads, layer.qk_nope_head_dim, layer.kv_lora_rank
        compressed = has_modules(layer, "q_a_proj", "q_b_proj")
        query = layer.q_b_proj if compressed else layer.q_proj
        gain = layer.q_a_layernorm.weight if compressed else None
        every = layer.kv_a_proj_with_mqa.weight.shape[0]
        found = {"dq": Rows.of(layer.q_a_proj, 1)} if compressed else {}
        return found | {
            "uq": Rows.of(query, heads, within=(0, nope), gain=gain),
            "qr": Rows.of(query, heads, within=(nope, query.weight.shape[0] // heads), gain=gain),
            "dkv": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(0, rank)),
            "kr": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(rank, every)),
            "uk": Rows.of(layer.kv_b_proj, heads, within=(0, nope), gain=layer.kv_a_layernorm.weight),
        }
