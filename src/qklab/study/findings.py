"""What the runs of a study on one corpus say so far: learning rates, verdicts, what each arm took, what is open."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from qklab.runs.progress import format_duration
from qklab.study.learned import describe_learning_state, describe_pace, has_barely_learned
from qklab.study.metrics import Metric, find_metric
from qklab.study.plan import count_runs, plan_confirming_runs, plan_tuning_runs, write_number, write_rounded
from qklab.study.records import LOST, Analyses, RunResult, collect_values, select_rate, sum_up_benchmarks, sum_up_ledger
from qklab.study.spec import StudySpec
from qklab.study.stats.groups import average_over_tasks
from qklab.study.stats.paired import false_alarm_bound, find_outlier
from qklab.study.tuning import ArmTuning, add_seeds, choose_learning_rates, describe_tuning, find_grids
from qklab.study.verdict import Verdict, judge_arms

ALIKE = 0.02  # costs that differ by less are called the same: clocks and allocators are no more exact


@dataclass
class Findings:
    """By name of the arm. `values` are the metric on test text by seed, over the seeds all arms are compared at;
    `chance` is its value where nothing has been learned, if it has one; `settling` says what would settle open cases,
    and `command` does it; `notes` say what could not be found, or only with a reservation, and why."""

    corpus: str
    metric: str = "loss"
    lrs: dict[str, float | None] = field(default_factory=dict)
    grid: list[float] = field(default_factory=list)
    tuning: dict[str, ArmTuning] = field(default_factory=dict)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    chance: float | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    ledgers: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: dict[str, str] = field(default_factory=dict)
    headline: str = ""
    settling: str = ""
    command: str = ""
    notes: list[str] = field(default_factory=list)
    planned: int = 0


def derive_findings(
    study: StudySpec, results: Sequence[RunResult], corpus: str, analyses: Analyses | None = None
) -> Findings:
    """What a study, finished or not, says on a corpus: each arm at the learning rate that validation text chose."""
    analyses = Analyses() if analyses is None else analyses
    lrs, grids = choose_learning_rates(study, results), find_grids(study, results)
    tuning = list(plan_tuning_runs(study, grids))
    missing = {*tuning} - {result.planned for result in results}
    untuned = [arm for arm in study.arms if any((run.corpus, run.arm) == (corpus, arm) for run in missing)]
    findings = Findings(
        corpus,
        study.metric,
        lrs={arm: lrs[corpus, arm] for arm in study.arms},
        grid=grids[corpus].lrs,
        tuning=describe_tuning(study, results, corpus),
        ledgers={arm: sum_up_ledger(results, corpus, arm, grids[corpus].lrs) for arm in study.arms},
        planned=sum(run.corpus == corpus for run in [*tuning, *plan_confirming_runs(study, lrs)]),
    )
    for arm, took in findings.ledgers.items():
        took["benchmarks"] = sum_up_benchmarks(results, corpus, arm, findings.lrs[arm])
    findings.costs = compare_costs(study, findings.ledgers)
    findings.chance = find_chance(find_metric(study.metric), results, corpus)
    hopeless = [arm for arm in study.arms if findings.lrs[arm] is None and arm not in untuned]
    begun = {arm: own for arm in study.arms if (own := collect_values(study, results, lrs, corpus, arm))}
    if untuned:
        findings.notes.append(f"Learning rates are still being tried for {join_names(untuned)}.")
    missing = [arm for arm in study.arms if arm not in begun and arm not in hopeless]
    seeds = set.intersection(*({*own} for own in begun.values())) if begun else set[int]()
    compared = [arm for arm in (*begun, *hopeless) if arm != study.baseline]
    if study.baseline in hopeless:
        findings.headline = f"{study.baseline} diverged at every learning rate on {corpus}: there is no baseline"
        findings.notes.append(f"Nothing can be compared with {study.baseline}; try lower learning rates in lrs.")
    elif study.baseline not in begun or not compared or not seeds:
        findings.headline = f"Nothing to compare on {corpus} yet"
        findings.notes.append("A comparison needs a seed that has ended in every arm that has begun.")
    else:
        if missing:
            findings.notes.append(f"No result yet of {join_names(missing)}.")
        failed = dict.fromkeys(sorted(seeds), math.inf)
        findings.values = {
            arm: failed if arm in hopeless else {seed: begun[arm][seed] for seed in sorted(seeds)}
            for arm in (study.baseline, *compared)
        }
        add_verdicts(study, results, findings, hopeless, analyses)
    return findings


def average_corpora(study: StudySpec, findings: Sequence[Findings]) -> Findings | None:
    """What is found on the mean over all corpora, paired by seed; None where that says nothing, or not yet."""
    metric, each = find_metric(study.metric), [own.values for own in findings]
    if len(each) < 2 or not metric.averages or any(own.keys() != set(study.arms) for own in each):
        return None
    means = average_over_tasks([{arm: own[arm] for arm in study.arms} for own in each])
    average = Findings(f"the mean of {len(each)} corpora", study.metric, values=means)
    chances = [own.chance for own in findings if own.chance is not None]
    average.chance = fmean(chances) if len(chances) == len(each) else None
    average.verdicts = judge_study(study, means)
    words = {arm: verdict.verdict for arm, verdict in average.verdicts.items()}
    average.headline = write_headline(words, study.baseline, average.corpus)
    scores = ", ".join(f"{arm} {fmean(own.values()):.2f}" for arm, own in means.items())
    chance = "" if average.chance is None else f", chance {average.chance:.2f}"
    average.notes.append(f"{metric.unit} on average: {scores}{chance}.")
    return average


def find_chance(metric: Metric, results: Sequence[RunResult], corpus: str) -> float | None:
    """The metric's value without reading a sequence: the same for every run that was evaluated on all of test."""
    tests = [r.summary.get("evaluation", {}).get("test", {}) for r in results if r.planned.corpus == corpus]
    return next((chance for test in tests if (chance := metric.read_chance(test)) is not None), None)


def add_verdicts(
    study: StudySpec, results: Sequence[RunResult], findings: Findings, hopeless: Sequence[str], analyses: Analyses
) -> None:
    """Fill in the verdicts and what follows from them."""
    found = judge_study(study, findings.values)
    rates = ", ".join(map(write_number, findings.grid))
    for arm in hopeless:
        took = findings.ledgers[arm]
        sentence = f"{arm} diverged at every learning rate ({rates}): {took['diverged']} of {took['runs']} runs."
        found[arm] = dataclasses.replace(found[arm], sentence=sentence)
    findings.verdicts = found
    words = {arm: verdict.verdict for arm, verdict in found.items()}
    base = select_rate(results, findings.corpus, study.baseline, findings.lrs[study.baseline])
    barely = ", with models that have barely learned" * has_barely_learned(base)
    findings.headline = write_headline(words, study.baseline, findings.corpus + barely)
    findings.notes += describe_learning_state(base, study.baseline)
    if pace := describe_pace(results, analyses.run_seconds):
        findings.notes.append(pace)
    note_grid_ends(findings)
    note_outliers(findings, study.baseline)
    propose_seeds(study, results, findings, analyses)
    taken = len(analyses.taken)
    if any(analysis.at == LOST for analysis in analyses.taken):
        findings.notes.append("analyses.json was lost; how often the study was judged is known from study.json.")
    if taken > study.analyses:
        bound, seeds = false_alarm_bound(study.alpha, study.analyses, taken), [str(n) for n in analyses.seeds]
        findings.notes.append(
            f"The study has been judged {taken} times, at {join_names(seeds)} seeds, and was planned for "
            f"{study.analyses} (analyses): the chance of a false alarm is up to {100 * bound:.3g} % instead of "
            f"{100 * study.alpha:.3g} %."
        )


def judge_study(study: StudySpec, values: Mapping[str, Mapping[int, float]]) -> dict[str, Verdict]:
    """The verdicts on arms with these values by seed, by what the study fixed."""
    return judge_arms(
        {arm: own for arm, own in values.items() if arm != study.baseline},
        values[study.baseline],
        study.margin,
        name=study.baseline,
        alpha=study.alpha,
        metric=find_metric(study.metric),
        analyses=study.analyses,
        family=len(study.arms) - 1,
    )


def write_headline(words: Mapping[str, str], baseline: str, corpus: str) -> str:
    """The verdicts in one line."""
    of = {word: [arm for arm, own in words.items() if own == word] for word in set(words.values())}
    parts: list[str] = []
    if "better" in of:
        parts.append(f"{join_names(of['better'])} {'beats' if len(of['better']) == 1 else 'beat'} {baseline}")
    if "equivalent" in of:
        parts.append(
            f"{join_names(of['equivalent'])} {'does' if len(of['equivalent']) == 1 else 'do'} as well as {baseline}"
        )
    if "worse" in of:
        parts.append(f"{join_names(of['worse'])} {'is' if len(of['worse']) == 1 else 'are'} worse than {baseline}")
    if "diverged" in of:
        parts.append(f"{join_names(of['diverged'])} diverged")
    if "open" in of:
        verb = "differs" if len(of["open"]) == 1 else "differ"
        parts.append(f"whether {join_names(of['open'])} {verb} from {baseline} is open")
    if "one seed" in of:
        parts.append(f"{join_names(of['one seed'])}: one seed, an anecdote")
    return f"On {corpus}, " + "; ".join(parts)


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def propose_seeds(study: StudySpec, results: Sequence[RunResult], findings: Findings, analyses: Analyses) -> None:
    """Say what would settle the open cases, how long it would take, and with which command."""
    wanted: dict[int, list[str]] = {}
    never: list[str] = []
    rough: dict[int, str] = {}
    for arm, verdict in findings.verdicts.items():
        plan = verdict.plan
        more = 2 if verdict.verdict == "one seed" else plan.more if plan is not None else 0
        if more is None:
            never.append(arm)
        elif more:
            wanted.setdefault(more, []).append(arm)
        if more and plan is not None:
            rough[more] = f" (from {plan.few} to {plan.many or f'more than {plan.cap}'})"
    parts: list[str] = []
    for more in sorted(wanted):
        seeds = "1 more seed" if more == 1 else f"{more} more seeds"
        time = format_duration(estimate_seconds(study, results, more, analyses))
        parts.append(f"{join_names(wanted[more])}: {seeds}{rough.get(more, '')}, about {time}")
    sentences = [f"What would settle it: {'; '.join(parts)}."] if parts else []
    if never:
        sentences.append(f"Not even 100 more seeds would settle {join_names(never)}.")
    looks = len({*analyses.seeds, study.seeds}) + 1
    if wanted and looks > study.analyses:
        bound = false_alarm_bound(study.alpha, study.analyses, looks)
        sentences.append(
            f"The study was planned to be judged {name_times(study.analyses)}, and that would be analysis {looks}: the "
            f"chance of a false alarm is then up to {100 * bound:.3g} % instead of {100 * study.alpha:.3g} %."
        )
    findings.settling = " ".join(sentences)
    if wanted and analyses.command:
        findings.command = analyses.write_command(study.seeds + min(wanted))


def name_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def note_grid_ends(findings: Findings) -> None:
    """Name arms whose best learning rate may lie beyond those that were tried."""
    grid = findings.grid
    arms = [arm for arm, lr in findings.lrs.items() if lr in (grid[0], grid[-1])]
    if arms and len(grid) > 2:
        tried = (
            f"{join_names(arms)} did best at an end of the learning rates tried ({', '.join(map(write_number, grid))})"
        )
        findings.notes.append(f"{tried}: another might do better still.")


def note_outliers(findings: Findings, baseline: str) -> None:
    """Name seeds that alone make an interval wide: there is something to look at before more seeds are bought."""
    for arm, verdict in findings.verdicts.items():
        differences = {
            seed: own - findings.values[baseline][seed]
            for seed, own in findings.values[arm].items()
            if math.isfinite(own) and math.isfinite(findings.values[baseline][seed])
        }
        found = find_outlier(differences) if verdict.paired is not None else None
        if found is not None:
            seed, wider = found
            findings.notes.append(
                f"Seed {seed} of {arm} lies far from the others ({differences[seed]:+.3g}) and makes the interval "
                f"{write_rounded(wider)} times as wide: look at that run and the baseline's before adding seeds."
            )


def estimate_seconds(study: StudySpec, results: Sequence[RunResult], more: int, analyses: Analyses) -> float:
    """How long so many more seeds of every arm would take, by what runs took so far."""
    each = [result.process_seconds for result in results]
    runs = more * len(study.arms) * len(study.corpora)
    if analyses.continues:
        runs = count_runs(add_seeds(study, study.seeds + more)) - count_runs(study)
    return runs * sum(each) / max(1, len(each)) / min(runs, analyses.at_once)


def compare_costs(study: StudySpec, ledgers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Arm → what it costs beside the baseline in time, memory and cache."""
    base, found = ledgers[study.baseline], dict[str, str]()
    for arm, own in ledgers.items():
        if arm == study.baseline or not own["runs"] or not base["runs"]:
            continue
        parts = [
            describe_cost_change("time per token", base["tokens_per_second"], own["tokens_per_second"]),
            describe_cost_change("peak memory", own["peak_memory_bytes"], base["peak_memory_bytes"]),
            describe_cost_change("cache", own["cache_bytes_per_token"], base["cache_bytes_per_token"]),
            describe_cost_change("parameters", own["parameters"], base["parameters"], exact=True, fewer="fewer"),
        ]
        alike = [name for name, change in parts if change is None]
        differ = [f"{change} {name}" for name, change in parts if change is not None]
        same = [f"the same {join_names(alike)}"] if alike else []
        found[arm] = f"{arm} takes {join_names(differ + same)}."
    return found


def describe_cost_change(
    name: str, own: float | None, base: float | None, exact: bool = False, fewer: str = "less"
) -> tuple[str, str | None]:
    """By how much more or less; None where it is the same, or not known."""
    if not own or not base or abs(own / base - 1) < (5e-4 if exact else ALIKE):
        return name, None
    per_cent = 100 * (own / base - 1)
    size = f"{abs(per_cent):.0f}" if abs(per_cent) >= 1 else f"{abs(per_cent):.1f}"
    return name, f"{size} % {'more' if per_cent > 0 else fewer}"
