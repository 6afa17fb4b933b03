"""A run small enough to be repeated many times, stopped where a test wants it, and what it leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qklab.runs import RunDirectory
from qklab.train.launch import train
from qklab.train.loop import Loop
from qklab.train.settings import merge_settings, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec

TINY: dict[str, Any] = {
    "corpus": {"tokenizer": "bytes"},
    "model": {"layers": 2, "width": 32, "context": 48, "mlp_ratio": 2.0},
    "attention": {"heads": 2},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * 48 * 12},
    "evaluation": {"times": 3, "tokens": 480, "probes": 2, "probe_tokens": 24},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 5},
}

Settings = Callable[..., tuple[RunSpec, ExecutionSpec]]
Command = Callable[..., tuple[int, str, str]]  # arguments → exit code, stdout, stderr


def tiny(folder: Path, /, **changes: Any) -> tuple[RunSpec, ExecutionSpec]:
    """The tiny run on a prepared corpus, with changes, e.g. optimiser={"lr": 1e-3}."""
    return resolve_run(merge_settings(merge_settings(TINY, {"corpus": {"source": str(folder)}}), changes))


def train_until(step: int | None, spec: RunSpec, execution: ExecutionSpec, folder: Path) -> str:
    """Train up to a step, where someone asks to stop, or to the end; how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        plain = Loop.should_stop
        patch.setattr(Loop, "should_stop", lambda self, stop: plain(self, stop) or self.state.step == step)
        return train(spec, folder, execution).status


def train_in_two(step: int, spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    assert train_until(step, spec, execution, folder) == "interrupted"
    assert train_until(None, spec, execution, folder) == "finished"
    resumed = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"resume"' in line]
    assert len(resumed) == 1
    assert f'"step": {step}' in resumed[0]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in RunDirectory(folder).metrics("train")]


def comparable(folder: Path) -> dict[str, Any]:
    """Everything a run leaves behind except its clock."""
    directory = RunDirectory(folder)
    metrics = [{k: v for k, v in record.items() if k != "time"} for record in directory.metrics()]
    last = sorted(directory.checkpoints_path.glob("step-*"))[-1]
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    probes = {path.name: path.read_bytes() for path in directory.probes_path.iterdir()}
    summary = directory.summary()
    assert summary is not None
    return {"metrics": metrics, "evaluation": summary["evaluation"], "files": files, "probes": probes}
