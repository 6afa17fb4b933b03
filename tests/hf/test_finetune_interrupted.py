"""A fine-tuning that was interrupted ends as one that never was: the same weights to the last bit, the same file."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import byte_llama, byte_tokenizer
from test_finetune import write_task

from qklab.cli import main
from qklab.hf import finetune, fit
from qklab.hf.evaluate import hash_weights
from qklab.optim import Optimiser
from qklab.runs.directory import RunDirectory, RunError
from qklab.testing.processes import finish_process, start_process
from qklab.train.checkpoint import Checkpoints, store
from qklab.train.launch import EXIT_CODES
from qklab.train.spec import ExecutionSpec

STEPS = 6  # two epochs of 84 examples in batches of 32; saved after every other one


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A model that draws random numbers in training, and examples."""
    byte_llama(attention_dropout=0.3).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    return write_task(tmp_path / "data", "sst2", 93).parent


def finetune_one(folders: Path, out: Path) -> dict[str, Any]:
    """One fine-tuning; what its file says, and the hash of the weights that were scored last."""
    torch.set_num_threads(1)
    scored: list[str] = []
    plain = finetune.predict

    def predict(model: Any, *given: Any, **named: Any) -> Any:
        scored.append(hash_weights(model))
        return plain(model, *given, **named)

    finetune.predict = predict
    try:
        finetune.finetune_all(
            {"llama": {3: folders / "llama"}},
            "sst2",
            data=folders / "data",
            out=out,
            lrs=[1e-3],
            epochs=2,
            execution=ExecutionSpec(device="cpu", checkpoint_steps=2),
            say=lambda sentence: None,
        )
    finally:
        finetune.predict = plain
    (path,) = out.glob("*.json")
    return json.loads(path.read_text()) | {"fitted": scored[-1] if scored else None}


def die_at(place: Any, name: str, call: int, before: bool) -> None:
    """Let the `call`-th call of a function kill this process, before or after its work."""
    plain, calls = getattr(place, name), [0]

    def dying(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        last = calls[0] == call
        if last and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*given, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, dying)


POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "between an update and its save": (Optimiser, "step", 4, False),
    "in a save, its tensors written": (store, "write_files", 2, False),
    "after a save": (Checkpoints, "wait", 4, False),
    "while it is scored": (finetune, "score_answers", 1, True),
    "before its state is deleted": (finetune, "write_json", 1, False),
}


def die_everywhere(folders: str) -> None:
    """A fine-tuning for each point, into a folder of its name; what it begins with is imported once for all."""
    for point in POINTS:
        if not (child := os.fork()):
            die_at(*POINTS[point])
            finetune_one(Path(folders), Path(folders) / point)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point


@pytest.mark.newest
def test_killed_anywhere_it_ends_with_the_same_bits(folders: Path) -> None:
    process = start_process(die_everywhere, str(folders))
    undisturbed = finetune_one(folders, folders / "undisturbed")
    assert finish_process(process) == 0
    for point in POINTS:
        found = finetune_one(folders, folders / point)
        assert found["steps"] == STEPS
        if point == "before its state is deleted":
            assert found.pop("fitted") is None  # its file was there, and nothing was done again
            found["fitted"] = undisturbed["fitted"]
        assert [path.name for path in (folders / point).iterdir() if path.is_dir()] == []
        assert found == undisturbed, point


def watch(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, note: Callable[[int], object]) -> list[int]:
    """Call `note` with the number of each call before it."""
    calls: list[int] = []
    plain = getattr(place, name)

    def watched(*given: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        note(calls[-1])
        return plain(*given, **named)

    monkeypatch.setattr(place, name, watched)
    return calls


def test_stopped_it_says_how_to_go_on_and_repeats_no_step(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "finetune",
        folders / "llama",
        "--data",
        folders / "data",
        "--lrs",
        "1e-3",
        "--seeds",
        "1",
        "--epochs",
        "2",
    ]
    saved = watch(monkeypatch, Checkpoints, "save", lambda call: None)

    def call(out: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, words), "--out", str(folders / out), "--device", "cpu"])
        return end.value.code, capsys.readouterr().err

    assert not call("undisturbed")[0]
    assert saved == []  # a short one pays for nothing
    kill = {3: signal.SIGTERM, 5: signal.SIGINT}
    steps = watch(monkeypatch, fit, "compute_loss", lambda call: call in kill and os.kill(os.getpid(), kill[call]))
    for name, done in (("SIGTERM", 3), ("SIGINT", 5)):
        code, said = call("out")
        assert (code, len(steps)) == (EXIT_CODES["interrupted"], done)
        assert said == (
            f"qklab: stopped by {name} in llama · sst2 · lr 0.001 · seed 0, everything is saved; "
            "the same command continues.\n"
        )
    busy = watch(
        monkeypatch, finetune, "score_answers", lambda call: call == 1 and os.kill(os.getpid(), signal.SIGTERM)
    )
    assert call("out")[0] == EXIT_CODES["interrupted"]  # while it is scored
    assert not call("out")[0]
    assert (len(steps), len(busy)) == (STEPS, 3)
    (one,), (other,) = ((folders / out).iterdir() for out in ("undisturbed", "out"))
    assert (one.name, one.read_text()) == (other.name, other.read_text())


def test_two_at_once_do_not_write_over_each_other(folders: Path) -> None:
    done = finetune_one(folders, folders / "other")
    (path,) = (folders / "other").glob("*.json")
    (folders / "out").mkdir()
    with (
        RunDirectory(folders / "out" / path.stem).lock(),
        pytest.raises(RunError, match=r"is in use by another process .* wait for it or choose another --out"),
    ):
        finetune_one(folders, folders / "out")
    assert finetune_one(folders, folders / "out") == done
