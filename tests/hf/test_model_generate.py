"""generate: however it is asked, the tokens are those of the model without a cache."""

import copy
from typing import Any

import pytest
import torch
from small_models import END, KINDS, Small
from transformers import CompileConfig, GenerationConfig

from qklab.hf import QKLabCache, generate, padding
from qklab.hf import model as model_of_transformers
from qklab.hf.generate import STEPS_TO_COMPILE, choose_cache

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


@pytest.mark.parametrize(
    ("way", "lengths"),
    [({}, [9]), ({"cache_implementation": "static"}, [9]), ({"prefill_chunk_size": 2}, [2, 4])],  # 4: padding came, too
    ids=str,
)
def test_a_mask_that_only_goes_on_is_not_examined_again(
    way: dict[str, Any],
    lengths: list[int],
    small: Small,
    ids: torch.Tensor,
    left: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: list[int] = []
    for module in (model_of_transformers, padding):
        monkeypatch.setattr(module, "check_one_piece", lambda mask: examined.append(mask.shape[1]))
    small().generate(ids, attention_mask=left, disable_compile=True, **GREEDY, **way)
    assert examined == lengths


@torch.no_grad()
def test_a_mask_is_examined_again_once_the_cache_has_changed(
    small: Small, ids: torch.Tensor, left: torch.Tensor
) -> None:
    """Rows change places, or the caller writes into the mask: what does not fit is still seen."""
    model, one, more = small(), ids[:, :1], torch.ones(3, 1, dtype=torch.long)
    turned = torch.tensor([2, 1, 0])
    for change in ("rows", "mask"):
        mask = left.clone()
        cache = model(ids, attention_mask=mask).past_key_values
        if change == "rows":
            cache.reorder_cache(turned)
        else:
            mask.fill_(1)
        with pytest.raises(ValueError, match="now begins the rows at"):
            model(one, attention_mask=torch.cat([mask, more], 1), past_key_values=cache)
    cache = model(ids, attention_mask=left).past_key_values
    cache.reorder_cache(turned)
    expected = model(torch.cat([ids[turned], one], 1), attention_mask=torch.cat([left[turned], more], 1)).logits[:, -1]
    found = model(one, attention_mask=torch.cat([left[turned], more], 1), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected)


PLENTY = 10**12


@pytest.mark.parametrize(
    ("asked", "chosen", "given"),
    [
        ({}, "static", {}),
        ({"do_sample": True}, "static", {}),
        ({}, None, {"steps": STEPS_TO_COMPILE - 1}),
        ({}, "static", {"steps": 1, "compiled": True}),
        ({}, None, {"free": None}),  # no GPU
        ({}, None, {"needed": PLENTY // 2 + 1}),
        ({"cache_implementation": "dynamic"}, "dynamic", {}),
        ({"cache_implementation": "static"}, "static", {"steps": 1}),
        ({"use_cache": False}, None, {}),
        ({"num_beams": 2}, None, {}),
        ({"prompt_lookup_num_tokens": 3}, None, {}),
        ({"disable_compile": True}, None, {}),
        ({"prefill_chunk_size": 8}, None, {}),
        ({"compile_config": CompileConfig()}, None, {}),
    ],
    ids=str,
)
def test_long_texts_take_the_static_cache_where_nothing_else_was_asked(
    asked: dict[str, Any], chosen: str | None, given: dict[str, Any]
) -> None:
    config = GenerationConfig(**asked)
    plain: dict[str, Any] = {"steps": STEPS_TO_COMPILE, "needed": PLENTY // 2, "free": PLENTY, "compiled": False}
    mode = config.get_generation_mode()
    assert choose_cache(config, mode, **(plain | given)) == chosen


def test_generate_takes_what_was_chosen_and_writes_the_same_text(
    small: Small, ids: torch.Tensor, left: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with plenty of memory; what would be compiled there is not."""
    model = small()
    ways: list[dict[str, Any]] = [
        {},
        {"cache_implementation": "dynamic"},
        {"max_new_tokens": NEW - 1},
        {"max_new_tokens": None, "max_length": 9 + NEW},
        {"do_sample": True, "top_k": 5},
        {"past_key_values": QKLabCache(model.config)},
        {"num_beams": 2},
    ]
    found: list[list[Any]] = []
    for gpu in (False, True):
        if gpu:
            monkeypatch.setattr(generate, "count_free_bytes", lambda device: PLENTY)
            monkeypatch.setattr(generate, "STEPS_TO_COMPILE", NEW - 1)  # after the prompt, which gives the first token
        found.append([])
        for way in ways:
            torch.manual_seed(0)
            given = {name: copy.deepcopy(value) for name, value in way.items()}
            asked: dict[str, Any] = GREEDY | {"attention_mask": left, "return_dict_in_generate": True} | given
            found[-1].append(model.generate(ids, **asked))
    for plain, other in zip(*found, strict=True):
        assert torch.equal(other.sequences, plain.sequences)
    kinds = [[answer.past_key_values.layers[0].is_compileable for answer in answers] for answers in found]
    assert kinds == [[False] * 7, [True, False, False, True, True, False, False]]
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids), "return_dict_in_generate": True, **GREEDY}
    answer = model.generate(**embedded)
    assert answer.past_key_values.layers[0].is_compileable
    assert torch.equal(answer.sequences, model.generate(ids, cache_implementation="dynamic", **GREEDY)[:, 9:])
