"""One browser, one fabricated study, one report and one trained run for all tests of the report."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from fabricated import TINY, TrainTiny, fabricate, fabricate_difficulties, fabricate_sizes, make_attention, spec

from qklab.data import DataSpec, prepare_corpus
from qklab.report.build import render_report
from qklab.report.data import gather_data
from qklab.train.launch import train
from qklab.train.settings import merge_settings, resolve_run


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome")
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fabricate(tmp_path_factory.mktemp("study") / "s", spec())


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, one arm diverged at one learning rate, maps of every arm; what studies say across three sizes and
    three difficulties."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    data = gather_data([fabricate(path.parent / "s", spec(corpora=["stdlib", "novels"]), diverge=(("affine", 1e-3),))])
    for group in data["groups"]:
        group["attention"] = {arm["name"]: make_attention() for arm in group["arms"]}
    others = fabricate_sizes(path.parent / "sized"), fabricate_difficulties(path.parent / "harder")
    data["across"] += gather_data(others)["across"]
    path.write_text(render_report(data), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The licence's paragraphs as documents, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    text = folder / "licence.txt"
    text.write_text("".join(f"{p.strip()[:40]}\n<|endoftext|>\n" for p in paragraphs), encoding="utf-8")
    made = DataSpec(source=str(text), tokenizer="bytes", valid=0.3, test=0.1)
    return prepare_corpus(made, out=folder / "it", workers=1).folder


@pytest.fixture(scope="session")
def train_tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainTiny:
    def run(**changes: Any) -> Path:
        spec, execution = resolve_run(
            merge_settings(merge_settings(TINY, {"corpus": {"source": str(corpus)}}), changes)
        )
        folder = tmp_path_factory.mktemp("run") / "run"
        assert train(spec, folder, execution).status == "finished"
        return folder

    return run


@pytest.fixture(scope="session")
def run(train_tiny: TrainTiny) -> Path:
    """A run whose best checkpoint is not its newest: its learning rate is too high to stay good."""
    return train_tiny(optimiser={"lr": 0.2, "clip": 0.0}, schedule={"kind": "constant", "warmup": 1.0})
