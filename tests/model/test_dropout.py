"""Dropout by key: as much as asked for, the same for the same key, and each member's own."""

import pytest
import torch

from qklab.model import Decoder, recipe, stack, unstack
from qklab.model.dropout import Dropout, scatter_words, set_dropout_key

SMALL = {"vocab": 11, "context": 8, "layers": 2}


def test_words_are_even_and_differ_by_key_and_site() -> None:
    words = scatter_words(torch.tensor([5, 6, -(2**60)]), 3, 2**16)
    again = scatter_words(torch.tensor([5]), 4, 2**16)
    assert words.min() >= 0
    assert words.max() < 2**32
    for row in (*words, again[0]):
        counts = torch.bincount(row >> 28, minlength=16) / 2**12
        assert (counts - 1).abs().max() < 0.08  # five standard deviations
        steps = ((row[1:] > 2**31) != (row[:-1] > 2**31)).double().mean()
        assert steps == pytest.approx(0.5, abs=0.01)
    high = torch.stack([*words, again[0]]) > 2**31
    assert torch.corrcoef(high.double()).fill_diagonal_(0).abs().max() < 0.02


def test_a_share_becomes_zero_and_the_mean_stays() -> None:
    dropout, x = Dropout(0.3, 1), torch.ones(64, 32, 32)
    y = dropout(x)
    assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(y, dropout(x))  # without a key each call draws one
    dropout.key = torch.tensor([7])
    assert torch.equal(dropout(x), dropout(x))
    assert torch.equal(dropout.eval()(x), x)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_members_drop_what_they_drop_alone(place: str) -> None:
    spec = recipe("nano", **SMALL).replace(dropout=0.5, norm_place=place)
    models = [Decoder(spec, seed=seed) for seed in (0, 1)]
    ids, keys = torch.randint(11, (2, 3, 8)), torch.tensor([123, 456])
    together = stack(models)
    set_dropout_key(together, keys)
    joint = together(ids)
    for model, own, key, logits in zip(models, ids, keys, joint, strict=True):
        set_dropout_key(model, key[None])
        torch.testing.assert_close(model(own), logits)
    assert all(module.key is None for module in unstack(together)[0].modules() if isinstance(module, Dropout))
    keys.copy_(torch.tensor([1, 2]))
    assert not torch.allclose(together(ids), joint)


def test_post_norm_is_the_norm_of_the_sum() -> None:
    spec = recipe("nano", **SMALL).replace(norm_place="post", layers=1, norm="layer")
    model = Decoder(spec, seed=0).double()
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters()
    ids, block = torch.randint(11, (2, 8)), model.blocks[0]
    x = model.embed(ids)
    h = block.attention_norm(x + block.attention(x))  # pyright: ignore[reportCallIssue]
    y = block.mlp_norm(h + block.mlp(h))  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(model(ids), y @ model.head.weight.T)
    assert "post-norm" in spec.name
