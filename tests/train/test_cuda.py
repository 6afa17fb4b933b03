"""On a GPU: packed rows through FlexAttention, bad steps skipped without waiting, runs that go on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Settings, losses, train_in_two

from qklab.model import Decoder, recipe
from qklab.runs import RunDirectory
from qklab.testing.numerics import within_budget
from qklab.train.launch import train, train_population
from qklab.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "gqa": {"kv_heads": 2},
    "k=v": {"share": "k=v", "kv_heads": 2},
    "leapfrog": {"coupling": {"kind": "leapfrog"}, "norm": "qk"},
    "differential": {"mix": "differential"},
    "differential-v2": {"mix": "differential-v2"},
    "mla": {"latent": {"query_rank": 64, "kv_rank": 32, "rope_width": 16}},
    "asymmetry": {"share": "q=k", "asymmetry_2d": True, "causal": False},
    "odd width": {"head_width": 24},
    "window": {"window": 40, "sinks": True},
    "sinks": {"sinks": True, "kv_heads": 2, "exclusive": True, "gate": "element"},
    "hybrid": {"attention": [{"window": 40}, {"share": "k=v", "norm": "qk", "value_norm": True}]},
}


# arms whose whole rows torch's own function does not take: flash or cuDNN do, and no mask is formed
FUSED = ("window", "sinks", "hybrid")


@pytest.mark.parametrize(("arm", "packed"), [*((arm, True) for arm in ARMS), *((arm, False) for arm in FUSED)], ids=str)
def test_rows_compiled_for_a_gpu_are_those_of_the_dense_mask(arm: str, packed: bool) -> None:
    torch._dynamo.reset()  # one function compiled for so many models is no longer compiled
    model = Decoder(recipe("nano", layers=2, vocab=320, **ARMS[arm]), seed=0).cuda()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(320, (3, 256), generator=generator).cuda()
    segments = (torch.rand(3, 256, generator=generator) < 0.02).cumsum(1).cuda() if packed else None
    from torch._inductor.compile_fx import compile_fx  # not where tests are only collected: it takes seconds

    graphs: list[str] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return compile_fx(graph, inputs)

    def run(call: Any, autocast: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = call(ids, segments=segments)
        (logits.double() ** 2).mean().backward()
        return [logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    compiled = run(torch.compile(model, backend=kept, dynamic=False), autocast=True)
    low = run(model, autocast=True)
    exact = run(model.double(), autocast=False)
    assert ("flex_attention" in "".join(graphs)) == (packed and arm != "asymmetry")
    assert ("attend_fused" in "".join(graphs)) == (not packed)
    within_budget(compiled[0], low[0], exact[0])
    # all gradients together, each of length one: the error of a single one may be twice that of another rounding
    lengths = [true.norm() for true in exact[1:]]
    within_budget(
        *(
            torch.cat([g.double().flatten() / n for g, n in zip(run[1:], lengths, strict=True)])
            for run in (compiled, low, exact)
        )
    )


def test_a_run_on_a_gpu_goes_on_where_it_stopped(settings: Settings, tmp_path: Path) -> None:
    changes = {"execution": {"device": "cuda", "compile": "no", "checkpoint_steps": 5}}
    spec, execution = settings(**changes)
    train(spec, tmp_path / "whole", execution)
    train_in_two(7, spec, execution, tmp_path / "parts")
    assert len(losses(tmp_path / "parts")) == 12
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-3)


def test_a_bad_step_is_skipped_by_the_device_itself(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, execution = settings(execution={"device": "cuda", "compile": "no"}, max_skips=3)
    plain, before = Trainer.average_over_ranks, {}

    def average(self: Trainer, nats: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        step = self.states[0].step + 1
        before[step] = self.decoder.embed.weight.detach().clone()
        return plain(self, nats * math.nan if step in (3, 6) else nats, norm)

    monkeypatch.setattr(Trainer, "average_over_ranks", average)
    outcome = train(spec, tmp_path / "run", execution)
    assert outcome.summary is not None
    assert outcome.summary["skipped_steps"] == 2
    assert torch.equal(before[3], before[4])
    assert not torch.equal(before[4], before[5])
    assert [r["step"] for r in RunDirectory(tmp_path / "run").metrics("train")] == list(range(1, 13))


@pytest.mark.parametrize("packing", ["packed", "contiguous"])
def test_members_on_a_gpu_are_the_runs_they_would_be_alone(packing: str, settings: Settings, tmp_path: Path) -> None:
    """Steps after the fourth are replayed from a CUDA graph, while another thread makes batches."""
    spec, execution = settings(
        batch={"packing": packing}, execution={"device": "cuda", "compile": "no", "checkpoint_steps": 5}
    )
    specs = [
        spec.replace(seed=seed, optimiser=spec.optimiser.replace(lr=lr))
        for seed, lr in ((0, 1e-3), (1, 1e-2), (0, 3e-3))
    ]
    folders = [tmp_path / f"{number}" for number in range(3)]
    outcomes = train_population(specs, folders, execution)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 3
    for one, folder in zip(specs, folders, strict=True):
        alone = train(one, tmp_path / f"{folder.name}-alone", execution).folder
        assert losses(folder) == pytest.approx(losses(alone), abs=0.02)
