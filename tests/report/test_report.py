"""The dictionary behind the page comes out as the runs went in, whatever state they are in; the page is one file."""

import base64
import json
import math
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from array import array
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import COMMIT, DATA, fabricate, final_loss, number, scores, spec

from qklab.report import build_report
from qklab.report import maps as maps_module
from qklab.report import page as page_module
from qklab.report.build import render_report
from qklab.report.data import combine_values, downsample_losses, gather_data, read_probes
from qklab.report.folders import name_arms
from qklab.report.maps import MapCache
from qklab.report.page import embed_json, pack_maps
from qklab.report.serve import ReportServer
from qklab.runs.directory import RunError
from qklab.study.plan import PlannedRun
from qklab.study.verdict import judge_arms

PAGE = Path(page_module.__file__).parent / "page"
TWO: dict[str, Any] = {"standard": {}, "k=v": {"attention": {"share": "k=v"}}}


def gather_one(*paths: Path) -> dict[str, Any]:
    (group,) = gather_data(paths)["groups"]
    return group


@pytest.fixture(scope="module")
def group(folder: Path) -> dict[str, Any]:
    return gather_one(folder)


def arm(group: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in group["arms"] if each["name"] == name)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_every_run_of_the_study_is_there_with_its_numbers(group: dict[str, Any], folder: Path) -> None:
    study = spec()
    assert len(group["runs"]) == group["planned"] == group["ended"] == 5 * (2 + 2)
    for run in group["runs"]:
        planned = PlannedRun("stdlib", group["arms"][run["arm"]]["name"], run["lr"], run["seed"])
        loss = final_loss(planned, study)
        assert run["test"]["loss"] == pytest.approx(loss, rel=1e-7)
        assert run["valid"]["bits_per_byte"] == pytest.approx((loss - 0.01) / math.log(2), rel=1e-7)
        assert run["id"] == f"{number(planned):032x}"
        assert (run["commit"], run["data"], run["status"]) == (COMMIT, DATA, "finished")
        assert run["fingerprint"] == planned.resolve_spec(study).fingerprint
        assert run["curve"]["tokens"] == [512 * 20 * k for k in range(1, 11)]
        assert run["curve"]["seconds"][-1] == pytest.approx(run["seconds"], rel=1e-5)
    # those at the learning rate that was chosen speak for their arm
    assert all(each["lr"] == 3e-3 for each in group["arms"])
    shown = [run for run in group["runs"] if run["shown"]]
    assert ({run["lr"] for run in shown}, len(shown)) == ({3e-3}, 5 * 3)
    last = sorted((folder / shown[0]["folder"] / "probes").glob("*.json"))[-1]
    largest = json.loads(last.read_text())["layers"]["largest_logit"]
    probes = shown[0]["probes"]
    assert (probes["step"][-1], probes["logit_change"][0]) == (200, None)
    assert probes["largest_logit"][-1] == [float(f"{max(row):.5g}") for row in largest]


def test_verdicts_and_curves_are_those_of_the_statistics(group: dict[str, Any]) -> None:
    study = spec()
    values = {
        name: {seed: final_loss(PlannedRun("stdlib", name, 3e-3, seed), study) for seed in range(3)}
        for name in study.arms
    }
    baseline = values.pop("standard")
    for name, verdict in judge_arms(values, baseline, study.margin, name="standard", alpha=study.alpha).items():
        found = arm(group, name)["verdict"]
        assert found["verdict"] == verdict.verdict
        assert verdict.paired is not None
        assert found["paired"]["mean"] == pytest.approx(verdict.paired.mean, abs=1e-12)
        assert found["paired"]["low"] == pytest.approx(verdict.paired.low, abs=1e-12)
        assert found["differences"] == {str(s): pytest.approx(values[name][s] - baseline[s]) for s in range(3)}
    assert arm(group, "standard")["verdict"] is None
    assert "k=v is worse" in group["headline"]
    learning = arm(group, "k=v")["learning"]
    for axis in ("tokens", "seconds"):
        assert learning[axis]["n"] == 3
        assert all(a < b < c for a, b, c in zip(*(learning[axis][k] for k in ("low", "mean", "high")), strict=True))
    assert learning["tokens"]["mean"][-1] == pytest.approx(arm(group, "k=v")["verdict"]["paired"]["mean"], abs=1e-5)
    assert "the baseline takes 0.834 × the arm's tokens" in learning["efficiency"]  # of time, a tenth less


def test_settings_are_told_once_and_those_that_differ_by_arm(group: dict[str, Any]) -> None:
    assert group["settings"]["model.layers"] == 4
    assert not {"seed", "optimiser.lr", "model.attention.share"} & group["settings"].keys()
    assert arm(group, "k=v")["settings"]["model.attention.share"] == "k=v"
    assert arm(group, "standard")["settings"]["model.attention.share"] == "none"


def test_losses_are_thinned_and_probes_combined_as_each_quantity_asks() -> None:
    records = [{"tokens": i, "loss": float(i), "time": {"seconds": i / 10}} for i in range(1, 1001)]
    found = downsample_losses(records)
    assert len(found["loss"]) == len(found["tokens"]) == len(found["seconds"]) == 200
    assert found["tokens"][-1] == 1000
    assert found["loss"] == [5.0 * k + 3 for k in range(200)]
    assert downsample_losses(records[:3])["loss"] == [1.0, 2.0, 3.0]
    assert downsample_losses([{"tokens": 1, "loss": "nan", "time": {"seconds": 0}}])["loss"] == [None]
    assert [combine_values([1.0, 7.0, None], how) for how in ("mean", "largest", "rms")] == [4.0, 7.0, 5.0]
    assert combine_values([None], "largest") is None


def test_of_many_probes_a_dozen_are_shown_from_the_first_to_the_last(tmp_path: Path) -> None:
    for step in range(1, 24):
        (tmp_path / f"step-{step:010d}.json").write_text(json.dumps({"step": step, "layers": {}}))
    found = read_probes(tmp_path, {23: (7, None)})
    assert found is not None
    assert (found["step"], found["tokens"][-1]) == (list(range(1, 24, 2)), 7)


def test_one_seed_is_an_anecdote_without_an_interval(tmp_path: Path) -> None:
    group = gather_one(fabricate(tmp_path / "s", spec(seeds=1, arms=TWO, lrs=[3e-3])))
    assert not {"seed", "optimiser.lr"} & group["settings"].keys()  # each run's own, even if all have the same
    found = arm(group, "k=v")
    assert found["verdict"]["verdict"] == "one seed"
    assert found["verdict"]["paired"]["low"] is None
    assert found["learning"]["tokens"]["low"] is None
    assert "anecdote" in group["headline"]


def test_an_arm_that_diverges_everywhere_is_told_as_such(tmp_path: Path) -> None:
    group = gather_one(fabricate(tmp_path / "s", spec(arms=TWO), diverge=(("k=v", 1e-3), ("k=v", 3e-3))))
    found = arm(group, "k=v")
    assert (found["lr"], found["verdict"]["verdict"], found["learning"]) == (None, "diverged", None)
    assert "diverged" in group["headline"]
    own = [run for run in group["runs"] if run["arm"] == 1]
    assert {run["status"] for run in own} == {"diverged"}
    assert any(run["shown"] and run["train"]["loss"][-1] is None for run in own)


def test_a_study_under_way_is_told_from_what_there_is(tmp_path: Path) -> None:
    unfinished, absent = PlannedRun("stdlib", "k=v", 3e-3, 2), PlannedRun("stdlib", "standard", 3e-3, 2)
    path = fabricate(tmp_path / "s", spec(arms=TWO), steps=100, unfinished=(unfinished,), absent=(absent,))
    group = gather_one(path)
    assert (group["ended"], group["planned"]) == (6, 8)
    assert arm(group, "k=v")["verdict"]["seeds"] == 2
    run = next(run for run in group["runs"] if run["seed"] == 2)
    assert (run["status"], run["done"], run["test"]) == ("not ended", 0.25, None)
    (PlannedRun("stdlib", "k=v", 3e-3, 0).folder_in(path) / "summary.json").write_text("{")  # damaged: left out, said
    group = gather_one(path)
    assert len(group["runs"]) == 6
    assert "summary.json" in group["notes"][-1]
    shutil.rmtree(path / "runs")
    group = data_of(build_report([path], tmp_path / "r.html").read_text())["groups"][0]
    assert group["runs"] == []
    assert group["headline"].startswith("Nothing to compare")


def test_runs_without_a_study_are_shown_and_not_judged(tmp_path: Path, folder: Path) -> None:
    for name in ("standard", "k=v"):
        for lr in (1e-3, 3e-3):
            shutil.copytree(PlannedRun("stdlib", name, lr, 0).folder_in(folder), tmp_path / f"{name}-{lr}")
    group = gather_one(tmp_path)
    assert group["study"] is None
    assert [each["verdict"] for each in group["arms"]] == [None] * 4
    assert [run["shown"] for run in group["runs"]] == [True] * 4
    assert any(each["name"].endswith("lr 0.001") for each in group["arms"])
    assert group["arms"][0]["ledger"]["parameters"] > 0
    base = {"seed": 0, "optimiser.lr": 1e-3, "model.attention.norm": "none", "corpus.source": "a"}
    runs = [("m", base), ("m", base | {"seed": 1}), ("m", base | {"optimiser.lr": 2e-3}), ("n", base)]
    assert name_arms(runs) == ["m · lr 0.001", "m · lr 0.001", "m · lr 0.002", "n"]


def test_several_folders_make_one_page_and_none_counts_twice(tmp_path: Path, folder: Path) -> None:
    other = fabricate(tmp_path / "other", spec(name="other", corpora=["a", "b"], seeds=1, arms=TWO), steps=20)
    found = gather_data([folder, folder, folder.parent, other])["groups"]
    names = [("fabricated", "stdlib"), ("other", "a"), ("other", "b")]
    assert [(group["title"], group["corpus"]) for group in found] == names


def test_what_cannot_be_read_or_written_is_told_in_a_sentence(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RunError, match="neither a study"):
        gather_data([tmp_path])
    with pytest.raises(RunError, match="is no folder"):
        gather_data([tmp_path / "none"])
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(RunError, match="cannot be read as a study"):
        gather_data([tmp_path])
    with pytest.raises(RunError, match="cannot be written"):
        build_report([folder], tmp_path / "study.json" / "r.html")


def test_the_page_is_one_file_that_asks_for_nothing(folder: Path, tmp_path: Path) -> None:
    page = build_report([folder], tmp_path / "deep" / "r.html").read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "connect-src 'none'" in page
    assert "{{" not in page.split('id="data"')[0]
    (group,) = data_of(page)["groups"]
    assert {each["why"] for each in group["attention"].values()} == {"no checkpoint yet."}
    wild = {"made": "</script><script>alert(1)</script> {{DATA}} {{SCRIPT}} \u2028", "groups": [{"title": "<b>"}]}
    page = render_report(wild)
    assert page.count("</script>") == render_report(wild | {"made": ""}).count("</script>")
    assert data_of(page) == wild
    assert "<title>&lt;b&gt; · qklab report</title>" in page
    with pytest.raises(ValueError, match="JSON"):
        embed_json({"x": math.nan})


def test_no_line_of_the_page_is_longer_than_one_of_the_source() -> None:
    """deno formats the scripts, but leaves long strings and other files as they are."""
    lines = {f"{path.name}: {line}": len(line) for path in PAGE.iterdir() for line in path.read_text().splitlines()}
    assert not [line for line, length in lines.items() if length > 120]


def test_maps_are_packed_as_lower_triangles_with_their_mean_first() -> None:
    heads = [[[1.0, 0.0], [0.25, 0.75]], [[1.0, 0.0], [0.75, 0.25]]]
    layer, other = {"index": 0, "maps": heads}, {"index": 1, "maps": [*heads, [[1.0, 0.0], [None, 1.0]]]}
    three = {"first": layer, "middle": other, "last": other}
    found = pack_maps({"tokens": ["a", "b"], "layers": three, "notes": ["cut"]}, heads=2)
    told = [(each["place"], each["index"], each["heads"]) for each in found["layers"]]
    assert told == [("first", 0, 2), ("last", 1, 3)]
    unpacked = [[array("H", base64.b64decode(text)).tolist() for text in each["maps"]] for each in found["layers"]]
    weights = [[round(x / 65_534, 3) for x in own] for own in unpacked[0]]
    assert weights == [[1, 0.5, 0.5], [1, 0.25, 0.75], [1, 0.75, 0.25]]
    assert unpacked[1][0][1] == 65_535  # not finite in one head
    assert len(unpacked[1]) == 1 + 2
    assert found["notes"] == ["cut"]


def test_a_checkpoint_is_read_once_and_what_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def read(run: Path, text: str) -> dict[str, Any]:
        seen.append(text)
        if len(seen) == 1:
            raise RunError("no corpus.")  # the first text is that of the corpus, which may be elsewhere
        layer = {"index": 0, "maps": [[[1.0]]]}
        return {"tokens": ["a"], "layers": dict.fromkeys(("first", "middle", "last"), layer), "notes": []}

    monkeypatch.setattr(maps_module, "read_attention", read)
    cache = MapCache()
    cache.packed[tmp_path / "other", "step-1"] = {}
    assert cache.read_arms({"a": None})["a"]["why"] == "no run of this arm has begun."
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert cache.read_run(tmp_path) == cache.read_run(tmp_path)
    assert seen == ["", maps_module.TEXT]
    (tmp_path / "checkpoints" / "step-2").mkdir()
    cache.read_run(tmp_path)
    assert len(seen) == 3
    assert list(cache.packed) == [(tmp_path / "other", "step-1"), (tmp_path, "step-2")]  # of each the newest

    def refuse(run: Path, text: str) -> dict[str, Any]:
        raise RunError("damaged." if not text else "damaged too.")

    monkeypatch.setattr(maps_module, "read_attention", refuse)
    assert MapCache().read_run(tmp_path) == {"why": "damaged."}


# what colours become for eyes without one kind of cone (Machado, Oliveira and Fernandes 2009), in linear RGB
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    t = XYZ @ rgb / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("theme", "paper"), [("light", "#ffffff"), ("dark", "#1b2026")])
def test_arms_have_colours_that_every_eye_tells_apart(theme: str, paper: str) -> None:
    """Distances in CIELAB, where about 2 is just visible side by side: 20 among the first five arms, 14 among eight;
    and 3 : 1 against the paper, as WCAG asks of graphics."""
    script = (PAGE / "colours.js").read_text(encoding="utf-8")
    found = re.search(rf"^  {theme}: \[(.*)\],$", script, re.MULTILINE)
    assert found is not None
    colours = [linear(colour) for colour in json.loads(f"[{found.group(1)}]")]
    assert len(colours) == 8
    for matrix in BLIND.values():
        seen = [lab(np.clip(np.array(matrix) @ colour, 0, 1)) for colour in colours]
        for i, j in combinations(range(8), 2):
            assert np.linalg.norm(seen[i] - seen[j]) > (20 if j < 5 else 14), (i, j)
    for colour in colours:
        dim, bright = sorted(float(XYZ[1] @ each) for each in (colour, linear(paper)))
        assert (bright + 0.05) / (dim + 0.05) >= 3


def fetched(address: str, host: str | None = None) -> str:
    asked = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return answer.read().decode()


def test_the_served_page_follows_the_runs(tmp_path: Path) -> None:
    study = spec(arms={"standard": {}, "k=v": {"attention": {"share": "k=v"}}}, seeds=1, lrs=[1e-3])
    path = fabricate(tmp_path / "s", study, steps=20)
    with ReportServer([path], 0, every=0.05) as live:
        assert live.address.startswith("http://127.0.0.1:")
        page, version = fetched(live.address), fetched(live.address + "version")
        assert "connect-src 'self'" in page
        assert 'data-watch="0.05"' in page
        changed = threading.Event()
        metrics = PlannedRun("stdlib", "k=v", 1e-3, 0).folder_in(path) / "metrics.jsonl"
        record = {"kind": "evaluation", "step": 20, "split": "valid", **scores(1.5)}
        metrics.write_text(metrics.read_text() + json.dumps(record) + "\n")
        for _ in range(400):
            if fetched(live.address + "version") != version:
                break
            changed.wait(0.05)
        runs = data_of(fetched(live.address))["groups"][0]["runs"]
        assert [run["curve"]["loss"][-1] for run in runs if run["arm"] == 1] == [1.5]
        for address, host in ((live.address + "etc/passwd", None), (live.address, "elsewhere.example")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetched(address, host)
            assert refused.value.code == 404
            refused.value.close()
        port = int(live.address.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(RunError, match="cannot be served on"):
            ReportServer([path], port)
    assert not any(thread.is_alive() for thread in live.threads)


def test_nothing_is_built_again_while_nothing_happens(tmp_path: Path) -> None:
    live = ReportServer([fabricate(tmp_path / "s", spec(seeds=1, lrs=[1e-3]), steps=20)], 0)
    try:
        assert not live.refresh()
        os.utime(next((tmp_path / "s").rglob("metrics.jsonl")), ns=(1, 1))
        assert live.refresh()
    finally:
        live.server.server_close()
