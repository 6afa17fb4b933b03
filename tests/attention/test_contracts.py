"""Every promise of the attention layer on every legal spec of the grid."""

import dataclasses
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qklab import Attention, AttentionSpec, CouplingSpec, LatentSpec, SpecError
from qklab.model.initialise import initialise, seed_of
from qklab.schema import Spec
from qklab.testing import CONTRACTS, contracts_of, grid
from qklab.testing.contracts import inductor
from qklab.testing.grid import NUMBERS, SIZE, choices, cover_choices, list_choices

GRID = grid()
SLOW = ("gradients", "compilation")


CHOICES = {*cover_choices(GRID, 1)}
COVERING = {*CHOICES, *cover_choices(GRID, 2, among=("share", "mix", "norm"))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is slow would take most of the time, so on a CPU it is for COVERING or CHOICES alone."""
    every = metafunc.config.getoption("--device") != "cpu"
    for name, some in (("covering", COVERING), ("choosing", CHOICES)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [spec for spec in GRID if every or spec in some], ids=lambda spec: spec.name)


@pytest.mark.parametrize("spec", GRID, ids=lambda spec: spec.name)
def test_contracts(spec: AttentionSpec, device: str) -> None:
    """All in one test: thousands of tests would cost more in being reported than in being run."""
    for name in contracts_of(spec):
        if name not in SLOW:
            CONTRACTS[name](spec, device)


def test_gradients(covering: AttentionSpec, device: str) -> None:
    CONTRACTS["gradients"](covering, device)


def test_compilation(choosing: AttentionSpec, device: str) -> None:
    CONTRACTS["compilation"](choosing, device)


def test_the_grid_is_wide_and_its_names_tell_specs_apart() -> None:
    assert len(GRID) >= 150
    assert len({spec.name for spec in GRID}) == len(GRID)
    assert all("stacking" in contracts_of(spec) for spec in GRID)
    made, covered = ({pair for spec in specs for pair in list_choices(spec)} for specs in (GRID, COVERING))
    assert made == covered
    assert len(COVERING) < 40


# numbers that the grid leaves as they are; choices, flags and the grid's own numbers are found by themselves
OTHER: dict[str, tuple[Any, ...]] = {
    "kv_heads": (1, 4),
    "norm_eps": (0.1,),
    "rope_base": (50.0,),
    "query_rank": (4,),
    "kv_rank": (4,),
    "rope_width": (4,),
}
SIZES = {"width", "heads", "head_width"}  # which change every shape
PARTS: dict[Any, str] = {CouplingSpec: "coupling", LatentSpec: "latent"}
FIELDS = [
    (kind, field.name)
    for kind in (AttentionSpec, *PARTS)
    for field in dataclasses.fields(kind)
    if field.name not in SIZES and "spec" not in field.metadata
]


def measure(spec: AttentionSpec) -> dict[str, Tensor]:
    """The output, and the gradients by name; each parameter is drawn by its own name, whatever else there is."""
    attention = Attention(spec, layer=2).double()
    initialise(attention, seed=0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            generator = torch.Generator().manual_seed(seed_of(1, name))
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator), alpha=0.3)
    x = torch.randn(2, 6, spec.width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = attention(x)
    y.square().sum().backward()
    return {"": y.detach(), **{name: p.grad for name, p in attention.named_parameters() if p.grad is not None}}


def change_field(spec: AttentionSpec, kind: type[Spec], field: str) -> Iterator[AttentionSpec]:
    """The spec with each other value of one field that is legal."""
    own = spec if kind is AttentionSpec else getattr(spec, PARTS[kind])
    values = [*choices(kind).get(field, ()), *NUMBERS.get(kind, {}).get(field, ()), *OTHER.get(field, ())]
    for value in values:
        try:
            changed = None if own is None or getattr(own, field) == value else own.replace(**{field: value})
            if changed is not None:
                yield changed if isinstance(changed, AttentionSpec) else spec.replace(**{PARTS[kind]: changed})
        except SpecError:
            continue


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_every_field_changes_something_somewhere(kind: type[Spec], field: str) -> None:
    """Options that do nothing are found by whoever trusted them."""
    for spec in sorted(GRID, key=lambda spec: spec not in COVERING):
        for other in change_field(spec, kind, field):
            before, after = measure(spec), measure(other)
            for name in before.keys() & after.keys():
                if before[name].shape != after[name].shape or not torch.allclose(before[name], after[name]):
                    return
    pytest.fail(f"{kind.__name__}.{field} changes neither output nor gradient of any spec of the grid")


@pytest.mark.inductor
@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
def test_inductor_equals_eager(device: str) -> None:
    spec = AttentionSpec(**SIZE, share="k=v", kv_heads=2, coupling=CouplingSpec(), norm="qk", mix="differential")
    inductor(spec, device)
