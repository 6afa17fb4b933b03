"""Conversion of Transformers models in place: nothing moves where nothing should, and what is fitted fits."""

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import SHAPE, TOKENS, enable_checkpointing, shake, step_by_step, tiny, token_ids
from small_models import compute_logits as logits
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qklab import CouplingSpec, register
from qklab.hf.convert import (
    convert,
    find_conversion,
    load_converted,
    revert,
)
from qklab.hf.convert.cache import Shared
from qklab.hf.families import convertible_families

FAMILIES = convertible_families()


def near(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Some virtual machines announce bf16 instructions that they then refuse; torch's own kernels do not use them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


# layouts that differ: apart, fused, norms of its own, angles by kind of layer; tests/hf/test_matrix.py has all families
CORE = ("llama", "gpt2", "gpt_neox", "gemma3_text")
family = pytest.mark.parametrize("family", CORE)


# Coupling: nothing moves


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gpt_neox", torch.float32), ("llama", torch.float64), ("gpt2", torch.bfloat16)],
)
def test_a_coupling_starts_as_nothing(family: str, dtype: torch.dtype) -> None:
    """Every kind, bit for bit, with and without a cache; and revert leaves the model as it was."""
    with without_onednn():
        model = tiny(family).to(dtype)
        names = list(model.state_dict())
        attention = type(next(iter(FAMILIES[family].layers(model).values())))
        before = logits(model, token_ids())
        for kind in (kind for kind, mechanism in register.coupling.items() if mechanism.has_identity):
            sharing = "per-head" if kind in ("leapfrog", "affine") else "per-layer"
            report = convert(model, coupling=CouplingSpec(kind=kind, init="identity", force_sharing=sharing))
            assert torch.equal(logits(model, token_ids()), before), kind
            assert torch.equal(logits(model, token_ids(), use_cache=False), before), kind
            new = [name for name in model.state_dict() if name not in names]
            assert new, kind
            assert all(".couple." in name for name in new)
            assert all(model.state_dict()[name].dtype == dtype for name in new)
            assert report.inserted == sum(model.get_parameter(name).numel() for name in new)
            shake(model)
            assert not torch.allclose(logits(model, token_ids()), before, atol=1e-3), kind
            revert(model)
            assert torch.equal(logits(model, token_ids()), before)
            assert list(model.state_dict()) == names
            assert all(type(layer) is attention for layer in FAMILIES[family].layers(model).values())
            assert find_conversion(model) is None


def test_only_the_coupling_trains() -> None:
    model = tiny("llama")
    report = convert(model, coupling="leapfrog", trainable="coupling")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".self_attn.couple." in name for name in trained)
    assert report.trainable == report.inserted == sum(model.get_parameter(name).numel() for name in trained)
    revert(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_seed_decides_the_forces() -> None:
    draws = itertools.count()

    def forces(seed: int, coupling: Any = "leapfrog") -> dict[str, Tensor]:
        model = tiny("llama")
        torch.manual_seed(next(draws))
        convert(model, coupling=coupling, seed=seed)
        return {name: value for name, value in model.state_dict().items() if ".force." in name}

    one, same, other = forces(0), forces(0, {"kind": "leapfrog"}), forces(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    first, second = (one[f"model.layers.{layer}.self_attn.couple.force.inner.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


def test_parameters_are_counted_without_weights() -> None:
    """On a published configuration, Llama 3.2 1B."""
    llama = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        report = convert(AutoModelForCausalLM.from_config(llama), coupling="affine")
    assert report.parameters_before == 1_235_814_400
    assert report.inserted == 16 * 2 * (64 * 128 + 128 + 128 * 128 + 128)
    assert report.parameters == report.parameters_before + report.inserted
    assert 0.0006 < report.inserted_share < 0.0007


def test_the_order_of_stages() -> None:
    """Coupling acts before the family's own norm and before rotation: with k⁺ = c·k, Qwen3's norm undoes the factor."""
    model = tiny("qwen3")
    before = logits(model, token_ids())
    convert(model, coupling="affine")
    for name, parameter in model.named_parameters():
        if name.endswith("key_outer.bias"):
            width = parameter.shape[0] // 2
            parameter.data[:width] = 0.5  # a scale of every entry alike
    near(logits(model, token_ids()), before)


# Generation


OPTIONS: dict[str, dict[str, Any]] = {
    "coupling": {"coupling": "leapfrog"},
    "shared": {"coupling": "leapfrog", "share": "k=v"},
}


@family
@pytest.mark.parametrize("option", OPTIONS)
def test_cached_is_uncached(family: str, option: str) -> None:
    """Dynamic and static caches, left padding, beams, cropping: what is read back is what was written."""
    model = tiny(family)
    convert(model, **OPTIONS[option])
    shake(model)
    tokens = token_ids()
    whole = logits(model, tokens, use_cache=False)
    caches: list[Any] = [DynamicCache(config=model.config), DynamicCache()]
    for past in caches:
        near(step_by_step(model, tokens, past), whole)
    static = StaticCache(config=model.config, max_cache_len=16)
    near(step_by_step(model, tokens, static), whole)
    assert all(isinstance(layer, Shared) == (option == "shared") for past in [*caches, static] for layer in past.layers)

    cache: Any = DynamicCache()
    logits(model, tokens, past_key_values=cache)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    again = logits(model, tokens[:, -4:].repeat_interleave(2, 0), past_key_values=cache)
    near(again, whole[:, -4:].repeat_interleave(2, 0))
    cache.crop(-4)
    cache.batch_select_indices(torch.tensor([0, 3]))
    near(logits(model, tokens[:, -4:], past_key_values=cache), whole[:, -4:])
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = logits(model, tokens.flip(0)[:, -4:], past_key_values=cache)
    near(swapped, whole.flip(0)[:, -4:])

    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens[:1, 3:]], 1)
    rows = torch.cat([padded, tokens[1:]])
    mask = (rows != 0).long()
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    batch = model.generate(rows, attention_mask=mask, **settings)
    single = model.generate(tokens[:1, 3:], **settings)
    assert torch.equal(batch[0, TOKENS:], single[0, TOKENS - 3 :])
    uncached = model.generate(rows, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(batch, uncached)
    beams = model.generate(rows, attention_mask=mask, num_beams=3, **settings)
    slow = model.generate(rows, attention_mask=mask, num_beams=3, use_cache=False, **settings)
    assert torch.equal(beams, slow)
    fixed = model.generate(rows, attention_mask=mask, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(fixed, batch)


def test_a_cache_under_autocast() -> None:
    model = tiny("llama")
    convert(model, share="k=v")
    with without_onednn(), torch.autocast("cpu", torch.bfloat16):
        whole = logits(model, token_ids(), use_cache=False)
        got = step_by_step(model, token_ids(), DynamicCache())
    torch.testing.assert_close(got, whole, rtol=0.05, atol=0.05)


def test_filled_and_foreign_caches_are_refused() -> None:
    model = tiny("llama")
    cache = DynamicCache()
    logits(model, token_ids(), past_key_values=cache)
    convert(model, share="k=v")
    with pytest.raises(ValueError, match="filled by a model with separate keys and values"):
        logits(model, token_ids(), past_key_values=cache)

    class Odd(transformers.cache_utils.DynamicLayer):
        pass

    with pytest.raises(ValueError, match="cannot use a cache of Odd"):
        logits(model, token_ids(), past_key_values=Cache(layer_class_to_replicate=Odd))


# Sharing and merging: what can be exact is exact


def layers_of(model: PreTrainedModel) -> list[Any]:
    return list(FAMILIES[model.config.model_type].layers(model).values())


@torch.no_grad()
def tie_values(model: PreTrainedModel) -> None:
    """Make every value a fixed linear map of its key (plus a constant where there are biases)."""
    torch.manual_seed(3)
    family = FAMILIES[model.config.model_type]
    for layer in layers_of(model):
        weights = family.read(layer)
        assert weights.v is not None
        maps = torch.randn(weights.k.shape[0], weights.k.shape[1], weights.k.shape[1]) / weights.k.shape[1] ** 0.5
        weights.v = maps.to(weights.k) @ weights.k
        family.write(layer, weights)


@family
@pytest.mark.parametrize("calibrated", [False, True])
def test_values_that_follow_from_keys_are_shared_without_loss(family: str, calibrated: bool) -> None:
    model = tiny(family).double()
    tie_values(model)
    before = logits(model, token_ids())
    report = convert(model, share="k=v", calibration=token_ids(seed=2, rows=8) if calibrated else None)
    moved = (logits(model, token_ids()) - before).norm() / before.norm()
    errors = [max(layer.keys or 0, layer.values or 0) for layer in report.layers]
    assert max(errors) < 0.02  # what the fit gives up so that rounding of the cache does no harm
    assert moved < 0.02
    assert (report.logits is None) != calibrated
    assert ("No calibration text" in str(report)) != calibrated


@family
def test_sharing_reports_what_happens(family: str) -> None:
    """The reported errors of keys, values and output are those of the layers before and after."""
    model = tiny(family)
    old = copy.deepcopy(model)
    text = token_ids(rows=6, seed=2)
    report = convert(model, share="k=v", calibration=text)
    kind = FAMILIES[family]
    caught: list[Any] = []
    first, second = layers_of(old)[0], layers_of(model)[0]
    handle = first.register_forward_hook(lambda _, a, kw, out: caught.append((a, kw, out[0])), with_kwargs=True)
    before = logits(old, text, use_cache=False)
    handle.remove()
    args, kwargs, wanted = caught[0]
    x = args[0] if args else kwargs["hidden_states"]
    with torch.no_grad():
        got = second(*args, **kwargs)[0]
        _, k, v, _ = kind.project(first, x)
        _, s, none, _ = kind.project(second, x)
    assert none is None
    assert v is not None
    layer = report.layers[0]
    assert layer.output == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-3)
    assert layer.keys == pytest.approx(float((s - k).norm() / k.norm()), rel=1e-3)
    assert report.logits == pytest.approx(float((logits(model, text) - before).norm() / before.norm()), rel=1e-3)
    assert 0.01 < (layer.values or 0) < 0.9
    assert report.parameters < report.parameters_before
    assert all(f"{100 * layer.output:.3g} %" in str(report) for layer in report.layers if layer.output is not None)


def test_later_layers_are_fitted_to_converted_ones() -> None:
    """The second layer's errors are those on what the converted first layer gives, not on what the original gave."""
    text = token_ids(rows=6, seed=2)
    model = tiny("llama")
    old = copy.deepcopy(model)
    report = convert(model, share="k=v", calibration=text)
    errors = []
    for source in (model, old):
        inputs: list[Tensor] = []
        handle = layers_of(source)[1].q_proj.register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0]))
        logits(source, text)
        handle.remove()
        with torch.no_grad():
            k, s = (layers_of(made)[1].k_proj(inputs[0]) for made in (old, model))
        errors.append(float((s - k).norm() / k.norm()))
    assert report.layers[1].keys == pytest.approx(errors[0], rel=1e-4)
    assert errors[1] != pytest.approx(errors[0], rel=1e-2)


def test_padding_does_not_count_in_calibration() -> None:
    text = token_ids(rows=3, seed=2)
    padded = torch.cat([torch.full((3, 4), 5), text], 1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    one, other = tiny("llama"), tiny("llama")
    convert(one, share="k=v", calibration=[text[:2], text[2:]])
    convert(other, share="k=v", calibration={"input_ids": padded, "attention_mask": mask})
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


GROUPED = ["llama", "qwen2", "gemma3_text"]
NORMED = ["gemma3_text"]


def turn() -> Tensor:
    """A random complex number for each of RoPE's pairs (i, i + 4), as a real matrix [8, 8]."""
    number = torch.randn(4, dtype=torch.complex64)
    real, imaginary = number.real.diag(), number.imag.diag()
    return torch.cat([torch.cat([real, -imaginary], 1), torch.cat([imaginary, real], 1)])


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("merge", ["mean", "least-squares"])
@pytest.mark.parametrize("share", [None, "k=v"])
def test_merging_heads(family: str, merge: Any, share: Any) -> None:
    """Heads that say the same merge without loss: equal ones always; by least squares also those whose values are
    linear maps of each other's, and whose keys are turned and stretched as RoPE's pairs can be."""
    model = tiny(family, num_key_value_heads=4).double()
    tie_values(model)
    kind = FAMILIES[family]
    for layer in layers_of(model):
        weights = kind.read(layer)
        assert weights.v is not None
        maps, turns = torch.eye(8).expand(4, 8, 8), torch.eye(8).expand(4, 8, 8)
        if merge == "least-squares":
            maps = torch.randn(4, 8, 8)
            turns = turns if family in NORMED else torch.stack([turn() for _ in range(4)])
        maps, turns = maps.to(weights.k), turns.to(weights.k)
        weights.k, weights.v = turns @ weights.k[0], maps @ weights.v[0]
        if weights.k_bias is not None and weights.v_bias is not None:
            weights.k_bias, weights.v_bias = turns @ weights.k_bias[0], maps @ weights.v_bias[0]
        kind.write(layer, weights)
    before = logits(model, token_ids())
    report = convert(model, kv_heads=2, merge=merge, share=share, calibration=token_ids(rows=8, seed=2))
    assert model.config.num_key_value_heads == 2
    assert layers_of(model)[0].num_key_value_groups == 2
    assert layers_of(model)[0].k_proj.weight.shape == (16, 32)
    moved = (logits(model, token_ids()) - before).norm() / before.norm()
    assert moved < (0.02 if share else 1e-6)
    assert report.cache_share == (0.25 if share else 0.5)
    cached = step_by_step(model, token_ids(), DynamicCache())
    near(cached, logits(model, token_ids(), use_cache=False))


@pytest.mark.parametrize("family", GROUPED)
def test_least_squares_merges_better_than_the_mean(family: str) -> None:
    text = token_ids(rows=6, seed=2)
    errors: dict[str, Any] = {}
    for merge in ("mean", "least-squares"):
        model = tiny(family, num_key_value_heads=4)
        old = logits(model, text)
        report = convert(model, kv_heads=1, merge=merge, calibration=text, keep_original=True)
        errors[merge] = report.layers[0]
        assert model.config.qklab["merge"] == merge
        if merge == "mean":
            weight = tiny(family, num_key_value_heads=4).model.layers[0].self_attn.k_proj.weight.view(4, 8, 32)
            torch.testing.assert_close(model.model.layers[0].self_attn.k_proj.weight, weight.mean(0))
        revert(model)
        assert torch.equal(logits(model, text), old)
        assert model.config.num_key_value_heads == 4
    assert errors["least-squares"].values < 0.95 * errors["mean"].values
    assert errors["least-squares"].output < errors["mean"].output
    if family in NORMED:
        assert errors["least-squares"].keys == pytest.approx(errors["mean"].keys)
    else:
        assert errors["least-squares"].keys < errors["mean"].keys


def test_merged_models_stay_plain(tmp_path: Path) -> None:
    """Fewer heads need no code of ours: any Transformers loads them."""
    model = tiny("llama")
    convert(model, kv_heads=1)
    model.save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain, token_ids()), logits(model, token_ids()))
    again = load_converted(tmp_path)
    assert torch.equal(logits(again, token_ids()), logits(model, token_ids()))
    convert(again, coupling="leapfrog")
    revert(again)
    assert find_conversion(again) == find_conversion(model)
    with pytest.raises(ValueError, match="kv_heads replaced weights that were not kept"):
        revert(again)


def test_conversions_in_turn_are_reverted_in_turn() -> None:
    model = tiny("llama")
    before = logits(model, token_ids())
    convert(model, kv_heads=1, keep_original=True)
    merged = logits(model, token_ids())
    convert(model, share="k=v", keep_original=True)
    revert(model)
    assert torch.equal(logits(model, token_ids()), merged)
    revert(model)
    assert torch.equal(logits(model, token_ids()), before)
    assert find_conversion(model) is None


def test_a_copy_stands_alone() -> None:
    model = tiny("llama")
    convert(model, coupling="leapfrog", share="k=v")
    shake(model)
    other = copy.deepcopy(model)
    assert torch.equal(
        step_by_step(other, token_ids(), DynamicCache()), step_by_step(model, token_ids(), DynamicCache())
    )
    assert layers_of(other)[0].rotary[0] is other.model.rotary_emb


# QK-norm


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_an_inserted_norm_keeps_the_scale_of_scores(family: str, calibrated: bool) -> None:
    model = tiny(family)
    old = copy.deepcopy(model)
    text = token_ids(rows=6, seed=2)
    before = logits(model, text)
    report = convert(model, norm="qk-norm", calibration=text if calibrated else None)
    kind = FAMILIES[family]
    first, second = layers_of(old)[0], layers_of(model)[0]
    inputs: list[Tensor] = []
    handle = second.register_forward_pre_hook(
        lambda _, a, kw: inputs.append(a[0] if a else kw["hidden_states"]), with_kwargs=True
    )
    after = logits(model, text)
    handle.remove()
    with torch.no_grad():
        q, k, *_ = kind.project(first, inputs[0])
        new_q, new_k = second.normalise(q, k)
    for old_side, new_side in ((q, new_q), (k, new_k)):
        ratio = new_side.square().mean((0, 1, 2)).sqrt() / old_side.square().mean((0, 1, 2)).sqrt()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-3 if calibrated else 0.6)
    size = new_q.norm(dim=-1)
    assert size.std() < q.norm(dim=-1).std()
    if calibrated:
        moved = float((after - before).norm() / before.norm())
        assert report.logits == pytest.approx(moved, rel=1e-3)
        assert moved < 0.5
    assert report.inserted == 2 * 2 * kind.width(first)
    near(step_by_step(model, token_ids(), DynamicCache()), logits(model, token_ids(), use_cache=False))
    revert(model)
    assert torch.equal(logits(model, text), before)


def test_norm_and_share_and_coupling_together() -> None:
    model = tiny("llama")
    convert(
        model,
        coupling="leapfrog",
        share="k=v",
        norm="qk-norm",
        kv_heads=1,
        calibration=token_ids(),
        trainable="inserted",
    )
    shake(model)
    near(step_by_step(model, token_ids(), DynamicCache()), logits(model, token_ids(), use_cache=False))
    trained = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"couple", "inner", "outer", "normalise"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    model = tiny(family).train()
    convert(model, coupling="leapfrog", share="k=v", norm=None if family in NORMED else "qk-norm")
    shake(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(model)
        model.zero_grad()
        model(token_ids(), labels=token_ids()).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() == {name for name, _ in model.named_parameters()}
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.newest
def test_compiles_into_one_graph() -> None:
    """With all that is inserted, and keys turned when they are read."""
    model = tiny("llama")
    convert(model, coupling="leapfrog", share="k=v", norm="qk-norm")
    shake(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(logits(compiled, token_ids()), logits(model, token_ids()))
    cache = StaticCache(config=model.config, max_cache_len=16)
    whole = logits(model, token_ids(), use_cache=False)
    logits(model, token_ids()[:, :-3], past_key_values=cache)
    for place in range(TOKENS - 3, TOKENS):
        position = torch.full((1, 1), place)
        got = logits(compiled, token_ids()[:, place : place + 1], past_key_values=cache, position_ids=position)
        near(got[:, 0], whole[:, place])
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_eager_gives_attention_maps(family: str) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        before = model(token_ids(), output_attentions=True)
    convert(model, coupling="leapfrog")
    with torch.no_grad():
        after = model(token_ids(), output_attentions=True)
    assert len(after.attentions) == 2
    assert torch.equal(after.logits, before.logits)
    for a, b in zip(after.attentions, before.attentions, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("family", "share"), [*((family, None) for family in (*CORE, "mistral", "gemma2", "gpt_oss")), ("llama", "k=v")]
)
def test_any_attention_implementation(family: str, share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted layers ask Transformers' interface, with all that their family says, as their own classes do: full and
    cached, argument for argument. Where key and value are one tensor, its two uses are what is cached and not."""
    calls: list[dict[str, Any]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, "mask": mask, **options})
        options.pop("softcap", None)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "of a test", attend)
    written = transformers.masking_utils.sdpa_mask
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "of a test", written)

    def record(model: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
        calls.clear()
        cache = DynamicCache(config=model.config)
        parts = [token_ids(), *token_ids().split([TOKENS - 1, 1], 1)]
        found = [logits(model, part, past_key_values=cache if number else None) for number, part in enumerate(parts)]
        assert len(calls) == 6
        return found, [{name: call[name] for name in call if name != "past_key_values"} for call in calls]

    model = tiny(family)
    model.set_attn_implementation("of a test")
    before, plain = record(model)
    convert(model, coupling="leapfrog", share=share, keep_original=True)
    after, given = record(model)
    near(after[2][:, 0], after[0][:, -1])
    assert all(map(torch.equal, after, before)) == (share is None)
    for mine, own in zip(given, plain, strict=True):
        assert mine.keys() == own.keys()
        for name, value in own.items():
            if not isinstance(value, Tensor):
                assert mine[name] == value, name
            elif share is None or name == "mask":
                assert torch.equal(mine[name], value), name
            else:
                assert mine[name].shape == value.shape, name


# Refusals: one sentence each


def refuse(match: str, model: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        convert(model, **options)
    assert "\n" not in str(caught.value)


def test_refused_models() -> None:
    refuse("a loaded Transformers model was expected", torch.nn.Linear(2, 2), coupling="leapfrog")
    opt = transformers.OPTConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, ffn_dim=16, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=16,
    )  # fmt: skip
    refuse("models of type 'opt' cannot be converted", AutoModelForCausalLM.from_config(opt), coupling="leapfrog")
    quantised = tiny("llama")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    refuse("quantised model", quantised, coupling="leapfrog")
    odd = tiny("llama")
    odd.model.layers[1].self_attn.v_proj = torch.nn.Sequential(odd.model.layers[1].self_attn.v_proj)
    refuse(r"layers\.1\.self_attn\.v_proj is a Sequential", odd, coupling="leapfrog")
    done = tiny("llama")
    convert(done, coupling="leapfrog")
    refuse(r"already converted \(leapfrog×1 identity\)", done, share="k=v")
    done.model.layers[0].self_attn.__class__ = type(tiny("llama").model.layers[0].self_attn)
    refuse("1 of the 2 attention layers of this model are converted", done, coupling="leapfrog")
    crossed = tiny("gpt2", add_cross_attention=True)
    refuse("cross-attention", crossed, coupling="leapfrog")
    upcast = tiny("gpt2", reorder_and_upcast_attn=True)
    refuse("reorder_and_upcast_attn", upcast, coupling="leapfrog")
    hooked = tiny("llama")
    hooked.model.layers[0].self_attn.forward = hooked.model.layers[0].self_attn.forward
    refuse("a forward of its own", hooked, coupling="leapfrog")
    growing = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    refuse("rope_type 'dynamic'", growing, share="k=v")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    refuse("need the weights", empty, share="k=v")


def test_refused_options() -> None:
    model = tiny("llama")
    refuse("nothing was asked for", model)
    refuse("coupling must be a CouplingSpec or one of .*did you mean 'leapfrog'", model, coupling="leapfrogs")
    refuse("changes nothing yet", model, coupling=CouplingSpec(kind="leapfrog"))
    refuse("looks back on tokens that the family's own cache does not keep", model, coupling=CouplingSpec(kind="cca"))
    refuse("share must be one of 'k=v', but 'q=k' came", model, share="q=k")
    refuse("norm must be one of 'qk-norm', but 'layer' came", model, norm="layer")
    refuse("Qwen3 already normalises", tiny("qwen3"), norm="qk-norm")
    refuse("GPT-2 has as many key/value heads as heads", tiny("gpt2"), kv_heads=2)
    refuse("must divide the model's 2 key/value heads and be fewer", model, kv_heads=3)
    refuse("must divide the model's 2 key/value heads and be fewer", model, kv_heads=2)
    refuse("merge must be one of", model, kv_heads=1, merge="median")
    refuse("say with kv_heads= how many are to stay", model, merge="mean")
    refuse("nothing is fitted here", model, coupling="leapfrog", calibration=token_ids())
    refuse("weight must lie between 0 and 1", model, share="k=v", weight=1.0)
    refuse("trainable must be one of", model, coupling="leapfrog", trainable="all")
    refuse("needs a coupling to train", model, share="k=v", trainable="coupling")
    refuse("needs something inserted", model, share="k=v", trainable="inserted")
    refuse("calibration must be token ids", model, share="k=v", calibration="some text")
    refuse("calibration must be token ids", model, share="k=v", calibration=torch.zeros(3, 4))
    refuse("calibration is empty", model, share="k=v", calibration=[])
    refuse("ids from 0 to 60", model, share="k=v", calibration=torch.tensor([[3, 61]]))
    nothing = {"input_ids": token_ids(), "attention_mask": torch.zeros(2, TOKENS)}
    refuse("leave tokens in each row", model, share="k=v", calibration=nothing)
    assert find_conversion(model) is None
    with pytest.raises(ValueError, match="nothing to revert"):
        revert(model)
    convert(model, share="k=v")
    with pytest.raises(ValueError, match="share replaced weights that were not kept"):
        revert(model)


@family
def test_kept_weights_come_back(family: str) -> None:
    model = tiny(family)
    before, names = logits(model, token_ids()), list(model.state_dict())
    convert(model, coupling="leapfrog", share="k=v", keep_original=True)
    assert list(model.state_dict()) != names
    revert(model)
    assert torch.equal(logits(model, token_ids()), before)
    assert set(model.state_dict()) == set(names)
