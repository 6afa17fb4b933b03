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
CASES = [(name, spec) for spec in GRID for name in contracts_of(spec)]


def pairs(spec: AttentionSpec) -> set[tuple[Any, ...]]:
    """Every two choices that the spec makes together."""
    choices: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        choices |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return set(itertools.combinations(choices.items(), 2))


def covering(specs: list[AttentionSpec]) -> set[AttentionSpec]:
    """So many of the specs that any two choices some spec makes together are made together by one of them."""
    seen, kept = set[tuple[Any, ...]](), set[AttentionSpec]()
    for spec in reversed(specs):
        if not (own := pairs(spec)) <= seen:
            seen |= own
            kept.add(spec)
    return kept


COVERING = covering(GRID)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every contract for every spec; but compilation takes most of the time, so on a CPU it is for COVERING alone."""
    if "contract" in metafunc.fixturenames:
        every = metafunc.config.getoption("--device") != "cpu"
        cases = [(name, spec) for name, spec in CASES if every or name != "compilation" or spec in COVERING]
        metafunc.parametrize(("contract", "spec"), cases, ids=[f"{name}-{spec.name}" for name, spec in cases])


def test_contract(contract: str, spec: AttentionSpec, device: str) -> None:
    CONTRACTS[contract](spec, device)


def test_the_grid_is_wide_and_its_names_tell_specs_apart() -> None:
    assert len(GRID) >= 150
    assert len({spec.name for spec in GRID}) == len(GRID)
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, GRID))
    assert len(COVERING) < len(GRID) / 2


INDUCTOR = [
    AttentionSpec(**SIZE, coupling=CouplingSpec(kind="leapfrog", steps=2), norm="qk", kv_heads=2),
    AttentionSpec(**SIZE, coupling=CouplingSpec(kind="affine", force_sharing="per-head"), share="k=v"),
    AttentionSpec(**SIZE, mix="differential", share="k=v", kv_rotation="on-read"),
    AttentionSpec(**SIZE, latent=LatentSpec(query_rank=6, kv_rank=5, rope_width=2)),
]


@pytest.mark.inductor
@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
@pytest.mark.parametrize("spec", INDUCTOR, ids=lambda spec: spec.name)
def test_inductor_equals_eager(spec: AttentionSpec, device: str) -> None:
    inductor(spec, device)
