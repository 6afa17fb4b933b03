"""A population's optimiser does to every member what a solo optimiser does to it alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from control import KINDS, decoder, tokens
from torch import Tensor, nn

from qklab import CouplingSpec
from qklab.model import Decoder
from qklab.model.stack import stack
from qklab.optim import LogitControlSpec, Optimiser, OptimiserSpec, PopulationOptimiser, measure_gradient_norms
from qklab.optim.update import orthogonalise

MEMBERS = 3
NOBODY = (False,) * MEMBERS
LRS = (1e-2, 3e-3, 5e-2)
SPECS = [
    OptimiserSpec(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, momentum=0.95, clip=1.0),
    OptimiserSpec(beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.4, momentum=0.9, clip=0.0),
    OptimiserSpec(beta1=0.95, beta2=0.9, eps=1e-6, weight_decay=0.0, momentum=0.5, clip=30.0),
]


def give_gradients(models: Sequence[nn.Module], step: int) -> None:
    """Random gradients, those of every next model ten times as large, and smaller with every step, so that in the end
    nothing is clipped."""
    generator = torch.Generator().manual_seed(step)
    for member, model in enumerate(models):
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = drawn * 10.0 ** (member - 1) / 4.0**step


def stack_gradients(models: Sequence[nn.Module], stacked: nn.Module) -> None:
    for name, parameter in stacked.named_parameters():
        parameter.grad = torch.stack([model.get_parameter(name).grad for model in models])  # pyright: ignore[reportArgumentType]


class Pair:
    """A population, and its members trained alone on the same gradients."""

    def __init__(
        self, specs: Sequence[OptimiserSpec], controls: Sequence[LogitControlSpec] | None = None, **attention: Any
    ):
        self.specs = specs
        self.models: list[Decoder] = [decoder(seed=member, **attention) for member in range(len(specs))]
        self.stacked = stack(self.models)
        solo = [None] * len(specs) if controls is None else controls
        self.solo = [Optimiser(spec, model, c) for spec, model, c in zip(specs, self.models, solo, strict=True)]
        self.population = PopulationOptimiser(specs, self.stacked, controls)

    def step(self, number: int, skip: Sequence[bool] = NOBODY, spoil: float = torch.nan) -> None:
        give_gradients(self.models, number)
        stack_gradients(self.models, self.stacked)
        lrs = torch.tensor(LRS, dtype=torch.float64) / (number + 1)
        for member, model in enumerate(self.models):
            if skip[member]:
                for parameter in self.stacked.parameters():
                    parameter.grad[member] = spoil  # pyright: ignore[reportOptionalSubscript]
            else:
                if self.specs[member].clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.specs[member].clip)
                self.solo[member].step(lrs[member].item())
        self.population.step(lrs, torch.tensor(skip), measure_gradient_norms(self.stacked))
        self.population.zero_grad()

    def assert_equal(self) -> None:
        for member, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                own = self.stacked.get_parameter(name)[member]
                torch.testing.assert_close(own, parameter, rtol=1e-9, atol=1e-12, msg=f"{name} of member {member}")
            expected, found = self.solo[member].tensors(), self.population.tensors(member)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=f"{name} of {member}")


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_adamw_equals_every_members_own() -> None:
    pair = Pair(SPECS)
    for number in range(5):
        pair.step(number)
    pair.assert_equal()


def test_a_member_that_skips_keeps_every_bit_and_its_own_count_of_steps() -> None:
    pair = Pair(SPECS)
    pair.step(0)
    state = bits(pair.population.tensors(1))
    weights = {name: p[1].clone() for name, p in pair.stacked.named_parameters()}
    for number, spoil in ((1, torch.nan), (2, torch.inf)):
        pair.step(number, (False, True, False), spoil)
        assert all(torch.equal(p[1], weights[name]) for name, p in pair.stacked.named_parameters())
        assert all(torch.equal(tensor, state[name]) for name, tensor in pair.population.tensors(1).items())
    pair.step(3)
    pair.assert_equal()


def test_norms_that_are_not_given_are_measured() -> None:
    given, asked = Pair(SPECS), Pair(SPECS)
    given.step(0)
    give_gradients(asked.models, 0)
    stack_gradients(asked.models, asked.stacked)
    asked.population.step(torch.tensor(LRS, dtype=torch.float64), torch.tensor(NOBODY), None)
    assert all(torch.equal(p, q) for p, q in zip(given.stacked.parameters(), asked.stacked.parameters(), strict=True))


def test_members_that_went_on_alone_return_in_another_order() -> None:
    pair = Pair(SPECS)
    for number in range(2):
        pair.step(number)
    stacked, lrs = stack(pair.models[::-1]), torch.tensor(LRS[::-1], dtype=torch.float64)
    population = PopulationOptimiser(SPECS[::-1], stacked)
    for place, solo in enumerate(pair.solo[::-1]):
        found, state = population.tensors(place), solo.tensors()
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in state.items()}
        for name, tensor in found.items():
            tensor.copy_(state[name])
    pair.step(2)
    give_gradients(pair.models, 2)
    stack_gradients(pair.models[::-1], stacked)
    population.step(lrs / 3, torch.tensor(NOBODY), measure_gradient_norms(stacked))
    for name, parameter in stacked.named_parameters():
        torch.testing.assert_close(parameter.flip(0), pair.stacked.get_parameter(name), rtol=1e-9, atol=1e-12)


@pytest.fixture
def exact_orthogonalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton–Schulz in float64, ours and torch's: in bfloat16 one batched product and several single ones may round
    differently, which five iterations with slope 3.4 amplify."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)


@pytest.mark.usefixtures("exact_orthogonalisation")
def test_muon_equals_every_members_own() -> None:
    pair = Pair([spec.replace(kind="muon") for spec in SPECS], bias=True, coupling=CouplingSpec(kind="leapfrog"))
    assert pair.population.orthogonal
    assert len(pair.population.alike) < len(pair.population.orthogonal)
    pair.step(0)
    pair.step(1, (True, False, False))
    for number in range(2, 5):
        pair.step(number)
    pair.assert_equal()


def test_orthogonalised_in_bfloat16_as_torch_does() -> None:
    """Equal to a few roundings of bfloat16, 2⁻⁸ of entries around 1/√8, as errors grow at most 3.4445-fold a step only
    where singular values are small."""
    matrices = torch.randn(2, MEMBERS, 8, 12, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT):
        for found, own in zip(orthogonalise(given.bfloat16()).flatten(0, 1), given.flatten(0, 1), strict=True):
            parameter = nn.Parameter(torch.zeros_like(own))
            parameter.grad = own
            torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0).step()
            scale = max(1.0, own.shape[0] / own.shape[1]) ** 0.5
            assert (found.float() + parameter.detach() / scale).abs().max() < 2**-5


def controls(method: str, norm: str = "frobenius") -> list[LogitControlSpec]:
    key, values = ("threshold", (0.5, 1.0, 100.0)) if method == "qk-clip" else ("tau", (0.5, 1.0, 3.0))
    return [LogitControlSpec.from_dict({"method": method, "norm": norm, key: value}) for value in values]


@torch.no_grad()
def watch_logits(pair: Pair, number: int) -> None:
    """A pass of other tokens through every member, alone and stacked, in which QK-clip sees how large logits get."""
    ids = torch.stack([tokens(seed=10 * number + member) for member in range(MEMBERS)])
    pair.stacked(ids)
    for own, model in zip(ids, pair.models, strict=True):
        model(own)


@pytest.mark.parametrize(
    ("kind", "method", "norm"),
    [
        *((kind, "quack", "frobenius") for kind in KINDS),
        *((kind, "qk-clip", "frobenius") for kind in KINDS if "leapfrog" not in kind),
        ("GQA with biases", "quack", "spectral"),
        ("MLA with biases", "quack", "spectral"),
        ("MHA", "fixed", "frobenius"),
    ],
)
def test_logit_control_equals_every_members_own(kind: str, method: str, norm: str) -> None:
    pair = Pair(SPECS, controls(method, norm), **KINDS[kind])
    for number in range(5):
        if method == "qk-clip":
            watch_logits(pair, number)
        pair.step(number)
        for member, solo in enumerate(pair.solo):
            assert solo.control is not None
            torch.testing.assert_close(pair.population.factors(member), solo.control.factors(), rtol=1e-9, atol=0.0)
    pair.assert_equal()


@pytest.mark.usefixtures("exact_orthogonalisation")
@pytest.mark.parametrize("method", ["quack", "qk-clip"])
def test_logit_control_of_muon_leaves_members_that_skip_alone(method: str) -> None:
    pair = Pair([spec.replace(kind="muon") for spec in SPECS], controls(method), kv_heads=2, bias=True)
    for number, skip in enumerate((NOBODY, (False, True, False), NOBODY)):
        if method == "qk-clip":
            watch_logits(pair, number)
        before = bits(pair.population.tensors(1))
        pair.step(number, skip)
        if skip[1]:
            assert all(torch.equal(t, before[n]) for n, t in pair.population.tensors(1).items())
            pair.solo[1].forget()
    pair.assert_equal()


def test_a_step_is_one_graph_that_asks_no_value_of_the_device() -> None:
    """Under Muon, AdamW and logit control; so a compiler or a CUDA graph can hold it."""
    specs = [spec.replace(kind="muon") for spec in SPECS]
    plain, compiled = (Pair(specs, controls("quack"), layers=1) for _ in range(2))
    plain.step(0)
    compiled.population.step = torch.compile(compiled.population.step, fullgraph=True, backend="eager")
    compiled.step(0)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.stacked.parameters(), compiled.stacked.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_member_that_diverges_changes_no_bit_of_another(kind: str) -> None:
    sick, sound = (Pair([spec.replace(kind=kind) for spec in SPECS], controls("quack")) for _ in range(2))
    for number in range(3):
        sick.step(number, (False, number > 0, False))
        sound.step(number)
    for member in (0, 2):
        for name, parameter in sound.stacked.named_parameters():
            assert torch.equal(sick.stacked.get_parameter(name)[member], parameter[member])
        state = sick.population.tensors(member)
        assert all(torch.equal(tensor, state[name]) for name, tensor in sound.population.tensors(member).items())


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([], "at least one member"),
        ([SPECS[0], SPECS[1].replace(kind="muon"), SPECS[2]], "share one optimiser, but adamw and muon came"),
        (SPECS[:2], "population of 2 is"),
    ],
)
def test_members_that_cannot_be_updated_together_are_refused(specs: list[OptimiserSpec], said: str) -> None:
    stacked = stack([decoder(seed=member) for member in range(MEMBERS)])
    with pytest.raises(ValueError, match=said):
        PopulationOptimiser(specs, stacked)


@pytest.mark.parametrize(
    ("chosen", "attention", "said"),
    [
        ([*controls("quack")[:2], controls("fixed")[2]], {}, "share one logit control, but method='fixed'"),
        ([*controls("quack")[:2], *controls("quack", "spectral")[2:]], {}, "share one logit control"),
        (controls("quack")[:2], {}, "one per member, 3, but 2 came"),
        (controls("quack"), {"norm": "qk"}, "LogitControl refuses layer blocks.0.attention"),
        (controls("qk-clip"), {"norm": "qk"}, "QKClip refuses layer blocks.0.attention"),
        (controls("qk-clip"), KINDS["leapfrog"], "QKClip refuses layer blocks.0.attention"),
        (controls("quack"), {}, "W_k of blocks.1.attention, head 2, is zero"),
    ],
)
def test_controls_that_fit_neither_each_other_nor_the_model_are_refused(
    chosen: list[LogitControlSpec], attention: dict[str, Any], said: str
) -> None:
    models = [decoder(seed=member, **attention) for member in range(MEMBERS)]
    if "zero" in said:
        models[1].get_parameter("blocks.1.attention.project.key.weight").data[8:12] = 0
    with pytest.raises(ValueError, match=said):
        PopulationOptimiser(SPECS, stack(models), chosen)


def test_a_parameter_without_a_gradient_is_named() -> None:
    pair = Pair(SPECS)
    give_gradients(pair.models, 0)
    stack_gradients(pair.models, pair.stacked)
    pair.stacked.get_parameter("norm.weight").grad = None
    with pytest.raises(ValueError, match=r"needs a gradient, but norm\.weight has none"):
        measure_gradient_norms(pair.stacked)
