"""A comparison for everyone: a budget fixed by the size of the models, or by the time there is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qklab.data.prepare import refuse_unusable
from qklab.data.spec import DataSpec
from qklab.data.tasks import parse_task
from qklab.runs.progress import format_duration
from qklab.study.arms import BASELINE, DEFAULT, select_arms
from qklab.study.executors import WorkerSlots
from qklab.study.plan import count_runs, write_rounded
from qklab.study.request import ComparisonRequest
from qklab.study.sizes import SIZES, TOKENS_PER_PARAMETER, count_runs_together, measure_arm_speed, share_gpus
from qklab.study.spec import DEFAULT_LR, StudyError, StudySpec
from qklab.study.tuning import add_seeds, choose_tuning_seeds
from qklab.train.spec import FINAL_SHARE, RunSpec

SPLITS = {"valid": 0.02, "test": 0.03}
START = {"cpu": 2.0, "cuda": 20.0}  # seconds that a run takes beside its steps and evaluations
POPULATION_START = 35.0  # seconds until a population makes its first step: a Python of its own, and compiling
OVERTIME = 1.25  # of the minutes asked for: everything has ended by then, learning rates that are added included
EVALUATIONS, EVALUATED = 8, 8192  # how often while training, on how many tokens at most
PROBES = 6  # enough for a curve of how logits grow
LEAST_READ = 16_384  # tokens that tell losses apart by about 0.03
LEAST_BYTES, BYTES_PER_TOKEN = 8_000_000, 8  # more than a token has, and so enough
LEAST_STEPS = 20
MARGIN, MARGIN_IN_BITS = 0.01, 0.004  # nats per token, and about as much in bits per byte
TASK_MARGIN = 1.0  # percentage points of accuracy
TASK_SEQUENCES = 32
EXTEND = 2  # learning rates more at an end where an arm does best
ANALYSES = 2  # one, and one after more seeds, which the answer itself may propose


@dataclass(frozen=True)
class ComparisonPlan:
    """A study that fits the time: so many tokens a run, of models with so many parameters, taking so many seconds."""

    study: StudySpec
    size: str
    slots: WorkerSlots
    tokens: int
    parameters: int
    run_seconds: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def to_record(self, request: ComparisonRequest) -> dict[str, Any]:
        """For study.json: what was asked for, and how long a run is to take."""
        return asdict(request.fill_defaults()) | {"run_seconds": self.run_seconds}

    @property
    def seconds(self) -> float:
        """Of all runs, so many at a time."""
        return self.run_seconds * math.ceil(count_runs(self.study) / self.slots.count)

    def describe(self) -> str:
        study = self.study
        millions, rate = write_rounded(self.parameters / 1e6, 3), write_rounded(self.tokens_per_parameter)
        arms = f"{len(study.arms)} arms" + f" × {len(study.corpora)} corpora" * (len(study.corpora) > 1)
        return (
            f"{arms} × {len(study.lrs)} learning rates × {study.seeds} seeds: {count_runs(study)} runs of {self.size} "
            f"({millions} M parameters) on {self.tokens:,} tokens each, {rate} a parameter, {self.slots.count} at a "
            f"time; about {format_duration(self.seconds)}, evaluation included."
        )


def plan_comparison(
    request: ComparisonRequest,
    *,
    slots: WorkerSlots,
    at_once: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> ComparisonPlan:
    """The study that answers in about the minutes asked for: the largest size that gets ten tokens a parameter, or else
    the smallest; as many tokens as there is time for, the same for every arm. Without minutes the study of a size, on
    as many tokens as that says."""
    request = request.fill_defaults()
    for text in request.texts or ("stdlib",):  # what cannot be used is told before anything is measured
        splits = {} if request.asks_tasks else SPLITS | {"limit_bytes": LEAST_BYTES}
        refuse_unusable(DataSpec(source=text, **splits, **request.reading), data)
    say("measuring how fast this machine trains…")
    chosen: ComparisonPlan | None = None
    for name in [request.size] if request.size is not None else list(SIZES):
        if chosen is not None and chosen.tokens_per_parameter < TOKENS_PER_PARAMETER:
            break  # a larger one gets fewer still, and need not be measured
        plan = plan_size(name, request, slots, at_once)
        if chosen is not None and plan.tokens_per_parameter < TOKENS_PER_PARAMETER:
            break
        chosen = plan
    assert chosen is not None
    say(chosen.describe())
    if request.minutes is not None and chosen.seconds > OVERTIME * 60 * request.minutes:
        say(
            f"That is more than the {request.minutes:g} min asked for, and runs of fewer than {LEAST_STEPS} steps say "
            "nothing; fewer --arms, --seeds or texts take less."
        )
    if chosen.tokens_per_parameter < TOKENS_PER_PARAMETER:
        rate = write_rounded(chosen.tokens_per_parameter)
        say(
            f"{rate} tokens a parameter are fewer than the {TOKENS_PER_PARAMETER:g} that show most of what a model of "
            f"this size can learn; {'' if request.minutes is None else 'more '}--minutes give it more."
        )
    return chosen


def plan_size(size: str, request: ComparisonRequest, slots: WorkerSlots, at_once: int | None) -> ComparisonPlan:
    """The study of a size with as many tokens a run as the time allows, evaluation and all, or as the size says."""
    trial = make_study(size, request, 2**20)
    runs = [trial.run(arm, trial.corpora[0], trial.lrs[0], 0) for arm in trial.arms]
    each, parameters, own = runs[0].tokens_per_step, runs[0].model.parameters(), trial.tuning_seeds * len(trial.lrs)
    together = min(count_runs_together(run, slots, own) for run in runs)
    slots = choose_slots(slots, runs[0], at_once, request.minutes is None)
    speeds = [measure_arm_speed(run, slots, own) for run in runs]
    speed = len(speeds) / sum(1 / each for each in speeds)  # every arm trains on as many tokens
    rounds = math.ceil(len(runs) * len(trial.corpora) * math.ceil(own / together) / slots.count)

    def seconds(tokens: int, starts: int = 1) -> float:
        """Of a run; of populations so many starts are waited for, since most begin while another is trained."""
        final = choose_final_tokens(request, tokens)
        whole = sum(SPLITS.values()) * choose_limit(tokens) / 3  # tokens that validation and test have at most
        read = EVALUATIONS * choose_evaluated(tokens) + (min(2 * final, whole) if final else whole)
        beside = starts * POPULATION_START * slots.count / count_runs(trial) if together > 1 else START[slots.device]
        return beside + (tokens + read / 3) * slots.count / speed  # a forward pass is a third of a step

    def fits(tokens: int, allowed: float) -> bool:
        """Whether it ends in time, and by OVERTIME with one more learning rate, and where every start is waited for."""
        more = 1 + 1 / len(trial.lrs) if trial.extend else 1.0
        return max(1.0, more / OVERTIME) * seconds(tokens) <= allowed >= seconds(tokens, rounds) / OVERTIME

    low = max(LEAST_STEPS * each, int(SIZES[size].tokens_per_parameter * parameters))
    if request.minutes is not None:
        allowed = 60 * request.minutes * slots.count / count_runs(trial)  # seconds for each run
        low, high = LEAST_STEPS * each, int(allowed * speed / slots.count)
        while high - low > each:
            tokens = (low + high) // 2
            low, high = (tokens, high) if fits(tokens, allowed) else (low, tokens)
    tokens = low // each * each
    return ComparisonPlan(make_study(size, request, tokens), size, slots, tokens, parameters, seconds(tokens))


def choose_slots(slots: WorkerSlots, run: RunSpec, at_once: int | None, by_size: bool) -> WorkerSlots:
    """The slots for runs like this one. Where the size fixes the comparison a run on a CPU has one thread, since sums
    are rounded differently with more."""
    slots = share_gpus(slots, run, at_once)
    return replace(slots, threads=1) if by_size and not slots.gpus else slots


def choose_final_tokens(request: ComparisonRequest, tokens: int) -> int:
    """How many tokens of validation and of test a run of so many tokens reads at its end; 0: all."""
    return max(LEAST_READ, tokens // FINAL_SHARE) if request.final_tokens is None else request.final_tokens


def choose_evaluated(tokens: int) -> int:
    """How many tokens an evaluation during a run of so many reads: all of them together no more than an eighth."""
    return max(1024, min(EVALUATED, tokens // (FINAL_SHARE * EVALUATIONS)))


def choose_limit(tokens: int) -> int:
    """Bytes of training text for runs of so many tokens: none of it is seen twice, where there is enough."""
    return max(LEAST_BYTES, BYTES_PER_TOKEN * tokens)


def make_study(size: str, request: ComparisonRequest, tokens: int) -> StudySpec:
    """The study of a size with so many tokens a run."""
    seeds = request.fill_defaults().seeds
    assert seeds is not None
    settings = SIZES[size].settings
    evaluation = {
        "probes": PROBES,
        "times": EVALUATIONS,
        "tokens": choose_evaluated(tokens),
        "final_tokens": choose_final_tokens(request, tokens),
    }
    corpus = settings.get("corpus", {}) | SPLITS | request.reading | {"limit_bytes": choose_limit(tokens)}
    base = settings | {"corpus": corpus, "budget": {"tokens": tokens}, "evaluation": evaluation}
    if request.asks_tasks:
        base = adapt_to_tasks(base, request.texts)
    return StudySpec.from_dict(
        {
            "name": f"Attention on {', '.join(Path(text).name for text in request.texts) or 'stdlib'}",
            "baseline": BASELINE,
            "arms": select_arms(request.arms or DEFAULT),
            "corpora": list(request.texts) or ["stdlib"],
            "lrs": list(SIZES[size].lrs),
            "extend": EXTEND if len(SIZES[size].lrs) > 1 else 0,
            "seeds": seeds,
            "tuning_seeds": choose_tuning_seeds(seeds),
            "metric": "accuracy" if request.asks_tasks else "loss",
            "margin": TASK_MARGIN if request.asks_tasks else MARGIN,
            "analyses": ANALYSES,
            "base": base,
        }
    )


def adapt_to_tasks(base: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Settings for text as they are for tasks, which have a length and symbols of their own; models see both ways where
    one of the tasks asks for what comes later."""
    model = {name: value for name, value in base["model"].items() if name != "context"}
    ahead = any(task.sees_ahead for name in tasks if (task := parse_task(name)) is not None)
    attention = base.get("attention", {}) | ({"causal": False} if ahead else {})
    kept = {name: value for name, value in base.items() if name != "corpus"}
    return kept | {"model": model, "attention": attention, "batch": {"sequences": TASK_SEQUENCES}}


def plan_sizes(request: ComparisonRequest, known: StudySpec | None = None) -> StudySpec:
    """The comparison at several sizes of the ladder, each with its own vocabulary, context and learning rates and as
    many tokens a parameter: in bits per byte, since nats per token of different vocabularies do not compare.

    `known`: the one that the folder holds, which is gone on with where the sizes are left open.
    """
    if known is not None and not known.sizes:
        raise StudyError("the folder holds a comparison at one size; choose another with --out.")
    seeds = request.seeds if request.seeds is not None or known is None else known.seeds
    if request.sizes is None:
        assert known is not None
        return known if request.seeds is None else add_seeds(known, request.seeds)
    rate, entries = request.tokens_per_parameter or TOKENS_PER_PARAMETER, list[dict[str, Any]]()
    for size in sorted(request.sizes, key=[*SIZES].index):
        trial = make_study(size, request, 2**20)
        base = make_study(size, request, round(rate * trial.first_run.model.parameters())).base
        own = {"corpus": {"limit_bytes": base["corpus"]["limit_bytes"]}, "evaluation": base["evaluation"]}
        entries.append({"name": size, "tokens_per_parameter": rate, "extend": trial.extend} | own)
    values = make_study(entries[0]["name"], replace(request, seeds=seeds), 2**20).to_dict()
    own = {"lrs": [DEFAULT_LR], "extend": 0, "base": {"corpus": SPLITS | request.reading}, "sizes": entries}
    return StudySpec.from_dict(values | own | {"metric": "bits_per_byte", "margin": MARGIN_IN_BITS})
