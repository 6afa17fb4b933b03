"""Many ranks compute what one computes, a run may change hands between them, and all of them learn of an error."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tiny import Settings, losses, train_until
from torch._C._distributed_c10d import TCPStore

from qklab.data.batches import Batch, Batches
from qklab.runs import RunDirectory, RunError, files
from qklab.testing.processes import finish_process, run_on_ranks, start_process
from qklab.train.launch import train
from qklab.train.load import load_model
from qklab.train.ranks import call_on_all_ranks, call_on_first_rank, own_rank, sum_over_ranks
from qklab.train.spec import ExecutionSpec, RunSpec


def evaluations(folder: Path) -> list[float]:
    summary = RunDirectory(folder).summary()
    assert summary is not None
    return [record["loss"] for record in RunDirectory(folder).metrics("evaluation")] + [
        result["loss"] for result in summary["evaluation"].values()
    ]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=2e-5)
    assert evaluations(one) == pytest.approx(evaluations(other), abs=2e-5)
    assert len(list((one / "probes").iterdir())) == 2
    for p, q in zip(load_model(one)[0].parameters(), load_model(other)[0].parameters(), strict=True):
        assert (p - q).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"parallel": "ddp"}, {"parallel": "fsdp"}, {"parallel": "ddp", "rows": 1, "recompute": "layers"}],
    ids=str,
)
def test_ranks_give_the_run_of_one_process(
    changes: dict[str, object], settings: Settings, tiny_run: Path, tmp_path: Path
) -> None:
    run_on_ranks(4, train_until, None, *settings(execution=changes), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", tiny_run)


@pytest.mark.parametrize(
    ("first", "then"),
    [((2, "fsdp"), (1, "ddp")), ((2, "fsdp"), (4, "fsdp")), ((2, "ddp"), (4, "fsdp")), ((1, "ddp"), (2, "fsdp"))],
    ids=lambda pair: f"{pair[1]}{pair[0]}",
)
def test_a_run_saved_on_some_ranks_continues_on_others(
    first: tuple[int, str], then: tuple[int, str], settings: Settings, tiny_run: Path, tmp_path: Path
) -> None:
    for (world, parallel), stop in ((first, 7), (then, None)):
        run_on_ranks(world, train_until, stop, *settings(execution={"parallel": parallel}), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", tiny_run)


def test_accumulated_micro_batches_are_the_batch(settings: Settings, tiny_run: Path, tmp_path: Path) -> None:
    train_until(None, *settings(execution={"rows": 3}), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tiny_run), abs=2e-5)


class UnsendableError(ValueError):
    def __init__(self, one: str, two: str):
        super().__init__(f"{one} and {two}")


ERRORS = {
    "[Errno 28] No space left: 'a.json'": OSError(28, "No space left", "a.json"),
    "a and b": UnsendableError("a", "b"),
    "'a'": KeyError("a"),
}


def agree() -> list[object]:
    def fail_on(rank: int, error: Exception) -> None:
        if own_rank() == rank:
            raise error

    came: list[object] = [call_on_first_rank(own_rank), call_on_all_ranks(own_rank), sum_over_ranks(1, own_rank())]
    for error in ERRORS.values():
        for call, rank in ((call_on_first_rank, 0), (call_on_all_ranks, 1)):
            try:
                call(lambda rank=rank, error=error: fail_on(rank, error))
            except Exception as caught:
                came.append(str(caught))
    return came


def test_ranks_return_and_raise_the_same() -> None:
    wanted = [0, [0, 1], [2.0, 1.0], *(sentence for sentence in ERRORS for _ in range(2))]
    assert run_on_ranks(2, agree) == [wanted, wanted]


def train_on_full_disk(spec: RunSpec, execution: ExecutionSpec, folder: Path, what: str) -> str:
    """Rank 0 cannot flush any file, or append more than three lines to a file."""
    lines = []

    def refuse(self: files.AppendedFile, line: str) -> None:
        if len(lines) == 3:
            raise OSError(28, "No space left on device", str(self.path))
        lines.append(line)

    with pytest.MonkeyPatch.context() as patch:
        if own_rank() == 0 and what == "tokenizer.json":
            patch.setattr(os, "fsync", lambda _: refuse_space())
        elif own_rank() == 0:
            patch.setattr(files.AppendedFile, "append_line", refuse)
        try:
            return train(spec, folder, execution).status
        except RunError as error:
            return str(error)


def refuse_space() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("file", ["tokenizer.json", "metrics.jsonl"])
def test_what_the_disk_refuses_the_first_rank_all_ranks_say(file: str, settings: Settings, tmp_path: Path) -> None:
    said = run_on_ranks(2, train_on_full_disk, *settings(), tmp_path / "run", file)
    sentence = f"the run stopped because of a file ({tmp_path / 'run' / file}): no space left on device; "
    assert said == 2 * [sentence + "what was saved before is still there, mend this and run the same command again."]


def train_as_rank(
    rank: int, port: int, spec: RunSpec, execution: ExecutionSpec, folder: Path, said: Connection
) -> None:
    """As torchrun starts it; the first rank cannot read its third batch."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    plain = Batches._prepare

    def prepare(self: Batches, step: int) -> Batch:
        if rank == 0 and step == 3:
            raise OSError(5, "Input/output error", "train-00000.bin")
        return plain(self, step)

    Batches._prepare = prepare
    try:
        train(spec, folder, execution)
    except RunError as error:
        said.send(str(error))


def test_what_only_the_first_rank_meets_the_others_say_at_once(settings: Settings, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        start_process(train_as_rank, rank, store.port, *settings(), tmp_path / "run", theirs)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    told = [ours.recv() if ours.poll(100) else None for ours, _ in pipes]
    assert [finish_process(process) for process in ranks] == [0, 0]
    sentence = "the run stopped because of a file (train-00000.bin): input/output error; "
    assert [str(each)[: len(sentence)] for each in told] == 2 * [sentence]
