"""Roles, optimisers by role, schedules."""

import itertools
import math

import pytest
import torch
from torch import nn

from qklab.model import Decoder, recipe
from qklab.optim import Optimiser, OptimiserSpec, ScheduleSpec, find_parameter_role
from qklab.schema import SpecError
from qklab.testing.grid import grid


def model(**choices: object) -> Decoder:
    return Decoder(recipe("nano", layers=1, vocab=64, **choices), seed=0)


def roles(decoder: Decoder) -> dict[str, str]:
    return {name: find_parameter_role(name, parameter) for name, parameter in decoder.named_parameters()}


def test_roles_of_a_model_with_everything() -> None:
    found = roles(model(mix="differential", coupling={"kind": "leapfrog"}, norm="qk"))
    assert found["embed.weight"] == "embedding"
    assert "head.weight" not in found  # tied
    assert found["blocks.0.attention.project.query.weight"] == "matrix"
    assert found["blocks.0.mlp.down.weight"] == "matrix"
    assert found["blocks.0.attention.couple.force.inner.weight"] == "coupling"
    for vector in ("couple.step", "couple.force.inner.bias", "mix.query_lambdas", "mix.gain"):
        assert found[f"blocks.0.attention.{vector}"] == "vector"
    assert found["norm.weight"] == "vector"
    assert roles(model(tied=False))["head.weight"] == "head"


def test_every_two_dimensional_linear_weight_is_a_matrix_and_nothing_else_is() -> None:
    for spec in grid()[::7]:
        decoder = Decoder(recipe("nano", layers=1, vocab=64).replace(width=spec.width, attention=spec), seed=0)
        linear = {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
        inside = {name for name in linear if name.startswith("blocks.") and ".couple." not in name}
        assert {name for name, kind in roles(decoder).items() if kind == "matrix"} == inside


def trained(optimiser: Optimiser, decoder: Decoder, steps: int, lr: float = 1e-2) -> list[float]:
    ids = torch.arange(64).reshape(1, 64) % 64
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(decoder(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step(lr)
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_adamw_is_torchs_with_decay_on_matrices_only() -> None:
    ours, theirs = model().double(), model().double()
    spec = OptimiserSpec(lr=1e-2, weight_decay=0.3)
    vectors = {name for name, kind in roles(theirs).items() if kind == "vector"}
    named = dict(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if name not in vectors], "weight_decay": 0.3},
            {"params": [p for name, p in named.items() if name in vectors], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    trained(Optimiser(spec, ours), ours, 5)
    ids = torch.arange(64).reshape(1, 64) % 64
    for _ in range(5):
        torch.nn.functional.cross_entropy(theirs(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        reference.step()
        reference.zero_grad()
    for (name, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-9, atol=1e-12, msg=name)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    decoder = model(coupling={"kind": "leapfrog"})
    optimiser = Optimiser(OptimiserSpec(kind="muon"), decoder)
    adamw, muon = optimiser.bases
    assert isinstance(muon, torch.optim.Muon)
    names = {optimiser.names[p] for group in muon.param_groups for p in group["params"]}
    assert names == {name for name, kind in roles(decoder).items() if kind == "matrix"}
    others = {optimiser.names[p] for group in adamw.param_groups for p in group["params"]}
    assert names | others == set(roles(decoder))
    assert not names & others


def test_state_can_be_made_and_loaded_before_the_first_step() -> None:
    decoder = model()
    optimiser = Optimiser(OptimiserSpec(), decoder)
    trained(optimiser, decoder, 3)
    again = model()
    other = Optimiser(OptimiserSpec(), again)
    before = {name: p.clone() for name, p in again.named_parameters()}
    other.materialise()
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters())
    assert all(p.grad is None for p in again.parameters())
    assert other.tensors().keys() == optimiser.tensors().keys()
    with torch.no_grad():
        for name, tensor in other.tensors().items():
            tensor.copy_(optimiser.tensors()[name])
        for name, p in again.named_parameters():
            p.copy_(dict(decoder.named_parameters())[name])
    trained(optimiser, decoder, 2)
    trained(other, again, 2)
    assert all(torch.equal(p, q) for p, q in zip(decoder.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_schedules_warm_up_and_end_where_they_say(kind: str) -> None:
    schedule = ScheduleSpec(kind=kind, warmup=0.1, decay=0.3, final=0.05)  # pyright: ignore[reportArgumentType]
    assert schedule.factor(0.05) == pytest.approx(0.5)
    assert schedule.factor(0.1) == pytest.approx(1.0)
    assert schedule.factor(1.0) == pytest.approx(1.0 if kind == "constant" else 0.05)
    values = [schedule.factor(p / 1000) for p in range(100, 1001)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(values))
    if kind == "cosine":
        assert schedule.factor(0.55) == pytest.approx(0.05 + 0.95 * 0.5)
        assert schedule.factor(0.325) == pytest.approx(0.05 + 0.95 * (1 + math.cos(math.pi / 4)) / 2)
    if kind == "wsd":
        assert schedule.factor(0.7) == pytest.approx(1.0)
        assert schedule.factor(0.85) == pytest.approx(0.05 + 0.95 / 2)


def test_schedules_at_the_edges() -> None:
    assert ScheduleSpec(warmup=0.0).factor(1e-9) == pytest.approx(1.0)
    assert ScheduleSpec(warmup=1.0).factor(0.5) == 0.5
    assert ScheduleSpec(kind="wsd", decay=0.0).factor(1.0) == 1.0
    with pytest.raises(SpecError, match="more than the whole run"):
        ScheduleSpec(kind="wsd", warmup=0.5, decay=0.6)


def test_a_step_skipped_on_the_device_changes_nothing() -> None:
    decoder = model()
    optimiser = Optimiser(OptimiserSpec(), decoder)
    trained(optimiser, decoder, 2)
    weights = [p.detach().clone() for p in decoder.parameters()]
    state = {name: tensor.clone() for name, tensor in optimiser.tensors().items()}
    for p in decoder.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimiser.step(1e-2, skip=torch.ones(()))
    assert all(torch.equal(p, q) for p, q in zip(decoder.parameters(), weights, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimiser.tensors().items())
    for p in decoder.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step(1e-2, skip=torch.zeros(()))
    assert not any(torch.equal(p, q) for p, q in zip(decoder.parameters(), weights, strict=True))
