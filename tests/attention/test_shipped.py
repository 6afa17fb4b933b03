"""Agreement with the attention of released models in Transformers, weights mapped across: at once and from our cache.

Transformers turns RoPE's angles and most norms in float32, so that errors are of that rounding.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_agreement import (
    BASE,
    LLAMA_MODEL_NAMES,
    LLAMA_NAMES,
    ROPE,
    SINGLE,
    TOKENS,
    VOCAB,
    WIDTH,
    State,
    assert_equal,
    assert_same_logits,
    configured,
    in_chunks,
    inputs,
    loaded,
    randomise,
    renamed,
    token_ids,
)
from torch import Tensor

from qklab import Attention, AttentionSpec, Decoder, DecoderSpec

WINDOW, HEADS, HEAD_WIDTH = 5, 4, 16
EPS = 1e-30  # where a model normalises what another norm has already scaled, and that scale must not show
SIZE: dict[str, Any] = {"width": WIDTH, "heads": HEADS, "head_width": HEAD_WIDTH}
NAMES = LLAMA_NAMES | {"sinks": "mix.sinks.logits"}


def find_model(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def find_config(name: str, kind: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), kind)


def mask_scores(window: int | None) -> Tensor:
    """What is added to the scores [1, 1, T, T]."""
    apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    hidden = (apart < 0) | (apart >= (TOKENS if window is None else window))
    return torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def assert_layers_agree(ours: Attention, call: Callable[[Tensor, Tensor], Any]) -> None:
    """Their outputs for x under a mask, against ours at once, in chunks, as a prompt and steps, and step by step."""
    x = inputs()
    expected = call(x, mask_scores(ours.spec.window))[0]
    assert_equal(ours(x), expected, SINGLE)
    for chunks in ([4, 1, 5, 1, 2], [8] + [1] * 5, [1] * TOKENS):
        assert_equal(in_chunks(ours, x, chunks), expected, SINGLE)
    if ours.spec.window is not None:
        assert not torch.allclose(ours(x), Attention.forward(loaded_without_window(ours), x))


def loaded_without_window(ours: Attention) -> Attention:
    return loaded(Attention(ours.spec.replace(window=None)), ours.state_dict())


@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss(layer: int) -> None:
    """Sinks in every layer, a window in every other."""
    oss = find_model("gpt_oss")
    config = configured(
        find_config("gpt_oss", "GptOssConfig"),
        attn_implementation="eager",
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=HEAD_WIDTH,
        sliding_window=WINDOW,
        rope_parameters=ROPE,
    )
    theirs, rotary = randomise(oss.GptOssAttention(config, layer_idx=layer)), oss.GptOssRotaryEmbedding(config)
    window = WINDOW if config.layer_types[layer] == "sliding_attention" else None
    spec = AttentionSpec(**SIZE, kv_heads=2, bias=True, rope_base=BASE, sinks=True, window=window)
    ours = loaded(Attention(spec), renamed(theirs.state_dict(), NAMES))
    angles = rotary(inputs(), torch.arange(TOKENS)[None])
    assert_layers_agree(ours, lambda x, mask: theirs(x, position_embeddings=angles, attention_mask=mask))
    assert [config.layer_types[0], window is None] == ["sliding_attention", layer == 1]


def add_one_to_gains(weights: State) -> State:
    """Gains that are kept as their distance from 1."""
    return {name: tensor + 1 if name.endswith("_gain") else tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("bias", [False, True])
def test_qwen3_next(bias: bool) -> None:
    """A gate for every element; queries and gates of a head lie side by side in one matrix."""
    qwen = find_model("qwen3_next")
    config = configured(
        find_config("qwen3_next", "Qwen3NextConfig"),
        num_key_value_heads=2,
        head_dim=HEAD_WIDTH,
        attention_bias=bias,
        rms_norm_eps=0.1,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
    )
    theirs, rotary = randomise(qwen.Qwen3NextAttention(config, layer_idx=0)), qwen.Qwen3NextRotaryEmbedding(config)
    weights = add_one_to_gains(renamed(theirs.state_dict(), NAMES))
    for kind in ("weight", "bias") if bias else ("weight",):
        fused = weights.pop(f"project.query.{kind}").unflatten(0, (HEADS, 2, -1))
        weights[f"project.query.{kind}"], weights[f"gate.weigh.{kind}"] = (fused[:, i].flatten(0, 1) for i in (0, 1))
    spec = AttentionSpec(
        **SIZE, kv_heads=2, bias=bias, norm="qk", norm_eps=0.1, rope_base=BASE, rope_fraction=0.25, gate="element"
    )
    ours = loaded(Attention(spec), weights)
    angles = rotary(inputs(), torch.arange(TOKENS)[None])
    assert_layers_agree(ours, lambda x, mask: theirs(x, position_embeddings=angles, attention_mask=mask))


LAYER_TYPES = ["sliding_attention", "full_attention"]
BASES = {"sliding_attention": BASE, "full_attention": 3 * BASE}


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma3(layer: int) -> None:
    """Local and global layers, each with a RoPE base of its own."""
    gemma, kind = find_model("gemma3"), LAYER_TYPES[layer]
    config = configured(
        find_config("gemma3", "Gemma3TextConfig"),
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=HEAD_WIDTH,
        query_pre_attn_scalar=HEAD_WIDTH,
        sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
        rms_norm_eps=0.1,
        rope_parameters={name: {"rope_type": "default", "rope_theta": base} for name, base in BASES.items()},
    )
    theirs, rotary = randomise(gemma.Gemma3Attention(config, layer_idx=layer)), gemma.Gemma3RotaryEmbedding(config)
    spec = AttentionSpec(
        **SIZE, kv_heads=2, norm="qk", norm_eps=0.1, rope_base=BASES[kind], window=WINDOW if layer == 0 else None
    )
    ours = loaded(Attention(spec), add_one_to_gains(renamed(theirs.state_dict(), NAMES)))
    angles = rotary(inputs(), torch.arange(TOKENS)[None], kind)
    assert_layers_agree(ours, lambda x, mask: theirs(x, position_embeddings=angles, attention_mask=mask))


def permute_entries(weights: State, order: Tensor, names: tuple[str, ...]) -> State:
    """The rows of every head of the named matrices in another order, and the columns that read what they give."""
    for name in names:
        heads = weights[f"project.{name}.weight"].unflatten(0, (-1, len(order)))
        weights[f"project.{name}.weight"] = heads[:, order].flatten(0, 1)
    return weights


def permute_outputs(weights: State, order: Tensor) -> State:
    columns = weights["output.weight"].unflatten(1, (-1, len(order)))
    return weights | {"output.weight": columns[:, :, order].flatten(1)}


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma4(layer: int) -> None:
    """Local layers normalise their values; global ones have none of their own, but make key and value of one tensor.

    Its scores are not divided by √D, which goes into the queries' gain. In global layers a quarter of the pairs
    (i, i + D/2) turn, at frequencies that are counted over all D: ours are the first entries, with base^(1/4).
    """
    gemma, kind = find_model("gemma4"), LAYER_TYPES[layer]
    config = configured(
        find_config("gemma4", "Gemma4TextConfig"),
        num_hidden_layers=2,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=HEAD_WIDTH,
        global_head_dim=HEAD_WIDTH,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
        rms_norm_eps=0.1,
        rope_parameters={
            "sliding_attention": ROPE,
            "full_attention": {"rope_type": "proportional", "rope_theta": BASE, "partial_rotary_factor": 0.25},
        },
    )
    theirs = randomise(gemma.Gemma4TextAttention(config, layer_idx=layer))
    rotary = gemma.Gemma4TextRotaryEmbedding(config)
    weights = renamed(theirs.state_dict(), NAMES)
    weights["normalise.query_gain"] = weights["normalise.query_gain"] * HEAD_WIDTH**0.5
    common: dict[str, Any] = {**SIZE, "norm": "qk", "norm_eps": 0.1, "value_norm": True}
    if layer == 0:
        spec = AttentionSpec(**common, kv_heads=2, rope_base=BASE, window=WINDOW)
    else:
        spec = AttentionSpec(**common, kv_heads=1, share="k=v", rope_base=BASE**0.25, rope_fraction=0.25)
        half, turned = torch.arange(HEAD_WIDTH).view(2, -1), HEAD_WIDTH // 8
        order = torch.cat([half[:, :turned].flatten(), half[:, turned:].flatten()])
        weights = permute_outputs(permute_entries(weights, order, ("query", "key")), order)
        for gain in ("normalise.query_gain", "normalise.key_gain"):
            weights[gain] = weights[gain][order]
    ours = loaded(Attention(spec), weights)
    angles = rotary(inputs(), torch.arange(TOKENS)[None], kind)
    assert_layers_agree(ours, lambda x, mask: theirs(x, angles, mask, shared_kv_states={}))


def test_deepseek_v4() -> None:
    """A sliding layer: one head that is key and value, turned once and back on the output; sinks; a window.

    Queries pass a latent with a norm, of which nothing is left after the norm of each head, and outputs two matrices:
    both are one matrix here. The gain of the key goes into the queries' gain and the output, which is possible where
    the two entries of a pair that turns share it.
    """
    deepseek = find_model("deepseek_v4")
    turned, groups, rank = 8, 2, 6
    rope = ROPE | {"partial_rotary_factor": turned / HEAD_WIDTH}
    config = configured(
        find_config("deepseek_v4", "DeepseekV4Config"),
        attn_implementation="eager",
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        head_dim=HEAD_WIDTH,
        q_lora_rank=20,
        o_groups=groups,
        o_lora_rank=rank,
        sliding_window=WINDOW,
        rms_norm_eps=EPS,
        partial_rotary_factor=turned / HEAD_WIDTH,
        rope_parameters={"main": rope, "compress": rope},
    )
    theirs = randomise(deepseek.DeepseekV4Attention(config, layer_idx=0))
    pairs = theirs.kv_norm.weight[-turned:].view(-1, 2)
    pairs.copy_(pairs[:, :1].expand(-1, 2))
    state, gain = theirs.state_dict(), theirs.kv_norm.weight
    columns = state["o_a_proj.weight"].unflatten(0, (groups, -1))  # [groups, rank, H·D/groups]
    output = state["o_b_proj.weight"] @ torch.block_diag(*columns)
    weights = {
        "project.query.weight": state["q_b_proj.weight"]
        @ (state["q_a_norm.weight"][:, None] * state["q_a_proj.weight"]),
        "project.key.weight": state["kv_proj.weight"],
        "normalise.query_gain": gain,
        "mix.sinks.logits": state["sinks"],
        "output.weight": output * gain.repeat(HEADS),
    }
    # [nope ; interleaved pairs] → [pairs (i, i + r/2) ; nope]
    tail = torch.arange(HEAD_WIDTH - turned, HEAD_WIDTH).view(-1, 2).mT.flatten()
    order = torch.cat([tail, torch.arange(HEAD_WIDTH - turned)])
    weights = permute_outputs(permute_entries(weights, order, ("query", "key")), order)
    weights["normalise.query_gain"] = gain[order]
    spec = AttentionSpec(
        **SIZE, share="k=v", kv_heads=1, norm="qk", norm_eps=EPS, rope_base=BASE, rope_fraction=turned / HEAD_WIDTH,
        sinks=True, window=WINDOW,
    )  # fmt: skip
    ours, rotary = loaded(Attention(spec), weights), deepseek.DeepseekV4RotaryEmbedding(config)
    at = torch.arange(TOKENS)[None]
    angles = {"main": rotary(inputs(), at, "main")}
    assert_layers_agree(
        ours, lambda x, mask: theirs(x, position_embeddings=angles, position_ids=at, attention_mask=mask)
    )


def test_mistral_model() -> None:
    """A whole model with a window in every layer: its own masks, and what it writes from its own sliding cache."""
    mistral = find_model("mistral")
    config = configured(
        find_config("mistral", "MistralConfig"),
        rope_parameters=ROPE,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        intermediate_size=2 * WIDTH,
        rms_norm_eps=1e-6,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    theirs = randomise(mistral.MistralForCausalLM(config))
    attention = AttentionSpec(width=WIDTH, heads=4, kv_heads=2, rope_base=BASE, window=WINDOW)
    spec = DecoderSpec(vocab=VOCAB, width=WIDTH, layers=2, attention=attention, mlp_ratio=2.0, norm_eps=1e-6)
    ours = loaded(Decoder(spec), renamed(theirs.state_dict(), LLAMA_MODEL_NAMES))
    assert_same_logits(ours, theirs, SINGLE)
    prompt = token_ids(7, rows=3)
    left_padding = torch.tensor([0, 3, 1])
    mask = (torch.arange(7) >= left_padding[:, None]).long()
    written: Any = theirs.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assert ours.generate(prompt, 12, temperature=0, left_padding=left_padding).tolist() == written.tolist()
