"""Small models: qklab's with every kind of cache, and Transformers' of every family."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qklab import AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec

END = 96  # end-of-text, and the padding
KINDS: dict[str, Any] = {
    "(Q,K,V)": {"kv_heads": 2},
    "(Q,K=V)": {"share": "k=v", "kv_heads": 2},
    "local | on-read": [
        {"mix": "differential-v2", "window": 4, "sinks": True},
        {"share": "k=v", "kv_rotation": "on-read"},
    ],
    "MLA": {"latent": LatentSpec(query_rank=12, kv_rank=8, rope_width=4)},
    "differential": {"mix": "differential", "coupling": CouplingSpec(), "norm": "qk"},
    "learned": {"position": "learned", "bias": True, "share": "q=k=v"},
}

Small = Callable[..., Any]  # pyright finds no `generate` in a GenerationMixin
RENAMED = hasattr(PreTrainedModel, "activation_checkpointing_enable")  # from Transformers 5.23 on
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"


def enable_checkpointing(model: Any, reentrant: bool = False) -> None:
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})


def decoder(kind: str, seed: int = 0, **changes: Any) -> Decoder:
    """Two layers of width 32 with no weight at a special value such as 0 or 1."""
    pattern = KINDS[kind] if isinstance(KINDS[kind], list) else [KINDS[kind]]
    attention = tuple(AttentionSpec(width=32, heads=4, **choices) for choices in pattern)
    model = Decoder(DecoderSpec(vocab=97, width=32, layers=2, attention=attention, context=64, **changes), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.2, generator=generator))
    return model


WINDOW = 6
TOKENS = 11  # more than the window
VOCAB = 61
SHAPE: dict[str, Any] = {  # of most; None is left to the family
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 9,
    "attention_bias": True,
    "q_lora_rank": 10,
}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIX_OF_TEN = {"hidden_size": 60, "num_attention_heads": 6, "head_dim": None, "attention_bias": True}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 4, "hidden_size": 36}
LENT = {  # the last two layers read the keys of the two before
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LINEAR = {  # one layer of linear attention, one with a gate
    "head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "attention_bias": True,
}
GLOBAL = {"attention_k_eq_v": True, "global_head_dim": 12, "num_global_key_value_heads": 1}
GLM_EXPERTS = EXPERTS | {
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
}
UNDROPPED = dict.fromkeys(("attention_dropout", "residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0)
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "shared_intermediate_size": 16}
# name → (Transformers' name of its classes, choices); shapes and positions differ, so that none is taken for granted
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma": ("Gemma", {"num_key_value_heads": 2, "head_dim": 10}),
    "granite": ("Granite", {**SIX_OF_TEN, "attention_multiplier": 0.3}),
    "granitemoe": ("GraniteMoe", {**EXPERTS, "head_dim": None}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {**EXPERTS, "head_dim": 20, "rope_parameters": YARN}),
    "ministral": ("Ministral", {"head_dim": 24, **MIXED}),
    "starcoder2": ("Starcoder2", {"head_dim": None, "use_bias": True, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"head_dim": None, "use_sliding_window": True, **MIXED}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "head_dim": None, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, **MIXED}),
    "gemma3_text": ("Gemma3Text", {"query_pre_attn_scalar": 8, **MIXED}),
    "phi": ("Phi", {"head_dim": None, "rope_parameters": ROPE}),
    "phi3": ("Phi3", {"head_dim": None, "rope_parameters": ROPE, "sliding_window": WINDOW}),
    "stablelm": ("StableLm", {"head_dim": None, "use_qkv_bias": True, "rope_parameters": ROPE}),
    "smollm3": ("SmolLM3", {"head_dim": None, "no_rope_layers": [1, 0], "rope_parameters": LLAMA3}),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "olmo3": ("Olmo3", {"head_dim": None, **MIXED}),
    "cohere": ("Cohere", {"head_dim": None}),
    "cohere2": ("Cohere2", {"head_dim": None, **MIXED}),
    "gpt_oss": ("GptOss", {**EXPERTS, "head_dim": 40, **MIXED}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "head_dim": None, "rope_parameters": ROPE}),
    "arcee": ("Arcee", {"head_dim": 20, "attention_bias": True, "rope_parameters": YARN}),
    "apertus": ("Apertus", {**SIX_OF_TEN, "rope_parameters": LLAMA3}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 12, "num_shared_experts": 1, "first_k_dense_replace": 1}),
    "nemotron": ("Nemotron", {"head_dim": 24, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "phimoe": ("Phimoe", {**EXPERTS, "head_dim": None, "attention_bias": True, **UNDROPPED}),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": True, "rope_parameters": ROPE}),
    "glm4_moe": ("Glm4Moe", {**GLM_EXPERTS, "use_qk_norm": True, "head_dim": 20}),
    "helium": ("Helium", {"num_key_value_heads": 2}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "head_dim": 10}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**EXPERTS, "moe_k": 1, "moe_num_experts": 2, "head_dim": None}),
    "dots1": ("Dots1", {**GLM_EXPERTS, **MIXED}),
    "vaultgemma": ("VaultGemma", {"query_pre_attn_scalar": 8, "head_dim": 10, **MIXED}),
    "gemma3n_text": ("Gemma3nText", {**PER_LAYER, **LENT, "laurel_rank": 4, "altup_num_inputs": 2}),
    "gemma4_text": ("Gemma4Text", {**PER_LAYER, **MIXED, **GLOBAL}),
    "gemma4_unified_text": ("Gemma4UnifiedText", {**MIXED, **GLOBAL, "attention_bias": True}),
    "minimax_m2": ("MiniMaxM2", {**EXPERTS, "head_dim": 10, "rope_parameters": ROPE}),
    "olmoe": ("Olmoe", {**EXPERTS, "head_dim": None}),
    "exaone4": ("Exaone4", {"head_dim": 24, **MIXED}),
    "seed_oss": ("SeedOss", {"head_dim": 10, "attention_bias": True, "attention_out_bias": True, **UNDROPPED}),
    "ministral3": ("Ministral3", {"head_dim": 10, "rope_parameters": SCALED}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"]}),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **SHARED_EXPERT, **LINEAR, "rope_parameters": ROPE}),
    "qwen3_5_text": ("Qwen3_5Text", {**LINEAR, "head_dim": 16}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**EXPERTS, **SHARED_EXPERT, **LINEAR, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **GLM_EXPERTS, "head_dim": None}),
    # choices of families that are another layout
    "gemma4_text, lent keys": ("Gemma4Text", {**PER_LAYER, **LENT}),
    "cohere, normed": ("Cohere", {"head_dim": None, "use_qk_norm": True}),
    "stablelm, normed": ("StableLm", {"head_dim": None, "qk_layernorm": True, "rope_parameters": ROPE}),
    "phi, normed": ("Phi", {"head_dim": None, "qk_layernorm": True, "rope_parameters": ROPE}),
    "llama, wide heads": ("Llama", {"head_dim": 10, "attention_bias": True}),
    # not converted, but controlled
    "glm": ("Glm", {"num_key_value_heads": 1}),
    "deepseek_v3, no query latent": ("DeepseekV3", LATENT | {"q_lora_rank": None}),
}
# in which the heads are not those that a wrong layout would also find
ODD_HEADS: dict[str, dict[str, Any]] = {
    "4 × 12": {"hidden_size": 48, "num_attention_heads": 4},
    "6 × 10": {"hidden_size": 60, "num_attention_heads": 6},
}


def tiny(family: str, **changes: Any) -> Any:
    """A random causal language model with biases and gains that are not at their defaults."""
    torch.manual_seed(0)
    kind, choices = FAMILIES[family]
    shape = {} if kind == "GPT2" else SHAPE
    shared = {name: SHAPE[name] for name in ("vocab_size", "initializer_range", *(n for n in SHAPE if "token_id" in n))}
    wanted = {name: value for name, value in (shape | shared | choices).items() if value is not None or "rank" in name}
    config = getattr(transformers, f"{kind}Config")(**wanted, eos_token_id=None)
    for name, value in changes.items():
        setattr(config, name, value)
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "eager"  # the only one in float64
    attention = "eager" if family in ("gemma2", "vaultgemma", "gpt_oss") else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name or ".ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def token_ids(rows: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def compute_logits(model: Any, tokens: Tensor | None = None, **kwargs: Any) -> Tensor:
    return model(token_ids() if tokens is None else tokens, **kwargs).logits


def step_by_step(model: Any, tokens: Tensor, cache: Any, first: int = 5) -> Tensor:
    """Logits from a prefill, two more tokens at once, and single tokens, through one cache."""
    cuts = [0, first, first + 2, first + 3, tokens.shape[1] - 1, tokens.shape[1]]
    parts = [compute_logits(model, tokens[:, a:b], past_key_values=cache) for a, b in itertools.pairwise(cuts)]
    return torch.cat(parts, 1)


@torch.no_grad()
def shake(model: torch.nn.Module, size: float = 0.2) -> None:
    """Move the coupling away from the identity."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".couple." in name:
            parameter.add_(size * torch.randn_like(parameter))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, and end-of-text as number 256."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=end, eos_token=end, pad_token=end)


def byte_llama(**choices: Any) -> Any:
    """A tiny random Llama for that tokenizer."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    wanted: dict[str, Any] = SHAPE | ends | {"vocab_size": 257} | choices
    return LlamaForCausalLM(LlamaConfig(**wanted))
