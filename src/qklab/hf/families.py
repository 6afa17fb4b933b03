"""Families: the only place that knows how other people's models keep their attention, before and after conversion.

A family says where its attention layers keep queries, keys and values. Conversion, logit control and watching all read
that from here, so they agree on every model, converted or not. Names of existing weights stay as they are, so that
tools which find modules by name go on working.

@register.family("llama")          # the `model_type` of its configuration
class Llama(SeparateProjections):
    title = "Llama"
    attention = "transformers.models.llama.modeling_llama.LlamaAttention"
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qklab import register
from qklab.hf.layout import ConvertibleFamily, Family, SeparateProjections, has_modules
from qklab.optim.roles import Rows
from qklab.schema import suggest_name

MODELS = "transformers.models"


@register.family("llama")
class Llama(SeparateProjections):
    title = "Llama"
    attention = f"{MODELS}.llama.modeling_llama.LlamaAttention"


@register.family("gemma")
class Gemma(Llama):
    title = "Gemma"
    attention = f"{MODELS}.gemma.modeling_gemma.GemmaAttention"


@register.family("granite")
class Granite(Llama):
    title = "Granite"
    attention = f"{MODELS}.granite.modeling_granite.GraniteAttention"


@register.family("granitemoe")
class GraniteMoe(Llama):
    title = "Granite MoE"
    attention = f"{MODELS}.granitemoe.modeling_granitemoe.GraniteMoeAttention"


@register.family("qwen2_moe")
class Qwen2Moe(Llama):
    title = "Qwen2 MoE"
    attention = f"{MODELS}.qwen2_moe.modeling_qwen2_moe.Qwen2MoeAttention"


@register.family("mistral")
class Mistral(Llama):
    """One window for all layers."""

    title = "Mistral"
    attention = f"{MODELS}.mistral.modeling_mistral.MistralAttention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": getattr(layer.config, "sliding_window", None)}


@register.family("mixtral")
class Mixtral(Mistral):
    title = "Mixtral"
    attention = f"{MODELS}.mixtral.modeling_mixtral.MixtralAttention"


@register.family("starcoder2")
class Starcoder2(Mistral):
    title = "StarCoder2"
    attention = f"{MODELS}.starcoder2.modeling_starcoder2.Starcoder2Attention"

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        return nn.functional.dropout(super().finish(layer, heads), layer.residual_dropout, layer.training)


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


@register.family("qwen2")
class Qwen2(Llama):
    """Windows in some of the layers."""

    title = "Qwen2"
    attention = f"{MODELS}.qwen2.modeling_qwen2.Qwen2Attention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": layer.sliding_window}


@register.family("ministral")
class Ministral(Qwen2):
    title = "Ministral"
    attention = f"{MODELS}.ministral.modeling_ministral.MinistralAttention"


@register.family("qwen3")
class Qwen3(Qwen2):
    title = "Qwen3"
    attention = f"{MODELS}.qwen3.modeling_qwen3.Qwen3Attention"


@register.family("qwen3_moe")
class Qwen3Moe(Qwen2):
    title = "Qwen3 MoE"
    attention = f"{MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention"


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


@register.family("cohere")
class Cohere(Llama):
    title = "Cohere"
    attention = f"{MODELS}.cohere.modeling_cohere.CohereAttention"
    interleaved, norms_span_heads = True, True


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
class DeepSeek(Family):
    """MLA as in DeepSeek-V2 and V3: fused up-projections, and the rotary key fused with the latent."""

    title = "DeepSeek-V3"
    attention = f"{MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention"

    def is_attention(self, module: nn.Module) -> bool:
        return has_modules(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")

    def normalises(self, layer: nn.Module) -> bool:
        return False  # its norms lie on the latents

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


@register.family("named like Llama")
class NamedLikeLlama(Family):
    """Layers of no other family with q_proj and k_proj, rows head by head: Qwen2-VL, GLM, Helium and others.

    Not where q_proj also makes a gate (Qwen3-Next), nor where a convolution follows (linear attention).
    """

    title = "others that name their projections alike"

    def is_attention(self, module: Any) -> bool:
        width = getattr(module, "head_dim", None)
        if not has_modules(module, "q_proj", "k_proj") or has_modules(module, "conv1d") or not isinstance(width, int):
            return False
        queries, keys = (linear.weight.shape[0] // width for linear in (module.q_proj, module.k_proj))
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None and queries != groups * keys:
            return False
        others = (kind() for kind in register.family.values() if kind is not NamedLikeLlama)
        return not any(family.is_attention(module) for family in others)

    def rows(self, layer: Any) -> dict[str, Rows]:
        linears = {"q": layer.q_proj, "k": layer.k_proj}
        return {s: Rows.of(linear, linear.weight.shape[0] // layer.head_dim) for s, linear in linears.items()}

    def shares_value(self, layer: Any) -> bool:
        return getattr(layer, "v_proj", None) is None


def convertible_families() -> dict[str, ConvertibleFamily]:
    """Model type → family, for those that can be converted."""
    return {name: kind() for name, kind in register.family.items() if issubclass(kind, ConvertibleFamily)}


def find_convertible(model_type: str) -> ConvertibleFamily:
    families = convertible_families()
    if model_type not in families:
        known = ", ".join(family.title for family in families.values())
        hint = suggest_name(model_type, families)
        raise ValueError(
            f"models of type {model_type!r} cannot be converted{hint}; the families known here are {known}."
        )
    return families[model_type]


def find_family(model: object) -> ConvertibleFamily:
    """The family of a loaded model, or a sentence that says why it has none here."""
    if not isinstance(model, PreTrainedModel):
        known = ", ".join(family.title for family in convertible_families().values())
        raise ValueError(
            f"a loaded Transformers model was expected ({known}), but a {type(model).__name__} came; "
            "wrappers such as PEFT, DDP or a compiled model go around the model after its conversion."
        )
    return find_convertible(str(text_config(model).model_type))


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of a model's decoder of text: its own, or that of the text part of a larger model."""
    config: Any = model.config
    return config if config.model_type in register.family else config.get_text_config()
