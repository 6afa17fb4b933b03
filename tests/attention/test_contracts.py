"""Every promise of the attention layer on every legal spec of the grid."""

import shutil

import pytest

from qklab import AttentionSpec, CouplingSpec, LatentSpec
from qklab.testing import CONTRACTS, contracts_of, grid
from qklab.testing.contracts import inductor
from qklab.testing.grid import SIZE

GRID = grid()
CASES = [(name, spec) for spec in GRID for name in contracts_of(spec)]


@pytest.mark.parametrize(("contract", "spec"), CASES, ids=[f"{name}-{spec.name}" for name, spec in CASES])
def test_contract(contract: str, spec: AttentionSpec, device: str) -> None:
    CONTRACTS[contract](spec, device)


def test_the_grid_is_wide_and_its_names_tell_specs_apart() -> None:
    assert len(GRID) >= 150
    assert len({spec.name for spec in GRID}) == len(GRID)


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
