"""What a study says: on whole studies, on ones under way, and on arms that failed."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from qklab.study.across import compare_across
from qklab.study.answer import write_answer
from qklab.study.difficulty import find_difficulties
from qklab.study.findings import derive_findings, describe_cost_change, join_names
from qklab.study.metrics import find_metric
from qklab.study.parts import StudyPart
from qklab.study.plan import PlannedRun
from qklab.study.records import Analyses, RunResult, StudyRecord, read_analyses, read_study_record
from qklab.study.spec import StudyError, StudySpec

LRS = (1e-3, 3e-3)
LOSS = find_metric("loss")
READ = "Each run trained 0.001 M parameters on 1,000 tokens, 1 a parameter."


def study(**changes: Any) -> StudySpec:
    values: dict[str, Any] = {
        "baseline": "standard",
        "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}, "norm": {"attention": {"norm": "qk"}}},
        "base": {"budget": {"tokens": 1000}},
        "lrs": list(LRS),
        "seeds": 4,
    }
    return StudySpec.from_dict(values | changes)


def result(arm: str, lr: float, seed: int, loss: float, corpus: str = "stdlib", **took: Any) -> RunResult:
    ended = "finished" if math.isfinite(loss) else "diverged"
    scores = {"loss": loss, "bits_per_byte": loss / 3}
    summary: dict[str, Any] = {
        "status": ended,
        "evaluation": {"valid": scores, "test": scores} if ended == "finished" else {},
        "parameters": 1000,
        "training_flops": 1e6,
        "tokens": 1000,
        "seconds": 10.0,
        "seconds_of_last_process": {"all": 12.0},
        "tokens_per_second": 100.0,
        "peak_memory_bytes": 2**20,
        "cache_bytes_per_token": 64,
    }
    return RunResult(PlannedRun(corpus, arm, lr, seed), ended, summary | took)


def whole(effects: dict[str, float], noise: float = 0.001, **took: Any) -> list[RunResult]:
    """Four seeds of every arm; the lower learning rate is worse by 0.1 for the one seed that tries it."""
    wiggle = (1.0, -1.0, 0.5, -0.4)
    return [
        result(
            arm,
            lr,
            seed,
            2.0 + seed / 10 + effect + (noise * wiggle[seed] if effect else 0.0) + 0.1 * (lr < 2e-3),
            **took,
        )
        for arm, effect in effects.items()
        for lr in LRS
        for seed in range(4)
        if seed == 0 or lr > 2e-3
    ]


def test_a_whole_study() -> None:
    results = whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03})
    found = derive_findings(study(), results, "stdlib")
    assert {arm: verdict.verdict for arm, verdict in found.verdicts.items()} == {"k=v": "worse", "norm": "better"}
    assert found.headline == "On stdlib, norm beats standard; k=v is worse than standard"
    assert found.lrs == {"standard": 3e-3, "k=v": 3e-3, "norm": 3e-3}
    assert found.values["standard"] == {0: 2.0, 1: 2.1, 2: 2.2, 3: pytest.approx(2.3)}
    assert (found.notes, found.settling, found.command) == ([READ], "", "")
    assert found.planned == 3 * (2 + 3)


@pytest.mark.parametrize("words", ["qklab compare --continue", "qklab study file.toml"])
def test_what_would_settle_it_and_the_command(words: str) -> None:
    results = whole({"standard": 0.0, "k=v": 0.02, "norm": 0.0001}, noise=0.02)
    taken = Analyses(at_once=2, command=f"{words} --seeds {{total}}")
    found = derive_findings(study(), results, "stdlib", taken)
    assert {v.verdict for v in found.verdicts.values()} == {"open"}
    wanted = {arm: v.plan.more for arm, v in found.verdicts.items() if v.plan is not None and v.plan.more}
    assert len(wanted) == 2
    least = min(wanted.values())
    assert found.command == f"{words} --seeds {4 + least}"
    for arm, more in wanted.items():
        runs = more
        if "compare" in words:  # three quarters of all seeds try both rates, where one of four did
            runs = 4 + more + math.ceil(3 * (4 + more) / 4) - 5
        seconds = runs * 3 * 12.0 / 2  # runs × arms × seconds of a process, two at a time
        minutes = f"{round(seconds) // 60} min {round(seconds) % 60} s" if seconds >= 60 else f"{seconds:.0f} s"
        plan = found.verdicts[arm].plan
        assert plan is not None
        assert f"{arm}: {more} more seeds (from {plan.few} to {plan.many}), about {minutes}" in found.settling


def test_no_more_time_than_one_run_where_there_is_room_for_all() -> None:
    results = whole({"standard": 0.0, "k=v": 0.02, "norm": 0.0001}, noise=0.02)
    found = derive_findings(study(), results, "stdlib", Analyses(at_once=10_000, command="x"))
    assert found.settling.count("about 12 s") == 2


def test_an_arm_that_diverged_everywhere_takes_nothing_from_the_others() -> None:
    results = [r for r in whole({"standard": 0.0, "k=v": 0.05}) if r.planned.arm != "norm"]
    results += [result("norm", lr, 0, math.inf) for lr in LRS]
    found = derive_findings(study(), results, "stdlib")
    assert found.verdicts["norm"].verdict == "diverged"
    assert found.verdicts["norm"].sentence == "norm diverged at every learning rate (0.001, 0.003): 2 of 2 runs."
    assert found.verdicts["k=v"].verdict == "worse"
    assert found.verdicts["k=v"].seeds == 4
    assert found.planned == 2 * 5 + 2


def test_a_baseline_that_diverged_everywhere() -> None:
    results = [*whole({"k=v": 0.05, "norm": 0.01}), *(result("standard", lr, 0, math.inf) for lr in LRS)]
    found = derive_findings(study(), results, "stdlib")
    assert found.headline == "standard diverged at every learning rate on stdlib: there is no baseline"
    assert found.verdicts == {}
    assert "standard" in write_answer(study(), results)


def test_under_way() -> None:
    assert derive_findings(study(), [], "stdlib").headline == "Nothing to compare on stdlib yet"
    results = whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03})
    for seen in range(len(results)):  # whatever has ended, there is an answer
        assert derive_findings(study(), results[:seen], "stdlib").headline
        assert write_answer(study(), results[:seen])
    some = [r for r in results if r.planned.arm != "norm" or r.planned.lr < 2e-3]
    found = derive_findings(study(), some, "stdlib")
    assert found.notes[0] == "Learning rates are still being tried for norm."
    assert found.verdicts["k=v"].verdict == "one seed"  # norm has ended at one seed only
    without = derive_findings(study(), [r for r in results if r.planned.arm != "norm"], "stdlib")
    assert "No result yet of norm." in without.notes
    assert without.verdicts["k=v"].verdict == "worse"


def test_one_learning_rate_that_failed_is_not_all_of_them() -> None:
    results = [*whole({"standard": 0.0, "k=v": 0.05}), result("norm", LRS[0], 0, math.inf)]
    found = derive_findings(study(), results, "stdlib")
    assert "norm" not in found.verdicts
    assert "Learning rates are still being tried for norm." in found.notes


def test_costs() -> None:
    results = whole({"standard": 0.0, "norm": 0.01})
    results += [
        result("k=v", lr, seed, 2.0, tokens_per_second=80.0, cache_bytes_per_token=32, parameters=990)
        for lr in LRS
        for seed in range(4)
    ]
    found = derive_findings(study(), results, "stdlib")
    assert found.costs == {
        "k=v": "k=v takes 25 % more time per token, 50 % less cache, 1 % fewer parameters and the same peak memory.",
        "norm": "norm takes the same time per token, peak memory, cache and parameters.",
    }
    assert describe_cost_change("time", 101.0, 100.0) == ("time", None)
    assert describe_cost_change("time", 97.0, 100.0) == ("time", "3 % less")
    assert describe_cost_change("time", None, 100.0) == ("time", None)
    assert describe_cost_change("parameters", 1003, 1000, exact=True) == ("parameters", "0.3 % more")


def test_the_answer_as_text() -> None:
    spec = study(corpora=["stdlib", "other"])
    results = whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03})
    results += [result(r.planned.arm, r.planned.lr, r.planned.seed, r.value(LOSS), corpus="other") for r in results]
    told = write_answer(spec, results)
    first, second = told.split("On other, ")
    assert first.startswith(
        "On stdlib, norm beats standard; k=v is worse than standard.\n\n- k=v is worse than standard by 0.05"
    )
    assert second.startswith("norm beats standard")
    rows = [line.split() for line in first.splitlines() if line.startswith("  ")]
    assert rows[1] == ["standard", "2.1500", "0.003", "0.050", "1,000", "64", "B", "100", "1", "MiB", "0", "of", "5"]


def test_bits_per_byte_are_told_as_such() -> None:
    told = write_answer(study(metric="bits_per_byte"), whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03}))
    assert "worse than standard by 0.0166" in told.replace("0.01658", "0.0166").replace("0.01667", "0.0166")
    assert "bits per byte" in told
    assert "nats" not in told


def test_analyses_are_counted_once_for_each_number_of_seeds(tmp_path: Path) -> None:
    assert read_analyses(tmp_path) == Analyses()
    for seeds in (3, 3, 6):
        read_analyses(tmp_path).add(seeds, 2, "again {total}").write(tmp_path)
    found = read_analyses(tmp_path)
    assert (found.seeds, len(found.taken), found.at_once, found.command) == ([3, 6], 2, 2, "again {total}")
    assert found.add(6, 2, "").command == "again {total}"
    (tmp_path / "analyses.json").write_text(json.dumps({"taken": 3}))
    with pytest.raises(StudyError, match=r"analyses\.json cannot be read"):
        read_analyses(tmp_path)


def test_each_analysis_gets_its_part_of_alpha_and_too_many_are_told() -> None:
    results = whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03})
    one, two = (derive_findings(study(analyses=n), results, "stdlib").verdicts["k=v"].paired for n in (1, 2))
    assert one is not None
    assert two is not None
    assert (one.level, two.level) == (0.95, 0.975)
    taken = Analyses().add(2, 1, "").add(3, 1, "").add(4, 1, "")
    read, *notes = derive_findings(study(analyses=2), results, "stdlib", taken).notes
    assert (read, len(notes)) == (READ, 1)
    assert "judged 3 times, at 2, 3 and 4 seeds, and was planned for 2 (analyses)" in notes[0]
    assert "up to 7.5 % instead of 5 %" in notes[0]
    assert derive_findings(study(analyses=3), results, "stdlib", taken).notes == [READ]


@pytest.mark.parametrize(("planned", "told"), [(1, "once, .* analysis 2: .* 10 % instead of 5 %"), (2, None)])
def test_advice_says_what_another_look_does_to_the_error_rate(planned: int, told: str | None) -> None:
    results = whole({"standard": 0.0, "k=v": 0.02, "norm": 0.0001}, noise=0.02)
    taken = Analyses(command="qklab study --seeds {total}").add(4, 1, "")
    found = derive_findings(study(analyses=planned), results, "stdlib", taken)
    assert found.command
    assert bool(re.search(told, found.settling)) if told else "instead of" not in found.settling


def test_one_outlying_seed_is_pointed_out() -> None:
    results = whole({"standard": 0.0, "k=v": 0.02, "norm": -0.03})
    assert not any("lies far" in note for note in derive_findings(study(), results, "stdlib").notes)
    far = [r for r in results if (r.planned.arm, r.planned.seed, r.planned.lr) == ("k=v", 2, 3e-3)]
    far[0].summary["evaluation"]["test"] = {"loss": 2.7, "bits_per_byte": 1.0}
    (note,) = [note for note in derive_findings(study(), results, "stdlib").notes if "lies far" in note]
    assert re.match(r"Seed 2 of k=v lies far from the others \(\+0\.5\) and makes the interval \d+ times as wide", note)


def test_analyses_are_not_forgotten_with_their_file(tmp_path: Path) -> None:
    StudyRecord(study(analyses=1), []).write(tmp_path)
    for seeds in (2, 4):
        read_analyses(tmp_path).add(seeds, 2, "again {total}").write(tmp_path)
    (tmp_path / "analyses.json").unlink()
    found = read_analyses(tmp_path)
    assert found.seeds == [2, 4]
    results = whole({"standard": 0.0, "k=v": 0.05, "norm": -0.03})
    notes = derive_findings(study(), results, "stdlib", found).notes
    assert any("analyses.json was lost" in note for note in notes)
    assert any("judged 2 times" in note for note in notes)
    found.add(5, 2, "").write(tmp_path)
    assert read_study_record(tmp_path).judged == [2, 4, 5]


@pytest.mark.parametrize(("unigram", "barely"), [(2.3, True), (4.0, False)])
def test_the_answer_says_how_far_the_models_have_come(unigram: float, barely: bool) -> None:
    test = {"loss": 2.1, "unigram_loss": unigram, "tokens": 300, "split_tokens": 900, "standard_error": 0.0123}
    corpus = {"train_tokens": 500, "train_bytes": 2_000_000, "text_bytes": 8_000_000}
    results = [result(arm, lr, seed, 2.1) for arm in study().arms for lr in LRS for seed in range(4)]
    for each in results:
        each.summary.update(corpus=corpus, evaluation={"valid": test, "test": test})
    told = write_answer(study(), results, Analyses(run_seconds=8.0))
    assert told.startswith("On stdlib, with models that have barely learned, ") == barely
    assert ("have barely learned: " in told) == barely
    assert f"The test loss of standard is 2.100 nats per token, that of a unigram model {unigram:.3f}." in told
    assert "1 a parameter: 2 MB of the corpus's 8 MB of text, each 2 times." in told
    assert "Tested on 300 of 900 tokens of test text" in told
    assert "±0.012" in told
    assert "Runs took 1.5 times as long as planned (12 s instead of 8 s)" in told
    assert "as long as planned" not in write_answer(study(), results, Analyses(run_seconds=10.0))


def test_benchmarks_stand_in_the_ledger_and_decide_where_they_are_the_metric() -> None:
    results = [result(arm, 1e-3, seed, 1.0) for arm in ("standard", "k=v", "norm") for seed in range(4)]
    for one in results:
        score = 0.5 + 0.01 * one.planned.seed + 0.1 * (one.planned.arm == "k=v")
        blimp = {"score": score + 0.002 * (one.planned.seed == 3) * (one.planned.arm != "standard"), "chance": 0.5}
        one.summary["evaluation"]["test"]["benchmarks"] = {"blimp": blimp, "lambada": {"score": 0.0}}
    text = write_answer(study(lrs=[1e-3], metric="blimp", margin=1.0), results)
    assert "k=v is better than standard by 10" in text
    assert "points of 100 (chance 50.0)" in text
    table = [line.split("  ") for line in text.splitlines() if "±" in line and line.startswith("  ")]
    assert [[cell.strip() for cell in row if cell] for row in table] == [
        ["standard", "51.50 ± 0.65", "0.00 ± 0.00"],
        ["k=v", "61.55 ± 0.68", "0.00 ± 0.00"],
        ["norm", "51.55 ± 0.68", "0.00 ± 0.00"],
    ]
    assert "points of 100  blimp (chance 50.0)      lambada" in text


def test_names_in_a_row() -> None:
    assert [join_names(list(names)) for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


def test_accuracies_are_averaged_over_corpora_by_seed_with_their_chance() -> None:
    tasks, right = ("task:copy", "task:sort"), {"standard": (0.9, 0.5), "k=v": (0.8, 0.5), "norm": (0.9, 0.5)}
    results = []
    for arm, shares in right.items():
        for corpus, share, chance in zip(tasks, shares, (0.1, 0.3), strict=True):
            for seed in range(4):
                one = result(arm, 1e-3, seed, 1.0, corpus)
                score = {
                    "loss": 1.0,
                    "accuracy": share + seed / 100 - (arm != "standard") * seed / 1000,
                    "chance": chance,
                }
                one.summary["evaluation"] = {"valid": score, "test": score}
                results.append(one)
    plan = study(corpora=list(tasks), lrs=[1e-3], metric="accuracy", margin=1.0)
    text = write_answer(plan, results)
    assert "On the mean of 2 corpora, norm does as well as standard; k=v is worse than standard" in text
    assert "% of the answers right on average: standard 71.50, k=v 66.35, norm 71.35, chance 20.00." in text
    assert "% of the answers right (chance 10.0)" in text
    assert "% of the answers right (chance 30.0)" in text
    assert "mean of" not in write_answer(plan.replace(metric="loss"), results)
    assert "mean of" not in write_answer(plan, results[:-4])  # norm has nothing on task:sort yet


def test_accuracy_against_difficulty_is_of_one_task_with_one_argument_changed() -> None:
    corpora = [f"task:mqar?pairs={pairs}&length=256" for pairs in (32, 4, 8)]
    assert list(find_difficulties(["task:copy", *corpora, "stdlib"])) == [
        ("mqar", "pairs", {4: corpora[1], 8: corpora[2], 32: corpora[0]})
    ]
    others = ["task:mqar", "task:mqar?pairs=8&length=128"], ["task:copy", "task:copy?seed=1"], ["task:needle"]
    two = "task:mqar?pairs=4", "task:mqar?pairs=16&length=128", "task:sort", "task:sort?length=64"
    assert [list(find_difficulties(own)) for own in (*others, two)] == [[("mqar", "length", ANY)], [], [], []]
    results = []
    for arm, shift in {"standard": 0.0, "k=v": 0.1}.items():
        for corpus in corpora[:2]:
            for seed in range(3):
                one = result(arm, 1e-3, seed, 1.0, corpus)
                score = {"loss": 1.0, "accuracy": (0.5 if "32" in corpus else 0.9) - shift + seed / 100, "chance": 0.02}
                one.summary["evaluation"] = {"valid": score, "test": score}
                results.append(one)
    plan = study(corpora=corpora, lrs=[1e-3])  # judged by loss: accuracies are shown all the same
    (found,) = compare_across(plan, [StudyPart(plan, results, "small")]).difficulty
    told = "standard 91.0 at 4, 51.0 at 32; k=v 81.0 at 4, 41.0 at 32; chance 2.0 at 4, 2.0 at 32."
    assert found.sentence == f"mqar at small, % of the answers right by pairs: {told}"
    assert found.sentence in write_answer(plan, results).replace("mqar at nano", "mqar at small")
    half = 4.303 / math.sqrt(3)  # t at 2 degrees of freedom, and a spread of one point
    for score in found.scores:
        assert score.score.high - score.score.estimate == pytest.approx(half, rel=1e-3)
    assert [(score.arm, score.at, score.seeds) for score in found.scores][:2] == [
        ("standard", 4, 3),
        ("standard", 32, 3),
    ]
