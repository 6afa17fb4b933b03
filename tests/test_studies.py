"""studies/logit_control.py from end to end, on models and texts that take seconds."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from qklab.data import Corpus, DataSpec, prepare
from qklab.data.batches import batch_of
from qklab.model.recipes import recipe
from qklab.train.machine import Machine
from qklab.train.spec import BatchSpec, ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "studies/logit_control.py"
STEPS, SEQUENCES, CONTEXT, WINDOWS = 12, 2, 16, 6  # so many that the first step is one of warm-up
MICRO = [
    *("--threads", "1", "--device", "cpu", "--steps", str(STEPS), "--sequences", str(SEQUENCES)),
    *("--context", str(CONTEXT), "--validation-windows", str(WINDOWS), "--probes", "3"),
]
Record = dict[str, Any]


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


study: Any = loaded("study_of_logit_control", SCRIPT)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    text = folder / "licence.txt"
    text.write_text("\n<|endoftext|>\n".join(paragraphs) + "\n<|endoftext|>\n", encoding="utf-8")
    spec = DataSpec(source=str(text), tokenizer="bytes", valid=0.15, test=0.1)
    return prepare(spec, out=folder / "prepared", workers=1).folder


@pytest.fixture(scope="module")
def everything(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study of every architecture at one learning rate."""
    out = tmp_path_factory.mktemp("study") / "all.jsonl"
    study.main([str(corpus), *MICRO, "--lrs", "0.01", "--out", str(out), "--commit", "abc"])
    return out


def runs_of(path: Path) -> list[Record]:
    return [record for record in study.lines(path) if record["kind"] == "run"]


def timeless(runs: list[Record]) -> list[Record]:
    return [{name: value for name, value in run.items() if name not in ("ms_per_step", "seconds")} for run in runs]


def named(runs: list[Record], architecture: str, arm: str) -> Record:
    return next(run for run in runs if (run["architecture"], run["arm"]) == (architecture, arm))


ARMS = ("none", "fixed-0.1", "quack-1", "quack-0.1")


def test_every_arm_of_every_architecture_is_recorded(everything: Path):
    runs = runs_of(everything)
    plain = [(a, arm) for a in ("mha", "mla") for arm in ARMS]
    clipped = [("mha-clipped", "qk-clip"), ("mla-clipped", "qk-clip")]
    normed = [("mha-qk-norm", "qk-norm"), ("mla-latent-norm", "latent-norm")]
    assert {(run["architecture"], run["arm"]) for run in runs} == {*plain, *clipped, *normed}
    assert len(runs) == 12
    for run in runs:
        assert run["steps"] == STEPS
        assert run["loss_steps"] == list(range(1, STEPS + 1))
        assert len(run["losses"]) == STEPS
        assert not run["diverged"]
        assert not run["non_finite_steps"]
        assert run["bits_per_byte"] == pytest.approx(run["validation_loss"] / math.log(2), rel=0.2)  # a token a byte
        assert [probe["step"] for probe in run["probes"]] == [1, 6, 12]
        assert all(len(probe["largest_logit"]) == 4 for probe in run["probes"])
        assert run["ms_per_step"] > 0


def test_arms_of_one_model_start_alike_and_part_with_the_first_updates(everything: Path):
    runs = runs_of(everything)
    for family in ("mha", "mla"):
        names = [(family, arm) for arm in ARMS] + [(f"{family}-clipped", "qk-clip")]
        same = [named(runs, *name) for name in names]
        assert len({run["losses"][0] for run in same}) == 1
        assert len({tuple(run["probes"][0]["largest_logit"]) for run in same}) == 1
        assert len({tuple(run["probes"][-1]["logit_change"]) for run in same[:4]}) == 4
        assert same[0]["losses"] == same[4]["losses"]  # no logit comes near QK-clip's threshold in twelve steps
        factors = [run["probes"][0]["factors"] for run in same]
        assert factors == [None, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        low, high = same[2]["probes"][-1]["factors"]
        assert low < high
        assert low < 1
    assert named(runs, "mha", "none")["losses"][0] != named(runs, "mha-qk-norm", "qk-norm")["losses"][0]


@pytest.mark.parametrize(("architecture", "arm"), [("mha", "none"), ("mla", "quack-0.1"), ("mha-qk-norm", "qk-norm")])
def test_a_run_is_what_the_trainer_makes_of_the_same_settings(
    everything: Path, corpus: Path, architecture: str, arm: str
):
    """Every loss, the validation loss and what probes see around the sixth step, to the digits that are kept."""
    recorded = named(runs_of(everything), architecture, arm)
    latent = {"query_rank": 64, "kv_rank": 32, "rope_width": 16, "norm": False}
    attention = {"mha": {}, "mla": {"latent": latent}, "mha-qk-norm": {"norm": "qk"}}[architecture]
    control = {"method": "quack", "tau": 0.1} if arm.startswith("quack") else {"method": "none"}
    values = {
        "model": recipe("nano", vocab=320, context=CONTEXT, **attention).to_dict(),
        "corpus": {"tokenizer": "bytes"},
        "batch": BatchSpec(sequences=SEQUENCES, packing="contiguous").to_dict(),
        "optimiser": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip": 1.0},
        "schedule": {"kind": "constant", "warmup": 0.1},
        "budget": {"tokens": STEPS * SEQUENCES * CONTEXT},
        "logit_control": control,
        "precision": "fp32",
    }
    execution = ExecutionSpec(device="cpu", threads=1)
    spec, machine, losses = RunSpec.from_dict(values), Machine.open(execution), []
    trainer = Trainer(spec, execution, Corpus.open(corpus), machine)
    before: Record = {}
    for step in range(STEPS):
        if step == 5:
            before = trainer.take_probe()
        lr = 0.01 * spec.schedule.factor((step + 1) / STEPS)
        losses.append(round(trainer.step(batch_of(trainer.order.rows(step)), lr).values()[0], 4))
        if step == 5:
            after, probe = trainer.take_probe(), recorded["probes"][1]
            assert probe["largest_logit"] == [max(heads) for heads in before["largest_logit"]]
            assert probe["largest_logit_change"] == [max(heads) for heads in after["largest_logit_change"]]
            for layer, heads in enumerate(after["logit_change"]):  # six digits are kept
                mean = math.sqrt(sum(value**2 for value in heads) / len(heads))
                assert probe["logit_change"][layer] == pytest.approx(mean, rel=1e-5)
    assert recorded["losses"] == losses
    assert recorded["training_loss"] == pytest.approx(sum(losses) / STEPS, abs=1e-4)
    found = trainer.evaluate("valid", WINDOWS * CONTEXT)
    assert recorded["validation_loss"] == round(found.loss, 4)
    assert recorded["bits_per_byte"] == round(found.bits_per_byte, 4)


def test_a_restart_repeats_nothing_and_changes_nothing(
    everything: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of a file cut in the middle of a record, the records before stay and the others come again as they were."""
    out, kept = tmp_path / "cut.jsonl", everything.read_bytes().splitlines(keepends=True)
    whole = b"".join(kept[:4])
    out.write_bytes(whole + kept[4][: len(kept[4]) // 2])
    small = ["--architectures", "mha", "mha-clipped", "--lrs", "0.01", "--out", str(out), "--commit", "abc"]
    study.main([str(corpus), *MICRO, *small])
    assert "5 runs, 3 of them in" in capsys.readouterr().err
    assert out.read_bytes().startswith(whole)
    assert timeless(runs_of(out)) == timeless(runs_of(everything))[:5]
    written = out.read_bytes()
    study.main([str(corpus), *MICRO, *small])
    assert out.read_bytes() == written


def test_other_settings_need_another_file(everything: Path, corpus: Path):
    before = everything.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        study.main([str(corpus), *MICRO, "--steps", "9", "--out", str(everything)])
    assert str(stopped.value.code) == (
        f"{everything} holds runs with steps=12, but 9 came; runs of different settings need files of their own."
    )
    assert everything.read_bytes() == before


def test_a_signal_stops_at_a_safe_place(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """SIGTERM in the second run: the first is kept, the second is not, and the exit code asks for another try."""
    train, calls = study.Bench.train, []

    def signalled(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return train(*arguments)

    monkeypatch.setattr(study.Bench, "train", signalled)
    out = tmp_path / "stopped.jsonl"
    with pytest.raises(SystemExit) as stopped:
        study.main([str(corpus), *MICRO, "--architectures", "mha", "--lrs", "0.01", "--out", str(out)])
    assert stopped.value.code == 75
    assert [run["arm"] for run in runs_of(out)] == ["none"]
    assert "stopped by SIGTERM; 1 more runs" in capsys.readouterr().err
    assert len(calls) == 2


def test_a_run_that_diverges_is_given_up(corpus: Path, tmp_path: Path):
    out = tmp_path / "high.jsonl"
    chosen = ["--architectures", "mha", "--arms", "none", "quack-1", "--lrs", "1e12", "--steps", "60"]
    study.main([str(corpus), *MICRO, *chosen, "--out", str(out)])
    for run in runs_of(out):
        assert run["steps"] == study.CHECK
        assert run["non_finite_steps"] >= study.GIVE_UP
        assert run["diverged"]
        assert run["unstable"]
        assert run["validation_loss"] is None
        assert [probe["step"] for probe in run["probes"]] == [1]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_reaches_no_weight(corpus: Path, kind: str):
    """AdamW is told to skip; Muon, which cannot, gets zeros. A finite gradient reaches both."""
    bench = small_bench(corpus)
    handed: list[tuple[list[torch.Tensor], Any]] = []

    def step(lr: float, skip: Any = None) -> None:
        gradients = [p.grad.clone() for p in bench.decoder.parameters() if p.grad is not None]
        handed.append((gradients, skip))

    optimiser = SimpleNamespace(spec=SimpleNamespace(kind=kind), step=step, zero_grad=bench.decoder.zero_grad)
    batch = bench.start(0)[0]
    for spoilt in (0.0, math.nan):
        bench.decoder.norm.weight.data[0] += spoilt
        outcome = bench.step(batch, optimiser, 0.01)
        assert bool(outcome.isfinite().all()) == (spoilt == 0.0)
    (fine, fine_skip), (spoilt, skip) = handed
    assert all(g.isfinite().all() for g in fine)
    assert any(g.any() for g in fine)
    assert math.sqrt(sum(g.double().square().sum().item() for g in fine)) <= 1 + 1e-6  # clipped
    if kind == "adamw":
        assert (fine_skip.item(), skip.item()) == (0.0, 1.0)
    else:
        assert (fine_skip, skip) == (None, None)
        assert not any(g.any() for g in spoilt)


def small_bench(corpus: Path) -> Any:
    options = study.arguments([str(corpus), *MICRO])
    opened, machine = Corpus.open(corpus), Machine(torch.device("cpu"))
    settings = study.settings_of(options, opened, machine)
    return study.Bench("mha", settings, opened, machine, ExecutionSpec(device="cpu"))


def test_muon_runs_on_the_cpu(corpus: Path, tmp_path: Path):
    """In a process of its own, where torch can be told which instructions to leave alone."""
    out = tmp_path / "muon.jsonl"
    chosen = ["--architectures", "mha-clipped", "--optimisers", "muon", "--lrs", "1e-2", "1e12", "--steps", "2"]
    command = [sys.executable, "-W", "error", str(SCRIPT), str(corpus), *MICRO, *chosen, "--out", str(out)]
    variables = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)
    assert ran.returncode == 0, ran.stderr
    low, high = runs_of(out)
    assert not low["diverged"]
    assert low["validation_loss"] < 6
    assert high["diverged"]
    assert high["steps"] == 2


def test_merging_keeps_every_run_once_with_where_it_came_from(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    head, *runs = everything.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    parts[0].write_text(head + "".join(runs[6:]), encoding="utf-8")
    again = runs[6].replace('"non_finite_steps": 0', '"non_finite_steps": 7')
    parts[1].write_text(head.replace('"abc"', '"def"') + "".join(runs[:6]) + again, encoding="utf-8")
    study.main(["--merge", *map(str, parts), "--name", "tiny", "--results", str(tmp_path / "results")])
    path = tmp_path / "results/logit-control-tiny.json"
    assert str(path) in capsys.readouterr().out
    merged = json.loads(path.read_text(encoding="utf-8"))
    assert sorted(map(str, merged["runs"])) == sorted(map(str, runs_of(everything)))
    assert [origin["commit"] for origin in merged["provenance"]] == ["abc", "def"]
    environment = merged["provenance"][0]["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["device"]["kind"] == "cpu"
    assert merged["settings"]["steps"] == STEPS
    study.main(["--table", str(path)])
    of_merged = capsys.readouterr().out
    study.main(["--table", *map(str, parts)])
    assert capsys.readouterr().out == of_merged
    assert f"{named(merged['runs'], 'mla', 'quack-1')['validation_loss']:.3f}" in of_merged


HEAD: Record = {
    "kind": "process",
    "settings": {"size": "nano", "steps": 40, "sequences": 2, "context": 16, "unigram_entropy": 5.0},
    "provenance": {"commit": "abc"},
}


def made(architecture: str, arm: str, lr: float, seed: int, loss: float | None, unstable: bool = False) -> Record:
    run = {"kind": "run", "architecture": architecture, "arm": arm, "optimiser": "adamw", "lr": lr, "seed": seed}
    probes = [
        {"step": step, "largest_logit": [size, 2 * size], "largest_logit_change": [0.1 * size, None]}
        for step, size in ((1, 1.0), (20, 30.0), (40, 400.0))
    ]
    outcome = {"validation_loss": loss, "diverged": loss is None, "unstable": unstable}
    return run | outcome | {"probes": probes}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    runs = [
        made("mha", "none", 0.01, 0, 4.0),
        made("mha", "none", 0.01, 1, 4.5),
        made("mha", "none", 0.1, 0, None),
        made("mha", "quack-1", 0.01, 0, 3.5),
        made("mha", "quack-1", 0.1, 0, 4.25, unstable=True),
        made("mha-qk-norm", "qk-norm", 0.1, 0, 3.0),
        made("mha-qk-norm", "qk-norm", 0.1, 1, None),
        made("mla-latent-norm", "latent-norm", 0.1, 0, 3.125),
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [HEAD, *runs]), encoding="utf-8")
    return path


def test_the_table_shows_means_ranges_and_what_went_wrong(written: Path, capsys: pytest.CaptureFixture[str]):
    study.main(["--table", str(written)])
    assert capsys.readouterr().out.splitlines() == [
        "nano: validation loss, nats per token; ✗ diverged, ! unstable",
        "",
        "mha, adamw  lr 0.01              lr 0.1",
        "none        4.250 (4.000–4.500)  ✗",
        "quack-1     3.500                4.250!",
        "qk-norm                          3.000 ✗1/2",
        "",
        "mla, adamw   lr 0.01  lr 0.1",
        "latent-norm           3.125",
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("drawings.logit_control")


def drawn(draw: Callable[[Path], Any], path: Path) -> tuple[str, list[Any]]:
    root = ElementTree.fromstring(draw(path).svg())
    return "".join(root.itertext()), list(root.iter())


def test_the_figures_show_every_arm_and_cross_out_what_diverged(written: Path, tmp_path: Path, figures: Any):
    study.main(["--merge", str(written), "--name", "made", "--results", str(tmp_path)])
    path = tmp_path / "logit-control-made.json"
    text, parts = drawn(figures.FIGURES["loss"], path)
    for word in ("MHA, AdamW", "MLA, AdamW", "no control", "QuacK, τ = 1", "QK-norm", "small marks: others"):
        assert word in text
    assert "QK-clip" not in text
    circles = [part for part in parts if part.tag.endswith("circle")]
    legend, unstable, *points = sorted(circles, key=lambda part: float(part.get("cy")))
    assert (legend.get("cx"), unstable.get("fill")) == ("28", "#ffffff")
    assert len(points) == 2  # two seeds at 0.01; what diverged at 0.1 is a cross and no point
    assert float(points[0].get("r")) < float(points[1].get("r"))  # the second seed, whose loss is higher
    crossed = Counter(part.get("stroke") for part in parts if part.tag.endswith("polyline"))
    plain = {look.colour: 1 for look in figures.ARMS.values()}  # the legend's line
    assert crossed[figures.ARMS["none"].colour] == plain[figures.ARMS["none"].colour] + 2 + 2  # two crosses
    assert crossed[figures.ARMS["norm"].colour] == plain[figures.ARMS["norm"].colour] + 2
    assert crossed[figures.ARMS["quack-1"].colour] == plain[figures.ARMS["quack-1"].colour] + 1  # its curve


def test_figures_against_steps_are_of_the_highest_learning_rate_and_logarithmic(
    written: Path, tmp_path: Path, figures: Any
):
    study.main(["--merge", str(written), "--name", "made", "--results", str(tmp_path)])
    path = tmp_path / "logit-control-made.json"
    for name, highest in (("largest-logit", "1000"), ("logit-change", "100")):
        text, parts = drawn(figures.FIGURES[name], path)
        assert "lr 0.1" in text
        assert highest in text
        curves = [p.get("points").split() for p in parts if p.tag.endswith("polyline")]
        three = [[float(pair.split(",")[1]) for pair in curve] for curve in curves if len(curve) == 3]
        heights = next(ys for ys in three if ys[0] > ys[1] > ys[2])
        ratio = (heights[0] - heights[1]) / (heights[0] - heights[2])
        assert ratio == pytest.approx(math.log(30) / math.log(400), abs=1e-3)


def test_only_results_that_are_kept_are_drawn(
    written: Path, tmp_path: Path, figures: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "nowhere")
    assert figures.drawings() == {}
    study.main(["--merge", str(written), "--name", "made", "--results", str(tmp_path)])
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    names = [f"logit-control-made-{name}.svg" for name in ("loss", "largest-logit", "logit-change")]
    assert list(figures.drawings()) == names
    assert all(draw().svg() for draw in figures.drawings().values())


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0] * 40, False),
        ([3.0] * 20 + [3.49] * 20, False),
        ([3.0] * 20 + [3.51] * 20, True),
        ([3.0] * 20 + [9.0] * 3 + [3.0] * 20, False),  # a spike that is over
        ([5.1] * 40, True),  # no better than knowing no context
        ([4.9] * 40, False),
        ([3.0, 3.6], False),  # the mean of fewer than twenty
        ([math.nan] * 5, True),
        ([3.0] * 25 + [math.inf], False),
    ],
)
def test_unstable_means_far_above_its_own_best_or_above_unigrams(losses: list[float], expected: bool):
    assert study.unstable(losses, entropy=5.0) is expected


def test_unigram_entropy_is_that_of_the_tokens(corpus: Path):
    split = Corpus.open(corpus).splits["train"]
    counts = Counter(split.read(0, split.tokens).tolist())
    entropy = -sum(n / split.tokens * math.log(n / split.tokens) for n in counts.values())
    assert study.unigram_entropy(split) == pytest.approx(entropy, rel=1e-12)


def test_further_seeds_run_only_where_asked():
    options = study.arguments(["x", "--lrs", "0.1", "0.2", "--seeds", "0", "1", "--second-seed-lrs", "0.2"])
    pairs = Counter((run.seed, run.lr) for run in study.planned(options))
    assert pairs == {(0, 0.1): 12, (0, 0.2): 12, (1, 0.2): 12}
    big = study.arguments(["x", "--size", "51m"])
    assert len(study.planned(big)) == 12 * 2 * 4
    assert (big.steps, big.sequences, big.context, big.optimisers) == (400, 8, 1024, ("adamw", "muon"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nowhere"], "nowhere is no prepared corpus (it has no manifest.json); run qklab data prepare."),
        (["--table", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--merge", "empty.jsonl", "--name", "x"], "empty.jsonl: no finished run is in there yet."),
        (["--table", "other.json"], "other.json is no merged result of this study; merge its JSONL files again."),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    given: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("other.json").write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        study.main(given)
    assert stopped.value.code == sentence


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "a prepared corpus is needed"),
        (["--merge", "a.jsonl"], "--merge needs --name"),
        (["x", "--lrs", "0"], "a learning rate must be above 0 and finite, but 0 came."),
        (["x", "--steps", "0"], "--steps must be at least 1, but 0 came."),
        (["x", "--second-seed-lrs", "0.5"], "--second-seed-lrs must be some of --lrs, but 0.5 came."),
    ],
)
def test_options_that_make_no_sense_are_named(given: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        study.main(given)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_text_too_short_for_a_window_is_refused(corpus: Path):
    with pytest.raises(SystemExit) as stopped:
        study.main([str(corpus), *MICRO, "--context", "100000"])
    assert "tokens in train, too few for a window of 100000; use more text." in str(stopped.value.code)


def test_two_processes_do_not_share_a_file(corpus: Path, tmp_path: Path):
    out = tmp_path / "busy.jsonl"
    with out.open("w") as held:
        study.fcntl.flock(held, study.fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as stopped:
            study.main([str(corpus), *MICRO, "--out", str(out)])
    assert str(stopped.value.code) == f"{out} is in use by another process; give each one a file of its own."
    assert not out.read_text()
