"""Every promise of the attention layer on every legal spec of the grid."""

import itertools
import shutil
from typing import Any

import pytest

from qklab import AttentionSpec, CouplingSpec, LatentSpec
from qklab.testing import CONTRACTS, contracts_of, grid
from qklab.testing.contracts import inductor
from qklab.testing.grid import SIZE

GRID = grid()
SLOW = ("gradients", "compilation")


def choices_of(spec: AttentionSpec) -> set[tuple[Any, ...]]:
    """Every choice that the spec makes, and every two of share, mix and norm."""
    choices: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        choices |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    stages = [(name, choices[name]) for name in ("share", "mix", "norm")]
    return {*choices.items(), *itertools.combinations(stages, 2)}


def covering(specs: list[AttentionSpec]) -> set[AttentionSpec]:
    """So many of the specs that whatever one of the others chooses is chosen by one of them."""
    chosen = {spec: choices_of(spec) for spec in specs}
    left, kept = set[tuple[Any, ...]]().union(*chosen.values()), set[AttentionSpec]()
    while left:
        kept.add(best := max(specs, key=lambda spec: len(chosen[spec] & left)))
        left -= chosen[best]
    return kept


COVERING = covering(GRID)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is slow would take most of the time, so on a CPU it is for COVERING alone."""
    if "covered" in metafunc.fixturenames:
        every = metafunc.config.getoption("--device") != "cpu"
        specs = [spec for spec in GRID if every or spec in COVERING]
        metafunc.parametrize("covered", specs, ids=lambda spec: spec.name)


@pytest.mark.parametrize("spec", GRID, ids=lambda spec: spec.name)
def test_contracts(spec: AttentionSpec, device: str) -> None:
    """All in one test: thousands of tests would cost more in being reported than in being run."""
    for name in contracts_of(spec):
        if name not in SLOW:
            CONTRACTS[name](spec, device)


def test_gradients_and_compilation(covered: AttentionSpec, device: str) -> None:
    for name in SLOW:
        CONTRACTS[name](covered, device)


def test_the_grid_is_wide_and_its_names_tell_specs_apart() -> None:
    assert len(GRID) >= 150
    assert len({spec.name for spec in GRID}) == len(GRID)
    assert all("stacking" in contracts_of(spec) for spec in GRID)
    assert set().union(*map(choices_of, COVERING)) == set().union(*map(choices_of, GRID))
    assert len(COVERING) < 40


INDUCTOR = [
    AttentionSpec(**SIZE, share="k=v", kv_heads=2, coupling=CouplingSpec(), norm="qk", mix="differential"),
    AttentionSpec(**SIZE, latent=LatentSpec(query_rank=6, kv_rank=5, rope_width=2)),
]


@pytest.mark.inductor
@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
@pytest.mark.parametrize("spec", INDUCTOR, ids=lambda spec: spec.name)
def test_inductor_equals_eager(spec: AttentionSpec, device: str) -> None:
    inductor(spec, device)
