"""How well arms do as a task gets harder, over the corpora of a study that are one task with one argument changed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qklab.data.tasks import PREFIX, Task, parse_task
from qklab.study.findings import find_chance
from qklab.study.metrics import Metric, find_metric
from qklab.study.parts import StudyPart
from qklab.study.stats.groups import Contrast, average_groups


@dataclass(frozen=True)
class DifficultyScore:
    """The mean over seeds of an arm's score where the argument is `at`, with its interval."""

    arm: str
    at: int
    seeds: int
    score: Contrast


@dataclass(frozen=True)
class TaskOverDifficulty:
    """A task at one size: the scores of every arm against the argument that changes, and what chance gets right."""

    task: str
    argument: str
    size: str
    metric: str
    scores: list[DifficultyScore]
    chance: list[tuple[int, float]]
    sentence: str


def compare_difficulty(part: StudyPart, level: float) -> list[TaskOverDifficulty]:
    """Of every task that the study has at several difficulties: in the study's metric, or accuracy where that is
    another kind of thing."""
    own = find_metric(part.study.metric)
    metric = own if own.averages else find_metric("accuracy")
    found: list[TaskOverDifficulty] = []
    for task, argument, corpora in find_difficulties(part.study.corpora):
        scores: list[DifficultyScore] = []
        for arm in part.study.arms:
            pairs = {at: part.pair(corpus, arm, metric) for at, corpus in corpora.items()}
            scores += [
                DifficultyScore(arm, at, len(pair.arm), average_groups([pair.arm], level))
                for at, pair in pairs.items()
                if pair is not None and pair.is_sound
            ]
        chances = {at: find_chance(metric, part.results, corpus) for at, corpus in corpora.items()}
        chance = [(at, value) for at, value in chances.items() if value is not None]
        if scores:
            sentence = describe_difficulty(f"{task} at {part.size}", argument, metric, scores, chance)
            found.append(TaskOverDifficulty(task, argument, part.size, metric.name, scores, chance, sentence))
    return found


def find_difficulties(corpora: Sequence[str]) -> Iterator[tuple[str, str, dict[int, str]]]:
    """A task's name, the one argument in which the corpora that have it differ, and by its value these corpora."""
    kinds: dict[str, dict[str, Task]] = {}
    for corpus in corpora:
        if task := parse_task(corpus):
            kinds.setdefault(corpus.removeprefix(PREFIX).partition("?")[0], {})[corpus] = task
    for name, tasks in kinds.items():
        values = {
            field: [getattr(task, field) for task in tasks.values()] for field in next(iter(tasks.values())).to_dict()
        }
        differ = [field for field, own in values.items() if len(set(own)) > 1]
        if len(differ) == 1 and differ != ["seed"] and len(set(values[differ[0]])) == len(tasks):
            yield name, differ[0], dict(sorted(zip(values[differ[0]], tasks, strict=True)))


def describe_difficulty(
    task: str,
    argument: str,
    metric: Metric,
    scores: Sequence[DifficultyScore],
    chance: Sequence[tuple[int, float]],
) -> str:
    def write(values: Sequence[tuple[int, float]]) -> str:
        return ", ".join(f"{value:.1f} at {at}" for at, value in values)

    arms = dict.fromkeys(score.arm for score in scores)
    told = [f"{arm} {write([(own.at, own.score.estimate) for own in scores if own.arm == arm])}" for arm in arms]
    guessed = [f"chance {write(chance)}"] if chance else []
    return f"{task}, {metric.unit} by {argument}: {'; '.join([*told, *guessed])}."
