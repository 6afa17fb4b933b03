"""Which runs of a study have ended, which are certain by now, and which of those are missing."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from qklab.data.sources import find_source_path
from qklab.data.spec import DataSpec
from qklab.runs.directory import RunDirectory, RunError
from qklab.study.plan import PlannedRun, RateGrid, count_runs, plan_confirming_runs, plan_tuning_runs
from qklab.study.records import RunResult, read_result
from qklab.study.spec import StudyError, StudySpec
from qklab.study.tuning import choose_learning_rates, find_grids
from qklab.train.resume import refuse_other_spec
from qklab.train.spec import RunSpec

SLACK = 1.1  # by how much longer than others a run may take


class RunSchedule:
    """The runs of a study, as far as the results in its folder make them certain; those of `arms` are ours to do."""

    def __init__(self, spec: StudySpec, folder: Path, data: Path | None, arms: Iterable[str]):
        self.spec, self.folder, self.data, self.arms = spec, folder, data, frozenset(arms)
        self.results: dict[PlannedRun, RunResult] = {}
        self.specs: dict[PlannedRun, RunSpec] = {}

    def resolve(self, planned: PlannedRun) -> RunSpec:
        if planned not in self.specs:
            self.specs[planned] = planned.resolve_spec(self.spec)
        return self.specs[planned]

    def list_corpora(self) -> list[DataSpec]:
        return list(dict.fromkeys(self.resolve(run).corpus for run in plan_tuning_runs(self.spec)))

    def find_result(self, planned: PlannedRun) -> RunResult | None:
        """The result of a run, read once; None while it has not ended. The run must be the one that is meant."""
        if planned not in self.results:
            found = read_result(self.folder, planned)
            if found is None:
                return None
            self.refuse_other_run(planned)
            self.results[planned] = found
        return self.results[planned]

    def refuse_other_run(self, planned: PlannedRun) -> None:
        directory = RunDirectory(planned.folder_in(self.folder))
        old, spec = directory.read()["spec"], self.resolve(planned)
        if spec.precision == "auto":
            spec = spec.replace(precision=old["precision"])
        try:
            refuse_other_spec(directory, old, spec)
        except RunError as error:
            if planned.corpus != "stdlib" and not planned.corpus.startswith("hf:"):
                find_source_path(planned.corpus, self.data)  # a prepared corpus that is gone cannot say what it was
            raise StudyError(f"another run is in the place of {planned.name}; move it away: {error}") from None

    def list_unfinished(self, planned: Iterable[PlannedRun]) -> list[PlannedRun]:
        return [run for run in planned if self.find_result(run) is None]

    def choose_known_rates(self) -> dict[tuple[str, str], float | None]:
        """The learning rates of the arms that are done with tuning."""
        grids, results = self.find_grids(), list(self.results.values())
        undone = {(run.corpus, run.arm) for run in self.plan_tuning() if run not in self.results}
        found = choose_learning_rates(self.spec, results)
        return {key: lr for key, lr in found.items() if key not in undone and grids[key[0]].final}

    def find_grids(self) -> dict[str, RateGrid]:
        return find_grids(self.spec, list(self.results.values()))

    def plan_tuning(self) -> list[PlannedRun]:
        """The runs that tune, as far as results have extended the grids."""
        return list(plan_tuning_runs(self.spec, self.find_grids()))

    def plan_certain_runs(self) -> list[PlannedRun]:
        """The runs that are certain already: those that tune, then the others of arms that are done with tuning."""
        return [*self.plan_tuning(), *plan_confirming_runs(self.spec, self.choose_known_rates())]

    def list_missing_runs(self) -> list[PlannedRun]:
        """The runs that are certain and have not ended; every result that is read may make others certain."""
        known = -1
        missing: list[PlannedRun] = []
        while len(self.results) > known:
            known = len(self.results)
            missing = self.list_unfinished(self.plan_certain_runs())
        return [run for run in missing if run.arm in self.arms]

    def count_runs(self) -> int:
        """How many runs there are as far as is known: an arm that diverged at every learning rate has none beside."""
        hopeless = [key for key, lr in self.choose_known_rates().items() if lr is None]
        planned = count_runs(self.spec, self.find_grids())
        return planned - len(hopeless) * (self.spec.seeds - self.spec.tuning_seeds)

    def estimate_seconds(self, runs: Sequence[PlannedRun]) -> float:
        """How long these runs take in one process, by what runs of their arm took, or all; 0 where none has ended."""
        alike = [result for run, result in self.results.items() if run.arm == runs[0].arm] or self.results.values()
        taken = [result.process_seconds for result in alike]
        return SLACK * len(runs) * sum(taken) / len(taken) if taken else 0.0

    def estimate_wall_clock(self, runs: Sequence[PlannedRun], workers: int) -> float:
        """Seconds until these runs end, by those that ended: what every process takes beside steps, and the steps."""
        ended = list(self.results.values())
        together = max(result.summary.get("population", 1) for result in ended)
        beside = sum(together * (result.process_seconds - result.seconds) for result in ended) / len(ended)
        steps = sum(result.seconds for result in ended) / len(ended)
        starts = len({(run.corpus, run.arm) for run in runs}) if together > 1 else len(runs)
        return SLACK * (starts * beside + len(runs) * steps) / workers
