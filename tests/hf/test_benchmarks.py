"""Benchmarks at the end of a run: the scores are those of qklab eval and of fine-tuning, alone and in a population."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_finetune import write_task

from qklab import register
from qklab.data.glue import find_glue_task, read_glue
from qklab.data.questions import measure_guessing
from qklab.hf import benchmarks, fit
from qklab.hf.evaluate import evaluate_folder
from qklab.hf.finetune import finetune
from qklab.hf.fit import FineTuning
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.progress import Display
from qklab.schema import SpecError
from qklab.study.answer import write_answer
from qklab.study.execute import Study
from qklab.study.findings import derive_findings
from qklab.study.metrics import find_metric
from qklab.study.plan import PlannedRun
from qklab.study.records import StudyRecord, read_results
from qklab.study.spec import StudySpec
from qklab.train.launch import train_population
from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "in", "big", "red"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets of questions two folders down, GLUE beside them, and a corpus."""
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    rng, folder = random.Random(0), tmp_path / "data"

    def write(name: str, make: Callable[[int], dict[str, Any]]) -> None:
        path = folder / "evals" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(10)))

    def say(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    for name in ("one", "two"):
        write(f"blimp/{name}", lambda _: {"sentence_good": say(3), "sentence_bad": say(3)})
    write("foundry/lambada_openai", lambda _: {"context": say(3), "continuation": say(1)})
    write("foundry/mine", lambda i: {"query": say(2), "choices": [say(1) for _ in range(2 + i % 2)], "gold": 0})
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(say(30) for _ in range(60)))
    return write_task(folder, "rte", 12)


def settings(data: Path, names: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "corpus": {"source": str(data / "text.txt"), "tokenizer": "bytes", "valid": 0.2, "test": 0.2},
        "model": {"layers": 1, "width": 16, "context": 32},
        "attention": {"heads": 2},
        "batch": {"sequences": 2},
        "budget": {"tokens": 192},
        "evaluation": {"times": 1, "tokens": 64, "probes": 0},
        "benchmarks": {"names": names, "questions": 8, "lrs": [1e-3, 1e-2], "epochs": 1, "examples": 6},
    } | changes


def train_runs(data: Path, names: str, folders: list[Path]) -> list[Any]:
    spec, execution = resolve_run(settings(data, names) | {"execution": {"device": "cpu", "threads": 1}})
    return train_population([spec.replace(seed=seed) for seed in range(len(folders))], folders, execution, data=data)


def test_scores_are_those_of_eval_and_of_finetune_for_every_member(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "runs" / str(seed) for seed in range(2)]
    for seed, outcome in enumerate(train_runs(data, "blimp, lambada,mine,rte", folders)):
        assert outcome.summary is not None
        found = outcome.summary["evaluation"]["test"]["benchmarks"]
        names = ["local-blimp", "local-lambada", "local-mine"]
        rows = evaluate_folder(folders[seed], names, data=data, limit=8, device="cpu")["rows"]
        expected = {row["task"]: row["value"] for row in rows if row["metric"] == "acc" and "group" not in row}
        assert {f"local-{name}": own["score"] for name, own in found.items() if name != "rte"} == expected
        assert found["lambada"]["perplexity"] == pytest.approx(
            next(row["value"] for row in rows if row["metric"] == "perplexity"), rel=1e-4
        )
        chances = {name: own.get("chance") for name, own in found.items()}
        assert (chances["blimp"], chances["lambada"]) == (0.5, None)
        assert chances["mine"] == pytest.approx((4 / 2 + 4 / 3) / 8)
        task, examples = find_glue_task("rte"), read_glue("rte", data, 6)
        tried = {lr: finetune(folders[seed], task, examples, FineTuning(lr, seed, 1))["scores"] for lr in (1e-3, 1e-2)}
        best = max(tried, key=lambda lr: tried[lr]["valid"]["glue"])
        assert (found["rte"]["lr"], found["rte"]["score"]) == (best, tried[best]["test"]["glue"])
        evaluation = outcome.summary["evaluation"]["test"]
        assert find_metric("blimp").read(evaluation) == 100 * found["blimp"]["score"]
        assert (
            find_metric("glue").read(evaluation) == find_metric("rte").read(evaluation) == 100 * found["rte"]["score"]
        )
        scores = [own["score"] for own in found.values()]
        assert find_metric("benchmarks").read(evaluation) == pytest.approx(100 * sum(scores) / 4)
        assert find_metric("blimp").read_chance(evaluation) == 50.0
        assert find_metric("benchmarks").read_chance(evaluation) is None  # lambada has none
        with pytest.raises(KeyError):
            find_metric("piqa").read(evaluation)


def test_a_run_stopped_between_benchmarks_ends_with_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []

    class Stopping:
        def __init__(self, spec: Any, data: Path | None): ...

        def score(self, decoder: Any, tokenizer: Any, seed: int, work: Any) -> dict[str, Any]:
            scored.append(seed)
            if len(scored) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"blimp": {"score": sum(p.detach().double().sum().item() for p in decoder.parameters())}}

    monkeypatch.setitem(register.scorer.entries, "benchmarks", Stopping)
    folders = [tmp_path / "runs" / str(seed) for seed in range(2)]
    assert [outcome.status for outcome in train_runs(data, "blimp", folders)] == ["interrupted"] * 2
    assert not any(RunDirectory(folder).summary() for folder in folders)
    outcomes = train_runs(data, "blimp", folders)
    assert ([outcome.status for outcome in outcomes], scored) == (["finished"] * 2, [0, 0, 1])
    others = train_runs(data, "blimp", [tmp_path / "undisturbed" / str(seed) for seed in range(2)])
    for one, other in zip(outcomes, others, strict=True):
        assert one.summary["evaluation"] == other.summary["evaluation"]


def test_chance_is_the_most_frequent_answer_where_all_questions_have_the_same(tmp_path: Path) -> None:
    """As of BoolQ and PubMedQA, whose yes alone is 62 and 55 % of the answers."""
    golds = [1, 1, 0, 1, 1]
    lines = [{"query": f"is it {row}?", "choices": ["no", "yes"], "gold": gold} for row, gold in enumerate(golds)]
    (tmp_path / "boolq.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [{"context": f"is it {row}?", "continuation": "yes" if gold else "maybe"} for row, gold in enumerate(golds)]
    (tmp_path / "pubmed_qa_labeled.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    assert measure_guessing("boolq", tmp_path) == measure_guessing("pubmedqa", tmp_path) == 0.8
    assert measure_guessing("boolq", tmp_path, limit=3) == 2 / 3


@pytest.mark.parametrize(("name", "call"), [("compute_loss", 1), ("run_harness", 2)])
def test_a_run_stopped_within_a_benchmark_goes_on_there(
    name: str, call: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a question nor a step is done twice, but those of a set of questions that was not done."""
    calls: dict[str, int] = {"compute_loss": 0, "run_harness": 0}
    stopped = tmp_path / "runs" / "stopped"

    def count(place: Any, counted: str) -> None:
        plain = getattr(place, counted)

        def counting(*given: Any, **named: Any) -> Any:
            calls[counted] += 1
            if (counted, calls[counted]) == (name, call):
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(*given, **named)

        monkeypatch.setattr(place, counted, counting)

    (whole,) = train_runs(data, "blimp,lambada,rte", [tmp_path / "runs" / "whole"])
    count(fit, "compute_loss")
    count(benchmarks, "run_harness")
    assert train_runs(data, "blimp,lambada,rte", [stopped])[0].status == "interrupted"
    assert (stopped / "scoring").is_dir()
    (found,) = train_runs(data, "blimp,lambada,rte", [stopped])
    assert calls == {"compute_loss": 2, "run_harness": 2 + (name == "run_harness")}
    assert found.summary["evaluation"] == whole.summary["evaluation"]
    assert not (stopped / "scoring").exists()


def test_what_is_missing_is_told_before_anything_is_trained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(names: str, folder: Path | None, match: str) -> None:
        spec, execution = resolve_run(settings(data, names) | {"execution": {"device": "cpu"}})
        with pytest.raises(ValueError, match=match):
            train_population([spec], [tmp_path / "run"], execution, data=folder)
        assert not (tmp_path / "run/run.json").exists()

    monkeypatch.delenv("QKLAB_DATA", raising=False)
    refuse("blimp", None, "blimp are read from a folder, but none was named: say with --data or QKLAB_DATA which")
    refuse("blimp", tmp_path / "none", "/none is none")
    refuse("blimp,piqa", data, r"piqa reads piqa\.jsonl, but it is neither in")
    refuse("cola", data, r"CoLA/train\.tsv cannot be read")
    refuse("blmp", data, r"^blmp is no known task .*did you mean 'blimp'\?\); known are lambada, ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse("blimp", data, r"evaluation needs lm_eval, .* pip install 'qklab\[eval\]'")

    def no_transformers() -> None:
        raise ImportError("qklab.hf needs Transformers 5.17 or newer")

    monkeypatch.setattr(register.scorer, "entries", {})
    monkeypatch.setattr(register.scorer, "_import_homes", no_transformers)
    refuse("blimp", data, "benchmarks cannot be scored: qklab.hf needs Transformers")


def make_study(data: Path, metric: str, names: str | None, **changes: Any) -> StudySpec:
    arms = {"standard": {}, "k=v": {"attention": {"share": "k=v"}} | changes.pop("own", {})}
    base = settings(data, names, corpus={"tokenizer": "bytes", "valid": 0.2, "test": 0.2})
    values = {"baseline": "standard", "arms": arms, "base": base, "metric": metric, "seeds": 1}
    return StudySpec.from_dict(values | {"corpora": [str(data / "text.txt")]} | changes)


def test_a_study_says_what_it_is_compared_on_and_what_is_missing(data: Path, tmp_path: Path) -> None:
    make_study(data, "blimp", "lambada,blimp").refuse_illegal()
    for metric, names, match in (
        (
            "blimp",
            "lambada",
            r"metric='blimp' is scored at the end of each run: base\.benchmarks\.names must have blimp",
        ),
        ("glue", "blimp", "must have a task of GLUE, such as rte"),
        ("benchmarks", None, "must have a name, such as blimp"),
    ):
        with pytest.raises(SpecError, match=match):
            make_study(data, metric, names).refuse_illegal()
    with pytest.raises(SpecError, match=r"arm k=v: benchmarks must be the baseline's"):
        make_study(data, "blimp", "blimp", own={"benchmarks": {"questions": 3}}).refuse_illegal()
    plain = settings(data, "blimp", corpus={}, model={"layers": 1, "width": 16})
    with pytest.raises(SpecError, match="a causal model says"):
        make_study(data, "blimp", "blimp", base=plain | {"attention": {"causal": False}}).refuse_illegal()
    with pytest.raises(SpecError, match="benchmarks are of text, and task:copy has none"):
        make_study(data, "blimp", "blimp", base=plain, corpora=["task:copy"]).refuse_illegal()
    with (
        Study(make_study(data, "piqa", "piqa"), tmp_path / "study", data=data).open() as study,
        pytest.raises((RunError, ValueError), match=r"piqa reads piqa\.jsonl"),
    ):
        study.prepare_corpora(Display())


def test_a_study_is_judged_by_glue_at_three_learning_rates_and_five_seeds(data: Path, tmp_path: Path) -> None:
    plan = make_study(data, "glue", "rte", seeds=5, lrs=[1e-2], margin=1.0)
    plan.base["benchmarks"]["lrs"] = [1e-4, 1e-3, 1e-2]
    rows = [[PlannedRun(plan.corpora[0], arm, 1e-2, seed) for seed in range(5)] for arm in plan.arms]
    for own in rows:
        specs = [planned.resolve_spec(plan) for planned in own]
        folders = [planned.folder_in(tmp_path / "study") for planned in own]
        train_population(specs, folders, ExecutionSpec(device="cpu", threads=1), data=data)
    StudyRecord(plan, []).write(tmp_path / "study")
    results = read_results(tmp_path / "study", plan)
    scored = {(r.planned.arm, r.planned.seed): r.summary["evaluation"]["test"]["benchmarks"]["rte"] for r in results}
    assert len(scored) == 10
    assert {own["lr"] for own in scored.values()} <= {1e-4, 1e-3, 1e-2}
    found = derive_findings(plan, results, plan.corpora[0])
    assert found.values == {
        arm: {seed: pytest.approx(100 * scored[arm, seed]["score"]) for seed in range(5)} for arm in plan.arms
    }
    assert found.chance == pytest.approx(100 * scored["k=v", 0]["chance"])
    paired = found.verdicts["k=v"].paired
    assert paired is not None
    differences = [scored["k=v", seed]["score"] - scored["standard", seed]["score"] for seed in range(5)]
    assert (paired.n, paired.mean) == (5, pytest.approx(100 * sum(differences) / 5))
    assert "points of 100 (chance" in write_answer(plan, results)
