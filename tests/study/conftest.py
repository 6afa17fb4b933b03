import fcntl
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_study import RecordingDisplay, carry_out, drive, read_comparable, small_spec

from qklab.data import DataSpec, prepare_corpus

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # clusters of two test processes share a token's file, and collide

LICENCE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "study"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def corpus(common: Path) -> str:
    """The licence's paragraphs, prepared as bytes."""
    with open(common / "corpus.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = common / "licence.txt"
        if not text.exists():
            paragraphs = LICENCE.read_text(encoding="utf-8").split("\n\n")
            text.write_text("\n<|endoftext|>\n".join(paragraphs) + "\n", encoding="utf-8")
        spec = DataSpec(source=str(text), tokenizer="bytes", valid=0.1, test=0.1)
        return str(prepare_corpus(spec, out=common / "corpus", workers=1).folder)


@pytest.fixture(scope="session")
def undisturbed_folder(corpus: str, common: Path) -> Path:
    """The small study, carried out by the first process that asks for it; undisturbed.json is what it said."""
    folder, said = common / "undisturbed", common / "undisturbed.json"
    with open(common / "undisturbed.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            display = RecordingDisplay()
            assert len(carry_out(small_spec(corpus), folder, display)) == 6
            said.write_text(json.dumps({"sentences": display.sentences, "shown": display.shown}))
    return folder


@pytest.fixture(scope="session")
def undisturbed(undisturbed_folder: Path) -> dict[str, Any]:
    """What the runs of the undisturbed study left behind."""
    return read_comparable(undisturbed_folder)


@pytest.fixture(scope="module")
def driver() -> Iterator[Callable[..., Any]]:
    """Call a function in another process; it has `.pid`, and `.code.value` is what the command would exit with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qklab.study.execute", "qklab.study.executors.local", "torch._dynamo"])
    started: list[Any] = []

    def start(act: Callable[..., object], *arguments: Any) -> Any:
        code = context.Value("i", -1)
        process = context.Process(target=drive, args=(act, arguments, code))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        started.append(process)
        process.code = code  # pyright: ignore[reportAttributeAccessIssue]
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
