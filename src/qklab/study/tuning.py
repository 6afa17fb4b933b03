"""Learning rates: which every arm tries, which is chosen for it, how surely, and how much depends on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qklab.study.metrics import find_metric
from qklab.study.plan import RateGrid
from qklab.study.records import RunResult
from qklab.study.spec import StudySpec
from qklab.study.stats.tuning import RateSensitivity, find_best_rates, measure_sensitivity

Losses = Mapping[tuple[str, float], Mapping[int, float]]  # (arm, learning rate) → seed → validation loss


def choose_tuning_seeds(seeds: int) -> int:
    """How many seeds try every learning rate: where few choose for many, a wrong choice that all share makes false
    alarms, and where three quarters do no more than where all do."""
    return max(min(seeds, 5), math.ceil(3 * seeds / 4))


def add_seeds(spec: StudySpec, seeds: int) -> StudySpec:
    """The study with so many seeds; those that are added tune too, as far as a new comparison's would, since a rate
    that few chose for many makes false alarms."""
    if seeds == spec.seeds:
        return spec
    within = max if seeds > spec.seeds else min
    return spec.replace(seeds=seeds, tuning_seeds=within(spec.tuning_seeds, choose_tuning_seeds(seeds)))


def collect_tuning_losses(study: StudySpec, results: Sequence[RunResult], corpus: str) -> Losses:
    """The validation losses of the seeds that tune; inf where a run diverged."""
    loss, found = find_metric("loss"), dict[tuple[str, float], dict[int, float]]()
    for result in results:
        planned = result.planned
        if planned.corpus == corpus and planned.seed < study.tuning_seeds:
            found.setdefault((planned.arm, planned.lr), {})[planned.seed] = result.value(loss, "valid")
    return found


def find_grids(study: StudySpec, results: Sequence[RunResult]) -> dict[str, RateGrid]:
    """Corpus → its grid as far as the results extend it."""
    return {corpus: find_grid(study, collect_tuning_losses(study, results, corpus)) for corpus in study.corpora}


def find_grid(study: StudySpec, losses: Losses) -> RateGrid:
    """The grid of a corpus: as long as an arm's best learning rate is at an end, it goes on there for all arms, by its
    own ratio, at most `extend` times at each end. An arm that diverged at every rate has its best at the lower end.

    A round begins when every arm has ended the one before, so that neither the order of runs nor who did them decides;
    within a round an end that one arm asks for is certain, and the others need not be waited for.
    """
    widest = study.widest_grid
    low, high = study.extend, len(widest) - study.extend
    while True:
        grid = widest[low:high]
        ended = [arm for arm in study.arms if all(len(losses.get((arm, lr), ())) == study.tuning_seeds for lr in grid)]
        best = {choose_rate(losses, arm, grid) for arm in ended}
        lower, higher = low > 0 and not best.isdisjoint({None, grid[0]}), high < len(widest) and grid[-1] in best
        if not (lower or higher):
            cannot_grow = low == 0 and high == len(widest)
            return RateGrid(grid, cannot_grow or len(ended) == len(study.arms))
        low, high = low - lower, high + higher
        if len(ended) < len(study.arms):
            return RateGrid(widest[low:high], False)


def choose_rate(losses: Losses, arm: str, grid: Sequence[float]) -> float | None:
    """The learning rate with the lowest mean validation loss; None if at every one some run diverged."""
    means: dict[float, float] = {}
    for lr in grid:
        own = losses.get((arm, lr), {}).values()
        means[lr] = sum(own) / len(own) if own else math.inf
    best = min(means, key=lambda lr: means[lr])
    return best if math.isfinite(means[best]) else None


def choose_learning_rates(study: StudySpec, results: Sequence[RunResult]) -> dict[tuple[str, str], float | None]:
    """(corpus, arm) → the learning rate with the lowest mean validation loss over the seeds that tune; None if at every
    learning rate some run diverged."""
    chosen: dict[tuple[str, str], float | None] = {}
    for corpus in study.corpora:
        losses = collect_tuning_losses(study, results, corpus)
        grid = find_grid(study, losses).lrs
        chosen |= {(corpus, arm): choose_rate(losses, arm, grid) for arm in study.arms}
    return chosen


@dataclass(frozen=True)
class ArmTuning:
    """What the grid says of an arm; `best`: the learning rates among which the seeds show its best to be, None where
    fewer than two tried them all; `sensitivity`: how much it loses where the rate is not the best."""

    best: list[float] | None
    sensitivity: RateSensitivity | None


def describe_tuning(study: StudySpec, results: Sequence[RunResult], corpus: str) -> dict[str, ArmTuning]:
    """What is known of every arm from the seeds that tried the whole grid."""
    losses = collect_tuning_losses(study, results, corpus)
    grid = find_grid(study, losses).lrs
    found: dict[str, ArmTuning] = {}
    for arm in study.arms:
        lr, tried = choose_rate(losses, arm, grid), [losses.get((arm, lr), {}) for lr in grid]
        whole = sorted(set.intersection(*({*own} for own in tried)))
        if lr is None or not whole or len(grid) < 2:
            found[arm] = ArmTuning(None, None)
            continue
        values, chosen = [[own[seed] for own in tried] for seed in whole], grid.index(lr)
        untrained = math.log(study.run(arm, corpus, lr, 0).model.vocab)  # where every token is as likely as any other
        best = [grid[k] for k in find_best_rates(values, chosen, study.alpha)] if len(whole) > 1 else None
        found[arm] = ArmTuning(best, measure_sensitivity(values, chosen, untrained, study.alpha))
    return found
