"""The probe: what it records, that it forgets nothing over a checkpoint, and that it leaves training alone."""

import json
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qklab import CouplingSpec, Decoder, LatentSpec, recipe
from qklab.model.diagnose import diagnose
from qklab.train.probe import Probe

MODELS: dict[str, dict[str, Any]] = {
    "standard": {},
    "(Q,K=V) leapfrog gqa": {"share": "k=v", "kv_heads": 2, "coupling": CouplingSpec(kind="leapfrog")},
    "differential": {"mix": "differential"},
    "differential-v2": {"mix": "differential-v2"},
    "MLA": {"latent": LatentSpec(query_rank=32, kv_rank=16, rope_width=8)},
}
every_model = pytest.mark.parametrize("name", MODELS)
SEGMENTS = torch.tensor([[0] * 9 + [1] * 7, [0] * 16])


def model(name: str) -> Decoder:
    return Decoder(recipe("nano", vocab=97, context=16, layers=2, **MODELS[name]), seed=0)


def tokens(seed: int = 2) -> Tensor:
    return torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(seed))


def flat(rows: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(rows))


def trainer(decoder: Decoder, call: Callable[..., Tensor] | None = None) -> Callable[[], None]:
    """One AdamW step on a fixed batch per call."""
    optimiser, ids, forward = torch.optim.AdamW(decoder.parameters(), lr=3e-3), tokens(seed=3), call or decoder

    def step() -> None:
        logits = forward(ids[:, :-1])
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()

    return step


@every_model
def test_a_record_is_the_diagnosis_as_json(name: str) -> None:
    decoder = model(name)
    record, found = Probe(tokens(), SEGMENTS).measure(decoder), diagnose(decoder, tokens(), SEGMENTS)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record.pop("logit_change") is None
    assert record.pop("largest_logit_change") is None
    assert record.keys() == found.keys()
    for quantity, values in found.items():
        for told, true in zip(flat(record[quantity]), values.flatten().tolist(), strict=True):
            assert told == pytest.approx(true, rel=5e-6) if math.isfinite(true) else told is None


@every_model
def test_changes_are_against_the_previous_call(name: str) -> None:
    decoder = model(name)
    probe, step = Probe(tokens(), SEGMENTS), trainer(decoder)
    probe.measure(decoder)
    still = probe.measure(decoder)
    assert not any(flat(still["logit_change"]))
    step()
    first = probe.measure(decoder)
    assert all(value > 0 for value in flat(first["logit_change"]))
    assert all(map(float.__le__, flat(first["logit_change"]), flat(first["largest_logit_change"])))
    assert not any(flat(probe.measure(decoder)["logit_change"]))


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@every_model
def test_interrupted_equals_uninterrupted(name: str, segments: Tensor | None, tmp_path: Path) -> None:
    decoder, probe = model(name), Probe(tokens(), segments)
    step = trainer(decoder)
    probe.measure(decoder)
    step()
    save_file(probe.state(), tmp_path / "probe.safetensors")
    expected = probe.measure(decoder)
    resumed = Probe(tokens(), segments)
    resumed.restore(load_file(tmp_path / "probe.safetensors"))
    assert resumed.measure(decoder) == expected
    assert all(torch.equal(mine, resumed.state()[key]) for key, mine in probe.state().items())


def test_a_state_from_before_the_first_call_restores_to_that() -> None:
    decoder, probe, used = model("standard"), Probe(tokens()), Probe(tokens())
    used.measure(decoder)
    used.restore(probe.state())
    assert used.measure(decoder)["logit_change"] is None


def test_a_state_outlives_later_changes_of_the_probe() -> None:
    decoder, probe = model("standard"), Probe(tokens())
    probe.measure(decoder)
    state = probe.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    trainer(decoder)()
    probe.measure(decoder)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_states_and_models_that_do_not_fit_are_refused() -> None:
    probe = Probe(tokens())
    probe.measure(model("standard"))
    for other in (Probe(tokens(seed=9)), Probe(tokens(), SEGMENTS), Probe(tokens()[:1])):
        with pytest.raises(ValueError, match="the probe's state is of another batch"):
            other.restore(probe.state())
    with pytest.raises(ValueError, match="logits can only be compared on one batch and for models of one shape"):
        probe.measure(model("MLA"))
    with pytest.raises(ValueError, match="ids must be a tensor of whole numbers"):
        Probe(torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["(Q,K=V) leapfrog gqa", "MLA"])
def test_a_compiled_step_stays_compiled(name: str) -> None:
    """Measuring between steps adds no graph and no graph break, and does not change what is trained."""
    alone = model(name)
    step = trainer(alone)
    for _ in range(3):
        step()
    decoder, probe = model(name), Probe(tokens(), SEGMENTS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda ids: decoder(ids), fullgraph=True, backend="eager")
    step = trainer(decoder, compiled)
    for _ in range(3):
        probe.measure(decoder)
        step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for mine, theirs in zip(decoder.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
