"""Every conversion of every family, and the table of docs/transformers.md that says so."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from small_models import FAMILIES, WINDOW, compute_logits, shake, step_by_step, tiny, token_ids
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from qklab.hf import convert, load_converted, revert
from qklab.hf.convert import count_converted_bytes, find_conversion
from qklab.hf.convert.calibrate import LayerWalk, evaluation_mode, read_batches
from qklab.hf.convert.layers import find_decoder_layer, list_decoder_layers
from qklab.hf.families import ALIKE, REFUSED, convertible_families, find_convertible

PAGE = (Path(__file__).parents[2] / "docs/transformers.md").read_text(encoding="utf-8")
KNOWN = convertible_families()
MODELS = [name for name in FAMILIES if name.partition(",")[0] in KNOWN and name != "deepseek_v3, no query latent"]
family = pytest.mark.parametrize("family", MODELS)
ALIKES = [pytest.param(name, marks=pytest.mark.newest) if name in ALIKE else name for name in MODELS]
layout = pytest.mark.parametrize("family", ALIKES)  # with the oldest Transformers every layout, not every family
UNDROPPED = ("ernie4_5", "ernie4_5_moe")  # they have no dropout


def list_conversions(family: str) -> dict[str, dict[str, Any]]:
    """Of latents, which have no heads, only an affine map is a coupling."""
    coupling = "affine" if KNOWN[family.partition(",")[0]].latent else "leapfrog"
    options = {"coupling": coupling, "share": "k=v", "kv_heads": 1, "norm": "qk-norm"}
    return {name: {name: value} for name, value in options.items()}


def combine_conversions(family: str, model: Any) -> dict[str, Any]:
    """Coupling and sharing at once, where both can be had."""
    kind, asked = KNOWN[family.partition(",")[0]], list_conversions(family)
    refused = kind.list_refusals(next(iter(kind.layers(model).values())))
    return asked["coupling"] | ({} if "share" in refused else asked["share"])


def near(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def count_cached(model: Any) -> int:
    """Bytes of keys and values of fewer tokens than a window holds."""
    cache = DynamicCache(config=model.config)
    compute_logits(model, token_ids(tokens=WINDOW - 1), past_key_values=cache)
    return count_converted_bytes(cache)[0]


def test_every_family_is_here() -> None:
    assert {name.partition(",")[0] for name in MODELS} == KNOWN.keys()


@family
def test_a_coupling_starts_as_nothing(family: str) -> None:
    """Bit for bit, with and without a cache, in training with dropout; `revert` leaves the model as it was."""
    dropout = dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "residual_dropout"), 0.5)
    model = tiny(family, **dropout)
    names, ways = list(model.state_dict()), ({"use_cache": True}, {"use_cache": False})
    before = [compute_logits(model, None, **way) for way in ways]
    torch.manual_seed(0)
    dropped = compute_logits(model.train())
    assert torch.equal(dropped, before[0]) == (family in UNDROPPED)
    convert(model, **list_conversions(family)["coupling"])
    torch.manual_seed(0)
    assert torch.equal(compute_logits(model), dropped)
    assert all(
        torch.equal(compute_logits(model.eval(), None, **way), was) for way, was in zip(ways, before, strict=True)
    )
    shake(model)
    assert not torch.allclose(compute_logits(model), before[0], atol=1e-3)
    revert(model)
    assert torch.equal(compute_logits(model), before[0])
    assert list(model.state_dict()) == names


@layout
def test_cached_is_full_and_what_is_refused_is_in_the_table(family: str) -> None:
    found, model = {}, tiny(family)
    owned = count_cached(model)
    for name, options in list_conversions(family).items():
        model = tiny(family)
        try:
            report = convert(model, **options)
        except ValueError as error:
            found[name] = str(error)
            assert find_conversion(model) is None
            continue
        found[name] = "yes"
        shake(model)
        whole = compute_logits(model, use_cache=False)
        cache: Any = DynamicCache(config=model.config)
        near(step_by_step(model, token_ids(), cache), whole)
        assert count_cached(model) == pytest.approx(report.cache_share * owned)
        if "share" in options:
            near(step_by_step(model, token_ids(), StaticCache(config=model.config, max_cache_len=16)), whole)
    assert found["coupling"] == "yes"
    title = KNOWN[family.partition(",")[0]].title
    if "," not in family:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {title} |"))
        assert [cell.strip().startswith("yes") for cell in row.split("|")[2:-1]] == [v == "yes" for v in found.values()]


def train_a_step(model: Any, folder: Path) -> None:
    """By Transformers' Trainer, which saves the model into the folder."""
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    settings = TrainingArguments(str(folder), use_cpu=True, max_steps=1, learning_rate=0.01, **quiet)
    rows: Any = [{"input_ids": row, "labels": row} for row in token_ids()]
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.train()
    trainer.save_model()


@layout
def test_trained_and_saved_is_loaded_and_takes_an_adapter(family: str, tmp_path: Path) -> None:
    """A step of Trainer, whole models by every door, and PEFT's adapters on what was loaded, with its coupling."""
    model = tiny(family)
    implementation = model.config._attn_implementation
    convert(model, **combine_conversions(family, model))
    shake(model)
    before = compute_logits(model)
    train_a_step(model, tmp_path / "trained")
    model.eval().save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    wanted = compute_logits(model)
    assert not torch.equal(wanted, before)
    loaded: Any = None
    doors = {"trained": load_converted, "whole": AutoModelForCausalLM.from_pretrained}
    for folder, load in doors.items():
        loaded = load(tmp_path / folder, attn_implementation=implementation)
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()  # aligned as they were: kernels round by that
        assert torch.equal(compute_logits(loaded), wanted)
        assert find_conversion(loaded) == find_conversion(model)
        assert type(loaded) is type(model)
    with pytest.raises(Exception, match="converted by qklab"):
        type(model).from_pretrained(tmp_path / "whole")

    kind = KNOWN[family.partition(",")[0]]
    name, layer = next(iter(kind.layers(loaded).items()))
    targets = [f"{name.rpartition('.')[2]}.{part}" for part in kind.projections if getattr(layer, part) is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that GPT-2's weights lie the other way
        config = LoraConfig(r=2, target_modules=targets, modules_to_save=["couple"], task_type="CAUSAL_LM")
        wrapped: Any = get_peft_model(loaded, config)
        assert torch.equal(compute_logits(wrapped), wanted)
        wrapped(token_ids(), labels=token_ids()).loss.backward()
        with torch.no_grad():
            for path, value in wrapped.named_parameters():
                assert (value.grad is not None) == value.requires_grad == ("lora" in path or "modules_to_save" in path)
                if value.requires_grad:
                    value.add_(0.1)
        wrapped.save_pretrained(tmp_path / "adapter")
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation=implementation)
    near(compute_logits(again.eval()), compute_logits(wrapped))
    assert not torch.allclose(compute_logits(wrapped), wanted, atol=1e-3)


@layout
def test_pairs_that_turn_together_merge_without_loss(family: str) -> None:
    """Keys that differ by a turn and a factor in each of RoPE's pairs are one head; in other pairs they are not."""
    kind = KNOWN[family.partition(",")[0]]
    model = tiny(family)
    layers = list(kind.layers(model).values())
    if "kv_heads" in kind.list_refusals(layers[0]) or kind.has_norms(layers[0]):
        return
    torch.manual_seed(0)
    for layer in layers:
        weights = kind.read(layer)
        assert weights.v is not None
        low, high = kind.pair_entries(layer)
        assert sorted([*low.tolist(), *high.tolist()]) == [*range(kind.width(layer))]
        a, b = torch.randn(2, len(low))
        turn = torch.zeros(kind.width(layer), kind.width(layer))
        turn[low, low], turn[high, high], turn[low, high], turn[high, low] = a, a, -b, b
        for symbol in ("k", "v", "k_bias", "v_bias"):
            part = getattr(weights, symbol)
            if part is not None:
                setattr(weights, symbol, torch.stack([part[0], turn @ part[0]]))
        kind.write(layer, weights)
    before = compute_logits(model)
    convert(model, kv_heads=1)
    torch.testing.assert_close(compute_logits(model), before, rtol=1e-3, atol=1e-3)


@pytest.mark.newest
def test_calibration_goes_through_layers_without_attention() -> None:
    model = tiny("granitemoehybrid", num_hidden_layers=3, layer_types=["full_attention", "linear_attention"] * 2)
    layers = KNOWN["granitemoehybrid"].layers(model)
    assert len(layers) == 2
    met: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, a, kw: met.append(kw["hidden_states"]), with_kwargs=True)
        for layer in layers.values()
    ]
    compute_logits(model, use_cache=False)
    for handle in handles:
        handle.remove()
    with evaluation_mode(model):
        walk = LayerWalk(model, list_decoder_layers(model, next(iter(layers))), read_batches(token_ids(), model))
        for (name, layer), wanted in zip(layers.items(), met, strict=True):
            near(walk.observe(find_decoder_layer(model, name), layer).inputs[0], wanted.flatten(0, 1))
            walk.advance(layer)


@pytest.mark.newest
def test_families_that_are_refused_exist_and_are_told_why() -> None:
    assert not {*REFUSED} & KNOWN.keys()
    for name, why in REFUSED.items():
        assert name in CONFIG_MAPPING
        with pytest.raises(ValueError, match=f"type '{name}' cannot be converted, as {why}; the families known"):
            find_convertible(name)


def test_the_table_has_nothing_else() -> None:
    table = re.findall(r"^\| ([^|`]+) \|(?: (?:yes|refused)[^|]* \|){4}$", PAGE, re.MULTILINE)
    assert sorted(table) == sorted(kind.title for kind in KNOWN.values())
