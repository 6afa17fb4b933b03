"""generate_batch: requests that share pages get the tokens they get alone, and pages hold what the spec keeps."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import KINDS, Small, shake, tiny
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from qklab import AttentionSpec, CouplingSpec, DecoderSpec, LatentSpec
from qklab.hf import QKLabConfig, QKLabForCausalLM, convert, load_converted, revert

SETTINGS = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
PAGE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
MORE: dict[str, Any] = {
    "on-read": {"share": "k=v", "kv_rotation": "on-read"},
    "both made on reading": {"share": "k=v", "value_norm": True, "norm": "qk"},
    "local | global": [{"window": 5, "sinks": True, "mix": "differential-v2"}, {"mix": "differential-v2"}],
    "exclusive": {"exclusive": True, "gate": "head", "kv_heads": 2, "share": "k=v"},
}
PAGED = [kind for kind in [*KINDS, *MORE] if kind != "local | on-read"]


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Transformers collects garbage at every end, through all that was ever imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def more_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, choices in MORE.items():
        monkeypatch.setitem(KINDS, name, choices)


def make_pages() -> Any:
    """Pages of 8 tokens, 16 new ones at a time, so that the longest prompt comes in parts."""
    size: dict[str, Any] = {PAGE: 8}
    return ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=16, **size)


def write_together(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What generate_batch and generate write after three prompts, one of them twice."""
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 60, (tokens,), generator=random).tolist() for tokens in (11, 5, 23)]
    prompts.append(prompts[0])
    found = model.generate_batch(prompts, SETTINGS, make_pages())
    alone = [model.generate(torch.tensor([prompt]), SETTINGS)[0, len(prompt) :].tolist() for prompt in prompts]
    return [result.generated_tokens for result in found.values()], alone


def count_page_bytes(model: Any) -> int:
    """Bytes of the tensors that the pages of a model are cut from."""
    before = model.config._attn_implementation
    pages = model.init_continuous_batching(SETTINGS, make_pages())._create_batch_processor().cache
    model.set_attn_implementation(before)
    whole = [pages.cache_tensor] if hasattr(pages, "cache_tensor") else [*pages.key_cache, *pages.value_cache]
    return sum(tensor.untyped_storage().nbytes() for tensor in whole)


@pytest.mark.usefixtures("more_kinds")
@pytest.mark.parametrize("kind", PAGED)
def test_requests_get_together_what_they_get_alone(kind: str, small: Small) -> None:
    model = small(kind)
    if kind == "(Q,K=V)":
        model.set_attn_implementation("eager")
    together, alone = write_together(model)
    assert together == alone


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("share", [None, "k=v"])
def test_converted_models_batch_continuously(family: str, share: Any) -> None:
    model = tiny(family)
    convert(model, coupling="leapfrog", share=share)
    shake(model)
    together, alone = write_together(model)
    assert together == alone


def test_pages_hold_one_tensor_where_key_is_value(small: Small, tmp_path: Path) -> None:
    both = count_page_bytes(small("(Q,K,V)"))
    assert count_page_bytes(small("(Q,K=V)")) == both // 2
    assert count_page_bytes(small("MLA")) == both * (8 + 4) // (2 * 2 * 8)  # latent and rotary key, for 2 heads of 8
    model = tiny("llama")
    both = count_page_bytes(model)
    convert(model, share="k=v", keep_original=True)
    assert count_page_bytes(model) == both // 2
    model.save_pretrained(tmp_path)
    assert count_page_bytes(load_converted(tmp_path)) == both // 2
    revert(model)
    assert count_page_bytes(model) == both


def test_pages_that_others_made_hold_both(tmp_path: Path) -> None:
    """Of a model that was converted by a part nobody knows that its pages could be smaller, until it is loaded."""
    model = tiny("llama")
    both = count_page_bytes(model)
    convert(model.model, share="k=v")
    assert count_page_bytes(model) == both
    model.save_pretrained(tmp_path)
    assert count_page_bytes(load_converted(tmp_path)) == both // 2
    together, alone = write_together(model)
    assert together == alone


def test_a_copy_pages_for_itself_and_a_dropped_model_is_gone() -> None:
    model: Any = tiny("llama")
    convert(model, share="k=v")
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for again in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert type(again) is LlamaForCausalLM
        assert again.init_continuous_batching(SETTINGS, make_pages()).model is again
    gone = weakref.ref(again)
    gc.disable()
    try:
        del again
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (
            [{"coupling": CouplingSpec(kind="cca")}],
            "looks back on the tokens before, which pages do not keep",
        ),
        ([{}, {"share": "k=v"}], "its layers keep tensors of different shapes, and pages have one"),
        ([{"window": 3}, {"window": 4}], r"its windows are \[3, 4\], and pages know one of 2 or more tokens"),
        ([{"latent": LatentSpec(query_rank=8, kv_rank=7, rope_width=4)}], "it keeps 11 numbers of a token and head"),
    ],
)
def test_what_pages_cannot_hold_is_refused_by_name(layers: list[dict[str, Any]], reason: str) -> None:
    attention = tuple(AttentionSpec(width=32, heads=4, **choices) for choices in layers)
    spec = DecoderSpec(vocab=97, width=32, layers=2, attention=attention, context=64)
    model: Any = QKLabForCausalLM(QKLabConfig(spec=spec))
    with pytest.raises(ValueError, match=f"does not run under generate_batch: .*{reason}.*; use generate"):
        model.generate_batch([[1, 2, 3]], SETTINGS)


def test_learned_positions_end_where_they_end(small: Small) -> None:
    model, text = small("learned"), list(range(3, 63))
    assert model.generate_batch([text], SETTINGS, make_pages())
    with pytest.raises(ValueError, match="learned positions for 64 tokens, but 65 came"):
        model.generate_batch([[*text, 3]], SETTINGS, make_pages())
