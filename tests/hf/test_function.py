"""attn_implementation: functions of Transformers get what qklab's own attention gets, full, cached and paged."""

import gc
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import KINDS, Small, tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from qklab import AttentionSpec, DecoderSpec
from qklab.hf import QKLabCache, QKLabConfig, QKLabForCausalLM, QKLabModel, convert
from qklab.testing import contracts_of, grid

PLAIN, FLASH = "of a test", "flash of a test"
MORE: dict[str, Any] = {
    "window": {"window": 4, "kv_heads": 2, "norm": "qk", "rope_fraction": 0.5},
    "window | full": [{"window": 3, "share": "k=v"}, {"share": "k=v", "kv_rotation": "on-read", "kv_heads": 1}],
    "windows": [{"window": 5, "share": "k=v", "kv_rotation": "on-read"}, {"share": "k=v"}],
    "sinks": {"sinks": True, "gate": "head", "exclusive": True},
    "both made on reading": {"share": "k=v", "value_norm": True, "norm": "qk", "window": 5},
    "differential, sinks": {"mix": "differential", "sinks": True, "window": 4},
}
PAGE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
FLEXIBLE = ("MLA", "differential")
REFUSED = ("differential", "sinks", "local")  # by FlashAttention


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What two functions of a test, registered with Transformers, were called with."""
    made: list[dict[str, Any]] = []

    def note(attend: Any) -> Any:
        def noted(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
            assert options["dropout"] == 0.0
            assert layer.num_key_value_groups == query.shape[1] // key.shape[1]
            made.append({"layer": layer.layer_idx, "mask": attention_mask, "key": key, **options})
            options |= {"groups": layer.num_key_value_groups}
            return attend(query, key, value, attention_mask, **options).transpose(1, 2), None

        return noted

    for name, choices in MORE.items():
        monkeypatch.setitem(KINDS, name, choices)
    for name, attend, write in ((PLAIN, attend_masked, sdpa_mask), (FLASH, attend_texts, flash_attention_mask)):
        for prefix in ("", "paged|"):
            monkeypatch.setitem(AttentionInterface._global_mapping, prefix + name, note(attend))
            monkeypatch.setitem(AttentionMaskInterface._global_mapping, prefix + name, write)
    for place in ("lazy_import_flash_attention", "lazy_import_paged_flash_attention"):
        monkeypatch.setattr(f"transformers.modeling_utils.{place}", lambda *_, **__: None, raising=False)
    gc.freeze()
    yield made
    gc.unfreeze()


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, is_causal: bool, groups: int,
    s_aux: Tensor | None = None, sliding_window: int | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Eager attention, by the mask alone, which has to know the window."""
    del dropout
    k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    scores = q @ k.mT * scaling
    if mask is None and is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    if mask is not None:
        assert sliding_window is None or int(mask.sum(-1).max()) < sliding_window * (1 if is_causal else 2) + is_causal
        scores = scores.masked_fill(~mask, -math.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def attend_texts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, groups: int, is_causal: bool = True,
    sliding_window: int | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None, max_length_k: int | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """As FlashAttention: whole texts, the last query beside the last key, and a mask [B, S] that only says what is
    padding."""
    assert v.shape[-1] <= q.shape[-1]
    rows, tokens = q.shape[0], q.shape[2]
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        assert mask is None
        flat = [tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (q, k, v)]
        spans = [ends.tolist() for ends in (cu_seq_lens_q, cu_seq_lens_k)]
        for longest, ends in zip((max_length_q, max_length_k), spans, strict=True):
            assert longest is not None
            assert longest >= max(b - a for a, b in itertools.pairwise(ends))
    else:
        flat = [q, k, v]
        spans = []
    heads: list[Tensor] = []
    plain: dict[str, Any] = {"scaling": scaling, "is_causal": is_causal, "groups": groups, "dropout": dropout}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(k.shape[2]) - (torch.arange(q.shape[2]) + k.shape[2] - q.shape[2])[:, None]
        seen = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if sliding_window is not None:
            seen = seen & (distance.abs() < sliding_window)
        return attend_masked(q, k, v, seen[None, None], **plain)

    if spans:
        places = zip(spans[0], spans[0][1:], spans[1], spans[1][1:], strict=False)
        heads = [attend(flat[0][:, :, a:b], *(t[:, :, c:d] for t in flat[1:])) for a, b, c, d in places if b > a]
        return torch.cat(heads, 2).unflatten(2, (rows, tokens))[0].transpose(0, 1)
    for row in range(rows):
        keys = slice(None) if mask is None else mask[row]
        queries = torch.ones(tokens, dtype=torch.bool)
        if mask is not None and tokens > 1:
            queries = mask[row, -tokens:]
        whole = torch.zeros(1, q.shape[1], tokens, v.shape[-1], dtype=q.dtype)
        whole[:, :, queries] = attend(q[row : row + 1, :, queries], *(t[row : row + 1, :, keys] for t in (k, v)))
        heads.append(whole)
    return torch.cat(heads)


def decode(model: Any, ids: Tensor, mask: Tensor, cache: Any, pieces: list[int]) -> Tensor:
    parts, end = [], 0
    for part in ids.split(pieces, 1):
        end += part.shape[1]
        parts.append(model(part, attention_mask=mask[:, :end], past_key_values=cache).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in [*KINDS, *MORE] for name in (PLAIN, FLASH)
     if name == PLAIN or not kind.startswith(REFUSED)],
)  # fmt: skip
@torch.no_grad()
def test_a_function_gets_what_our_attention_gets(
    kind: str, name: str, small: Small, ids: Tensor, left: Tensor, calls: list[dict[str, Any]]
) -> None:
    """Padded, packed, growing and static: the same logits, from calls that name window and sinks."""
    model = small(kind).double()
    packed = torch.cat([torch.arange(tokens) for tokens in (4, 3, 2)])[None].expand(3, -1)
    text, caches = left.bool(), {"growing": [5, 2, 1, 1], "static": [6, 1, 1, 1]}
    found = []
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        logits = [
            model(ids).logits,
            model(ids, position_ids=packed).logits,
            model(ids, attention_mask=left).logits[text],
        ]
        for room, pieces in caches.items():
            made = [QKLabCache(model.config, 12 if room == "static" else None) for _ in range(2)]
            logits.append(decode(model, ids, torch.ones_like(left), made[0], pieces))
            logits.append(decode(model, ids, left, made[1], pieces)[text])
        found.append(logits)
        assert bool(calls) == (implementation == name)
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected)
    for call in calls:
        spec = model.config.decoder_spec.attentions[call["layer"]]
        assert (call.get("sliding_window"), "s_aux" in call) == (spec.window, spec.sinks)
    assert {call["layer"] for call in calls} == {0, 1}


@pytest.mark.newest
@torch.no_grad()
def test_every_causal_mechanism_goes_through_a_function(calls: list[dict[str, Any]]) -> None:
    ids = torch.arange(12).view(2, 6) * 5 % 19
    for attention in [spec for spec in grid() if "cached_decoding" in contracts_of(spec)][::10]:
        spec = DecoderSpec(vocab=20, width=8, layers=1, attention=attention, mlp_ratio=1.0, context=16)
        model: Any = QKLabForCausalLM(QKLabConfig(spec=spec)).eval()
        expected = model(ids).logits
        calls.clear()
        model.set_attn_implementation(PLAIN)
        cache = QKLabCache(model.config)
        torch.testing.assert_close(model(ids).logits, expected, msg=attention.name)
        cached = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([3, 2, 1], 1)], 1)
        torch.testing.assert_close(cached, expected, msg=attention.name)
        assert len(calls) == 4 * (1 + (attention.mix == "differential"))


@torch.no_grad()
def test_a_model_that_looks_both_ways_tells_the_function_so(ids: Tensor, left: Tensor) -> None:
    attention = AttentionSpec(width=32, heads=4, causal=False, window=3)
    model: Any = QKLabModel(QKLabConfig(spec=DecoderSpec(vocab=97, width=32, layers=2, attention=attention))).eval()
    expected = model(ids, attention_mask=left).last_hidden_state
    for name in (PLAIN, FLASH):
        model.set_attn_implementation(name)
        got = model(ids, attention_mask=left).last_hidden_state
        torch.testing.assert_close(got[left.bool()], expected[left.bool()])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.parametrize("kind", ["window | full", *(pytest.param(k, marks=pytest.mark.newest) for k in FLEXIBLE)])
@torch.no_grad()
def test_flex_attention_gives_the_same_text(kind: str, small: Small, ids: Tensor, left: Tensor) -> None:
    model = small(kind)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with torch.compiler.set_stance("force_eager"):
        expected = model.generate(ids, attention_mask=left, **settings)
        before = model(ids, attention_mask=left).logits
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(ids, attention_mask=left).logits, before, atol=1e-4, rtol=1e-4)
        for cache in (None, "static"):
            got = model.generate(ids, attention_mask=left, cache_implementation=cache, **settings)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["(Q,K,V)", "MLA", "windows", "converted"])
def test_pages_are_read_by_flash_attention_where_it_was_asked_for(kind: str, small: Small) -> None:
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size: dict[str, Any] = {PAGE: 8}
    prompts = [torch.arange(3, 3 + tokens).tolist() for tokens in (11, 5, 23)]
    model, found = tiny("llama") if kind == "converted" else small(kind), []
    if kind == "converted":
        convert(model, share="k=v")
    for name in ("sdpa", FLASH):
        model.set_attn_implementation(name)
        pages = ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=16, **size)
        found.append([each.generated_tokens for each in model.generate_batch(prompts, settings, pages).values()])
    assert found[1] == found[0]


def test_what_a_function_cannot_compute_is_refused_by_name(small: Small, ids: Tensor, tmp_path: Any) -> None:
    for kind, name, why in (
        ("differential", "flash_attention_2", "its values are twice as wide as its keys"),
        ("differential", "kernels-community/flash-attn2", "its values are twice as wide as its keys"),
        ("sinks", "flash_attention_3", "it does not take sinks"),
    ):
        small(kind).save_pretrained(tmp_path / kind)
        refused = f"attn_implementation='{name}' cannot compute .*{why}.*choose 'sdpa' or 'eager'"
        with pytest.raises(ValueError, match=refused):
            AutoModelForCausalLM.from_pretrained(tmp_path / kind, attn_implementation=name)
        with pytest.raises(ValueError, match=refused):
            small(kind).set_attn_implementation(name)
    spec = AttentionSpec(width=32, heads=4, share="q=k", causal=False, asymmetry_2d=True)
    decoder = DecoderSpec(vocab=97, width=32, layers=1, attention=spec)
    with pytest.raises(ValueError, match="2-D asymmetry adds a bias to the scores"):
        QKLabModel._from_config(QKLabConfig(spec=decoder), attn_implementation="flex_attention")
    model = small()
    for unknown in ("flash_attention_2", "flesh"):
        with pytest.raises((ValueError, ImportError), match=r"FlashAttention2|is not supported"):
            model.set_attn_implementation(unknown)
    assert torch.equal(model(ids).logits, small()(ids).logits)
    model.set_attn_implementation(FLASH)
    static = QKLabCache(model.config, 12)
    model(ids[:, :5], past_key_values=static)
    with pytest.raises(ValueError, match=r"2 tokens at once came behind others in a static cache.*growing cache"):
        model(ids[:, 5:7], past_key_values=static)
