"""Logit control: its laws, the formulas against a plain transcription, and what it leaves exactly as it was."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from control import (
    KINDS,
    Make,
    controlled_names,
    decoder,
    draw_gradients,
    expected_clips,
    expected_factors,
    grow,
    largest_logits,
    linears,
    loss_of,
    norms,
    per_row,
    put,
    snapshot,
    tokens,
)
from torch import Tensor, nn

from qklab import AttentionSpec
from qklab.attention.layer import Attention
from qklab.model import Decoder
from qklab.optim import LogitControl, QKClip, Rows, attention_roles, layer_roles
from qklab.optim.logit_control import Method, NormKind
from qklab.optim.norms import largest_singular_value
from qklab.testing.grid import grid, randomise

Control = LogitControl | QKClip
EPS = torch.finfo(torch.float64).eps
CLIPPABLE = [name for name in KINDS if not name.startswith("leapfrog")]


def exact(found: Tensor, expected: Tensor) -> None:
    """Equal up to a few hundred roundings: quotients of roots of sums of at most 100 squares."""
    torch.testing.assert_close(found, expected, rtol=1000 * EPS, atol=0.0)


def near(found: Tensor, expected: Tensor) -> None:
    """Weights below 100, or differences of such, equal up to a few hundred roundings."""
    torch.testing.assert_close(found, expected, rtol=1000 * EPS, atol=100 * 1000 * EPS)


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3)


# laws


def brings_norm(spec: AttentionSpec) -> bool:
    return spec.coupling is not None and spec.coupling.kind == "cca"


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_every_kind_of_attention_starts_with_factors_of_exactly_one_and_the_bare_optimisers_step(
    norm: NormKind,
) -> None:
    free = [spec for spec in grid() if spec.norm == "none" and not brings_norm(spec)]
    for spec in free[:: 5 if norm == "frobenius" else 23]:
        ours = randomise(Attention(spec))
        bare = copy.deepcopy(ours)
        control = LogitControl(adamw([*ours.parameters()]), attention_roles(ours), norm=norm)
        base = adamw([*bare.parameters()])
        for model, optimiser in ((ours, control), (bare, base)):
            draw_gradients(model, seed=1)
            optimiser.step()
        factors = control.factors()["attention"]
        assert all(torch.equal(value, torch.ones_like(value)) for value in factors.values()), spec.name
        assert factors.keys() == linears(ours).keys()
        assert same(ours, bare), spec.name


Bases = Callable[[Decoder], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]


def one(model: Decoder) -> torch.optim.Optimizer:
    return adamw([*model.parameters()])


def two(model: Decoder) -> Sequence[torch.optim.Optimizer]:
    """Queries and half of the rest in one optimiser, keys and the other half in another."""
    parameters = [*model.parameters()]
    return [adamw(parameters[::2]), torch.optim.AdamW(parameters[1::2], lr=3e-3, amsgrad=True)]


def quack(model: Decoder, bases: Bases) -> Control:
    return LogitControl(bases(model), attention_roles(model), tau=0.7)


def clip(model: Decoder, bases: Bases) -> Control:
    return QKClip(bases(model), attention_roles(model), threshold=0.05)


@pytest.mark.parametrize("wrap", [quack, clip])
@pytest.mark.parametrize("bases", [one, two])
@pytest.mark.parametrize("kind", ["GQA with biases", "MLA"])
def test_a_resumed_run_continues_bit_for_bit(
    wrap: Callable[[Decoder, Bases], Control], bases: Bases, kind: str
) -> None:
    def opened(model: Decoder) -> tuple[Control, torch.optim.lr_scheduler.LambdaLR]:
        control = wrap(model, bases)
        return control, torch.optim.lr_scheduler.LambdaLR(control, lambda step: 1 / (1 + step))

    def train(model: Decoder, control: Control, schedule: torch.optim.lr_scheduler.LambdaLR, start: int) -> None:
        for step in range(start, start + 3):
            loss_of(model, tokens(step)).backward()
            control.step()
            schedule.step()
            control.zero_grad()

    model = decoder(**KINDS[kind])
    control, schedule = opened(model)
    train(model, control, schedule, 0)
    kept = io.BytesIO()
    torch.save({"weights": model.state_dict(), "optimiser": control.state_dict(), "at": schedule.state_dict()}, kept)
    saved = {layer: {s: f.clone() for s, f in table.items()} for layer, table in control.factors().items()}
    train(model, control, schedule, 3)

    kept.seek(0)
    loaded = torch.load(kept, weights_only=True)
    again = decoder(seed=1, **KINDS[kind])
    again.load_state_dict(loaded["weights"])
    other, at = opened(again)
    assert any((f != 1).any() for table in saved.values() for f in table.values())
    other.load_state_dict(loaded["optimiser"])
    at.load_state_dict(loaded["at"])
    for layer, table in other.factors().items():
        assert all(torch.equal(value, saved[layer][symbol]) for symbol, value in table.items())
    train(again, other, at, 3)
    assert same(model, again)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in control.param_groups]


def test_a_state_is_a_copy_and_holds_the_norms_at_the_start() -> None:
    model = decoder(layers=1)
    control = LogitControl(one(model), attention_roles(model))
    tensors = control.state_dict()["logit_control"]["tensors"]
    for symbol, values in norms(model.attention(0)).items():
        exact(tensors[f"initial.blocks.0.attention.{symbol}"], torch.tensor(values, dtype=torch.float64))
    grow(model, seed=0)
    draw_gradients(model, seed=0)
    control.step()
    assert (tensors["factors.blocks.0.attention.q"] == 1).all()
    assert (control.state_dict()["logit_control"]["tensors"]["factors.blocks.0.attention.q"] != 1).all()


# the formulas


def test_factors_and_updates_of_all_kinds_under_one_control_equal_a_plain_transcription() -> None:
    models = {kind: decoder(seed=number, **KINDS[kind]) for number, kind in enumerate(KINDS)}
    roles = {
        f"{kind}, {layer}": attention_roles(model)[f"blocks.{layer}.attention"]
        for kind, model in models.items()
        for layer in range(2)
    }
    initial = {kind: [norms(model.attention(layer)) for layer in range(2)] for kind, model in models.items()}
    control = LogitControl(sgd([p for model in models.values() for p in model.parameters()]), roles, tau=0.6)
    before, expected, clamped = dict[str, Any](), dict[str, Any](), set[str]()
    for step in range(3):
        for kind, model in models.items():
            grow(model, seed=step)
            draw_gradients(model, seed=step)
            before[kind], now = snapshot(model), [norms(model.attention(layer)) for layer in range(2)]
            pairs = [(now[i][s], initial[kind][i][s]) for i in range(2) for s in now[i]]
            clamped |= {kind for n, n0 in pairs if any(a < 0.3 * b for a, b in zip(n, n0, strict=True))}
            spec = model.attention(0).spec
            expected[kind] = [expected_factors(spec, now[i], initial[kind][i]) for i in range(2)]
        control.step()
        assert list(control.factors()) == list(roles)
        for kind, model in models.items():
            for layer, factors in enumerate(expected[kind]):
                found = control.factors()[f"{kind}, {layer}"]
                assert found.keys() == factors.keys(), kind
                for symbol, values in factors.items():
                    exact(found[symbol], torch.tensor(values, dtype=torch.float64))
            controlled = controlled_names(model)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                if name in controlled:
                    layer, symbol, _ = controlled[name]
                    update = 0.6 * per_row(expected[kind][layer][symbol], parameter) * parameter.grad
                    near(parameter.detach(), before[kind][name] - 0.1 * update)
                else:
                    assert torch.equal(parameter.detach(), before[kind][name].add(parameter.grad, alpha=-0.1)), name
            put(model, before[kind])
    assert clamped == KINDS.keys()


@pytest.mark.parametrize("kind", ["GQA with biases", "q=k", "leapfrog", "differential-v2", "MLA", "MLA with biases"])
def test_spectral_factors_follow_the_largest_singular_values(kind: str) -> None:
    model = decoder(**KINDS[kind])
    initial = [norms(model.attention(layer), "spectral") for layer in range(2)]
    control = LogitControl(sgd([*model.parameters()]), attention_roles(model), norm="spectral")
    tensors = control.tensors()
    for layer in range(2):
        for symbol, values in initial[layer].items():
            exact = torch.tensor(values, dtype=torch.float64)
            ratio = tensors[f"initial.blocks.{layer}.attention.{symbol}"] / exact
            assert (ratio >= 1 - 1000 * EPS).all()
            assert (ratio <= 1.005).all()
    grow(model, seed=3)
    now = [norms(model.attention(layer), "spectral") for layer in range(2)]
    draw_gradients(model, seed=0)
    control.step()
    for layer in range(2):
        for symbol, values in expected_factors(model.attention(0).spec, now[layer], initial[layer]).items():
            ratio = control.factors()[f"blocks.{layer}.attention"][symbol] / torch.tensor(values, dtype=torch.float64)
            # at most four norms stand in one factor, each at most 0.5 % too large
            assert ratio.max() <= 1.005**4
            assert ratio.min() >= 1.005**-4


@pytest.mark.parametrize("shape", [(100, 300), (300, 100), (64, 64), (1, 7), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_largest_singular_value_is_never_too_small_and_at_most_half_a_percent_too_large(
    shape: tuple[int, int], dtype: torch.dtype, size: float
) -> None:
    drawn = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = torch.linalg.svd(drawn, full_matrices=False)
    equal = flat.U @ flat.Vh  # all singular values alike: the worst there is
    for matrix in (drawn * size, equal * size, drawn[:, :, :1] * drawn[:, :1, :] * size):
        ratio = largest_singular_value(matrix.to(dtype)) / torch.linalg.matrix_norm(matrix, ord=2)
        assert ratio.min() >= 1 - 100 * torch.finfo(dtype).eps
        assert ratio.max() <= 1.005


@pytest.mark.parametrize("kind", CLIPPABLE)
def test_qk_clip_multiplies_the_weights_as_a_plain_transcription_says(kind: str) -> None:
    model = decoder(**KINDS[kind])
    ids = tokens(length=12)
    grow(model, seed=1)
    largest = largest_logits(model, ids)
    threshold = float(torch.tensor(largest).median())
    control = QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold)
    before = snapshot(model)
    model(ids)
    control.step()
    clips = [expected_clips(model.attention(0).spec, largest[layer], threshold) for layer in range(2)]
    controlled = controlled_names(model)
    for name, parameter in model.named_parameters():
        if name not in controlled:
            assert torch.equal(parameter.detach(), before[name]), name
            continue
        layer, symbol, _ = controlled[name]
        exact(parameter.detach(), before[name] * per_row(clips[layer][symbol], parameter))
    for layer in range(2):
        for symbol, values in control.factors()[f"blocks.{layer}.attention"].items():
            exact(values, torch.tensor(clips[layer][symbol], dtype=torch.float64))
    assert any(value < 1 for table in clips for values in table.values() for value in values)


@pytest.mark.parametrize("kind", CLIPPABLE)
def test_after_qk_clip_the_largest_logit_is_the_threshold(kind: str) -> None:
    model = decoder(layers=1, **KINDS[kind])
    ids = tokens(length=12)
    before = largest_logits(model, ids)[0]
    threshold = sorted(before)[len(before) // 2 - 1]  # half of the heads are above it, or a little more
    assert threshold > 0
    control = QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold)
    model(ids)
    control.step()
    spec = model.attention(0).spec
    expected = [min(s, threshold) for s in before]
    if spec.coupling is not None and spec.share == "none":  # a group shrinks as one
        group = len(before) // spec.kv_heads
        worst = [max(threshold, *before[h // group * group : (h // group + 1) * group]) for h in range(len(before))]
        expected = [s * threshold / w for s, w in zip(before, worst, strict=True)]
    after = largest_logits(model, ids)[0]
    assert max(after) == pytest.approx(threshold, rel=1000 * EPS)
    assert after == pytest.approx(expected, rel=1000 * EPS)


def test_qk_clip_takes_the_largest_of_all_training_passes_since_the_last_step() -> None:
    model = decoder(layers=1)
    control = QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold=1e-3)
    passes = sorted((tokens(seed) for seed in range(4)), key=lambda ids: largest_logits(model, ids)[0][0])
    largest = torch.tensor([largest_logits(model, ids)[0] for ids in passes], dtype=torch.float64)
    assert len(set(largest[:3].argmax(0).tolist())) > 1  # not one pass is the largest for every head
    for ids in passes[:3]:
        model(ids)
    model.eval()(passes[3])  # larger for the first head, but not in training
    model.train()
    control.step()
    gamma = 1e-3 / largest[:3].amax(0)
    exact(control.factors()["blocks.0.attention"]["q"], gamma.sqrt())
    before = snapshot(model)
    control.step()
    assert (control.factors()["blocks.0.attention"]["q"] == 1).all()
    assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())


def test_qk_clip_takes_logits_that_it_is_told() -> None:
    query, key = nn.Linear(6, 8), nn.Linear(6, 4)
    roles = {"mine": layer_roles(query=query, key=key, heads=4, kv_heads=2)}
    control = QKClip(torch.optim.SGD([*query.parameters(), *key.parameters()], lr=0.0), roles, threshold=100)
    control.observe("mine", torch.tensor([50.0, 400.0, 100.0, -900.0]))
    control.observe("mine", torch.tensor([200.0, 10.0, 100.0, torch.nan]))
    before = query.weight.detach().clone(), key.bias.detach().clone()
    control.step()
    scale = torch.tensor([0.5 / 0.5, 0.25 / 0.5, 1.0, 1.0])
    assert torch.equal(control.factors()["mine"]["q"], scale)
    assert torch.equal(control.factors()["mine"]["k"], torch.tensor([0.5, 1.0]))
    assert torch.equal(query.weight.detach(), before[0] * scale.repeat_interleave(2)[:, None])
    assert torch.equal(key.bias.detach(), before[1] * torch.tensor([0.5, 0.5, 1.0, 1.0]))


# what it leaves as it was


@pytest.mark.parametrize("settings", [{"method": "none", "tau": 0.3}, {"method": "fixed", "tau": 1.0}])
def test_no_control_is_the_bare_optimiser_bit_for_bit(settings: dict[str, Any]) -> None:
    ours, bare = decoder(), decoder()
    control, base = LogitControl(one(ours), attention_roles(ours), **settings), one(bare)
    for step in range(4):
        for model, optimiser in ((ours, control), (bare, base)):
            grow(model, seed=step)
            draw_gradients(model, seed=step)
            optimiser.step()
        assert same(ours, bare)


def checked_steps(
    make: Make,
    *,
    decay: float = 0.0,
    base_step: Callable[[torch.optim.Optimizer], Callable[[], Any]] = lambda base: base.step,
    step_of: Callable[[LogitControl], Callable[[], Any]] = lambda control: control.step,
    kind: str = "GQA with biases",
    method: Method = "quack",
    layers: int = 2,
) -> None:
    """Three steps from grown weights, each against the bare optimiser's from the same weights and state:
    w = (1 − lr·decay)·before + τ·factor·(bare − (1 − lr·decay)·before), and the rest bit for bit."""
    ours, bare = decoder(layers, **KINDS[kind]), decoder(layers, **KINDS[kind])
    initial = [norms(ours.attention(layer)) for layer in range(layers)]
    base = make([*bare.parameters()])
    control = LogitControl(make([*ours.parameters()]), attention_roles(ours), tau=0.6, method=method)
    step, bare_step = step_of(control), base_step(base)
    controlled = controlled_names(ours)
    for number in range(3):
        grow(bare, seed=number)
        before = snapshot(bare)
        put(ours, before)
        factors = [expected_factors(ours.attention(0).spec, norms(ours.attention(i)), n) for i, n in enumerate(initial)]
        draw_gradients(bare, seed=number)
        draw_gradients(ours, seed=number)
        bare_step()
        step()
        after = snapshot(bare)
        for name, parameter in ours.named_parameters():
            if name not in controlled:
                assert torch.equal(parameter.detach(), after[name]), name
                continue
            layer, symbol, heads = controlled[name]
            scale = factors[layer][symbol] if method == "quack" else [1.0] * heads
            left = (1 - float(base.param_groups[0]["lr"]) * decay) * before[name]
            expected = left + 0.6 * per_row(scale, left) * (after[name] - left)
            near(parameter.detach(), expected)
            assert not torch.equal(parameter.detach(), after[name])


@pytest.mark.parametrize("kind", ["GQA with biases", "MLA with biases"])
@pytest.mark.parametrize(
    "way", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"lr": torch.tensor(0.05).double()}]
)
def test_every_kernel_of_adamw_is_scaled_and_its_decay_is_not(way: dict[str, Any], kind: str) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.4} | way
    checked_steps(lambda parameters: torch.optim.AdamW(parameters, **settings), decay=0.4, kind=kind)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.2),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.4),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, weight_decay=0.4),
    ],
)
def test_decay_that_is_part_of_the_gradient_is_scaled_with_it(make: Make) -> None:
    checked_steps(make)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.4, decoupled_weight_decay=True),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.05, weight_decay=0.4, decoupled_weight_decay=True),
    ],
)
def test_decay_that_acts_on_the_weight_is_not_scaled(make: Make) -> None:
    checked_steps(make, decay=0.4)


def test_a_fixed_factor_scales_the_updates_by_tau_alone() -> None:
    checked_steps(adamw, decay=0.3, method="fixed")


# fused weights


class SeparateProjections(nn.Module):
    """Queries, keys and values of 3 heads of width 4, from 5 inputs, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, 12).double() for _ in range(3))

    @property
    def linears(self) -> list[nn.Linear]:
        return [self.query, self.key, self.value]

    def roles(self) -> dict[str, Any]:
        return {"layer": {"query": self.query, "key": self.key, "heads": 3}}


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """q of all heads, k of all heads, v of all heads."""
    return torch.cat(list(parts))


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """q, k and v of the first head, then of the second, and so on."""
    return torch.cat([part.unflatten(0, (3, 4)) for part in parts], 1).flatten(0, 1)


LAYOUTS: dict[str, tuple[Callable[[Sequence[Tensor]], Tensor], int]] = {
    "side by side": (side_by_side, 0),
    "side by side, inputs first": (side_by_side, 1),
    "interleaved": (interleaved, 0),
    "interleaved, inputs first": (interleaved, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [adamw, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
def test_fused_and_separate_weights_get_identical_updates(layout: str, make: Make) -> None:
    join, axis = LAYOUTS[layout]
    separate = SeparateProjections()

    def fuse(parts: Sequence[Tensor | None]) -> Tensor:
        joined = join([part.detach() for part in parts if part is not None])
        return (joined.mT if axis == 1 and joined.dim() == 2 else joined).contiguous()

    def weights() -> tuple[Tensor, Tensor]:
        return fuse([part.weight for part in separate.linears]), fuse([part.bias for part in separate.linears])

    weight, bias = (nn.Parameter(tensor.clone()) for tensor in weights())
    numbers = torch.arange(36)
    q, k = (numbers[12 * i : 12 * i + 12].view(3, 4) for i in range(2))
    if join is interleaved:
        q, k = (numbers.view(3, 3, 4)[:, i] for i in range(2))
    roles = {"layer": layer_roles(query=Rows(weight, q, bias, axis), key=Rows(weight, k, bias, axis), heads=3)}
    fused_control = LogitControl(make([weight, bias]), roles, tau=0.6)
    control = LogitControl(make([*separate.parameters()]), separate.roles(), tau=0.6)
    for step in range(3):
        draw_gradients(separate, seed=step)
        with torch.no_grad():  # heads grow differently
            for i, part in enumerate(separate.linears):
                part.weight.view(3, 4, 5).mul_(torch.tensor([0.1, 3.0, 2.0 + i]).view(3, 1, 1))
            weight.copy_(weights()[0])
        weight.grad = fuse([part.weight.grad for part in separate.linears])
        bias.grad = fuse([part.bias.grad for part in separate.linears])
        control.step()
        fused_control.step()
        for symbol, factor in control.factors()["layer"].items():
            assert (factor != 1).any()
            exact(fused_control.factors()["layer"][symbol], factor)
        for fused, expected in zip((weight, bias), weights(), strict=True):
            near(fused.detach(), expected)


def test_rows_of_finds_fused_rows() -> None:
    fused = nn.Linear(5, 36)
    assert torch.equal(Rows.of(fused, 3, among=(12, 24)).rows, torch.arange(12, 24).view(3, 4))
    assert Rows.of(fused, 3, within=(4, 8)).rows.tolist() == [[4, 5, 6, 7], [16, 17, 18, 19], [28, 29, 30, 31]]
    assert Rows.of(fused, 3).bias is fused.bias
    assert Rows.of(fused.weight, 3).bias is None


def test_rows_that_no_role_claims_keep_the_bare_update_bit_for_bit() -> None:
    fused, bare = (nn.Linear(5, 36).double() for _ in range(2))
    bare.load_state_dict(fused.state_dict())
    q, k = (Rows.of(fused, 3, among=(12 * i, 12 * i + 12)) for i in range(2))
    control = LogitControl(adamw([*fused.parameters()]), {"layer": layer_roles(query=q, key=k, heads=3)})
    base = adamw([*bare.parameters()])
    for model, optimiser in ((fused, control), (bare, base)):
        with torch.no_grad():
            model.weight.mul_(3)
        draw_gradients(model, seed=0)
        optimiser.step()
    assert torch.equal(fused.weight[24:], bare.weight[24:])
    assert torch.equal(fused.bias[24:], bare.bias[24:])
    assert (fused.weight[:24] != bare.weight[:24]).all()


# the ways training is done


def compiled(optimiser: torch.optim.Optimizer) -> Callable[[], Any]:
    """A compiled AdamW counts steps in float32, so its results are compared with those of a compiled one."""
    return torch.compile(optimiser.step, backend="eager")


def test_a_compiled_step_is_the_same_step() -> None:
    checked_steps(adamw, decay=0.3, base_step=compiled, step_of=compiled, layers=1)


def test_a_compiled_step_of_the_wrapped_optimiser_is_scaled() -> None:
    def inside(control: LogitControl) -> Callable[[], Any]:
        base = control.bases[0]
        base.step = compiled(base)  # pyright: ignore[reportAttributeAccessIssue]
        return control.step

    checked_steps(adamw, decay=0.3, base_step=compiled, step_of=inside, layers=1)


def test_schedules_multiply_it() -> None:
    model = decoder(layers=1)
    control = LogitControl(sgd([*model.parameters()]), attention_roles(model), tau=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(control, lambda step: 0.5**step)
    for step in range(3):
        before = model.get_parameter("blocks.0.attention.project.key.weight").detach().clone()
        other = model.embed.weight.detach().clone()
        draw_gradients(model, seed=step)
        control.step()
        factor = control.factors()["blocks.0.attention"]["k"].repeat_interleave(4)[:, None]
        moved = model.get_parameter("blocks.0.attention.project.key.weight")
        assert moved.grad is not None
        near(moved.detach(), before - 0.1 * 0.5**step * 0.5 * factor * moved.grad)
        assert model.embed.weight.grad is not None
        assert torch.equal(model.embed.weight.detach(), other.add(model.embed.weight.grad, alpha=-0.1 * 0.5**step))
        schedule.step()


@pytest.mark.parametrize("wrap", [quack, clip])
def test_a_gradient_scaler_skips_steps_that_are_not_finite_and_unscales_others(
    wrap: Callable[[Decoder, Bases], Control],
) -> None:
    model, plain = decoder().float(), decoder().float()
    control, other = wrap(model, one), wrap(plain, one)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        broken = step == 1
        before = snapshot(model)
        loss = loss_of(model, tokens(step))
        scaler.scale(loss).backward()
        if broken:
            assert model.embed.weight.grad is not None
            model.embed.weight.grad[0, 0] = torch.inf
        scaler.unscale_(control)
        scaler.step(control)
        scaler.update()
        control.zero_grad()
        if broken:
            assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())
            if isinstance(control, QKClip):
                control.watch.reset()
            continue
        loss_of(plain, tokens(step)).backward()
        other.step()
        other.zero_grad()
        assert same(model, plain)  # the scale is a power of two


@pytest.mark.parametrize("method", ["quack", "fixed", "qk-clip"])
def test_a_step_skipped_on_the_device_leaves_every_weight(method: Any) -> None:
    model = decoder()
    base = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.4, fused=True)
    roles = attention_roles(model)
    control = QKClip(base, roles, 1e-3) if method == "qk-clip" else LogitControl(base, roles, tau=0.6, method=method)
    grow(model, seed=0)
    before = snapshot(model)
    model(tokens())
    draw_gradients(model, seed=0)
    base.found_inf = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
    control.step()
    assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())
    base.found_inf = torch.zeros(())  # pyright: ignore[reportAttributeAccessIssue]
    control.step()
    assert not any(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())


def test_weights_without_a_gradient_stay_as_they_are() -> None:
    model = decoder()
    frozen = "blocks.0.attention.project.query.weight"
    resting = "blocks.1.attention.project.key.weight"
    model.get_parameter(frozen).requires_grad_(False)
    moving = [p for p in model.parameters() if p.requires_grad]
    control = LogitControl(adamw(moving), attention_roles(model), tau=0.6)
    grow(model, seed=0)
    before = snapshot(model)
    draw_gradients(model, seed=0)
    model.get_parameter(frozen).grad = model.get_parameter(resting).grad = None
    control.step()
    unmoved = {name for name, p in model.named_parameters() if torch.equal(p.detach(), before[name])}
    assert unmoved == {frozen, resting}


def test_a_frozen_query_that_is_in_the_optimiser_still_decides_the_keys_step() -> None:
    model = decoder(layers=1)
    model.get_parameter("blocks.0.attention.project.query.weight").requires_grad_(False)
    control = LogitControl(adamw([*model.parameters()]), attention_roles(model))
    with torch.no_grad():
        model.get_parameter("blocks.0.attention.project.query.weight").mul_(2)
    loss_of(model, tokens()).backward()
    control.step()
    assert control.factors()["blocks.0.attention"]["k"].tolist() == [0.5] * 4


@pytest.mark.parametrize("kind", ["GQA with biases", "MLA"])
def test_masters_stand_for_coarser_weights(kind: str) -> None:
    coarse, fine = decoder(**KINDS[kind]).bfloat16(), decoder(**KINDS[kind]).bfloat16().float()
    masters: dict[Tensor, Tensor] = {p: nn.Parameter(p.detach().float()) for p in coarse.parameters()}
    control = LogitControl(adamw([*masters.values()]), attention_roles(coarse), masters=masters)
    reference = LogitControl(adamw([*fine.parameters()]), attention_roles(fine))
    for step in range(3):
        draw_gradients(fine, seed=step)
        for master, p in zip(masters.values(), fine.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.clone()
        with torch.no_grad():
            for parameters in (masters.values(), fine.parameters()):
                for p in parameters:
                    p.mul_(1.5)
        control.step()
        reference.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    assert all(torch.equal(a, b) for a, b in zip(masters.values(), fine.parameters(), strict=True))
    for layer, table in control.factors().items():
        for symbol, factor in table.items():
            assert factor.dtype == torch.float32
            assert (factor != 1).all()
            assert torch.equal(factor, reference.factors()[layer][symbol])


def test_coarse_weights_without_masters_are_scaled_in_float32() -> None:
    model = decoder(layers=1).bfloat16()
    control = LogitControl(torch.optim.SGD(model.parameters(), lr=0.1), attention_roles(model))
    with torch.no_grad():
        model.get_parameter("blocks.0.attention.project.key.weight").mul_(2)
    bare = decoder(layers=1).bfloat16()
    bare.load_state_dict(model.state_dict())
    before = snapshot(model)
    for m, optimiser in ((model, control), (bare, torch.optim.SGD(bare.parameters(), lr=0.1))):
        draw_gradients(m, seed=0)
        optimiser.step()
    name = "blocks.0.attention.project.query.weight"
    old, new = before[name].float(), bare.get_parameter(name).detach().float()
    expected = (old + 0.5 * (new - old)).bfloat16()  # exact in float32 but for the last rounding
    torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=2**-8, atol=0)
    assert control.factors()["blocks.0.attention"]["q"].tolist() == [0.5] * 4


@pytest.mark.parametrize("bases", [one, two])
def test_a_closure_is_called_once_and_its_loss_returned(bases: Bases) -> None:
    model, other = decoder(), decoder()
    control, plain = quack(model, bases), quack(other, bases)
    calls = []

    def closure() -> Tensor:
        control.zero_grad()
        loss = loss_of(model, tokens())
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    for step in range(2):
        loss = control.step(closure)
        assert float(loss.detach()) == calls[step]
        plain.zero_grad()
        loss_of(other, tokens()).backward()
        plain.step()
        assert same(model, other)
    assert len(calls) == 2


def test_several_optimisers_are_one_and_their_groups_keep_their_rate_and_decay() -> None:
    def split(m: Decoder) -> list[torch.optim.Optimizer]:
        queries = [p for name, p in m.named_parameters() if ".query." in name]
        keys = [p for name, p in m.named_parameters() if ".key." in name]
        rest = [p for name, p in m.named_parameters() if ".query." not in name and ".key." not in name]
        groups = [{"params": keys, "lr": 0.02, "weight_decay": 0.5}, {"params": rest}]
        momentum = torch.optim.SGD(queries, lr=0.1, momentum=0.9, weight_decay=0.2)
        return [momentum, torch.optim.AdamW(groups, lr=0.05, weight_decay=0.4)]

    model, twin = decoder(), decoder()
    bases, bare = split(model), split(twin)
    initial = [norms(model.attention(layer)) for layer in range(2)]
    control = LogitControl(bases, attention_roles(model), tau=0.6)
    assert control.param_groups == [*bases[0].param_groups, *bases[1].param_groups]
    for m in (model, twin):
        grow(m, seed=0)
        draw_gradients(m, seed=0)
    before = snapshot(model)
    factors = [expected_factors(model.attention(0).spec, norms(model.attention(i)), initial[i]) for i in range(2)]
    control.step()
    for base in bare:
        base.step()
    for name, (layer, symbol, _) in controlled_names(model).items():
        left = before[name] * (1.0 if symbol == "q" else 1 - 0.02 * 0.5)
        expected = left + 0.6 * per_row(factors[layer][symbol], left) * (twin.get_parameter(name).detach() - left)
        near(model.get_parameter(name).detach(), expected)
    assert len(control.state) == len([*model.parameters()])
    control.zero_grad()
    assert all(p.grad is None for p in model.parameters())
