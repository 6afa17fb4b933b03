"""Agreement with Transformers: with weights mapped across, its attention modules and ours give the same numbers."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from qklab import Attention, AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec

pytest.importorskip("transformers")

from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.diffllama.configuration_diffllama import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

# Both sides run in float64; errors are relative to the largest expected number. Where Transformers computes in float64
# throughout, only the order of sums differs: over many draws of the weights errors reach 4 units of rounding.
EXACT = 16 * torch.finfo(torch.float64).eps
# Some things it computes in float32 whatever its inputs are: RoPE's angles, its own RMSNorm, the softmax of its eager
# attention, DiffLlama's λ. Errors reach 3 units of that rounding, and 7 where DiffLlama's norm divides by a small rms.
SINGLE = 8 * torch.finfo(torch.float32).eps

WIDTH, TOKENS = 24, 13
BASE = 50.0  # so small that even the slowest pair turns visibly within TOKENS
ROPE = {"rope_type": "default", "rope_theta": BASE}

Config = TypeVar("Config")
Module = TypeVar("Module", bound=nn.Module)
State = dict[str, Tensor]
Pairing = Callable[[Tensor, int], Tensor]


def randomise(module: Module) -> Module:
    """The module in float64 with every weight random, gains, biases and λ included."""
    generator = torch.Generator().manual_seed(2)
    module.double().eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        std = 1.5 * max(parameter.shape) ** -0.5
        if parameter.dim() == 1:
            std = 0.1 if name.endswith("bias") else 0.5  # the others are gains and λ
        parameter.copy_(torch.empty(parameter.shape, dtype=parameter.dtype).normal_(0, std, generator=generator))
    return module


def inputs() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loaded(module: Module, weights: State) -> Module:
    """The module in float64 with exactly these weights: none missing, none left over."""
    module.double().eval().requires_grad_(False)
    module.load_state_dict(weights)
    return module


def renamed(state: State, names: dict[str, str]) -> State:
    """The same tensors under names in which every key of `names` is replaced by its value."""
    result = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = tensor
    return result


def configured(kind: Callable[..., Config], **choices: Any) -> Config:
    """A tiny configuration; "sdpa" keeps the softmax in float64, which most of their eager attentions do not."""
    common: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4, "attn_implementation": "sdpa"}
    return kind(**common | choices)


def unchanged(rows: Tensor, *_: int) -> Tensor:
    return rows


def causal_mask(segments: Tensor | None = None) -> Tensor:
    """What Transformers adds to the scores: 0 where a query may look and −∞ elsewhere."""
    visible = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)


def packed_texts() -> tuple[Tensor, Tensor]:
    """Two rows of three texts each: which text a token belongs to, and its place in it."""
    lengths = [[4, 6, 3], [1, 5, 7]]
    segments = [torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths]
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return torch.stack(segments), torch.stack(positions)


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def in_chunks(ours: Attention, x: Tensor, sizes: Iterable[int]) -> Tensor:
    """The layer's outputs when x comes in pieces through a cache."""
    cache = ours.new_cache(x.shape[0], 1)
    return torch.cat([ours(chunk, cache=cache) for chunk in x.split(list(sizes), 1)], 1)


def assert_agreement(ours: Attention, theirs: nn.Module, rotary: nn.Module, tolerance: float) -> None:
    """Same outputs on random inputs: at once with the same angles, at once with our own, and decoded with a cache."""
    x = inputs()
    cos, sin = rotary(x, torch.arange(TOKENS)[None])
    expected = theirs(x, position_embeddings=(cos, sin), attention_mask=causal_mask())[0]
    half = cos.shape[-1] // 2  # theirs are written twice, once for each entry of a pair
    angles = (cos[:, :, None, :half], sin[:, :, None, :half])
    positions, visibility = ours.locate(x)
    given = {"positions": positions._replace(angles=angles), "visibility": visibility}
    assert_equal(ours(x, **given), expected, tolerance)
    assert_equal(ours(x), expected, max(tolerance, SINGLE))
    # a chunk after a cached prefix is where a mask is easily aligned to the wrong corner
    assert_equal(in_chunks(ours, x, [4, 1, 5, 1, 2]), expected, max(tolerance, SINGLE))
    assert_equal(in_chunks(ours, x, [1] * TOKENS), expected, max(tolerance, SINGLE))


@pytest.mark.parametrize("rotated", [2, 6, 64])
@pytest.mark.parametrize("base", [BASE, 10_000.0, 500_000.0])
def test_angles(base: float, rotated: int):
    """In float32 even the rounding is shared, so that texts of any length see the same angles."""
    rope = {"rope_type": "default", "rope_theta": base}
    config = configured(LlamaConfig, head_dim=rotated, rope_parameters=rope)
    x = torch.zeros(1, 5000, 4 * rotated)
    positions, _ = Attention(AttentionSpec(width=4 * rotated, heads=4, rope_base=base)).locate(x)
    assert positions.angles is not None
    for ours, theirs in zip(positions.angles, LlamaRotaryEmbedding(config)(x, torch.arange(5000)[None]), strict=True):
        # one unit: vectorised cosines and the scalar ones at the end of a loop may round differently
        assert_equal(ours[:, :, 0], theirs[..., : rotated // 2], torch.finfo(torch.float32).eps)


# Llama and Qwen3: plain renaming

LLAMA_NAMES = {
    "q_proj.": "project.query.",
    "k_proj.": "project.key.",
    "v_proj.": "project.value.",
    "o_proj.": "output.",
    "q_norm.weight": "normalise.query_gain",
    "k_norm.weight": "normalise.key_gain",
}


def llama(kv_heads: int, bias: bool = False) -> tuple[Attention, LlamaAttention]:
    config = configured(LlamaConfig, num_key_value_heads=kv_heads, attention_bias=bias, rope_parameters=ROPE)
    theirs = randomise(LlamaAttention(config, layer_idx=0))
    spec = AttentionSpec(width=WIDTH, heads=4, kv_heads=kv_heads, bias=bias, rope_base=BASE)
    return loaded(Attention(spec), renamed(theirs.state_dict(), LLAMA_NAMES)), theirs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_llama(kv_heads: int, bias: bool):
    ours, theirs = llama(kv_heads, bias)
    assert_agreement(ours, theirs, LlamaRotaryEmbedding(theirs.config), EXACT)


def test_packed_texts():
    ours, theirs = llama(kv_heads=2)
    segments, positions = packed_texts()
    x = inputs()
    angles = LlamaRotaryEmbedding(theirs.config)(x, positions)
    expected = theirs(x, position_embeddings=angles, attention_mask=causal_mask(segments))[0]
    assert_equal(ours(x, segments=segments), expected, SINGLE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.1])  # the large one would show if it were not handed on
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_qwen3(kv_heads: int, eps: float, bias: bool):
    config = configured(
        Qwen3Config,
        rope_parameters=ROPE,
        num_key_value_heads=kv_heads,
        head_dim=10,  # not WIDTH / heads
        rms_norm_eps=eps,
        attention_bias=bias,
    )
    theirs = randomise(Qwen3Attention(config, layer_idx=0))
    spec = AttentionSpec(
        width=WIDTH, heads=4, kv_heads=kv_heads, head_width=10, bias=bias, norm="qk", norm_eps=eps, rope_base=BASE
    )
    ours = loaded(Attention(spec), renamed(theirs.state_dict(), LLAMA_NAMES))
    assert_agreement(ours, theirs, Qwen3RotaryEmbedding(config), SINGLE)


# GPT-NeoX: query, key and value of a head lie side by side in one matrix, and only part of a head turns


def neox_weights(theirs: GPTNeoXAttention, heads: int) -> State:
    """The fused rows, ordered (head, q/k/v, entry), taken apart."""
    weights = renamed(theirs.state_dict(), {"dense.": "output."})
    for kind in ("weight", "bias"):
        fused = weights.pop(f"query_key_value.{kind}").unflatten(0, (heads, 3, -1))
        for index, name in enumerate(("query", "key", "value")):
            weights[f"project.{name}.{kind}"] = fused[:, index].flatten(0, 1)
    return weights


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_gpt_neox(fraction: float):
    config = configured(
        GPTNeoXConfig,
        num_attention_heads=3,
        rope_parameters=ROPE | {"partial_rotary_factor": fraction},
    )
    theirs = randomise(GPTNeoXAttention(config, layer_idx=0))
    spec = AttentionSpec(width=WIDTH, heads=3, bias=True, rope_base=BASE, rope_fraction=fraction)
    ours = loaded(Attention(spec), neox_weights(theirs, heads=3))
    assert_agreement(ours, theirs, GPTNeoXRotaryEmbedding(config), EXACT)


# DiffLlama: differential attention


def neighbours(rows: Tensor, kv_heads: int) -> Tensor:
    """Rows of key/value groups paired as (g, g + G/2), paired as (2g, 2g + 1) instead."""
    return rows.unflatten(0, (2, kv_heads // 2, -1)).transpose(0, 1).flatten(0, 2)


def diffllama_weights(theirs: DiffLlamaAttention, kv_heads: int) -> State:
    """Query, key and value rows paired our way.

    The columns of the output stay: on both sides they are ordered (g, r, first and second value, entry).
    """
    weights = renamed(theirs.state_dict(), LLAMA_NAMES)
    weights["mix.query_lambdas"] = torch.stack([weights.pop("lambda_q1"), weights.pop("lambda_q2")])
    weights["mix.key_lambdas"] = torch.stack([weights.pop("lambda_k1"), weights.pop("lambda_k2")])
    return {
        name: neighbours(tensor, kv_heads) if name.startswith("project.") else tensor
        for name, tensor in weights.items()
    }


def diffllama(kv_heads: int, layer: int, bias: bool) -> tuple[AttentionSpec, DiffLlamaAttention]:
    config = configured(
        DiffLlamaConfig,
        rope_parameters=ROPE,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=6,
        attention_bias=bias,
    )
    spec = AttentionSpec(
        width=WIDTH,
        heads=8,
        kv_heads=kv_heads,
        head_width=6,
        bias=bias,
        rope_base=BASE,
        mix="differential",
        differential_gain=False,
    )
    return spec, randomise(DiffLlamaAttention(config, layer_idx=layer))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 7])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_diffllama(kv_heads: int, layer: int, bias: bool):
    spec, theirs = diffllama(kv_heads, layer, bias)
    ours = loaded(Attention(spec, layer), diffllama_weights(theirs, kv_heads))
    assert_agreement(ours, theirs, DiffLlamaRotaryEmbedding(theirs.config), SINGLE)


# DeepSeek-V3: multi-head latent attention

HEADS, HEAD_WIDTH, LATENT = 3, 10, LatentSpec(query_rank=14, kv_rank=9, rope_width=8)
DEEPSEEK_NAMES = {
    "q_a_proj.": "project.down_query.",
    "q_a_layernorm.weight": "project.query_gain",
    "kv_a_layernorm.weight": "project.key_value_gain",
    "o_proj.": "output.",
}


def halves(rows: Tensor, axis: int) -> Tensor:
    """Entries paired as (2i, 2i + 1), paired as (i, i + r/2) instead."""
    return rows.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def deepseek_weights(theirs: DeepseekV3Attention, pairing: Pairing) -> State:
    """Their fused matrices taken apart, the rotated rows paired our way."""
    weights = renamed(theirs.state_dict(), DEEPSEEK_NAMES)
    queries = weights.pop("q_b_proj.weight").unflatten(0, (HEADS, -1))
    weights["project.up_query.weight"] = queries[:, :HEAD_WIDTH].flatten(0, 1)
    weights["project.rope_query.weight"] = pairing(queries[:, HEAD_WIDTH:], 1).flatten(0, 1)
    for kind in ("weight", "bias") if theirs.config.attention_bias else ("weight",):
        latent, rope = weights.pop(f"kv_a_proj_with_mqa.{kind}").split([LATENT.kv_rank, LATENT.rope_width])
        weights[f"project.down_key_value.{kind}"] = latent
        weights[f"project.rope_key.{kind}"] = pairing(rope, 0)
    keys, values = weights.pop("kv_b_proj.weight").unflatten(0, (HEADS, 2, -1)).unbind(1)
    return weights | {"mix.up_key.weight": keys.flatten(0, 1), "mix.up_value.weight": values.flatten(0, 1)}


def deepseek(bias: bool, interleaved: bool) -> tuple[AttentionSpec, DeepseekV3Attention]:
    config = configured(
        DeepseekV3Config,
        rope_parameters=ROPE,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=LATENT.query_rank,
        kv_lora_rank=LATENT.kv_rank,
        qk_rope_head_dim=LATENT.rope_width,
        qk_nope_head_dim=HEAD_WIDTH,
        v_head_dim=HEAD_WIDTH,
        attention_bias=bias,
        rope_interleave=interleaved,
    )
    # 1e-6 is written into their module, whatever the configuration says
    spec = AttentionSpec(
        width=WIDTH, heads=HEADS, head_width=HEAD_WIDTH, bias=bias, latent=LATENT, norm_eps=1e-6, rope_base=BASE
    )
    return spec, randomise(DeepseekV3Attention(config, layer_idx=0))


@pytest.mark.parametrize("form", ["expanded", "absorbed", "cheaper"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_deepseek(bias: bool, interleaved: bool, form: str, monkeypatch: pytest.MonkeyPatch):
    spec, theirs = deepseek(bias, interleaved)
    ours = loaded(Attention(spec), deepseek_weights(theirs, halves if interleaved else unchanged))
    if form != "cheaper":
        monkeypatch.setattr(ours.mix, "prefers_absorbed", lambda queries, keys: form == "absorbed")
    assert_agreement(ours, theirs, DeepseekV3RotaryEmbedding(theirs.config), SINGLE)


# ZAYA: CCA, its convolutions and its norm

ZAYA_NAMES = LLAMA_NAMES | {
    "qkv_proj.": "",
    "q_proj.": "project.query.",
    "k_proj.": "project.key.",
    "qk_norm.temp": "couple.temperature",
    "conv_qk_depthwise.bias": "couple.entry_bias",
    "conv_qk_grouped.bias": "couple.head_bias",
}


def zaya_weights(theirs: Any) -> State:
    """Their two halves of the value as one matrix, and their kernels, which count tokens forwards, in our layout."""
    width = theirs.head_dim
    weights = {name.replace("qkv_proj.", ""): tensor for name, tensor in theirs.state_dict().items()}
    now, late = (weights.pop(f"v_proj_{half}.weight") for half in ("current", "delayed"))
    entry, head = (weights.pop(f"conv_qk_{name}.weight").flip(-1) for name in ("depthwise", "grouped"))
    weights = renamed(weights, ZAYA_NAMES) | {"project.value.weight": torch.cat([now, late])}
    for name in ("couple.entry_bias", "couple.head_bias"):
        weights[name] = weights[name].unflatten(0, (-1, width))
    weights["couple.entry_weight"] = entry[:, 0].mT.unflatten(1, (-1, width))
    # [heads · out, in, token] → [heads, token · in, out]
    weights["couple.head_weight"] = head.unflatten(0, (-1, width)).permute(0, 3, 2, 1).flatten(1, 2)
    return weights


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_zaya(kv_heads: int):
    """At once and from their cache: the prompt, a chunk and single tokens. In float64 but for their angles."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")  # not in the oldest Transformers
    rope = ROPE | {"partial_rotary_factor": 0.5}
    config = configured(
        zaya.ZayaConfig,
        head_dim=8,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        rope_parameters={"hybrid": rope, "hybrid_sliding": rope},
    )
    theirs = randomise(zaya.ZayaAttention(config, layer_idx=0))
    spec = AttentionSpec(
        width=WIDTH, heads=4, kv_heads=kv_heads, head_width=8, rope_fraction=0.5, rope_base=BASE, norm_eps=1e-30,
        coupling=CouplingSpec(kind="cca"),
    )  # fmt: skip
    ours, rotary = loaded(Attention(spec), zaya_weights(theirs)), zaya.ZayaRotaryEmbedding(config)
    x, cache, expected, at = inputs(), DynamicCache(config=config), [], 0
    for chunk in x.split([5, 4, 1, 1, 2], 1):
        stop = at + chunk.shape[1]
        angles = rotary(chunk, torch.arange(at, stop)[None], "hybrid")
        masks = {"causal": causal_mask()[:, :, at:stop, :stop]}
        expected.append(theirs(chunk, masks, past_key_values=cache, position_embeddings=angles)[0])
        at = stop
    angles = rotary(x, torch.arange(TOKENS)[None], "hybrid")
    whole = theirs(x, {"causal": causal_mask()}, position_embeddings=angles)[0]
    assert_equal(torch.cat(expected, 1), whole, EXACT)
    assert_equal(ours(x), whole, SINGLE)
    assert_equal(in_chunks(ours, x, [5, 4, 1, 1, 2]), torch.cat(expected, 1), SINGLE)
    positions, visibility = ours.locate(x)
    half = angles[0].shape[-1] // 2
    theirs_turned = (angles[0][:, :, None, :half].double(), angles[1][:, :, None, :half].double())
    given = {"positions": positions._replace(angles=theirs_turned), "visibility": visibility}
    assert_equal(ours(x, **given), whole, EXACT)


# whole models

VOCAB, CONTEXT = 40, 26
LLAMA_MODEL_NAMES = {
    "model.embed_tokens.": "embed.",
    "model.norm.": "norm.",
    "model.layers.": "blocks.",
    "self_attn.": "attention.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "gate_proj.": "gate.",
    "up_proj.": "up.",
    "down_proj.": "down.",
    "lm_head.": "head.",
} | LLAMA_NAMES
GPT2_NAMES = {
    "transformer.wte.": "embed.",
    "transformer.wpe.": "positions.",
    "transformer.ln_f.": "norm.",
    "transformer.h.": "blocks.",
    "ln_1.": "attention_norm.",
    "ln_2.": "mlp_norm.",
    "mlp.c_fc.": "mlp.up.",
    "mlp.c_proj.": "mlp.down.",
    "attn.c_attn.": "attention.c_attn.",
    "attn.c_proj.": "attention.output.",
    "lm_head.": "head.",
}


def assert_same_logits(ours: Decoder, theirs: nn.Module, tolerance: float) -> None:
    """Same logits at once and after a cached prefix."""
    ids = token_ids(TOKENS)
    expected = theirs(ids).logits
    assert_equal(ours(ids), expected, tolerance)
    cache = ours.new_cache(len(ids), 1)
    assert_equal(torch.cat([ours(chunk, cache=cache) for chunk in ids.split(5, 1)], 1), expected, tolerance)


def token_ids(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(3))


def llama_models(eps: float = 1e-6) -> tuple[Decoder, LlamaForCausalLM]:
    config = configured(
        LlamaConfig,
        rope_parameters=ROPE,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        intermediate_size=2 * WIDTH,
        rms_norm_eps=eps,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    theirs = randomise(LlamaForCausalLM(config))
    spec = DecoderSpec(
        vocab=VOCAB,
        width=WIDTH,
        layers=2,
        attention=AttentionSpec(width=WIDTH, heads=4, kv_heads=2, rope_base=BASE),
        mlp="swiglu",
        mlp_ratio=2.0,
        norm="rms",
        norm_eps=eps,
        tied=True,
    )
    return loaded(Decoder(spec), renamed(theirs.state_dict(), LLAMA_MODEL_NAMES)), theirs


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_llama_model(eps: float):
    assert_same_logits(*llama_models(eps), SINGLE)


def gpt2_weights(theirs: GPT2LMHeadModel) -> State:
    """Their matrices the other way round (they multiply from the right), with q, k and v taken apart."""
    weights = {}
    for name, tensor in renamed(theirs.state_dict(), GPT2_NAMES).items():
        tensor = tensor.mT if tensor.dim() == 2 and name.startswith("blocks.") else tensor
        if "c_attn" in name:
            for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                weights[name.replace("c_attn", f"project.{part}")] = rows
        else:
            weights[name] = tensor
    return weights


def gpt2_models() -> tuple[Decoder, GPT2LMHeadModel]:
    config = configured(
        GPT2Config,
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_layer=2,
        activation_function="gelu",  # the exact one; their default is an approximation
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = randomise(GPT2LMHeadModel(config))
    spec = DecoderSpec(
        vocab=VOCAB,
        width=WIDTH,
        layers=2,
        attention=AttentionSpec(width=WIDTH, heads=4, position="learned", bias=True),
        mlp="gelu",
        norm="layer",
        norm_eps=1e-5,
        bias=True,
        context=CONTEXT,
    )
    return loaded(Decoder(spec), gpt2_weights(theirs)), theirs


def test_gpt2_model():
    assert_same_logits(*gpt2_models(), EXACT)


def test_gpt2_model_on_packed_texts():
    # unlike RoPE, learned positions show where counting starts
    ours, theirs = gpt2_models()
    ids = token_ids(TOKENS)
    segments, positions = packed_texts()
    expected = theirs(ids, attention_mask=causal_mask(segments), position_ids=positions).logits
    assert_equal(ours(ids, segments=segments), expected, EXACT)


@pytest.mark.parametrize(("models", "tolerance"), [(llama_models, SINGLE), (gpt2_models, EXACT)])
def test_left_padding(models: Callable[[], tuple[Decoder, nn.Module]], tolerance: float):
    ours, theirs = models()
    ids, padding = token_ids(TOKENS), torch.tensor([2, 7])
    text = torch.arange(TOKENS) >= padding[:, None]
    positions = (torch.arange(TOKENS) - padding[:, None]).clamp(min=0)
    expected = theirs(ids, attention_mask=text.long(), position_ids=positions).logits
    actual = ours(ids, cache=ours.new_cache(2, TOKENS, left_padding=padding))
    assert_equal(actual[text], expected[text], tolerance)


@pytest.mark.parametrize("padding", [[0, 0, 0], [0, 2, 5]])
@pytest.mark.parametrize("models", [llama_models, gpt2_models])
def test_greedy_generation(models: Callable[[], tuple[Decoder, Any]], padding: list[int]):
    ours, theirs = models()
    prompt, left_padding = token_ids(6, rows=3), torch.tensor(padding)
    mask = (torch.arange(6) >= left_padding[:, None]).long()
    expected = theirs.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=CONTEXT - 6)
    actual = ours.generate(prompt, CONTEXT - 6, temperature=0, left_padding=left_padding)
    assert actual.tolist() == expected.tolist()
