"""The cache: growth, refusal, crop, reorder, and what it owns."""

from typing import Any

import pytest
import torch

from qklab import Attention, AttentionSpec, Decoder, LatentSpec, recipe
from qklab.attention import Cache, KeyValueCache, LatentCache, SharedCache
from qklab.attention.cache import StaticCache
from qklab.testing import randomise
from qklab.testing.grid import LOOKING_BACK

SPECS: dict[str, tuple[dict[str, Any], type[Cache]]] = {
    "(Q,K,V)": ({"kv_heads": 2}, KeyValueCache),
    "(Q,K=V)": ({"share": "k=v", "kv_heads": 2}, SharedCache),
    "(Q=K=V)": ({"share": "q=k=v"}, SharedCache),
    "on-read": ({"share": "k=v", "kv_rotation": "on-read"}, SharedCache),
    "MLA": ({"latent": LatentSpec(query_rank=8, kv_rank=6, rope_width=2)}, LatentCache),
    "looking back": (LOOKING_BACK, KeyValueCache),
}
every_cache = pytest.mark.parametrize("name", SPECS)


def layer(name: str) -> Attention:
    torch.manual_seed(0)
    return randomise(Attention(AttentionSpec(width=16, heads=4, **SPECS[name][0])))


def inputs(batch: int = 2, tokens: int = 10) -> torch.Tensor:
    return torch.randn(batch, tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@every_cache
def test_each_need_has_its_class(name: str) -> None:
    assert type(layer(name).new_cache(1, 4)) is SPECS[name][1]


@every_cache
@torch.no_grad()
def test_growth_keeps_everything_and_says_what_is_spare(name: str) -> None:
    attention, x = layer(name), inputs()
    cache = attention.new_cache(2, tokens=2)
    decoded = torch.cat([attention(token, cache=cache) for token in x.split(1, 1)], 1)
    torch.testing.assert_close(decoded, attention(x))
    assert cache.length == 10
    assert cache.capacity <= 15
    filled = 2 * attention.spec.cache_bytes(10, torch.float64)
    assert cache.bytes - cache.spare_bytes == filled


@every_cache
@torch.no_grad()
def test_a_full_cache_refuses_and_stays_whole(name: str) -> None:
    attention, x = layer(name), inputs()
    cache = attention.new_cache(2, tokens=8, grow=False)
    attention(x[:, :6], cache=cache)
    before = [tensor.clone() for tensor in cache.tensors]
    with pytest.raises(ValueError, match=r"room for 8 tokens and holds 6, but 3 more came; make it with tokens=9"):
        attention(x[:, 6:9], cache=cache)
    assert cache.length == 6
    assert all(map(torch.equal, cache.tensors, before))
    torch.testing.assert_close(attention(x[:, 6:8], cache=cache), attention(x)[:, 6:8])


@every_cache
@torch.no_grad()
def test_crop_forgets_rejected_tokens(name: str) -> None:
    attention, x = layer(name), inputs()
    cache = attention.new_cache(2, tokens=10, drafts=4)
    attention(x[:, :5], cache=cache)
    attention(torch.randn(2, 4, 16, dtype=torch.float64), cache=cache)  # a draft that is rejected
    cache.crop(5)
    torch.testing.assert_close(attention(x[:, 5:], cache=cache), attention(x)[:, 5:])
    with pytest.raises(ValueError, match="cannot be cropped to 11"):
        cache.crop(11)


@pytest.mark.parametrize("what", ["looking back", "window", "both", "static"])
@torch.no_grad()
def test_a_cache_is_cropped_by_as_many_drafts_as_it_was_made_with(what: str) -> None:
    """One rule for all that is kept in rings: over more tokens than they have slots, in chunks and one by one; further
    back is refused, and so is no draft at all."""
    window, back, drafts = {"window": WINDOW}, LOOKING_BACK, 7
    fields = {"looking back": back, "window": window}.get(what, back | window)
    attention, x = randomise(Attention(AttentionSpec(width=16, heads=4, **fields))), inputs(tokens=40)
    full = attention(x)
    cache = attention.new_cache(2, 40, drafts=drafts)
    if what == "static":
        cache = StaticCache(attention.spec, 2, 40, torch.float64, "cpu", drafts)
    for chunk in x[:, :30].split([10, *[1] * 20], 1):
        attention(chunk, cache=cache)
    kept = [tensor.clone() for tensor in cache.owned_tensors]
    least = 30 - drafts
    with pytest.raises(ValueError, match=rf"crop to {least - 1}; crop to 0 or to {least} .* drafts={drafts + 1}\."):
        cache.crop(least - 1)
    assert cache.length == 30
    assert all(map(torch.equal, cache.owned_tensors, kept))
    for length in (29, least):
        cache.crop(length)
        decoded = torch.cat([attention(token, cache=cache) for token in x[:, length:30].split(1, 1)], 1)
        torch.testing.assert_close(decoded, full[:, length:30])
    cache.crop(0)
    torch.testing.assert_close(attention(x[:, :3], cache=cache), full[:, :3])
    cache.crop(2)  # nothing has gone round yet
    torch.testing.assert_close(attention(x[:, 2:20], cache=cache), full[:, 2:20])
    with pytest.raises(ValueError, match="drafts must be at least 1"):
        attention.new_cache(2, 10, drafts=0)


@every_cache
@torch.no_grad()
def test_reorder_moves_rows_with_their_padding(name: str) -> None:
    attention, x = layer(name), inputs(batch=3)
    padding = torch.tensor([0, 2, 3])
    cache = attention.new_cache(3, tokens=10, left_padding=padding)
    attention(x[:, :6], cache=cache)
    rows = torch.tensor([2, 2, 0, 1])
    cache.reorder(rows)
    decoded = attention(x[rows, 6:], cache=cache)
    for row, source in enumerate(rows.tolist()):
        start = int(padding[source])
        torch.testing.assert_close(decoded[row], attention(x[source : source + 1, start:])[0, 6 - start :])


@pytest.mark.parametrize("rows", [torch.tensor([0, 2]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor([[0]])])
def test_reorder_refuses_rows_that_do_not_exist(rows: torch.Tensor) -> None:
    cache = layer("(Q,K,V)").new_cache(2, 4)
    with pytest.raises(ValueError, match=r"^rows must"):
        cache.reorder(rows)


def test_wrong_batches_and_paddings_are_refused() -> None:
    attention = layer("(Q,K,V)")
    cache = attention.new_cache(2, 4)
    with pytest.raises(ValueError, match="holds 2 sequences, but 3 came"):
        attention(inputs(batch=3), cache=cache)
    assert cache.length == 0
    for padding in (torch.tensor([1]), torch.tensor([0.0, 1.0]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"^left_padding must be 2 whole numbers"):
            attention.new_cache(2, 4, left_padding=padding)
    with pytest.raises(ValueError, match="only causal attention"):
        Attention(AttentionSpec(width=16, heads=4, causal=False)).new_cache(1, 4)
    with pytest.raises(ValueError, match="batch ≥ 1"):
        attention.new_cache(0, 4)


def test_a_cache_of_another_spec_is_refused_untouched() -> None:
    attention, x = layer("(Q,K,V)"), inputs()
    for name in ("(Q,K=V)", "MLA"):
        cache = layer(name).new_cache(2, 10)
        with pytest.raises(ValueError, match=r"per token, but .* came; use this layer's own new_cache"):
            attention(x, cache=cache)
        assert cache.length == 0
        assert not any(tensor.any() for tensor in cache.tensors)


def test_caches_of_the_wrong_kind_are_named() -> None:
    attention, decoder = layer("(Q,K,V)"), Decoder(recipe("nano", vocab=20), seed=0)
    whole: Any = decoder.new_cache(2, 10)
    with pytest.raises(ValueError, match="a layer's cache comes from its new_cache, but a DecoderCache came"):
        attention(inputs(), cache=whole)
    ids, single = torch.zeros(2, 3, dtype=torch.long), decoder.attention(0).new_cache(2, 10)
    for cache, came in ((single, "a KeyValueCache came"), (type(whole)(whole[:3]), "a DecoderCache came of 3")):
        with pytest.raises(ValueError, match=came):
            decoder(ids, cache=cache)
    with pytest.raises(ValueError, match=r"floating-point numbers, but dtype=torch\.int8 came"):
        attention.new_cache(2, 10, torch.int8)
    with pytest.raises(ValueError, match=r"segments must be a tensor .* but list came"):
        attention(inputs(), segments=[0] * 10)


def test_torch_refuses_a_backward_through_overwritten_tokens() -> None:
    attention, x = layer("(Q,K,V)"), inputs()
    cache = attention.new_cache(2, 10)
    outputs = [attention(chunk, cache=cache) for chunk in x.split(5, 1)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_positions_and_segments_exclude_each_other() -> None:
    attention, x = layer("(Q,K,V)"), inputs()
    segments, (positions, visibility) = torch.zeros(2, 10, dtype=torch.long), attention.locate(x)
    with pytest.raises(ValueError, match="give one of the two"):
        attention(x, segments=segments, positions=positions, visibility=visibility)


def test_segments_and_a_cache_exclude_each_other() -> None:
    attention, x = layer("(Q,K,V)"), inputs()
    with pytest.raises(ValueError, match="exclude each other"):
        attention(x, segments=torch.zeros(2, 10, dtype=torch.long), cache=attention.new_cache(2, 10))
    for segments in (torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 10)):
        with pytest.raises(ValueError, match="segments must be a tensor of whole numbers of shape"):
            attention(x, segments=segments)
    with pytest.raises(ValueError, match=r"x must have shape \[batch, tokens, 16\]"):
        attention(x[..., :8])


@torch.no_grad()
def test_a_cache_may_be_coarser_than_the_layer() -> None:
    attention, x = layer("(Q,K=V)"), inputs()
    cache = attention.new_cache(2, 10, torch.bfloat16)
    decoded = torch.cat([attention(token, cache=cache) for token in x.split(1, 1)], 1)
    error = (decoded - attention(x)).abs().max() / attention(x).abs().max()
    assert decoded.dtype == torch.float64
    assert 1e-6 < error < 0.05


def test_gradients_through_one_cached_chunk_are_those_of_the_full_forward() -> None:
    attention, x = layer("(Q,K,V)"), inputs(tokens=4)
    grads = []
    for cache in (None, attention.new_cache(2, 4)):
        attention.zero_grad()
        attention(x, cache=cache).square().sum().backward()
        grads.append([p.grad.clone() for p in attention.parameters() if p.grad is not None])
    for full, cached in zip(*grads, strict=True):
        torch.testing.assert_close(cached, full)


@torch.no_grad()
def test_an_empty_chunk_changes_nothing() -> None:
    attention, x = layer("(Q,K=V)"), inputs()
    assert attention(x[:, :0]).shape == (2, 0, 16)
    cache = attention.new_cache(2, 10)
    attention(x[:, :4], cache=cache)
    assert attention(x[:, :0], cache=cache).shape == (2, 0, 16)
    assert cache.length == 4


WINDOW = 4
RINGS: dict[str, dict[str, Any]] = {
    "(Q,K,V)": {"kv_heads": 2, "sinks": True},
    "on-read": {"share": "k=v", "kv_rotation": "on-read"},
    "MLA": {"latent": LatentSpec(query_rank=8, kv_rank=6, rope_width=2)},
}
every_ring = pytest.mark.parametrize("name", RINGS)


def ring_layer(name: str) -> Attention:
    torch.manual_seed(0)
    return randomise(Attention(AttentionSpec(width=16, heads=4, window=WINDOW, **RINGS[name])))


@pytest.mark.parametrize("chunks", [[1] * 10, [7, 1, 1, 1], [2, 5, 1, 2], [3, 1, 4, 2], [10]], ids=str)
@pytest.mark.parametrize("padding", [[0, 0], [0, 6]], ids=str)
@every_ring
@torch.no_grad()
def test_a_window_keeps_what_it_sees(name: str, padding: list[int], chunks: list[int]) -> None:
    """Growing, static and full from the start, padded or not: the full forward's outputs from W tokens of memory."""
    attention, x = ring_layer(name), inputs()
    rows = [attention(x[row : row + 1, start:])[0] for row, start in enumerate(padding)]
    static = StaticCache(attention.spec, 2, 12, torch.float64, "cpu")
    assert static.left_padding is not None
    static.left_padding.copy_(torch.tensor(padding))
    left_padding = torch.tensor(padding) if any(padding) else None
    for cache in (
        attention.new_cache(2, tokens=1, left_padding=left_padding),
        attention.new_cache(2, tokens=30, grow=False, left_padding=left_padding),
        static,
    ):
        decoded = torch.cat([attention(chunk, cache=cache) for chunk in x.split(chunks, 1)], 1)
        for row, start in enumerate(padding):
            torch.testing.assert_close(decoded[row, start:], rows[row])
        assert cache.length == 10
        assert cache.bytes == 2 * attention.spec.cache_bytes(10, torch.float64)
        assert cache.bytes == 2 * attention.spec.cache_bytes(WINDOW, torch.float64)
        assert cache.spare_bytes == 0


@torch.no_grad()
def test_a_ring_crops_and_reorders_what_it_still_knows() -> None:
    attention, x = ring_layer("(Q,K,V)"), inputs()
    full = attention(x)
    cache = attention.new_cache(2, 10)
    attention(x[:, :4], cache=cache)
    cache.crop(2)  # nothing has gone round yet
    attention(x[:, 2:7], cache=cache)
    attention(torch.randn(2, 1, 16, dtype=torch.float64), cache=cache)
    cache.crop(7)  # one draft that is rejected
    torch.testing.assert_close(attention(x[:, 7:9], cache=cache), full[:, 7:9])
    cache.reorder(torch.tensor([1, 0, 1]))
    torch.testing.assert_close(attention(x[[1, 0, 1], 9:], cache=cache), full[[1, 0, 1], 9:])
    cache.crop(0)
    torch.testing.assert_close(attention(x[[1, 0, 1]], cache=cache), full[[1, 0, 1]])
    cache = attention.new_cache(2, 10, drafts=4)
    for kept, draft in ((3, 3), (5, 4), (6, 1), (7, 3)):
        attention(x[:, cache.length : kept], cache=cache)
        attention(torch.randn(2, draft, 16, dtype=torch.float64), cache=cache)
        cache.crop(kept)
    torch.testing.assert_close(attention(x[:, 7:8], cache=cache), full[:, 7:8])
    torch.testing.assert_close(attention(x[:, 8:], cache=cache), full[:, 8:])
    assert cache.bytes - cache.spare_bytes == 2 * attention.spec.cache_bytes(10, torch.float64)


@torch.no_grad()
def test_a_ring_without_room_for_its_window_refuses_what_it_would_lose() -> None:
    attention, x = ring_layer("(Q,K,V)"), inputs()
    cache = attention.new_cache(2, 3, grow=False)
    attention(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match="room for 3 tokens and holds 3, but 1 more came"):
        attention(x[:, 3:4], cache=cache)
    static = StaticCache(attention.spec, 2, 3, torch.float64, "cpu")
    with pytest.raises(ValueError, match="room for 3 tokens, but 4 came"):
        attention(x[:, :4], cache=static)
