"""Small models: qklab's with every kind of cache, and Transformers' of every family."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qklab import AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec

END = 96  # end-of-text, and the padding
KINDS: dict[str, Any] = {
    "(Q,K,V)": {"kv_heads": 2},
    "(Q,K=V)": {"share": "k=v", "kv_heads": 2},
    "(Q,K,V) | on-read": [{"mix": "differential-v2"}, {"share": "k=v", "kv_rotation": "on-read"}],
    "MLA": {"latent": LatentSpec(query_rank=12, kv_rank=8, rope_width=4)},
    "differential": {"mix": "differential", "coupling": CouplingSpec(), "norm": "qk"},
    "learned": {"position": "learned", "bias": True, "share": "q=k=v"},
}

Small = Callable[..., Any]  # pyright finds no `generate` in a GenerationMixin


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
SHAPE: dict[str, Any] = {
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
# name → (Transformers' name of its classes, choices)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"head_dim": None, "use_sliding_window": True, **MIXED}),
    "qwen3": ("Qwen3", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "head_dim": None, "rope_parameters": ROPE}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, **MIXED}),
    "gemma3_text": ("Gemma3Text", {"query_pre_attn_scalar": 8, **MIXED}),
    # not converted, but controlled
    "llama, wide heads": ("Llama", {"head_dim": 10, "attention_bias": True}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 10}),
    "deepseek_v3": ("DeepseekV3", LATENT),
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
    attention = "eager" if family == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def token_ids(rows: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


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
