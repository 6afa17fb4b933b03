"""Many ranks compute what one computes, and a run may change hands between them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Settings, tiny

from qklab.runs import RunDirectory
from qklab.train.launch import train
from qklab.train.load import load_model
from qklab.train.spec import ExecutionSpec, RunSpec


def rank_of(rank: int, world: int, port: int, spec: RunSpec, execution: ExecutionSpec, folder: Path, stop: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    if stop:
        from qklab.train.loop import Loop

        plain = Loop.stopping
        Loop.stopping = lambda self, request: plain(self, request) or self.state.step == stop  # pyright: ignore[reportAttributeAccessIssue]
    train(spec, folder, execution)


@pytest.fixture
def together(spawn: Callable[..., Any]) -> Callable[..., None]:
    """Train on `world` gloo ranks; with `stop` only up to that step."""

    def run(world: int, spec: RunSpec, execution: ExecutionSpec, folder: Path, stop: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [spawn(rank_of, rank, world, port, spec, execution, folder, stop) for rank in range(world)]
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * world

    return run


def curve(folder: Path) -> list[float]:
    return [record["loss"] for record in RunDirectory(folder).metrics("train")]


def evaluations(folder: Path) -> list[float]:
    summary = RunDirectory(folder).summary()
    assert summary is not None
    return [record["loss"] for record in RunDirectory(folder).metrics("evaluation")] + [
        result["loss"] for result in summary["evaluation"].values()
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    spec, execution = tiny(corpus_folder)
    train(spec, folder, execution)
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_give_the_loss_curve_of_one_process(
    parallel: str, world: int, together: Callable[..., None], settings: Settings, alone: Path, tmp_path: Path
) -> None:
    spec, execution = settings(execution={"parallel": parallel})
    together(world, spec, execution, tmp_path / "run")
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), abs=2e-5)
    assert evaluations(tmp_path / "run") == pytest.approx(evaluations(alone), abs=2e-5)
    assert len(list((tmp_path / "run" / "probes").iterdir())) == 2


@pytest.mark.parametrize(
    ("first", "then"),
    [((2, "fsdp"), (1, "ddp")), ((2, "fsdp"), (4, "fsdp")), ((2, "ddp"), (4, "fsdp")), ((1, "ddp"), (2, "fsdp"))],
    ids=lambda pair: f"{pair[1]}{pair[0]}",
)
def test_a_run_saved_on_some_ranks_continues_on_others(
    first: tuple[int, str],
    then: tuple[int, str],
    together: Callable[..., None],
    settings: Settings,
    alone: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    for (world, parallel), stop in ((first, 7), (then, 0)):
        spec, execution = settings(execution={"parallel": parallel})
        together(world, spec, execution, folder, stop)
    resumed = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"resume"' in line]
    assert len(resumed) == 1
    assert '"step": 7' in resumed[0]
    assert curve(folder) == pytest.approx(curve(alone), abs=2e-5)
    assert evaluations(folder) == pytest.approx(evaluations(alone), abs=2e-5)
    ours, reference = load_model(folder)[0], load_model(alone)[0]
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-4


def test_accumulated_micro_batches_are_the_batch(settings: Settings, alone: Path, tmp_path: Path) -> None:
    spec, execution = settings(execution={"rows": 3})
    train(spec, tmp_path / "run", execution)
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), abs=2e-5)


def test_accumulation_and_recomputation_on_ranks(
    together: Callable[..., None], settings: Settings, alone: Path, tmp_path: Path
) -> None:
    for parallel in ("ddp", "fsdp"):
        spec, execution = settings(execution={"rows": 2, "parallel": parallel, "recompute": "layers"})
        together(2, spec, execution, tmp_path / parallel)
        assert curve(tmp_path / parallel) == pytest.approx(curve(alone), abs=2e-5)
