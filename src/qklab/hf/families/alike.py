"""Families that are laid out as another one, and those that are not converted."""

from __future__ import annotations

from typing import Any

from qklab import register
from qklab.hf.families.apart import Gemma2, Gemma4Text, Interleaved, Llama, Mistral, Olmo2, Qwen2, Qwen3Next
from qklab.hf.families.fused import DeepSeek
from qklab.hf.layout import MODELS, ConvertibleFamily, Family, has_modules
from qklab.optim.roles import Rows

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
