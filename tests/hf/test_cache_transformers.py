"""The cache as Transformers knows it: what it owns, and what it makes of Transformers' own caches."""

from typing import Any

import pytest
import torch
from small_models import KINDS, Small
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from qklab.attention.cache import StaticCache as PlainStatic
from qklab.attention.cache import cache_class
from qklab.hf import QKLabCache, count_cache_bytes
from qklab.hf.cache import QKLabCacheLayer, count_filled_bytes

every_kind = pytest.mark.parametrize("kind", KINDS)


@torch.no_grad()
def rest(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of the tokens after the first five, fed in pieces: some, then one by one."""
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([5, 2, 1, 1], 1)[1:]], 1)


@every_kind
@torch.no_grad()
def test_every_cache_gives_the_full_forward(kind: str, small: Small, ids: torch.Tensor) -> None:
    model = small(kind).double()
    expected = model(ids, use_cache=False).logits
    made: list[Any] = [
        QKLabCache(model.config),
        QKLabCache(model.config, 9),
        DynamicCache(),
        DynamicCache(config=model.config),
        StaticCache(model.config, max_cache_len=12),
    ]
    for cache in made:
        first = model(ids[:, :5], past_key_values=cache)
        assert first.past_key_values is cache
        assert torch.equal(first.logits, model(ids[:, :5], use_cache=False).logits)
        torch.testing.assert_close(rest(model, ids, cache), expected[:, 5:])
        assert int(cache.get_seq_length()) == 9
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        model(ids.flip(0)[:, :5], past_key_values=cache)
        torch.testing.assert_close(rest(model, ids.flip(0), cache), expected.flip(0)[:, 5:])


@every_kind
@torch.no_grad()
def test_it_owns_what_the_spec_promises(kind: str, small: Small, ids: torch.Tensor) -> None:
    model = small(kind)
    spec = model.config.decoder_spec
    static, growing = QKLabCache(model.config, 20), QKLabCache(model.config)
    for cache in (static, growing):
        model(ids, past_key_values=cache)
        assert count_filled_bytes(cache) == 3 * spec.cache_bytes(9, torch.float32)
        layers: Any = cache.layers
        tensors = [tensor for layer in layers for tensor in layer.cache.tensors]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        assert sum(storages.values()) == count_cache_bytes(cache)
        assert len(tensors) == sum(len(cache_class(one).widths(one)) for one in spec.attentions)
    assert count_cache_bytes(static) == 3 * spec.cache_bytes(20, torch.float32)
    assert static.get_max_length() == 20
    assert growing.get_max_length() == -1
    assert (static.is_compileable, growing.is_compileable) == (True, False)


@every_kind
@torch.no_grad()
def test_rows_and_tokens_are_taken_back_and_repeated(
    kind: str, small: Small, ids: torch.Tensor, left: torch.Tensor
) -> None:
    model = small(kind).double()
    ones = torch.ones(3, 2, dtype=torch.long)
    full = model(ids, attention_mask=left, use_cache=False).logits
    cache: Any = QKLabCache(model.config)
    static: Any = QKLabCache(model.config, 9)
    model(ids[:, :7], attention_mask=left[:, :7], past_key_values=static)
    order = torch.tensor([2, 0, 1])
    static.reorder_cache(order)
    after = model(ids[order, 7:], attention_mask=left[order], past_key_values=static).logits
    torch.testing.assert_close(after, full[order, 7:])
    model(ids[:, :7], attention_mask=left[:, :7], past_key_values=cache)
    model(ids[:, :2], attention_mask=torch.cat([left[:, :7], ones], 1), past_key_values=cache)  # a draft
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 0, 3, 2]))  # rows 2, 0, 1, 1
    cache.batch_select_indices(torch.tensor([True, True, False, True]))
    rows = torch.tensor([2, 0, 1])
    assert cache.batch_size == 3
    after = model(ids[rows, 7:], attention_mask=left[rows], past_key_values=cache).logits
    torch.testing.assert_close(after, full[rows, 7:])
    with pytest.raises(ValueError, match="minus the number of tokens to forget, but 3 came"):
        cache.crop(3)


@torch.no_grad()
def test_transformers_layout_goes_in_and_out(small: Small) -> None:
    keys, values = torch.randn(2, 3, 2, 5, 8).unbind()
    for kind, seconds in (("(Q,K,V)", values), ("(Q,K=V)", keys)):
        layer = QKLabCacheLayer(small(kind).config.decoder_spec.attention)
        first = layer.append(
            *(keys[:, :, :3].transpose(1, 2), values[:, :, :3].transpose(1, 2))[: 2 - (seconds is keys)]
        )
        assert first[0].data_ptr() == keys.data_ptr()  # a prompt is attended to where it lies
        held, read = layer.update(keys[:, :, 3:], values[:, :, 3:])
        assert torch.equal(held, keys)
        assert torch.equal(read, seconds)
        assert layer.get_mask_sizes(2) == (7, 0)


def test_caches_that_do_not_fit_are_refused(small: Small, ids: torch.Tensor) -> None:
    model = small()
    strange = DynamicCache()
    strange.update(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), 0)
    wrong: list[tuple[Any, str]] = [
        (strange, "a DynamicCache that holds tokens of another model came"),
        (DynamicCache(offloading=True), "but an offloaded one was asked for"),
        (((ids, ids),), "but tuple came"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "but EncoderDecoderCache came"),
        (QKLabCache(small("MLA").config), "was made for 2 layers of MLA 12/8"),
        (QKLabCache(model.config, 4), "room for 4 tokens, but 9 came"),
        (full := QKLabCache(model.config, 12), "room for 12 tokens and holds 9, but 9 more came"),
    ]
    model(ids, past_key_values=full)
    for cache, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_of_one_layer_keeps_its_tensors(small: Small) -> None:
    """In place: the first chunk, later tokens, moved rows and forgetting; full, it refuses a chunk that cannot fit."""
    spec = small("(Q,K=V)").config.decoder_spec.attention
    cache, new = PlainStatic(spec, 2, 6, torch.float32, "cpu"), torch.randn(2, 4, 2, 8)
    places = [tensor.data_ptr() for tensor in cache.tensors]
    assert cache.append(new)[0] is new
    read = cache.append(new[:, :1])[0]
    assert torch.equal(read[:, :5], torch.cat([new, new[:, :1]], 1))
    assert not read[:, 5:].any()
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.tensors[0][0, :4], new[1])
    assert (cache.length, cache.started, cache.spare_bytes) == (5, True, cache.bytes // 6)
    cache.crop(2)
    assert torch.equal(cache.append(new[:, 3:])[0][1, :3], new[1][[0, 1, 3]])
    cache.clear()
    assert (cache.length, cache.started) == (0, False)
    assert [tensor.data_ptr() for tensor in cache.tensors] == places
    with pytest.raises(ValueError, match="room for 6 tokens, but 7 came"):
        cache.append(torch.zeros(2, 7, 2, 8))
