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
from qklab.attention.spec import LatentSpec
from qklab.hf.layout import ConvertibleFamily, Family, SeparateProjections, has_modules
from qklab.optim.roles import CouplingLinearity, Rows
from qklab.schema import suggest_name

MODELS = "transformers.models"


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


# Families laid out as one above: model type → what people call it, its attention class, and whose layout it has.
ALIKE: dict[str, tuple[str, str, type[ConvertibleFamily]]] = {
    "gemma": ("Gemma", "GemmaAttention", Llama),
    "granite": ("Granite", "GraniteAttention", Llama),
    "granitemoe": ("Granite MoE", "GraniteMoeAttention", Llama),
    "qwen2_moe": ("Qwen2 MoE", "Qwen2MoeAttention", Llama),
    "arcee": ("Arcee", "ArceeAttention", Llama),
    "apertus": ("Apertus", "ApertusAttention", Llama),
    "hy_v3": ("Hy3", "HYV3Attention", Llama),
    "nemotron": ("Nemotron", "NemotronAttention", Llama),
    "phimoe": ("Phi-3.5 MoE", "PhimoeAttention", Llama),
    "glm4_moe": ("GLM-4.5", "Glm4MoeAttention", Llama),
    "glm4": ("GLM-4", "Glm4Attention", Interleaved),
    "helium": ("Helium", "HeliumAttention", Interleaved),
    "ernie4_5": ("ERNIE 4.5", "Ernie4_5Attention", Interleaved),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", "Ernie4_5_MoeAttention", Interleaved),
    "mixtral": ("Mixtral", "MixtralAttention", Mistral),
    "ministral": ("Ministral", "MinistralAttention", Qwen2),
    "qwen3": ("Qwen3", "Qwen3Attention", Qwen2),
    "qwen3_moe": ("Qwen3 MoE", "Qwen3MoeAttention", Qwen2),
    "dots1": ("dots.llm1", "Dots1Attention", Qwen2),
    "vaultgemma": ("VaultGemma", "VaultGemmaAttention", Gemma2),
    "gemma4_unified_text": ("Gemma 4 unified (text)", "Gemma4UnifiedTextAttention", Gemma4Text),
    "minimax_m2": ("MiniMax-M2", "MiniMaxM2Attention", Olmo2),
    "qwen3_5_text": ("Qwen3.5 (text)", "Qwen3_5Attention", Qwen3Next),
    "qwen3_5_moe_text": ("Qwen3.5 MoE (text)", "Qwen3_5MoeAttention", Qwen3Next),
    "glm4_moe_lite": ("GLM-4.7 Flash", "Glm4MoeLiteAttention", DeepSeek),
}
for _model_type, (_title, _attention, _layout) in ALIKE.items():
    _folder = _model_type.removesuffix("_text")
    _path = f"{MODELS}.{_folder}.modeling_{_folder}.{_attention}"
    register.family(_model_type)(type(_attention, (_layout,), {"title": _title, "attention": _path}))


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


# Why models that people know are not converted, though they are decoders of text.
NORM_AFTER_ROPE = "it normalises queries and keys after RoPE has turned them"
INDEXED = "an indexer of its own chooses which keys a query meets"
RENAMED_LAYERS = "Transformers before 5.23 renames the kinds of its layers where a converted model is saved"
NO_SOFTMAX = "it has no softmax attention"
REFUSED = {
    "llama4_text": NORM_AFTER_ROPE,
    "hunyuan_v1_dense": NORM_AFTER_ROPE,
    "hunyuan_v1_moe": NORM_AFTER_ROPE,
    "nanochat": NORM_AFTER_ROPE,
    "deepseek_v2": "its RoPE multiplies complex numbers",
    "deepseek_v32": INDEXED,
    "deepseek_v4": "it makes one key of several tokens",
    "glm_moe_dsa": INDEXED,
    "hy_v4": INDEXED,
    "qwen4_exp_text": INDEXED,
    "mistral4": "it scales queries by their position after latents were expanded",
    "lfm2": RENAMED_LAYERS,
    "lfm2_moe": RENAMED_LAYERS,
    "falcon_h1": "it multiplies its keys by a number before RoPE",
    "diffllama": "it subtracts two attention maps",
    "falcon": "its layers call no attention function of Transformers' interface",
    "bloom": "it adds ALiBi's bias to the logits itself",
    "mpt": "it adds ALiBi's bias to the logits itself",
    "mamba": NO_SOFTMAX,
    "mamba2": NO_SOFTMAX,
    "rwkv": NO_SOFTMAX,
    "xlstm": NO_SOFTMAX,
}


def convertible_families() -> dict[str, ConvertibleFamily]:
    """Model type → family, for those that can be converted."""
    return {name: kind() for name, kind in register.family.items() if issubclass(kind, ConvertibleFamily)}


def find_convertible(model_type: str) -> ConvertibleFamily:
    families = convertible_families()
    if model_type not in families:
        known = ", ".join(family.title for family in families.values())
        why = f", as {REFUSED[model_type]}" if model_type in REFUSED else suggest_name(model_type, families)
        raise ValueError(
            f"models of type {model_type!r} cannot be converted{why}; the families known here are {known}."
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
