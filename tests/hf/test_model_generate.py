"""generate: however it is asked, the tokens are those of the model without a cache."""

from typing import Any

import pytest
import torch
from small_models import END, KINDS, Small
from transformers import CompileConfig

every_kind = pytest.mark.parametrize("kind", KINDS)
NEW = 7
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "suppress_tokens": [END]}


@every_kind
def test_padded_rows_continue_as_they_do_alone(kind: str, small: Small, ids: torch.Tensor, left: torch.Tensor) -> None:
    model = small(kind)
    texts = [row[mask.bool()][None] for row, mask in zip(ids, left, strict=True)]
    alone = [model.generate(text, use_cache=False, **GREEDY)[:, -NEW:] for text in texts]
    expected = torch.cat([ids, torch.cat(alone)], 1)
    ways: list[dict[str, Any]] = [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
        {"prefill_chunk_size": 2, "cache_implementation": "static"},
    ]
    for way in ways:
        assert torch.equal(model.generate(ids, attention_mask=left, **GREEDY, **way), expected), way


@every_kind
def test_beams_are_those_without_a_cache(kind: str, small: Small, ids: torch.Tensor, left: torch.Tensor) -> None:
    model = small(kind)
    beams: dict[str, Any] = GREEDY | {"num_beams": 3, "num_return_sequences": 2, "attention_mask": left}
    expected = model.generate(ids, use_cache=False, **beams)
    assert torch.equal(model.generate(ids, **beams), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **beams), expected)


@every_kind
def test_drafts_change_nothing(kind: str, small: Small, ids: torch.Tensor) -> None:
    """Prompt lookup, and another model's and its own drafts, so that some are accepted and some taken back."""
    model, prompt = small(kind), ids[:1].repeat(1, 2)
    expected = model.generate(prompt, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY), expected)
    for assistant in (small("(Q,K,V)", seed=1), model):
        assert torch.equal(model.generate(prompt, assistant_model=assistant, **GREEDY), expected)


def test_sampling_draws_the_same_with_and_without_a_cache(small: Small, ids: torch.Tensor, left: torch.Tensor) -> None:
    model = small()
    drawn = []
    for way in ({}, {"use_cache": False}, {}):
        torch.manual_seed(len(drawn) // 2)
        drawn.append(model.generate(ids, attention_mask=left, do_sample=True, top_k=9, max_new_tokens=NEW, **way))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_embeddings_instead_of_ids_begin_a_text_too(small: Small, ids: torch.Tensor) -> None:
    model = small("MLA")
    expected = model.generate(ids, **GREEDY)[:, 9:]
    assert torch.equal(model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY), expected)


@pytest.mark.parametrize("kind", ["(Q,K=V)", "MLA"])
def test_one_compiled_graph_serves_every_step(kind: str, small: Small, ids: torch.Tensor, left: torch.Tensor) -> None:
    model = small(kind)
    expected = model.generate(ids, attention_mask=left, use_cache=False, **GREEDY)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling: Any = CompileConfig(fullgraph=True, backend="aot_eager")
    compiling.mode = None
    compiling._compile_all_devices = True
    for _ in range(2):
        way: dict[str, Any] = {"cache_implementation": "static", "compile_config": compiling}
        assert torch.equal(model.generate(ids, attention_mask=left, **GREEDY, **way), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_generate_cannot_do_is_one_sentence(small: Small, ids: torch.Tensor, left: torch.Tensor) -> None:
    model = small()
    with pytest.raises(ValueError, match="stays on its device, but an offloaded one was asked for"):
        model.generate(ids, cache_implementation="offloaded", **GREEDY)
    with pytest.raises(ValueError, match="padded on the right, so nothing can follow them; pad on the left"):
        model.generate(ids, attention_mask=left.flip(-1), **GREEDY)
    with pytest.raises(ValueError, match="learned positions for 64 tokens, but 65 came; shorten the text"):
        small("learned").generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None, attention_mask=left)
