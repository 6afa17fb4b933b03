"""`qklab inspect`: what it measures, what it draws, what it refuses. And the study files of the published claims."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from qklab.data import Corpus, DataSpec, prepare_corpus
from qklab.model.diagnose import diagnose
from qklab.report import inspect as subject
from qklab.report.inspect import attention_of, inspect
from qklab.runs.directory import RunDirectory, RunError
from qklab.train.launch import train
from qklab.train.spec import merged, resolve
from qklab.train.trained import load

ROOT = Path(__file__).parents[2]
CONTEXT, LAYERS, HEADS = 64, 3, 2
TEXT = 'if x < 1 & y > 2: <script>"'
TINY: dict[str, Any] = {
    "corpus": {"tokenizer": "bytes"},
    "model": {"layers": LAYERS, "width": 32, "context": CONTEXT, "mlp_ratio": 2.0},
    "attention": {"heads": HEADS},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * CONTEXT * 12},
    "evaluation": {"times": 6, "tokens": 480, "probes": 1, "probe_tokens": 24},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 4, "keep": 4},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The licence's paragraphs as documents, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = [p.strip() for p in (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")]
    text = folder / "licence.txt"
    text.write_text("\n<|endoftext|>\n".join(p[:40] for p in paragraphs) + "\n<|endoftext|>\n", encoding="utf-8")
    return prepare_corpus(
        DataSpec(source=str(text), tokenizer="bytes", valid=0.3, test=0.1), out=folder / "it", workers=1
    ).folder


Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    def made(**changes: Any) -> Path:
        spec, execution = resolve(merged(merged(TINY, {"corpus": {"source": str(corpus)}}), changes))
        folder = tmp_path_factory.mktemp("run") / "run"
        assert train(spec, folder, execution).status == "finished"
        return folder

    return made


@pytest.fixture(scope="module")
def run(trained: Trained) -> Path:
    """A run whose best checkpoint is not its newest: its learning rate is too high to stay good."""
    folder = trained(optimiser={"lr": 0.2, "clip": 0.0}, schedule={"kind": "constant", "warmup": 1.0})
    steps = {which: subject.subject(folder, "a", which).step for which in ("newest", "best")}
    assert steps["newest"] == 12
    assert steps["best"] < 12
    return folder


def ids_of(run: Path, text: str) -> torch.Tensor:
    _, tokenizer = load(run)
    return torch.tensor([[tokenizer.eot, *tokenizer.encode([text])[0].tolist()]])


@pytest.mark.parametrize("which", ["newest", "best"])
def test_the_maps_are_those_of_the_three_layers_of_the_checkpoint(run: Path, which: Any):
    found = attention_of(run, TEXT, which=which)
    model, _ = load(run, which)
    assert found["tokens"] == ["<|endoftext|>", *TEXT]
    assert {name: layer["index"] for name, layer in found["layers"].items()} == {"first": 0, "middle": 1, "last": 2}
    for layer in found["layers"].values():
        own = diagnose(model, ids_of(run, TEXT), layers=[layer["index"]], maps=True).maps
        assert own is not None
        maps = np.array(layer["maps"])
        assert maps.shape == (HEADS, len(TEXT) + 1, len(TEXT) + 1)
        assert maps == pytest.approx(own[0, 0].numpy(), abs=5.1e-4)
        assert all(value == round(value, 3) for value in maps.flatten())
        assert not np.triu(maps, 1).any()


def test_checkpoints_differ(run: Path):
    assert attention_of(run, TEXT)["layers"] != attention_of(run, TEXT, which="best")["layers"]


def test_maps_of_few_tokens_are_the_corner_of_those_of_many(run: Path):
    few, many = attention_of(run, TEXT, tokens=5), attention_of(run, TEXT)
    assert few["tokens"] == many["tokens"][:5]
    for name in few["layers"]:
        corner = np.array(many["layers"][name]["maps"])[:, :5, :5]
        assert np.array(few["layers"][name]["maps"]) == pytest.approx(corner, abs=1.1e-3)
    assert few["notes"] == [f"Attention maps show the first 5 of {len(TEXT) + 1} tokens."]
    assert many["notes"] == []


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    paths = inspect(run, TEXT + " again" * 6, out)
    assert all(path.parent == out for path in paths)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in paths)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_the_json_holds_every_quantity_and_where_it_comes_from(run: Path, written: dict[str, str]):
    content, record = json.loads(written["inspect.json"]), RunDirectory(run).read()
    text = TEXT + " again" * 6
    model, _ = load(run)
    whole = diagnose(model, ids_of(run, text))
    assert content["text"] == "<|endoftext|>" + text
    assert len(content["tokens"]) == len(text) + 1
    assert content["diagnostics"].keys() == whole.keys()
    for name, values in content["diagnostics"].items():
        known = torch.tensor([[math.nan if v is None else v for v in row] for row in values])
        torch.testing.assert_close(known, whole[name], rtol=1e-4, atol=1e-6, equal_nan=True)
    first = content["singular_values"][1][0]
    assert first[0] == 1
    assert first == sorted(first, reverse=True)
    assert (first[0] - first[1]) / first[0] == pytest.approx(content["diagnostics"]["spectral_gap"][1][0], rel=1e-3)
    assert content["largest_entropy"] == pytest.approx(np.log(np.arange(1, len(text) + 2)).mean(), rel=1e-5)
    origin = content["provenance"]
    assert (origin["run"], origin["step"], origin["commit"]) == (record["id"], 12, record["commit"])
    assert (origin["fingerprint"], origin["data"]) == (record["fingerprint"], record["data"]["hash"])
    assert content["notes"] == [f"Attention maps show the first 48 of {len(text) + 1} tokens."]
    assert len(content["layers"]["last"]["maps"][0]) == 48


def svg_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def inside(text: str, tag: str) -> list[ElementTree.Element]:
    return list(svg_of(text).iter("{http://www.w3.org/2000/svg}" + tag))


def test_figures_and_page_stand_alone(written: dict[str, str]):
    names = [f"attention-layer-{i}.svg" for i in range(LAYERS)] + ["entropy-and-sinks.svg", "spectrum.svg"]
    assert list(written) == ["inspect.html", "inspect.json", *names]
    for name in names:
        assert inside(written[name], "title")[0].text
        assert written[name] in written["inspect.html"]
        assert "prefers-color-scheme: dark" in written[name]
    page = written["inspect.html"]
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"(?:src|href)=\"(?!attention-layer-\d\.svg|entropy-and-sinks\.svg|spectrum\.svg|inspect\.json)", page
    )


def painted(svg: str, left: float, top: float, cell: float, count: int) -> np.ndarray:
    """The opacities of a square of cells, read back from the paths."""
    found = np.zeros((count, count))
    for path in inside(svg, "path"):
        for x, y, w in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", path.attrib["d"]):
            i, j, n = ((float(v) - base) / cell for v, base in ((y, top), (x, left), (w, 0.0)))
            if -0.1 < j < count - 0.1 and -0.1 < i < count - 0.1:
                assert abs(i - round(i)) < 0.1
                assert abs(j - round(j)) < 0.1
                found[round(i), round(j) : round(j + n)] = float(path.attrib["fill-opacity"])
    return found


def test_a_map_is_drawn_as_it_is(written: dict[str, str]):
    maps = np.array(json.loads(written["inspect.json"])["layers"]["middle"]["maps"])
    svg = written["attention-layer-1.svg"]
    frames = [e.attrib for e in inside(svg, "rect") if e.attrib["class"] == "edge" and float(e.attrib["width"]) > 40]
    assert len(frames) == 1 + HEADS
    for frame, table in zip(frames, [maps.mean(0), *maps], strict=True):
        cell = float(frame["width"]) / 48
        drawn = painted(svg, float(frame["x"]), float(frame["y"]), cell, 48)
        assert drawn == pytest.approx(np.sqrt(table), abs=0.5 / subject.LEVELS + 0.01)
    labels = [e.text for e in inside(svg, "text")]
    assert labels.count("⟨eot⟩") == 2  # beside its row and below its column
    assert labels.count("·") == 2 * [" ", *TEXT, *" again" * 6][1:48].count(" ")


def test_dots_and_lines_are_at_their_numbers(written: dict[str, str]):
    entropy = json.loads(written["inspect.json"])["diagnostics"]["entropy"]
    dots = [e.attrib for e in inside(written["entropy-and-sinks.svg"], "circle")]
    assert len(dots) == 2 * LAYERS * HEADS
    ticks = [
        (float(e.attrib["y"]) - 4, float(e.text or ""))
        for e in inside(written["entropy-and-sinks.svg"], "text")
        if e.attrib["text-anchor"] == "end" and float(e.attrib["x"]) < 64
    ]
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    assert v0 < v1
    assert y0 > y1  # more is higher up
    heights = [v0 + (float(dot["cy"]) - y0) * (v1 - v0) / (y1 - y0) for dot in dots[: LAYERS * HEADS]]
    assert heights == pytest.approx([value for layer in entropy for value in layer], abs=0.02)
    bars = [e.attrib for e in inside(written["spectrum.svg"], "rect") if e.attrib["class"] == "bar"]
    ranks = [sum(row) / HEADS for row in json.loads(written["inspect.json"])["diagnostics"]["effective_rank"]]
    assert all(float(bar["height"]) > 0 for bar in bars)
    shares = [float(bar["height"]) / float(bars[0]["height"]) for bar in bars]
    assert shares == pytest.approx([rank / ranks[0] for rank in ranks], rel=1e-3)


def test_empty_text_is_the_first_validation_window(run: Path, corpus: Path, tmp_path: Path):
    split = Corpus.open(corpus).splits["valid"]
    stream = split.read(0, CONTEXT)
    found = attention_of(run, "  \n", tokens=CONTEXT)
    _, tokenizer = load(run)
    assert found["tokens"] == [subject.token_text(tokenizer, int(token)) for token in stream]
    begins = int(split.starts[1])
    assert 0 < begins < CONTEXT  # a second document is in the window, and is blind to the first
    maps = np.array(found["layers"]["last"]["maps"])
    assert not maps[:, begins:, :begins].any()
    assert maps[:, begins, begins] == pytest.approx(1)
    assert [note.split(",")[0] for note in found["notes"]] == ["No text came"]
    said: list[str] = []
    inspect(run, "", tmp_path, say=said.append)
    assert said[0] == found["notes"][0]
    assert said[0] in (tmp_path / "inspect.html").read_text(encoding="utf-8")


def test_a_long_text_is_cut_and_it_is_said(run: Path):
    found = attention_of(run, "a" * 300, tokens=CONTEXT)
    assert len(found["tokens"]) == CONTEXT
    assert found["notes"] == [f"The text is 301 tokens long and was cut to the model's context of {CONTEXT}."]
    just = attention_of(run, "a" * (CONTEXT - 1), tokens=CONTEXT)
    assert (len(just["tokens"]), just["notes"]) == (CONTEXT, [])


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text and "Traceback" not in text


def test_what_cannot_be_inspected_is_told_in_a_sentence(run: Path, tmp_path: Path):
    def refused(path: Path, text: str = "a", **more: Any) -> str:
        with pytest.raises(ValueError) as caught:
            inspect(path, text, tmp_path / "out", **more)
        assert one_sentence(caught.value), caught.value
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "there is no run directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    assert "is not a run directory" in refused(tmp_path / "folder")
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.json").write_text("{}")
    assert "none of them has begun yet" in refused(study)
    inner = study / "runs" / "stdlib" / "standard" / "lr0.003-seed0"
    shutil.copytree(run, inner)
    assert f"is a study of 1 runs so far and not a run; give one of them, e.g. {inner}" in refused(study)
    assert "give the run directory itself" in refused(next((run / "checkpoints").glob("step-*")))
    shutil.rmtree(inner / "checkpoints")
    assert "has no checkpoint yet" in refused(inner)
    assert "has no best checkpoint yet" in refused(inner, which="best")
    assert "'newest' or 'best'" in refused(run, which="worst")
    assert "not UTF-8" in refused(run, "ab\udc80")
    for tokens in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="tokens must be a whole number above 0"):
            attention_of(run, "a", tokens=tokens)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunError, match=r"cannot be written: .*; choose another folder with --out") as caught:
        inspect(run, "a", tmp_path / "file" / "out")
    assert one_sentence(caught.value)


def test_without_text_and_corpus_a_text_is_asked_for(run: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["data"]["folder"] = str(tmp_path / "gone")
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="give a text") as caught:
        attention_of(copy, "")
    assert one_sentence(caught.value)
    assert attention_of(copy, "abc")["tokens"] == ["<|endoftext|>", "a", "b", "c"]


def test_a_diverged_model_is_shown_as_such(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, tokenizer = load(run)
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    monkeypatch.setattr(subject, "load", lambda *_: (model, tokenizer))
    inspect(run, TEXT, tmp_path)
    content = json.loads((tmp_path / "inspect.json").read_text(), parse_constant=pytest.fail)
    assert content["diagnostics"]["entropy"] == [[None] * HEADS] * LAYERS
    assert content["layers"]["first"]["maps"][0][1][0] is None
    assert 'class="lost"' in (tmp_path / "attention-layer-0.svg").read_text()
    assert "the model has diverged" in (tmp_path / "entropy-and-sinks.svg").read_text()


def test_any_text_gives_well_formed_figures(run: Path, tmp_path: Path):
    inspect(run, "\x00\x1b[0m\r\u202e𝔘🙂漢字 ]]> -- &amp;\ufffe", tmp_path)
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ufffe]", page)


def test_a_checkpoint_saved_meanwhile_is_not_mistaken(run: Path, monkeypatch: pytest.MonkeyPatch):
    """The step that is told is that of the weights."""
    steps = iter([4, 8, 8, 8])
    monkeypatch.setattr(subject, "step_of", lambda *_: next(steps))
    assert subject.subject(run, "a").step == 8
    assert next(steps, None) is None


@pytest.mark.parametrize("mix", ["differential", "differential-v2"])
def test_every_softmax_of_differential_attention_is_shown(trained: Trained, tmp_path: Path, mix: str):
    folder = trained(attention={"mix": mix}, model={"layers": 1}, budget={"tokens": 8 * CONTEXT})
    inspect(folder, TEXT, tmp_path)
    content = json.loads((tmp_path / "inspect.json").read_text())
    softmaxes = HEADS * (2 if mix == "differential-v2" else 1)
    assert {name: layer["index"] for name, layer in content["layers"].items()} == {"first": 0, "middle": 0, "last": 0}
    assert len(content["layers"]["first"]["maps"]) == softmaxes
    assert "before the subtraction" in (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.glob("attention-*")] == ["attention-layer-0.svg"]
    assert f"mean of {softmaxes} softmaxes" in (tmp_path / "attention-layer-0.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "·the"), ("\n\t", "⏎⇥"), ("\x07", "\\x07"), ("a" * 12, "a" * 12), ("a" * 13, "a" * 11 + "…")],
)
def test_labels(token: str, shown: str):
    assert subject.label(token) == shown


def test_a_wide_label_takes_no_more_room_than_a_narrow_one():
    assert subject.label("漢" * 7) == "漢" * 5 + "…"
