"""Families that make queries, keys and values by projections of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qklab import register
from qklab.hf.layout import MODELS, ConvertibleFamily, SeparateProjections


@register.family("llama")
class Llama(SeparateProjections):
    title = "Llama"
    attention = f"{MODELS}.llama.modeling_llama.LlamaAttention"


@register.family("mistral")
class Mistral(Llama):
    """One window for all layers."""

    title = "Mistral"
    attention = f"{MODELS}.mistral.modeling_mistral.MistralAttention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": getattr(layer.config, "sliding_window", None)}


class DropsOutput(ConvertibleFamily):
    """Dropout on what an attention layer gives."""

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        return nn.functional.dropout(super().finish(layer, heads), layer.residual_dropout, layer.training)


@register.family("starcoder2")
class Starcoder2(DropsOutput, Mistral):
    title = "StarCoder2"
    attention = f"{MODELS}.starcoder2.modeling_starcoder2.Starcoder2Attention"


@register.family("seed_oss")
class SeedOss(DropsOutput, Llama):
    title = "Seed-OSS"
    attention = f"{MODELS}.seed_oss.modeling_seed_oss.SeedOssAttention"


@register.family("ministral3")
class Ministral3(Mistral):
    """Queries grow with the logarithm of their position."""

    title = "Ministral 3"
    attention = f"{MODELS}.ministral3.modeling_ministral3.Ministral3Attention"

    def scale_queries(self, layer: Any, q: Tensor, position_ids: Tensor | None) -> Tensor:
        rope = layer.config.rope_parameters
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        return q * self.source.get_llama_4_attn_scale(position_ids, *map(rope.get, names)).to(q.dtype)


@register.family("qwen2")
class Qwen2(Llama):
    """Windows in some of the layers."""

    title = "Qwen2"
    attention = f"{MODELS}.qwen2.modeling_qwen2.Qwen2Attention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": layer.sliding_window}


@register.family("gemma2")
class Gemma2(Qwen2):
    title = "Gemma 2"
    attention = f"{MODELS}.gemma2.modeling_gemma2.Gemma2Attention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"softcap": layer.attn_logit_softcapping}


@register.family("gemma3_text")
class Gemma3Text(Qwen2):
    title = "Gemma 3 (text)"
    attention = f"{MODELS}.gemma3.modeling_gemma3.Gemma3Attention"
    rotary_by_kind = True


class LendsKeys(Qwen2):
    """Some layers read the keys and values of an earlier one, and have no projections for them; values are normalised.

    A layer whose value is its key keeps one tensor in the cache, normalised as key and as value when it is read.
    """

    rotary_by_kind = True
    unfolded = "a norm"

    def rotate(self, layer: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        turn = self.source.apply_rotary_pos_emb
        return turn(q, *angles), turn(k, *angles)

    def normalise_value(self, layer: Any, v: Tensor) -> Tensor:
        return layer.v_norm(v)

    def has_keys(self, layer: Any) -> bool:
        return not layer.is_kv_shared_layer

    def lend_keys(self, layer: Any, k: Tensor, v: Tensor, states: Any) -> None:
        if layer.store_full_length_kv:
            states[layer.layer_type] = k, v


@register.family("gemma3n_text")
class Gemma3nText(LendsKeys):
    title = "Gemma 3n (text)"
    attention = f"{MODELS}.gemma3n.modeling_gemma3n.Gemma3nTextAttention"

    def lend_keys(self, layer: Any, k: Tensor, v: Tensor, states: Any) -> None:
        if hasattr(layer, "kv_shared_layer_index") and layer.store_full_length_kv:  # before Transformers 5.23
            states[layer.layer_idx] = k, v
        else:
            super().lend_keys(layer, k, v, states)


@register.family("gemma4_text")
class Gemma4Text(LendsKeys):
    """In some models the value of a layer without a window is its key. Heads differ between kinds of layers."""

    title = "Gemma 4 (text)"
    attention = f"{MODELS}.gemma4.modeling_gemma4.Gemma4TextAttention"
    shares_already = True

    def list_refusals(self, layer: Any) -> dict[str, str]:
        found = super().list_refusals(layer)
        if layer.config.attention_k_eq_v:
            del found["share"]
        return found


@register.family("smollm3")
class SmolLM3(Qwen2):
    """Some layers know no positions."""

    title = "SmolLM3"
    attention = f"{MODELS}.smollm3.modeling_smollm3.SmolLM3Attention"

    def rotates(self, layer: Any) -> bool:
        return bool(layer.use_rope)


@register.family("gpt_oss")
class GptOss(Qwen2):
    """Every head has a sink: a logit of its own that takes part in the softmax and has no value."""

    title = "gpt-oss"
    attention = f"{MODELS}.gpt_oss.modeling_gpt_oss.GptOssAttention"
    repeats_angles = False

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"s_aux": layer.sinks}


class Interleaved(Llama):
    interleaved = True


@register.family("cohere")
class Cohere(Interleaved):
    title = "Cohere"
    attention = f"{MODELS}.cohere.modeling_cohere.CohereAttention"
    norms_span_heads = True


@register.family("cohere2")
class Cohere2(Qwen2):
    """Only layers with a window know positions."""

    title = "Cohere 2"
    attention = f"{MODELS}.cohere2.modeling_cohere2.Cohere2Attention"
    interleaved = True

    def rotates(self, layer: Any) -> bool:
        return layer.sliding_window is not None


class NormsAllHeads(ConvertibleFamily):
    """One norm over all heads together."""

    norms_span_heads = True

    def apply_norm(self, norm: Any, u: Tensor) -> Tensor:
        return norm(u.flatten(-2)).view_as(u)


@register.family("olmo2")
class Olmo2(NormsAllHeads, Llama):
    title = "OLMo 2"
    attention = f"{MODELS}.olmo2.modeling_olmo2.Olmo2Attention"


@register.family("olmo3")
class Olmo3(NormsAllHeads, Qwen2):
    title = "OLMo 3"
    attention = f"{MODELS}.olmo3.modeling_olmo3.Olmo3Attention"
    rotary_by_kind = True


@register.family("olmoe")
class Olmoe(NormsAllHeads, Mistral):
    title = "OLMoE"
    attention = f"{MODELS}.olmoe.modeling_olmoe.OlmoeAttention"

    def list_refusals(self, layer: Any) -> dict[str, str]:
        if layer.config.clip_qkv is None:
            return super().list_refusals(layer)
        return dict.fromkeys(("coupling", "share", "kv_heads", "norm"), "clips queries, keys and values (clip_qkv)")


@register.family("exaone4")
class Exaone4(Qwen2):
    """Where some layers have a window, only those know positions."""

    title = "EXAONE 4"
    attention = f"{MODELS}.exaone4.modeling_exaone4.Exaone4Attention"

    def rotates(self, layer: Any) -> bool:
        return layer.sliding_window is None or layer.is_sliding

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": layer.sliding_window if layer.is_sliding else None}


@register.family("granitemoehybrid")
class GraniteMoeHybrid(Llama):
    """Granite 4: layers of Mamba lie between those of attention, which stay what they are."""

    title = "Granite 4 (hybrid)"
    attention = f"{MODELS}.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridAttention"

    def rotates(self, layer: Any) -> bool:
        return layer.config.position_embedding_type == "rope"

    def list_refusals(self, layer: Any) -> dict[str, str]:
        found = super().list_refusals(layer)
        if self.rotates(layer):
            found["share"] = "does not tell its attention the positions by which cached keys would be turned"
        return found


@register.family("qwen3_next")
class Qwen3Next(Llama):
    """q_proj makes a gate as well, head by head; layers of linear attention lie between."""

    title = "Qwen3-Next"
    attention = f"{MODELS}.qwen3_next.modeling_qwen3_next.Qwen3NextAttention"
    inputs = {"q_proj": "qg", "k_proj": "k", "v_proj": "v"}  # noqa: RUF012
    unfolded = "a gate"

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        heads = y.unflatten(-1, (-1, layer.head_dim * len(self.inputs[name])))
        return dict(zip(self.inputs[name], heads.split(layer.head_dim, -1), strict=True))


@register.family("stablelm")
class StableLM(Llama):
    """RoPE turns a part of each head; a norm, where there is one, has gains for each head."""

    title = "StableLM"
    attention = f"{MODELS}.stablelm.modeling_stablelm.StableLmAttention"
    norms, norms_span_heads = ("q_layernorm", "k_layernorm"), True

    def rotate(self, layer: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        turned = layer.rotary_ndims
        parts = self.source.apply_rotary_pos_emb(q[..., :turned], k[..., :turned], *angles)
        return torch.cat([parts[0], q[..., turned:]], -1), torch.cat([parts[1], k[..., turned:]], -1)

    def apply_norm(self, norm: Any, u: Tensor) -> Tensor:
        return norm(u.transpose(1, 2)).transpose(1, 2)


@register.family("phi")
class Phi(StableLM):
    title = "Phi"
    attention = f"{MODELS}.phi.modeling_phi.PhiAttention"
    output, norms_span_heads = "dense", False
