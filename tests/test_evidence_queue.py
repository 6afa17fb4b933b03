"""The queue of the evidence: every plan can be run, and what is done of them when."""

import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import torch

from evidence_scripts import ROOT, load_build, load_script, read_records
from qklab.model.decoder import Decoder
from qklab.model.stack import stack
from qklab.optim.population import PopulationOptimiser
from qklab.runs.progress import Display
from qklab.study.execute import Study
from qklab.study.executors.local import LocalExecutor
from qklab.study.executors.worker import perform_runs
from qklab.study.plan import PlannedRun
from qklab.study.spec import read_study
from qklab.train.objective import Objective
from qklab.train.population import LARGEST, choose_population_size, describe_shape

EVIDENCE = ROOT / "evidence"
ORDER_SCRIPT, RUN_SCRIPT = load_script(EVIDENCE / "order.py"), load_script(EVIDENCE / "run.py")
PLANNED = ORDER_SCRIPT.read_order(EVIDENCE)
OWN = [(name, arm) for name, own in PLANNED.items() for arm in own.spec.arms if own.find_origin(arm, PLANNED) == name]


def test_every_arm_of_the_order_is_one_population_and_those_taken_over_are_the_same_runs() -> None:
    for name, study in PLANNED.items():
        spec = study.spec
        assert (len(spec.lrs) >= 3, spec.tuning_seeds, spec.extend) == (True, spec.seeds, 1), name
        for arm in spec.arms:
            ends = (spec.widest_grid[0], 0), (spec.widest_grid[-1], spec.seeds - 1)
            runs = [spec.run(arm, spec.corpora[0], lr, seed) for lr, seed in ends]
            assert describe_shape(runs[0]) == describe_shape(runs[1])
            origin = PLANNED[study.find_origin(arm, PLANNED)]
            if origin is not study:
                assert runs[0] == origin.spec.run(arm, spec.corpora[0], spec.widest_grid[0], 0), (name, arm)
                continue
            together = study.population or ("auto" if runs[0].model.parameters() < LARGEST else 1)
            expected, layer = study.population or study.runs, runs[0].replace(model=runs[0].model.replace(layers=1))
            assert choose_population_size(layer, "cuda", together, study.runs) == expected, (name, arm)


@pytest.mark.parametrize(("name", "arm"), [pair for pair in OWN if "pico" in pair[0]])
def test_an_arm_of_the_order_trains_as_a_population(name: str, arm: str) -> None:
    """At the smallest size, of which the others have the arms: two steps of one layer, as the plan would have them."""
    spec = PLANNED[name].spec
    for other in (own for own in PLANNED if own.rpartition("-")[0] == name.rpartition("-")[0] and own[-2:] != "4m"):
        assert arm in PLANNED[other].spec.arms
    runs = [spec.run(arm, spec.corpora[0], lr, seed) for lr, seed in zip(spec.lrs, (0, 1), strict=False)]
    models = [Decoder(run.model.replace(layers=1), seed=run.seed) for run in runs]
    objective = Objective(stack(models), 0.0)
    optimiser = PopulationOptimiser([r.optimiser for r in runs], objective.decoder, [r.logit_control for r in runs])
    ids = torch.randint(2048, (2, 1, 9), generator=torch.Generator().manual_seed(0))
    rates, losses = torch.tensor([run.optimiser.lr for run in runs]), []
    for _ in range(2):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = objective(ids[..., :-1], ids[..., 1:])
        loss.sum().backward()
        optimiser.step(rates, torch.tensor([False, False]))
        losses.append(loss.detach())
    assert (losses[1] < losses[0]).all()


def test_every_figure_of_a_claim_is_planned_at_three_sizes() -> None:
    claims = tomllib.loads((EVIDENCE / "claims.toml").read_text(encoding="utf-8"))["claims"]
    for claim in claims:
        for figure in claim["figures"]:
            arms = {figure["arm"], figure.get("baseline", figure["arm"])}
            specs = {name: read_study(EVIDENCE / name / "study.toml") for name in claim["studies"]}
            able = [name for name, spec in specs.items() if arms <= spec.arms.keys()]
            corpora = {corpus for name in able for corpus in specs[name].corpora}
            sizes = {str(specs[name].base["model"]) for name in able}
            assert len(sizes) >= 3, (claim["id"], arms)
            assert figure.get("corpus", specs[able[0]].corpora[0]) in corpora


def test_what_shares_a_card_ends_later() -> None:
    card = ORDER_SCRIPT.SharedCard({"a": [0.0, 2.0]})
    assert card.foresee_end(1.0, 3.0) == pytest.approx(5.0)  # a alone for 1, both for 2, the other alone for 2
    assert card.advance(1.0) == 1.0
    card.left["b"] = [0.0, 3.0]
    card.advance(2.0)
    assert card.take_ended() == ["a"]
    assert card.left == {"b": [0.0, pytest.approx(2.0)]}
    assert card.advance() == pytest.approx(2.0)
    assert ORDER_SCRIPT.SharedCard({}).advance() == 0.0


def test_nothing_is_begun_that_would_not_end_or_keep_others_from_it(tmp_path: Path) -> None:
    for folder in EVIDENCE.glob("*/study.toml"):
        (tmp_path / "evidence" / folder.parent.name).mkdir(parents=True)
        shutil.copy(folder, tmp_path / "evidence" / folder.parent.name)
    order = """
first = [["headline-nano", "standard", "leapfrog"], ["headline-micro", "k=v"], ["sharing-nano-48m", "q=k"]]
[studies]
headline-nano = {minutes = 1.5}
headline-micro = {minutes = 4}
sharing-nano-48m = {minutes = 1.5, begins_with = ["headline-nano"]}
"""
    (tmp_path / "evidence/order.toml").write_text(order)

    def take(minutes: float) -> list[tuple[str, str]]:
        queue = RUN_SCRIPT.Queue(tmp_path / "evidence", tmp_path / "work", None, None, minutes)
        taken = [found for _ in range(2) if (found := queue.take()) is not None]
        queue.stop()
        assert queue.take() is None
        return [(study.name, arm) for study, arm, _ in taken]

    # side by side they share the card: 6.3 minutes for nano and micro, 3.8 for two of nano
    assert take(7.0) == [("headline-nano", "standard"), ("headline-micro", "k=v")]
    assert take(6.0) == [("headline-nano", "standard"), ("sharing-nano-48m", "q=k")]
    assert take(4.0) == [("headline-nano", "standard")]
    assert take(2.0) == []


PLAN = """
name = "one"
baseline = "standard"
corpora = ["task:copy?length=16&train=64&valid=16&test=16"]
lrs = [1e-3]
seeds = 1
metric = "accuracy"
[base]
model = {layers = 1, width = 8, mlp = "gelu"}
attention = {heads = 2, causal = false}
batch = {sequences = 16}
budget = {tokens = 256}
evaluation = {probes = 0}
[arms.standard]
[arms."k=v"]
attention = {share = "k=v"}
"""
ORDER = """
first = [["two", "q=k"]]
[studies]
one = {minutes = 0.01}
two = {minutes = 0.01, begins_with = ["one"]}
three = {minutes = 60}
"""


def keep_one_run(folder: Path, arm: str, work: Path) -> None:
    """As another machine has done and kept it."""
    with Study(read_study(folder / "study.toml"), work).open() as study:
        study.prepare_corpora(Display())
        run = PlannedRun(study.spec.corpora[0], arm, study.spec.lrs[0], 0)
        unit = study.make_unit([run], LocalExecutor("cpu", 1))
        assert perform_runs(unit, unit.tasks) == 0
    RUN_SCRIPT.keep.main(work, folder)


@pytest.mark.long
def test_what_lacks_is_done_in_order_and_packed_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    evidence = tmp_path / "evidence"
    other = PLAN.replace('"one"', '"two"').replace("k=v", "q=k")
    for name, plan in (("one", PLAN), ("two", other), ("three", PLAN.replace('"one"', '"three"'))):
        (evidence / name).mkdir(parents=True)
        (evidence / name / "study.toml").write_text(plan)
    (evidence / "order.toml").write_text(ORDER)
    keep_one_run(evidence / "one", "k=v", tmp_path / "earlier")

    def run(*flags: str) -> str:
        """In this process, which has imported everything."""
        monkeypatch.setattr(sys, "argv", ["run.py", "--evidence", str(evidence), *flags])
        heeded = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            RUN_SCRIPT.main()
        finally:
            for number, handler in heeded.items():
                signal.signal(number, handler)
        return capsys.readouterr().out

    def list_places(folder: Path) -> list[str]:
        return [record["place"].partition("/")[2] for record in read_records(folder)]

    assert "three                   0 runs kept, about 120 min missing" in run("--list")
    command = [sys.executable, ROOT / "evidence/run.py", "--evidence", evidence]
    command += ["--minutes", "30", "--lanes", "1", "--out", "new.tar.gz"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # the third would take longer than there is time, and the second one's standard is the first one's to do, of which
    # the other arm is there
    begun = [line.partition(",")[0] for line in told.splitlines() if "min left" in line]
    assert begun == ["two: q=k", "one: standard"]
    with tarfile.open(tmp_path / "new.tar.gz") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    for folder in (evidence, tmp_path / "elsewhere"):
        assert list_places(folder / "one") == ["k=v/lr0.001-seed0", "standard/lr0.001-seed0"]
        assert list_places(folder / "two") == ["q=k/lr0.001-seed0"]
    taken_over = load_build(ROOT / "evidence").Evidence(evidence / "two", ["one"])
    assert sorted(taken_over.parameters) == ["q=k", "standard"]
    shutil.rmtree(tmp_path / "runs")  # another machine, which has the records alone
    assert "nothing new" in run("--minutes", "4")
