"""Every promise of the attention layer on every legal spec of the grid."""

import shutil

import pytest

from qklab import AttentionSpec, CouplingSpec, LatentSpec
from qklab.testing import CONTRACTS, contracts_of, grid
from qklab.testing.contracts import inductor
from qklab.testing.grid import SIZE, cover_choices, list_choices

GRID = grid()
SLOW = ("gradients", "compilation")


COVERING = {*cover_choices(GRID, 1), *cover_choices(GRID, 2, among=("share", "mix", "norm"))}


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
    made, covered = ({pair for spec in specs for pair in list_choices(spec)} for specs in (GRID, COVERING))
    assert made == covered
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
