"""What a study plans, how its arms are matched, which learning rate is chosen and what is reported."""

import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qklab.schema import SpecError
from qklab.study.metrics import find_metric
from qklab.study.plan import PlannedRun, encode_file_name, plan_confirming_runs, plan_tuning_runs, write_number
from qklab.study.records import RunResult, collect_values, sum_up_ledger
from qklab.study.spec import StudyError, StudySpec, read_study
from qklab.study.tuning import choose_learning_rates

BASE: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "context": 32},
    "corpus": {"tokenizer": "bytes"},
    "batch": {"sequences": 4},
    "budget": {"tokens": 10_000},
}
ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "k=v": {"attention": {"share": "k=v"}},
    "leapfrog": {"attention": {"coupling": {"kind": "leapfrog"}}},
    "gelu": {"model": {"mlp": "gelu"}},
}


def study(**changes: Any) -> StudySpec:
    values = {"baseline": "standard", "arms": ARMS, "base": BASE, "lrs": [3e-3, 1e-3], "seeds": 3}
    return StudySpec.from_dict(values | changes)


# the plan


def test_every_arm_gets_the_same_learning_rates_and_seeds() -> None:
    spec = study(corpora=["stdlib", "other"], seeds=4, tuning_seeds=2)
    plan = list(plan_tuning_runs(spec))
    assert len(plan) == len(set(plan)) == 2 * 2 * 2 * 4
    for arm in spec.arms:
        own = {(run.corpus, run.lr, run.seed) for run in plan if run.arm == arm}
        assert own == {(c, lr, seed) for c in ("stdlib", "other") for lr in (1e-3, 3e-3) for seed in (0, 1)}
    chosen = {(corpus, arm): 1e-3 for corpus in spec.corpora for arm in spec.arms}
    rest = list(plan_confirming_runs(spec, chosen))
    assert not set(rest) & set(plan)
    assert Counter(run.arm for run in rest) == dict.fromkeys(spec.arms, 2 * 2)
    assert {run.seed for run in rest} == {2, 3}
    assert {run.lr for run in rest} == {1e-3}
    assert [run.arm for run in plan[:4]] == list(ARMS)  # arms of a seed next to each other
    assert [(run.seed, run.lr) for run in plan[:16:4]] == [(0, 1e-3), (0, 3e-3), (1, 1e-3), (1, 3e-3)]
    chosen |= {("stdlib", "gelu"): None, ("other", "gelu"): None}  # an arm without a learning rate is not confirmed
    assert {run.arm for run in plan_confirming_runs(spec, chosen)} == set(ARMS) - {"gelu"}


LOSS = find_metric("loss")
ODD = [
    *["a/b", "a%2Fb", "a%2fb", "a%20b", ".", "..", "%2E", ".a", "%2Ea", "k=v", "k+v", "k%3Dv", "hf:x/y"],
    "a b",
    "é",
    "\u0301e",
    "e\u0301",
    "\x0e9",
]
ODD += ["é9", "\u0141", "\x141", "/" * 200, "/" * 201, "x" * 100, "x" * 101, "x" * 102]


def test_names_of_folders_are_unique_plain_and_short_enough() -> None:
    made = [encode_file_name(name) for name in ODD]
    assert len(set(made)) == len(ODD)
    for name in made:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 100
        assert name.isascii()
    assert encode_file_name("k=v") == "k=v"


def test_learning_rates_that_look_alike_have_folders_of_their_own() -> None:
    rates = [1e-3, 1.0000001e-3, 3e-3, 0.1 + 0.2, 0.3, 1e-5]
    plan = [PlannedRun("c", "a", lr, 0) for lr in rates]
    assert len({run.folder_in(Path("s")) for run in plan}) == len(rates)
    assert len({run.name for run in plan}) == len(rates)
    assert all(float(write_number(lr)) == lr for lr in rates)
    assert plan[0].folder_in(Path("s")) == Path("s/runs/c/a/lr0.001-seed0")


# matching


def runs(spec: StudySpec) -> dict[str, Any]:
    return {arm: spec.run(arm, "stdlib", 1e-3, 5) for arm in spec.arms}


def test_runs_differ_in_what_the_arm_says_and_in_nothing_else() -> None:
    made = runs(study())
    assert {run.seed for run in made.values()} == {5}
    assert {run.optimiser.lr for run in made.values()} == {1e-3}
    assert {run.corpus.source for run in made.values()} == {"stdlib"}
    assert {run.budget.tokens for run in made.values()} == {10_000}
    assert {run.steps * run.tokens_per_step for run in made.values()} == {79 * 128}
    standard = made["standard"].to_dict()
    leapfrog = made["leapfrog"].to_dict()
    assert leapfrog["model"]["attention"].pop("coupling")["kind"] == "leapfrog"
    standard["model"]["attention"].pop("coupling", None)
    assert leapfrog == standard


def test_matched_on_seconds() -> None:
    base = BASE | {"budget": {"seconds": 2.5}}
    made = runs(study(match="seconds", base=base))
    assert {run.budget.seconds for run in made.values()} == {2.5}
    assert {run.steps for run in made.values()} == {None}
    with pytest.raises(SpecError, match=r"match='seconds' needs base.budget.seconds"):
        study(match="seconds").run("k=v", "stdlib", 1e-3, 0)
    with pytest.raises(SpecError, match=r"match='tokens' needs base.budget.tokens"):
        study(base=base).run("k=v", "stdlib", 1e-3, 0)


def test_two_arms_that_are_the_same_run_are_refused() -> None:
    for match in ("tokens", "flops"):
        twins = study(match=match, arms={"standard": {}, "a": {"z_loss": 0.1}, "b": {"z_loss": 0.10}})
        with pytest.raises(SpecError, match="arms a and b are the same run: there is nothing to compare"):
            twins.refuse_illegal()
    with pytest.raises(SpecError, match=r"arm a: evaluation.final_tokens must be the baseline's"):
        study(arms={"standard": {}, "a": {"evaluation": {"final_tokens": 9}}}).refuse_illegal()


@pytest.mark.parametrize("budget", [{"tokens": 10_000}, {"flops": 3e9}])
def test_matched_on_flops_within_one_step(budget: dict[str, Any]) -> None:
    made = runs(study(match="flops", base=BASE | {"budget": budget}))
    spent = {arm: run.steps * run.flops_per_step for arm, run in made.items()}
    for arm, run in made.items():
        assert 0 <= spent[arm] - spent["standard"] < run.flops_per_step
    assert made["gelu"].steps > made["standard"].steps  # two matrices instead of three
    assert runs(study(match="flops", base=BASE | {"budget": budget}, arms={"standard": {}, "same": {}}))[
        "same"
    ].steps == (made["standard"].steps)


def test_matched_on_flops_beyond_what_a_float_holds() -> None:
    base = BASE | {"budget": {"tokens": 2**46 + 12_345}, "batch": {"sequences": 7}, "model": {"context": 33}}
    made = runs(study(match="flops", base=base, arms={"standard": {}, "same": {"z_loss": 1e-4}}))
    assert made["standard"].steps * made["standard"].flops_per_step > 2**53
    assert made["same"].steps == made["standard"].steps


def test_matched_on_parameters_within_half_a_hidden_unit() -> None:
    made = runs(study(match="parameters"))
    wanted = made["standard"].model.parameters()
    for run in made.values():
        matrices = {"swiglu": 3, "gelu": 2}[run.model.mlp]
        each = run.model.layers * matrices * run.model.width
        assert abs(run.model.parameters() - wanted) <= each / 2
    assert made["k=v"].model.hidden > made["standard"].model.hidden
    assert made["standard"] == study().run("standard", "stdlib", 1e-3, 5)
    assert {run.budget.tokens for run in made.values()} == {10_000}


def test_an_arm_too_large_to_be_matched_is_refused() -> None:
    arms = {"standard": {"model": {"mlp": "gelu", "layers": 1}}, "deep": {"model": {"layers": 12}}}
    spec = study(match="parameters", arms=arms)
    with pytest.raises(SpecError, match=r"arm deep: match='parameters': even with an MLP of one hidden unit"):
        spec.refuse_illegal()


# what is refused


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"baseline": "standrad"}, "did you mean 'standard'"),
        ({"arms": {"standard": {}}}, "at least two arms"),
        ({"arms": {"standard": {}, "a/b": {}}}, "'a/b' is none"),
        ({"arms": {"standard": {}, "Standard": {}}}, "differ in more than capitals"),
        ({"arms": {"standard": {}, "x": 3}}, "'x' is 3"),
        ({"lrs": []}, "different numbers above 0"),
        ({"lrs": [1e-3, 1e-3]}, "different numbers above 0"),
        ({"lrs": [math.nan]}, "different numbers above 0"),
        ({"corpora": ["a", "a"]}, "different corpora"),
        ({"seeds": 0}, "whole number from 1"),
        ({"tuning_seeds": 4}, "there are only seeds=3"),
        ({"match": "watts"}, "must be one of"),
        ({"alpha": 0.0}, "above 0"),
        ({"colour": "red"}, "no field 'colour'"),
    ],
)
def test_a_study_that_is_none(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        study(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base": BASE | {"seed": 1}}, "base: seed is set by the study; seeds says"),
        ({"base": BASE | {"execution": {"threads": 4}}}, "base: execution is set by the study"),
        ({"base": BASE | {"optimiser": {"lr": 1e-3}}}, r"base: optimiser.lr is set by the study; write it in lrs"),
        ({"base": BASE | {"optimiser": "muon"}}, "base: optimiser must be a table of settings, but 'muon' came"),
        ({"base": BASE | {"corpus": "stdlib"}}, "base: corpus must be a table of settings"),
        ({"base": BASE | {"corpus": {"source": "x"}}}, r"corpus.source is set by the study; write it in corpora"),
        ({"arms": ARMS | {"x": {"budget": {"tokens": 5}}}}, "arm x: the budget is what arms are matched on"),
        ({"arms": ARMS | {"x": {"attention": {"shrae": "k=v"}}}}, "arm x: .*did you mean 'share'"),
        ({"arms": ARMS | {"x": {"corpus": {"test": 0.1}}}}, r"arm x: corpus.valid and corpus.test"),
        ({"arms": ARMS | {"x": {"corpus": {"tokenizer": "bpe"}}}}, "x has another tokenizer .*bits_per_byte"),
        ({"arms": ARMS | {"x": {"model": {"mlp_ratio": 2.0}}}, "match": "parameters"}, "sets model.mlp_ratio itself"),
    ],
)
def test_an_arm_that_is_none(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        study(**changes).refuse_illegal()
    study(arms=ARMS | {"x": {"corpus": {"tokenizer": "bpe"}}}, metric="bits_per_byte").refuse_illegal()


def test_more_seeds_and_other_spellings_are_the_same_study() -> None:
    assert study(seeds=3).fingerprint == study(seeds=9).fingerprint
    one = study(base=BASE | {"optimiser": {"weight_decay": 0}})
    assert one.fingerprint == study(base=BASE | {"optimiser": {"weight_decay": 0.0}}).fingerprint
    others = [{"alpha": 0.1}, {"margin": 0.02}, {"lrs": [1e-3]}, {"match": "flops"}, {"base": BASE | {"z_loss": 0.1}}]
    assert len({study(**changes).fingerprint for changes in [*others, {}]}) == 6


def test_a_study_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        'baseline = "standard"\nlrs = [1e-3]\n[base]\nbudget = {tokens = 1000}\n[arms.standard]\n'
        '[arms."k=v"]\nattention = {share = "k=v"}\n'
    )
    spec = read_study(path)
    assert list(spec.arms) == ["standard", "k=v"]
    assert spec == StudySpec.from_dict(tomllib.loads(path.read_text()))
    assert StudySpec.from_dict(spec.to_dict()).fingerprint == spec.fingerprint
    with pytest.raises(StudyError, match=r"there is no study file .*none\.toml"):
        read_study(tmp_path / "none.toml")
    path.write_text('baseline = "standard"\nlsr = [1e-3]\n')
    with pytest.raises(SpecError, match=r"study\.toml: .*did you mean 'lrs'"):
        read_study(path)


# results


def result(
    arm: str, lr: float, seed: int, valid: float, test: float, status: str = "finished", **more: Any
) -> RunResult:
    evaluation = {
        "valid": {"loss": valid, "bits_per_byte": valid / 2},
        "test": {"loss": test, "bits_per_byte": test / 2},
    }
    costs = {"parameters": 100, "training_flops": 1e6, "tokens": 10, "seconds": 2.0, "tokens_per_second": 5.0}
    memory = {"peak_memory_bytes": 1000, "cache_bytes_per_token": 64}
    summary = {"evaluation": evaluation if status == "finished" else {}} | costs | memory | more
    return RunResult(PlannedRun("stdlib", arm, lr, seed), status, summary)


def test_the_learning_rate_is_chosen_on_validation_and_reported_on_test() -> None:
    spec = study(arms={"standard": {}, "k=v": {}}, tuning_seeds=2)
    results = [
        result("standard", 1e-3, 0, valid=2.0, test=9.0),
        result("standard", 1e-3, 1, valid=2.2, test=9.5),
        result("standard", 3e-3, 0, valid=1.0, test=1.0),  # better on one seed and on test, worse in the mean
        result("standard", 3e-3, 1, valid=3.3, test=1.0),
        result("k=v", 1e-3, 0, valid=2.0, test=1.0),
        result("k=v", 1e-3, 1, valid=2.0, test=1.0),
        result("k=v", 3e-3, 0, valid=1.9, test=8.0),
        result("k=v", 3e-3, 1, valid=1.9, test=8.5),
        result("standard", 1e-3, 2, valid=0.1, test=7.0),
        result("k=v", 3e-3, 2, valid=99.0, test=8.25),  # a seed that does not tune
    ]
    chosen = choose_learning_rates(spec, results)
    assert chosen == {("stdlib", "standard"): 1e-3, ("stdlib", "k=v"): 3e-3}
    assert collect_values(spec, results, chosen, "stdlib", "standard") == {0: 9.0, 1: 9.5, 2: 7.0}
    assert collect_values(spec, results, chosen, "stdlib", "k=v") == {0: 8.0, 1: 8.5, 2: 8.25}
    bits = study(arms={"standard": {}, "k=v": {}}, tuning_seeds=2, metric="bits_per_byte")
    assert collect_values(bits, results, chosen, "stdlib", "k=v") == {0: 4.0, 1: 4.25, 2: 4.125}


def test_a_learning_rate_at_which_a_run_diverged_is_not_chosen() -> None:
    spec = study(arms={"standard": {}, "k=v": {}}, tuning_seeds=2)
    diverged = {"valid": 0.0, "test": 0.0, "status": "diverged"}
    results = [
        result("standard", 1e-3, 0, 5.0, 5.0),
        result("standard", 1e-3, 1, 5.0, 5.0),
        result("standard", 3e-3, 0, 1.0, 1.0),
        result("standard", 3e-3, 1, **diverged),
        result("k=v", 1e-3, 0, **diverged),
        result("k=v", 1e-3, 1, 1.0, 1.0),
        result("k=v", 3e-3, 0, **diverged),
        result("k=v", 3e-3, 1, **diverged),
    ]
    chosen = choose_learning_rates(spec, results)
    assert chosen == {("stdlib", "standard"): 1e-3, ("stdlib", "k=v"): None}
    assert collect_values(spec, results, chosen, "stdlib", "k=v") == {}
    assert results[3].value(LOSS) == math.inf
    assert results[3].describe(LOSS) == "no result"


def test_a_run_whose_evaluation_is_not_finite_has_no_result_and_validation_never_stands_in() -> None:
    run = result("standard", 1e-3, 0, 1.0, 1.0)
    for value in ("nan", "inf", math.nan):
        run.summary["evaluation"]["test"]["loss"] = value
        assert run.value(LOSS) == math.inf
        assert run.describe(LOSS) == "no result"
        assert run.value(LOSS, "valid") == 1.0
    del run.summary["evaluation"]["test"]
    with pytest.raises(StudyError, match="has no loss on test text"):
        run.value(LOSS)


def test_ledger() -> None:
    spec = study(arms={"standard": {}, "k=v": {}})
    results = [
        result("standard", 1e-3, 0, 1.0, 1.0, seconds=2.0, peak_memory_bytes=100),
        result("standard", 3e-3, 0, 1.0, 1.0, seconds=4.0, peak_memory_bytes=300),
        result("standard", 3e-3, 1, 1.0, 1.0, status="diverged", seconds=0.1, tokens=1),
        result("k=v", 1e-3, 0, 1.0, 1.0, status="diverged", tokens=3),
    ]
    assert sum_up_ledger(results, "stdlib", "standard", spec.lrs) == {
        "parameters": 100,
        "training_flops": 1e6,
        "tokens": 10,
        "seconds": 3.0,
        "tokens_per_second": 5.0,
        "peak_memory_bytes": 200,
        "cache_bytes_per_token": 64,
        "learning_rates": [1e-3, 3e-3],
        "runs": 3,
        "diverged": 1,
    }
    other = sum_up_ledger(results, "stdlib", "k=v", spec.lrs)
    assert (other["runs"], other["diverged"], other["tokens"]) == (1, 1, 3)
    none = sum_up_ledger(results, "elsewhere", "standard", spec.lrs)
    assert (none["runs"], none["seconds"]) == (0, None)
