"""Models of ours that are a Llama in all but name, as Transformers' own: conversion begins from those."""

import re
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from qklab.attention.spec import AttentionSpec
from qklab.hf.heads import QKLabForCausalLM, QKLabForMaskedLM
from qklab.model.spec import DecoderSpec

RENAMED = {
    r"\bembed\b": "embed_tokens",
    r"\bblocks\b": "layers",
    r"\battention\.project\.query\b": "self_attn.q_proj",
    r"\battention\.project\.key\b": "self_attn.k_proj",
    r"\battention\.project\.value\b": "self_attn.v_proj",
    r"\battention\.output\b": "self_attn.o_proj",
    r"\battention_norm\b": "input_layernorm",
    r"\bmlp_norm\b": "post_attention_layernorm",
    r"\bmlp\.(gate|up|down)\b": r"mlp.\1_proj",
}


def rewrite_as_llama(model: QKLabForCausalLM | QKLabForMaskedLM) -> LlamaForCausalLM:
    """The same model with copies of its weights, in evaluation mode."""
    spec, ours = model.config.decoder_spec, model.config
    refuse_other_specs(spec)
    attention = spec.pattern[0]
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.width,
        intermediate_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_width,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope_base},
        tie_word_embeddings=spec.tied,
        bos_token_id=ours.bos_token_id,
        eos_token_id=ours.eos_token_id,
        pad_token_id=ours.pad_token_id,
    )
    llama: Any = LlamaForCausalLM(config)
    llama.to(model.dtype)
    llama.load_state_dict({rename_weight(name): value for name, value in model.state_dict().items()})
    return llama.eval()


def rename_weight(name: str) -> str:
    """Llama's name of a weight of ours."""
    for ours, theirs in RENAMED.items():
        name = re.sub(ours, theirs, name)
    return name


def refuse_other_specs(spec: DecoderSpec) -> None:
    """A Llama has (Q,K,V) in every layer, RoPE, softmax, SwiGLU and RMSNorm before each part, and here no biases."""
    attention = spec.pattern[0]
    sizes = {name: getattr(attention, name) for name in ("width", "heads", "kv_heads", "head_width", "rope_base")}
    llama = DecoderSpec(
        **{name: getattr(spec, name) for name in ("vocab", "width", "layers", "mlp_ratio", "norm_eps", "tied")},
        attention=AttentionSpec(**sizes),
        context=spec.context,
    )
    if llama != spec.replace(dropout=0.0, attention=attention if len(set(spec.pattern)) == 1 else spec.attention):
        raise ValueError(
            f"{spec.name} cannot be converted: of models trained here those can that are a Llama, with (Q,K,V), RoPE, "
            "softmax, SwiGLU and RMSNorm, without biases; train the others with the choice you want instead."
        )
