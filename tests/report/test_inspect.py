"""`qklab inspect`: what it measures, what its page shows, what it refuses."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser
from fabricated import CONTEXT, HEADS, LAYERS, TrainTiny

from qklab.data import Corpus, DataSpec, prepare_corpus
from qklab.model.diagnose import diagnose
from qklab.report import inspect as inspect_module
from qklab.report.inspect import decode_token, inspect_run, load_inspection, read_attention
from qklab.report.page import fill_template, pack_maps
from qklab.runs.directory import RunDirectory, RunError
from qklab.train.load import load_model

TEXT = 'if x < 1 & y > 2: <script>"'
LONG = TEXT + " again" * 6


def ids_of(run: Path, text: str) -> torch.Tensor:
    _, tokenizer = load_model(run)
    return torch.tensor([[tokenizer.eot, *tokenizer.encode([text])[0].tolist()]])


def test_the_maps_are_those_of_three_layers_of_the_checkpoint(run: Path):
    steps = {which: load_inspection(run, "a", which).step for which in ("newest", "best")}
    assert steps["best"] < steps["newest"] == 12
    for which in ("newest", "best"):
        found = read_attention(run, TEXT, which=which)
        model, _ = load_model(run, which)
        assert found["tokens"] == ["<|endoftext|>", *TEXT]
        assert {name: each["index"] for name, each in found["layers"].items()} == {"first": 0, "middle": 1, "last": 2}
        for layer in found["layers"].values():
            own = diagnose(model, ids_of(run, TEXT), layers=[layer["index"]], maps=True).maps
            assert own is not None
            maps = np.array(layer["maps"])
            assert maps.shape == (HEADS, len(TEXT) + 1, len(TEXT) + 1)
            assert maps == pytest.approx(own[0, 0].numpy(), abs=5.1e-4)
            assert all(value == round(value, 3) for value in maps.flatten())
            assert not np.triu(maps, 1).any()


def test_maps_of_few_tokens_are_the_corner_of_those_of_many(run: Path):
    few, many = read_attention(run, TEXT, tokens=5), read_attention(run, TEXT)
    assert few["tokens"] == many["tokens"][:5]
    for name in few["layers"]:
        corner = np.array(many["layers"][name]["maps"])[:, :5, :5]
        assert np.array(few["layers"][name]["maps"]) == pytest.approx(corner, abs=1.1e-3)
    assert few["notes"] == [f"Attention maps show the first 5 of {len(TEXT) + 1} tokens."]
    assert many["notes"] == []


@pytest.fixture(scope="module")
def out(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    assert inspect_run(run, LONG, out) == [out / "inspect.html", out / "inspect.json"]
    assert len(list(out.iterdir())) == 2
    return out


@pytest.fixture(scope="module")
def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "inspect.json").read_text(encoding="utf-8"))


def test_the_json_holds_every_quantity_and_where_it_comes_from(run: Path, content: dict[str, Any]):
    record = RunDirectory(run).read()
    model, _ = load_model(run)
    whole = diagnose(model, ids_of(run, LONG))
    assert content["text"] == "<|endoftext|>" + LONG
    assert len(content["tokens"]) == len(LONG) + 1
    assert content["diagnostics"].keys() == whole.keys()
    for name, values in content["diagnostics"].items():
        known = torch.tensor([[math.nan if v is None else v for v in row] for row in values])
        torch.testing.assert_close(known, whole[name], rtol=1e-4, atol=1e-6, equal_nan=True)
    first = content["singular_values"][1][0]
    assert first[0] == 1
    assert first == sorted(first, reverse=True)
    assert (first[0] - first[1]) / first[0] == pytest.approx(content["diagnostics"]["spectral_gap"][1][0], rel=1e-3)
    assert content["largest_entropy"] == pytest.approx(np.log(np.arange(1, len(LONG) + 2)).mean(), rel=1e-5)
    origin = content["provenance"]
    assert (origin["run"], origin["step"], origin["commit"]) == (record["id"], 12, record["commit"])
    assert (origin["fingerprint"], origin["data"]) == (record["fingerprint"], record["data"]["hash"])
    assert content["notes"] == [f"Attention maps show the first 48 of {len(LONG) + 1} tokens."]
    assert len(content["layers"]["last"]["maps"][0]) == 48


def tip(browser: Browser) -> str:
    return browser.run("return document.getElementById('tip').textContent")


def test_the_page_stands_alone_and_shows_every_map_as_it_is(browser: Browser, out: Path, content: dict[str, Any]):
    browser.show_all((out / "inspect.html").as_uri())
    assert browser.complaints == []
    assert browser.requests == [(out / "inspect.html").as_uri()]
    assert "<script>" in browser.run("return document.querySelector('pre').textContent")
    assert browser.run(
        "return [...document.querySelectorAll('figure')].map(f => f.querySelectorAll('.mark').length)"
    ) == [
        *[1 + HEADS] * LAYERS,  # a map each
        *[1 + 1 + LAYERS * HEADS, 1 + LAYERS * HEADS, 1 + LAYERS * HEADS],  # lines, and a dot for every head
        LAYERS,
    ]
    maps = np.array(content["layers"]["middle"]["maps"])
    for number, table in enumerate([maps.mean(0), *maps]):
        image = f"const image = document.querySelectorAll('#fig-layer-2 image')[{number}];"
        box = browser.run(
            f"{image} image.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            "const b = image.getBoundingClientRect(); return [b.x, b.y, b.width]"
        )
        for query, key in ((0, 0), (20, 3), (47, 46)):
            browser.hover(box[0] + (key + 0.5) * box[2] / 48, box[1] + (query + 0.5) * box[2] / 48)
            assert f"query {query + 1} “{content['tokens'][query]}”" in tip(browser)
            assert f"key {key + 1} “" in tip(browser)
            told = float(tip(browser).rsplit(" ", 1)[1])
            assert told == pytest.approx(table[query, key], abs=6e-4)
        pixels = browser.run(
            f"{image} const c = new OffscreenCanvas(48, 48).getContext('2d'), i = new Image();"
            "i.src = image.getAttribute('href'); await i.decode(); c.drawImage(i, 0, 0);"
            "return [...c.getImageData(0, 0, 48, 48).data]"
        )
        red, opacity = np.array(pixels).reshape(48, 48, 4)[..., 0], np.array(pixels).reshape(48, 48, 4)[..., 3]
        assert (opacity == 255 * np.tri(48)).all()
        seen = np.tri(48, dtype=bool)
        order = np.argsort(table[seen], kind="stable")
        assert (np.diff(red[seen][order].astype(int)) <= 0).all()  # the more weight, the less paper


def test_dots_are_at_their_numbers_and_say_them(browser: Browser, out: Path, content: dict[str, Any]):
    browser.show_all((out / "inspect.html").as_uri())
    for name in ("entropy", "sink_mass", "effective_rank"):
        heights = browser.run(
            f"return [...document.querySelectorAll('#fig-{name} .mark[transform]')]"
            ".map(m => Number(m.getAttribute('transform').match(/,(.*)\\)/)[1]))"
        )
        values = [value for layer in content["diagnostics"][name] for value in layer]
        slope, _ = np.polyfit(values, heights, 1)
        assert slope < 0  # more is higher up
        assert abs(np.corrcoef(values, heights)[0, 1]) > 1 - 1e-5
        browser.run(f"document.querySelector('#fig-{name} svg').focus()")
        browser.key("ArrowRight")
        browser.settle()
        assert tip(browser).split("\n")[0] == "layer 1, head 1"
        assert float(tip(browser).split("\n")[1]) == pytest.approx(values[0], rel=1e-3)
    labels = browser.run("return [...document.querySelectorAll('#fig-layer-2 text')].map(t => t.textContent)")
    assert labels.count("⟨eot⟩") == 2  # beside its row and below its column
    assert labels.count("·") == 2 * [" ", *LONG][1:48].count(" ")


def test_any_token_is_shown_without_control_characters(browser: Browser, content: dict[str, Any], tmp_path: Path):
    names = {
        " the": "·the",
        "\n\t": "⏎⇥",
        "\x07": "\\x07",
        "\u202e": "\\x202e",
        "a" * 12: "a" * 12,
        "a" * 13: "a" * 11 + "…",
        "漢" * 8: "漢" * 6 + "…",
        "</script>": "</script>",
    }
    tokens = [*names, *content["tokens"][len(names) :]]
    wild = content | {"tokens": tokens, "text": "".join(tokens)}
    path = tmp_path / "inspect.html"
    path.write_text(fill_template("wild", "inspect.js", wild | pack_maps(wild)), encoding="utf-8")
    browser.show_all(path.as_uri(), dark=True)
    labels = browser.run("return [...document.querySelectorAll('#fig-layer-1 text')].map(t => t.textContent)")
    assert labels[1 : 1 + 2 * len(names) : 2] == list(names.values())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", browser.run("return document.body.innerText"))
    assert browser.complaints == []


def test_a_diverged_model_is_shown_as_such(
    run: Path, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, _ = load_model(run)
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    monkeypatch.setattr(inspect_module, "load_decoder", lambda *_: model)
    inspect_run(run, TEXT, tmp_path)
    content = json.loads((tmp_path / "inspect.json").read_text(), parse_constant=pytest.fail)
    assert content["diagnostics"]["entropy"] == [[None] * HEADS] * LAYERS
    assert content["layers"]["first"]["maps"][0][1][0] is None
    browser.show_all((tmp_path / "inspect.html").as_uri())
    assert "the model has diverged" in browser.run("return document.querySelector('#fig-entropy').textContent")
    browser.run("document.querySelector('#fig-layer-1 svg').focus()")
    browser.key("ArrowRight")
    browser.settle()
    assert "not finite" in tip(browser)
    assert browser.complaints == []


@pytest.mark.parametrize("mix", ["differential", "differential-v2"])
def test_every_softmax_of_differential_attention_is_shown(train_tiny: TrainTiny, tmp_path: Path, mix: str):
    folder = train_tiny(attention={"mix": mix}, model={"layers": 1}, budget={"tokens": 8 * CONTEXT})
    inspect_run(folder, TEXT, tmp_path)
    content = json.loads((tmp_path / "inspect.json").read_text())
    assert content["heads"] == "softmaxes"
    assert {name: layer["index"] for name, layer in content["layers"].items()} == {"first": 0, "middle": 0, "last": 0}
    assert len(content["layers"]["first"]["maps"]) == HEADS * (2 if mix == "differential-v2" else 1)


def test_empty_text_is_the_first_validation_window(run: Path, corpus: Path, tmp_path: Path):
    split = Corpus.open(corpus).splits["valid"]
    stream = split.read(0, CONTEXT)
    found = read_attention(run, "  \n", tokens=CONTEXT)
    _, tokenizer = load_model(run)
    assert found["tokens"] == [decode_token(tokenizer, int(token)) for token in stream]
    begins = int(split.starts[1])
    assert 0 < begins < CONTEXT  # a second document is in the window, and is blind to the first
    maps = np.array(found["layers"]["last"]["maps"])
    assert not maps[:, begins:, :begins].any()
    assert maps[:, begins, begins] == pytest.approx(1)
    assert [note.split(",")[0] for note in found["notes"]] == ["No text came"]
    said: list[str] = []
    inspect_run(run, "", tmp_path, say=said.append)
    assert said[0] == found["notes"][0]
    assert said[0] in (tmp_path / "inspect.html").read_text(encoding="utf-8")


def point_to_corpus(run: Path, corpus: Path, copy: Path) -> Path:
    """The run, with its corpus in another folder."""
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["data"]["folder"] = str(corpus)
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def test_a_window_longer_than_the_validation_text_is_not_filled_up(run: Path, tmp_path: Path):
    texts = {"train": "It was a bright cold day in April. " * 9, "valid": "one two"}
    for split, text in texts.items():
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{split}.txt").write_text(text, encoding="utf-8")
    made = DataSpec(source=str(tmp_path / "texts"), tokenizer="bytes")
    short = prepare_corpus(made, out=tmp_path / "corpus", workers=1).folder
    found = read_attention(point_to_corpus(run, short, tmp_path / "copy"), "", tokens=CONTEXT)
    assert found["tokens"] == ["<|endoftext|>", *"one two"]
    assert np.array(found["layers"]["last"]["maps"]).shape[1:] == (8, 8)


def test_a_long_text_is_cut_and_it_is_said(run: Path):
    found = read_attention(run, "a" * 300, tokens=CONTEXT)
    assert len(found["tokens"]) == CONTEXT
    assert found["notes"] == [f"The text is 301 tokens long and was cut to the model's context of {CONTEXT}."]
    just = read_attention(run, "a" * (CONTEXT - 1), tokens=CONTEXT)
    assert (len(just["tokens"]), just["notes"]) == (CONTEXT, [])


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text and "Traceback" not in text


def test_what_cannot_be_inspected_is_told_in_a_sentence(run: Path, tmp_path: Path):
    def refused(path: Path, text: str = "a", **more: Any) -> str:
        with pytest.raises(ValueError) as caught:
            inspect_run(path, text, tmp_path / "out", **more)
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
            read_attention(run, "a", tokens=tokens)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunError, match=r"cannot be written: .*; choose another folder with --out") as caught:
        inspect_run(run, "a", tmp_path / "file" / "out")
    assert one_sentence(caught.value)


def test_without_text_and_corpus_a_text_is_asked_for(run: Path, tmp_path: Path):
    copy = point_to_corpus(run, tmp_path / "gone", tmp_path / "copy")
    with pytest.raises(RunError, match="give a text") as caught:
        read_attention(copy, "")
    assert one_sentence(caught.value)
    assert read_attention(copy, "abc")["tokens"] == ["<|endoftext|>", "a", "b", "c"]
