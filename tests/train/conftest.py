"""A tiny corpus and a tiny run on it, and processes that can be killed."""

import multiprocessing
import multiprocessing.forkserver
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Settings, tiny

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
def spawn() -> Callable[..., Any]:
    """Start a function in a process of its own, forked from a server that has torch loaded and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qklab.train.launch"])

    def start(function: Callable[..., None], *arguments: Any) -> Any:
        process = context.Process(target=function, args=arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        return process

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return start
