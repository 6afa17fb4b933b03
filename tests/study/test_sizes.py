"""Studies of several sizes and corpora: what is planned, what is refused, and what is said across them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_study import InProcess

from qklab import register
from qklab.cli.study import StudyCommand
from qklab.schema import SpecError
from qklab.study import execute
from qklab.study.across import AcrossFindings, compare_across
from qklab.study.answer import write_across
from qklab.study.compare import plan_sizes
from qklab.study.parts import StudyPart, find_size_folder
from qklab.study.plan import plan_tuning_runs
from qklab.study.records import RunResult
from qklab.study.request import ComparisonRequest
from qklab.study.sizes import split_sizes
from qklab.study.spec import StudyError, StudySpec

SIZES = [
    {"name": "small", "model": {"layers": 1, "width": 16}, "tokens_per_parameter": 2},
    {"name": "middle", "model": {"layers": 2, "width": 32}},
    {"name": "large", "model": {"layers": 4, "width": 64}},
]


def make_spec(**changes: Any) -> StudySpec:
    values = {
        "name": "sized",
        "baseline": "standard",
        "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}, "q=k": {"attention": {"share": "q=k"}}},
        "base": {"model": {"context": 16}, "corpus": {"tokenizer": "bytes"}, "batch": {"sequences": 2}},
        "lrs": [1e-3],
        "seeds": 4,
        "tuning_seeds": 4,
        "sizes": SIZES,
    }
    return StudySpec.from_dict(values | changes)


# The plan


def test_every_size_is_a_study_of_its_own() -> None:
    parts = split_sizes(make_spec(sizes=[*SIZES[:2], {**SIZES[2], "arms": ["k=v"], "lrs": [1e-3, 1e-2]}]))
    assert [*parts] == ["small", "middle", "large"]
    runs = {size: part.run("standard", "stdlib", 1e-3, 0) for size, part in parts.items()}
    assert [run.model.width for run in runs.values()] == [16, 32, 64]
    assert {run.model.context for run in runs.values()} == {16}
    for size, rate in (("small", 2), ("middle", 10), ("large", 10)):
        assert runs[size].budget.tokens == rate * runs[size].model.parameters()
    assert [*parts["large"].arms] == ["standard", "k=v"]
    assert (parts["large"].lrs, parts["middle"].lrs) == ([1e-3, 1e-2], [1e-3])
    assert not parts["large"].sizes


def test_names_of_the_ladder_bring_their_settings_and_learning_rates() -> None:
    spec = make_spec(sizes=["pico", "nano"], lrs=[3e-3], base={"corpus": {"vocab": 2048}})
    parts = split_sizes(spec)
    assert parts["pico"].lrs == [1.5e-3, 3e-3, 6e-3]
    run = parts["nano"].run("standard", "stdlib", 4e-3, 0)
    assert (run.model.layers, run.corpus.vocab) == (4, 2048)  # the study's base lies over the ladder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sizes": ["nano", "micro"], "base": {}}, "sizes nano and micro have different tokenizers (vocab=4,096 and"),
        ({"sizes": ["nano", "micro"], "base": {}}, "set metric='bits_per_byte', or one corpus.vocab"),
        ({"sizes": ["nano", "nano"]}, "must have different names"),
        ({"sizes": [{**SIZES[0], "name": "a/b"}]}, "must have different names of letters, digits"),
        ({"sizes": ["nan"]}, "there is no size 'nan' (did you mean 'nano'?)"),
        ({"sizes": [{"model": {}}]}, "must be a list of sizes, each a name or a table with one"),
        ({"sizes": [{"name": "x", "model": {"layers": 0}}]}, "size x: arm standard: model: layers must be a whole"),
        ({"sizes": [{**SIZES[0], "tokens_per_parameter": 0}]}, "must be a number above 0, but 0 came"),
        ({"sizes": [{**SIZES[0], "arms": ["k-v"]}]}, "small names the arm 'k-v', which is none of standard, k=v"),
        ({"base": {"budget": {"tokens": 5}}}, "leave base.budget out and set tokens_per_parameter"),
    ],
)
def test_sizes_that_do_not_compare_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        split_sizes(make_spec(**changes))
    assert sentence in str(caught.value)


def test_unequal_vocabularies_compare_in_bits_per_byte() -> None:
    parts = split_sizes(make_spec(sizes=["nano", "micro"], base={}, metric="bits_per_byte"))
    assert [part.run("standard", "stdlib", 1e-3, 0).corpus.vocab for part in parts.values()] == [4096, 8192]


def test_compare_plans_sizes_by_tokens_a_parameter() -> None:
    spec = plan_sizes(ComparisonRequest(sizes=("micro", "pico", "nano"), tokens_per_parameter=3.0, seeds=4))
    assert (spec.metric, spec.seeds, spec.margin) == ("bits_per_byte", 4, 0.004)
    for size, part in split_sizes(spec).items():
        part.refuse_illegal()
        run = part.run("standard", "stdlib", part.lrs[0], 0)
        assert run.budget.tokens == 3 * run.model.parameters(), size
        assert len(part.lrs) == 3
        assert part.extend == 2
    assert [*split_sizes(spec)] == ["pico", "nano", "micro"]
    assert plan_sizes(ComparisonRequest(), spec) == spec
    assert plan_sizes(ComparisonRequest(seeds=9), spec).seeds == 9


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"sizes": ("nano",)}, "two or more different ones of pico, nano"),
        ({"sizes": ("nano", "mikro")}, "did you mean 'micro'"),
        ({"sizes": ("nano", "micro"), "minutes": 3.0}, "--minutes has nothing to say"),
        ({"tokens_per_parameter": 3.0}, "--tokens-per-parameter is of --sizes"),
    ],
)
def test_requests_for_sizes_that_cannot_be_met(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        ComparisonRequest(**asked)


# What is said


Effect = Callable[[str, str, str], float]


def make_part(spec: StudySpec, size: str, effect: Effect, diverged: tuple[str, ...] = ()) -> StudyPart:
    """The study at a size as if it had been run: 1 + 3 · (tokens / 10⁴)^−0.2 and `effect(size, corpus, arm)`."""
    results = []
    for planned in plan_tuning_runs(spec):
        run = planned.resolve_spec(spec)
        assert run.steps is not None
        assert run.budget.tokens is not None
        shared, own = np.random.default_rng([planned.seed, len(size)]).normal(0, [0.004, 0.002])
        own = own * (1 + 0.1 * len(planned.arm)) * (planned.arm != spec.baseline)
        loss = 1 + 3 * (run.budget.tokens / 1e4) ** -0.2 + shared + own + effect(size, planned.corpus, planned.arm)
        score = {"loss": loss, "bits_per_byte": loss / 2}
        summary = {
            "evaluation": {"valid": score, "test": score},
            "training_flops": float(run.steps * run.flops_per_step),
            "tokens_per_second": 1000.0 if planned.arm == spec.baseline else 800.0,
            "seconds": 1.0,
        }
        results.append(RunResult(planned, "diverged" if f"{size} {planned.arm}" in diverged else "finished", summary))
    return StudyPart(spec, results, size)


def across(effect: Effect, *, diverged: tuple[str, ...] = (), count: int = 3, **changes: Any) -> AcrossFindings:
    spec = make_spec(**changes)
    parts = split_sizes(spec) if spec.sizes else {"alone": spec}
    return compare_across(spec, [make_part(parts[size], size, effect, diverged) for size in [*parts][:count]])


def shrinking(size: str, corpus: str, arm: str) -> float:
    return {"small": -0.06, "middle": -0.04, "large": -0.02}[size] * (arm == "k=v")


def test_effects_trend_and_speed_up_over_sizes() -> None:
    found = across(shrinking)
    arm = next(each for each in found.sizes if each.arm == "k=v")
    assert [each.effect.estimate for each in arm.effects] == pytest.approx([-0.06, -0.04, -0.02], abs=0.004)
    assert arm.trend is not None
    assert 0 < arm.trend.slope.low < arm.trend.slope.high
    assert arm.trend.parameters == 4 * arm.effects[-1].parameters
    assert [each.size for each in arm.speed_ups] == ["small", "middle", "large"]
    ratio, low, high = arm.speed_ups[0].flops
    assert 1 < low < ratio < (high or 0)
    assert f"at small {ratio:.3g} × ({low:.3g} to {high:.3g}) in FLOPs" in arm.sentences[-1]
    assert arm.speed_ups[0].seconds[0] < ratio  # k=v trains more slowly here
    text = write_across(found)
    assert "an extrapolation, of a straight line, beyond every size that was run." in text
    assert (
        "What standard needs to reach the loss of k=v on stdlib, as a multiple of what k=v took (95 % intervals): at"
        in text
    )
    assert "Without its largest run it foretells" in text
    assert len(found.compute[0].curve) > 20


def test_an_arm_without_effect_has_none() -> None:
    arm = next(each for each in across(shrinking).sizes if each.arm == "q=k")
    assert arm.trend is not None
    assert arm.trend.slope.low < 0 < arm.trend.slope.high
    assert arm.trend.held_out.holds


def test_too_few_sizes_are_one_sentence_and_no_fit() -> None:
    found = across(shrinking, count=2)
    assert [arm.trend for arm in found.sizes] == [None, None]
    assert not any(arm.speed_ups or arm.sentences for arm in found.sizes)
    assert found.compute[0].curve == []
    assert found.notes == [
        "A trend, a curve of loss against compute and speed-ups need 3 sizes, and 2 of 3 have begun: nothing is fitted."
    ]


def test_a_size_at_which_an_arm_diverged_is_left_out_and_told() -> None:
    found = across(shrinking, diverged=("middle k=v",))
    arm = next(each for each in found.sizes if each.arm == "k=v")
    assert [each.place for each in arm.effects] == ["small", "large"]
    assert arm.trend is None
    assert [each.size for each in arm.speed_ups] == ["small", "large"]  # the curve is the baseline's own
    assert "k=v on stdlib at middle is left out: it diverged there, or has one seed." in found.notes


def test_an_effect_that_differs_between_corpora_is_told_with_its_p() -> None:
    def effect(size: str, corpus: str, arm: str) -> float:
        return {"one": -0.05, "two": 0.05}[corpus] * (arm == "k=v")

    plain = {"sizes": (), "corpora": ["one", "two"]}
    base = make_spec().base | {"budget": {"tokens": 4096}}
    found = across(effect, **plain, base=base)
    assert [each.p_holm < 0.05 for each in found.corpora] == [True, False]
    assert found.corpus_metric == "loss"  # bytes are one tokenizer
    assert "k=v at alone: that its effect differs between corpora is shown (p < 0.001 after Holm" in write_across(found)
    assert "q=k at alone: that its effect differs between corpora is not shown" in write_across(found)
    other = across(effect, **plain, base=base | {"corpus": {}})
    assert other.corpus_metric == "bits_per_byte"  # each corpus has its own bpe
    assert other.corpora[0].effects[0].effect.estimate == pytest.approx(-0.025, abs=0.002)


def test_claims_are_judged_over_the_sizes() -> None:
    claim = {"id": "B1", "arm": "k=v", "published": 3.1, "parameters": 300e6, "source": "arXiv 2606.04032"}
    none = across(lambda *_: 0.0, claims=[claim])
    assert none.claims[0].verdict.phrase == "not seen up to large"
    assert "(97.5 % interval" in across(lambda *_: 0.0, claims=[claim, claim | {"id": "B2"}]).claims[0].verdict.sentence
    seen = across(lambda size, _, arm: 0.04 * (arm == "k=v") * (size != "small"), claims=[claim])
    assert seen.claims[0].verdict.phrase == "seen from middle on"
    assert "B1 (arXiv 2606.04032): Seen from middle on" in write_across(seen)
    assert not across(lambda *_: 0.0, sizes=(), base=make_spec().base | {"budget": {"tokens": 4096}}).claims


def test_claims_over_sizes_with_vocabularies_of_their_own_have_a_trend_in_bits_per_byte() -> None:
    claim = {"id": "B1", "arm": "k=v", "published": 3.1, "parameters": 300e6, "source": "arXiv 2606.04032"}
    alike = across(lambda *_: 0.0, claims=[claim]).claims[0].verdict.sentence
    assert "With ten times the parameters" in alike
    assert "bits per byte" not in alike
    base, sizes = make_spec().base | {"corpus": {}}, make_spec().to_dict()["sizes"]
    for k, size in enumerate(sizes):
        size["corpus"] = {"vocab": 512 + k}
    own = across(lambda *_: 0.0, claims=[claim], base=base, sizes=sizes, metric="bits_per_byte")
    assert "bits per byte)." in own.claims[0].verdict.sentence


# From the command line


def test_a_study_of_two_sizes_from_its_file(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[InProcess] = []

    def make(*_: Any) -> InProcess:
        made.append(InProcess())
        return made[-1]

    monkeypatch.setitem(register.executor.entries, "local", make)
    lines = [
        'name = "two"\nbaseline = "standard"\nseeds = 2\nlrs = [1e-2]',
        f'corpora = ["{corpus}"]',
        "[base]\nmodel = {context = 16}\nattention = {heads = 2}\nbatch = {sequences = 2}",
        "evaluation = {times = 1, tokens = 64, probes = 1, probe_tokens = 16}",
        '[[sizes]]\nname = "one"\nmodel = {layers = 1, width = 8}\ntokens_per_parameter = 0.1',
        '[[sizes]]\nname = "two"\nmodel = {layers = 1, width = 16}\ntokens_per_parameter = 0.1',
        '[arms.standard]\n[arms."k=v"]\nattention = {share = "k=v"}',
    ]
    file, out = tmp_path / "two.toml", tmp_path / "out"
    file.write_text("\n".join(lines))
    assert StudyCommand(file, out=str(out)).execute() == 0
    text = capsys.readouterr().out
    assert "need 3 sizes, and 2 of 2 have begun: nothing is fitted." in text
    assert all(len([*find_size_folder(out, size).glob("runs/*/*/*/summary.json")]) == 4 for size in ("one", "two"))
    assert "two, one" in (out / "report.html").read_text(encoding="utf-8")
    assert [len(executor.units) for executor in made] == [4, 4]
    minutes, begin = list[float](), execute.Study.__init__

    def note(self: Any, *given: Any, **settings: Any) -> None:
        minutes.append(settings["minutes"])
        begin(self, *given, **settings)

    monkeypatch.setattr(execute.Study, "__init__", note)
    clock = iter((0.0, 30.0, 150.0))  # after half a minute the first size begins, and two minutes later the second
    monkeypatch.setattr("qklab.cli.study.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert StudyCommand(file, out=str(out), minutes=5.0).execute() == 0
    assert minutes == [4.5, 2.5]  # of one budget
    assert [len(executor.units) for executor in made[2:]] == [0, 0]  # nothing is done twice
    file.write_text("\n".join(lines).replace("width = 16", "width = 24"))
    with pytest.raises(StudyError, match="holds a study that began with base"):
        StudyCommand(file, out=str(out)).execute()
    with pytest.raises(ValueError, match="needs a folder, but s3://bucket/x came"):
        StudyCommand(file, out="s3://bucket/x").execute()
