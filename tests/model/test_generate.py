"""Generation: agreement with full forwards, sampling rules, padding, stopping, and bad requests."""

from typing import Any

import pytest
import torch

from qklab import CouplingSpec, Decoder, LatentSpec, recipe
from qklab.model.generate import next_tokens

ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "(Q,K=V)": {"share": "k=v", "kv_heads": 2, "coupling": CouplingSpec(kind="leapfrog")},
    "MLA": {"latent": LatentSpec(query_rank=32, kv_rank=16, rope_width=8)},
    "learned": {"position": "learned"},
}


def decoder(name: str = "standard", **changes: Any) -> Decoder:
    model = Decoder(recipe("nano", vocab=61, context=40, **ARMS[name], **changes), seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform logits, so that greedy choices are not ties
    return model


def prompt(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ARMS)
@torch.no_grad()
def test_greedy_generation_is_repeated_full_forwards(name: str) -> None:
    model, ids = decoder(name), prompt()
    full = ids
    for _ in range(20):
        full = torch.cat([full, model(full)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, 20, temperature=0), full)


def test_the_seed_decides() -> None:
    model, ids = decoder(), prompt()
    runs = [model.generate(ids, 20, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(runs[0][:, :6], ids)
    assert model.generate(ids, 0).shape == ids.shape


@pytest.mark.parametrize("name", ARMS)
def test_left_padded_prompts_continue_as_they_do_alone(name: str) -> None:
    model, ids = decoder(name), prompt()
    ids[0, :3] = 0
    both = model.generate(ids, 10, temperature=0, left_padding=torch.tensor([3, 0]))
    assert torch.equal(both[:1, 3:], model.generate(ids[:1, 3:], 10, temperature=0))
    assert torch.equal(both[1:], model.generate(ids[1:], 10, temperature=0))


def test_rows_stop_at_the_stop_token() -> None:
    model, ids = decoder(), prompt()
    free = model.generate(ids, 12, seed=4)
    stop = int(free[0, 8])
    stopped = model.generate(ids, 12, seed=4, stop_token=stop)
    first = int((free[0, 6:] == stop).nonzero()[0]) + 6
    assert stopped[0, first:].eq(stop).all()
    assert torch.equal(stopped[0, :first], free[0, :first])
    single = model.generate(ids[:1], 12, temperature=0)
    assert model.generate(ids[:1], 12, temperature=0, stop_token=int(single[0, 6])).shape[1] == 7


def frequencies(logits: torch.Tensor, **choices: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    options = {"temperature": 1.0, "top_k": None, "top_p": None} | choices
    drawn = next_tokens(logits.expand(20_000, -1), generator=generator, **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / len(drawn)


def test_sampling_rules() -> None:
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = p.log()[None]
    torch.testing.assert_close(frequencies(logits), p, atol=0.015, rtol=0)
    torch.testing.assert_close(frequencies(logits, top_k=2), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.015, rtol=0)
    # 0.5 + 0.25 first reaches 0.7; 0.5 alone already reaches 0.5
    torch.testing.assert_close(frequencies(logits, top_p=0.7), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.015, rtol=0)
    torch.testing.assert_close(frequencies(logits, top_p=0.5), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(frequencies(logits, top_p=1e-9), torch.tensor([1.0, 0, 0, 0]))
    cold = (p**2) / (p**2).sum()
    torch.testing.assert_close(frequencies(logits, temperature=0.5), cold, atol=0.015, rtol=0)
    assert int(next_tokens(logits, 0, None, None, None)) == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_p": 1.5}, "top_p must lie in"),
        ({"left_padding": torch.tensor([6, 0])}, "leave a token of text"),
        ({"left_padding": torch.tensor([0])}, "left_padding must be 2 whole numbers"),
        ({"ids": torch.zeros(2, 0, dtype=torch.long)}, "there must be a token to continue"),
        ({"ids": torch.zeros(0, 2, dtype=torch.long)}, "there must be a token to continue"),
        ({"ids": torch.zeros(6, dtype=torch.long)}, "ids must be a tensor of whole numbers"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(request_: dict[str, Any], message: str) -> None:
    arguments = {"ids": prompt(), "max_new_tokens": 3} | request_
    with pytest.raises(ValueError, match=message):
        decoder().generate(**arguments)


def test_models_that_cannot_generate_say_why() -> None:
    with pytest.raises(ValueError, match="only a causal model generates"):
        decoder(causal=False).generate(prompt(), 3)
    with pytest.raises(
        ValueError, match="6 tokens and 36 new ones exceed the 40 learned positions; ask for at most 35"
    ):
        decoder("learned").generate(prompt(), 36)
    assert decoder("learned").generate(prompt(), 35).shape == (2, 41)  # the last is drawn, never read


@torch.no_grad()
def test_beam_search_on_the_cache_equals_beam_search_without() -> None:
    """Two beams over reordered caches score what full forwards score."""
    model, ids = decoder("(Q,K=V)"), prompt(batch=1)
    cache = model.new_cache(1, 20)
    beams, scores = ids, torch.zeros(1, dtype=torch.float64)
    logits = model(ids, cache=cache)[:, -1]
    for _ in range(6):
        total = scores[:, None] + logits.log_softmax(-1)
        scores, flat = total.flatten().topk(2)
        rows, token = flat // 61, flat % 61
        beams = torch.cat([beams[rows], token[:, None]], 1)
        cache.reorder(rows)
        logits = model(token[:, None], cache=cache)[:, -1]
    log_probs = model(beams[:, :-1]).log_softmax(-1).gather(-1, beams[:, 1:, None])[:, 5:, 0].sum(1)
    torch.testing.assert_close(scores, log_probs)
