"""A tiny corpus, a tiny run on it, and the command line."""

import json
from pathlib import Path

import pytest
from tiny import Command, Settings, tiny, train_until

from qklab.cli import main
from qklab.data import DataSpec, prepare_corpus

REPOSITORY = Path(__file__).parents[2]


def prepared_licence(folder: Path) -> Path:
    """The licence's paragraphs as documents, prepared as bytes: the same text everywhere."""
    paragraphs = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    text = folder / "licence.txt"
    text.write_text("\n<|endoftext|>\n".join(paragraphs) + "\n<|endoftext|>\n", encoding="utf-8")
    spec = DataSpec(source=str(text), tokenizer="bytes", valid=0.15, test=0.1)
    return prepare_corpus(spec, out=folder / "prepared", workers=1).folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_licence(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def settings(corpus_folder: Path) -> Settings:
    """The tiny run with changes, e.g. settings(optimiser={"lr": 1e-3})."""

    return lambda **changes: tiny(corpus_folder, **changes)


@pytest.fixture(scope="session")
def tiny_run(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, finished in one go; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train_until(None, *tiny(corpus_folder), folder) == "finished"
    return folder


@pytest.fixture
def run_file(corpus_folder: Path, tmp_path: Path) -> Path:
    """A run file of six small steps."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        seed = 5
        corpus = {{ source = {json.dumps(str(corpus_folder))}, tokenizer = "bytes" }}
        model = {{ layers = 1, width = 32, context = 48, mlp_ratio = 2.0 }}
        attention = {{ heads = 2 }}
        batch = {{ sequences = 4 }}
        budget = {{ tokens = {6 * 4 * 48} }}
        evaluation = {{ times = 1, tokens = 240, probes = 1 }}
        execution = {{ device = "cpu", threads = 1 }}
        """,
        encoding="utf-8",
    )
    return path


@pytest.fixture
def qklab(capsys: pytest.CaptureFixture[str]) -> Command:
    """A command's exit code and what it wrote: qklab("train", path, "--out", folder)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
