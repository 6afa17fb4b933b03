"""What `pytest --pyargs qklab.testing --mechanism NAME` runs: every contract, on specs of that name in which any two
other choices that it allows meet."""

from typing import Any

import pytest

from qklab import AttentionSpec, register
from qklab.model.spec import DecoderSpec
from qklab.schema import suggest_name
from qklab.testing.contracts import CONTRACTS, DECODER_CONTRACTS, contracts_of
from qklab.testing.grid import cover_choices, grid, list_decoders

SLOW = ("gradients", "compilation")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names: list[str] = metafunc.config.getoption("--mechanism") or []
    refuse_unregistered(names)
    if "decoder" in metafunc.fixturenames:
        found: list[Any] = [made for name in names if name in register.pattern for made in list_decoders(name)]
        metafunc.parametrize("decoder", found, ids=lambda spec: spec.name)
        return
    specs = [spec for spec in grid() if {spec.mix, spec.norm, getattr(spec.coupling, "kind", None)} & set(names)]
    together = 1 if "covered" in metafunc.fixturenames else 2
    name = "covered" if "covered" in metafunc.fixturenames else "spec"
    metafunc.parametrize(name, cover_choices(specs, together), ids=lambda spec: spec.name)


def refuse_unregistered(names: list[str]) -> None:
    known = [name for kind in (register.coupling, register.norm, register.mix, register.pattern) for name in kind]
    for name in names:
        if name not in known:
            raise pytest.UsageError(
                f"no mechanism {name!r} is registered{suggest_name(name, known)}; there are {', '.join(known)}."
            )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--mechanism-device"))


def test_a_layer_keeps_its_contracts(spec: AttentionSpec, device: str) -> None:
    for name in contracts_of(spec):
        if name not in SLOW:
            CONTRACTS[name](spec, device)


def test_gradients_and_compilation_of_a_layer(covered: AttentionSpec, device: str) -> None:
    for name in SLOW:
        CONTRACTS[name](covered, device)


def test_a_decoder_keeps_its_contracts(decoder: DecoderSpec, device: str) -> None:
    for contract in DECODER_CONTRACTS.values():
        contract(decoder, device)
