"""A comparison for everyone: arms by name, and a budget fixed by the size of the models, or by the time there is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qklab import register
from qklab.attention.project import PROJECTIONS
from qklab.data.prepare import refuse_unusable
from qklab.data.spec import DataSpec
from qklab.data.tasks import parse_task
from qklab.runs.progress import format_duration
from qklab.schema import suggest_name
from qklab.study.executors import WorkerSlots
from qklab.study.plan import count_runs, write_rounded
from qklab.study.records import StudyRecord, read_analyses, read_results
from qklab.study.sizes import (
    SIZES,
    TOKENS_PER_PARAMETER,
    Size,
    count_runs_together,
    find_size,
    measure_arm_speed,
    share_gpus,
)
from qklab.study.spec import DEFAULT_LR, StudyError, StudySpec
from qklab.study.tuning import find_grids
from qklab.train.spec import FINAL_SHARE, RunSpec

BASELINE = "standard"
DEFAULT = (BASELINE, "leapfrog", "affine", "k=v", "qk-norm")
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
MINUTES = 5.0  # that --continue adds
SMALLEST = "pico"
EXTEND = 2  # learning rates more at an end where an arm does best
LOCAL = 64  # tokens that every other layer of a hybrid sees: half of the smallest size's context
ANALYSES = 2  # one, and one after more seeds, which the answer itself may propose


@dataclass(frozen=True)
class ComparisonRequest:
    """What a comparison is asked to be, None where that is left open. Without `minutes` the size fixes what runs are
    trained on, and nothing depends on how fast a machine is. `final_tokens`: how much of validation and of
    test is read at the end of a run, 0 for all; `reading`: settings of a corpus that say how its files are read."""

    texts: tuple[str, ...] = ()
    arms: tuple[str, ...] | None = None
    minutes: float | None = None
    seeds: int | None = None
    size: str | None = None
    final_tokens: int | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] | None = None
    tokens_per_parameter: float | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            self.refuse_unusable_sizes(self.sizes)
        elif self.tokens_per_parameter is not None:
            raise StudyError("--tokens-per-parameter is of --sizes; name two sizes or more, or leave it out.")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise StudyError(f"minutes must be a number above 0, but {self.minutes:g} came.")
        if self.size is not None and self.size not in SIZES:
            raise StudyError(
                f"size must be one of {', '.join(SIZES)}{suggest_name(self.size, SIZES)}, but {self.size!r} came."
            )
        if self.arms is not None:
            select_arms(self.arms)

    @property
    def asks_tasks(self) -> bool:
        """Whether it is tasks that are compared on; text and tasks together are refused."""
        tasks = [parse_task(text) for text in self.texts]
        if any(tasks) and not all(tasks):
            raise StudyError("tasks are compared by accuracy and texts by loss, but both came; compare them apart.")
        return any(tasks)

    def refuse_unusable_sizes(self, sizes: tuple[str, ...]) -> None:
        if self.asks_tasks:
            raise StudyError("--sizes compares on text, in bits per byte, but a task came; leave --sizes out.")
        for name, value in (("minutes", self.minutes), ("size", self.size)):
            if value is not None:
                raise StudyError(
                    f"--sizes fixes how many tokens each size gets, so --{name} has nothing to say; leave it out, or "
                    "set --tokens-per-parameter."
                )
        unknown = next((size for size in sizes if size not in SIZES), None)
        if unknown is not None or len({*sizes}) < max(2, len(sizes)):
            came = suggest_name(unknown, SIZES) if unknown is not None else ""
            raise StudyError(
                f"sizes must be two or more different ones of {', '.join(SIZES)}{came}, but {', '.join(sizes)} came."
            )

    def fill_defaults(self) -> "ComparisonRequest":
        """As a comparison is begun; study.json keeps it, by which the same command is known again."""
        by_size = self.minutes is None and self.sizes is None
        size = SMALLEST if by_size and self.size is None else self.size
        own = SIZES[size].seeds if by_size and size is not None else Size.seeds
        return replace(self, size=size, seeds=own if self.seeds is None else self.seeds)


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


def list_arms() -> dict[str, dict[str, Any]]:
    """Every arm that has a name, with the settings it changes: each registered mechanism, and a few others."""
    attention = {
        **{kind: {"coupling": {"kind": kind}} for kind in register.coupling},
        **{share: {"share": share} for share in PROJECTIONS if share != "none"},
        "gqa": {"kv_heads": 2},
        "mqa": {"kv_heads": 1},
        **{f"{norm}-norm": {"norm": norm} for norm in register.norm if norm != "none"},
        **{mix: {"mix": mix} for mix in register.mix if mix != "softmax"},
        **{name: {"layers": name} for name in register.pattern},
        "gate": {"gate": "element"},
        "sinks": {"sinks": True},
        "xsa": {"exclusive": True},
        "hybrid": {"layers": [{"window": LOCAL}, {}]},
        "learned-positions": {"position": "learned"},
        "short-conv": {"short_conv": 4},
        "key-shift": {"key_shift": True, "rope_fraction": 0.5},
    }
    arms = {name: {"attention": choices} for name, choices in attention.items()}
    return {BASELINE: {}, **arms, "quack": {"logit_control": {"tau": 1.0}}}


def select_arms(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The named arms, the baseline first."""
    arms = list_arms()
    for name in names:
        if name not in arms:
            raise StudyError(f"there is no arm {name!r}{suggest_name(name, arms)}; there are {', '.join(arms)}.")
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise StudyError(f"the arm {repeated} came twice; two arms that are the same cannot be compared.")
    if not set(names) - {BASELINE}:
        raise StudyError(f"a comparison needs an arm besides {BASELINE}; there are {', '.join(arms)}.")
    return {name: arms[name] for name in dict.fromkeys([BASELINE, *names])}


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


def choose_tuning_seeds(seeds: int) -> int:
    """How many seeds try every learning rate: where few choose for many, a wrong choice that all share makes false
    alarms, and where three quarters do no more than where all do."""
    return max(min(seeds, 5), math.ceil(3 * seeds / 4))


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
        return known.replace(seeds=seeds)
    rate, entries = request.tokens_per_parameter or TOKENS_PER_PARAMETER, list[dict[str, Any]]()
    for size in sorted(request.sizes, key=[*SIZES].index):
        trial = make_study(size, request, 2**20)
        run = trial.run(trial.baseline, trial.corpora[0], trial.lrs[0], 0)
        base = make_study(size, request, round(rate * run.model.parameters())).base
        own = {"corpus": {"limit_bytes": base["corpus"]["limit_bytes"]}, "evaluation": base["evaluation"]}
        entries.append({"name": size, "tokens_per_parameter": rate, "extend": trial.extend} | own)
    values = make_study(entries[0]["name"], replace(request, seeds=seeds), 2**20).to_dict()
    own = {"lrs": [DEFAULT_LR], "extend": 0, "base": {"corpus": SPLITS | request.reading}, "sizes": entries}
    return StudySpec.from_dict(values | own | {"metric": "bits_per_byte", "margin": MARGIN_IN_BITS})


# A comparison that is there


def refuse_other_request(record: StudyRecord, folder: Path, request: ComparisonRequest) -> None:
    """Raise if the comparison in the folder is not the one that is asked for; what is left open is as it was."""
    refuse_other_comparison(record.spec, folder, request)
    asked, spec = record.asked, record.spec
    for name, there in (("minutes", [asked.get("minutes")]), ("seeds", [asked.get("seeds"), spec.seeds])):
        wanted = getattr(request, name)
        if wanted is not None and wanted not in there:
            fixed = "tokens that its size fixed" if name == "minutes" else f"{spec.seeds} seeds"
            told = fixed if there[0] is None else f"{name}={there[0]:g}"
            raise StudyError(
                f"{folder} holds a comparison of {told}, but {name}={wanted:g} came; to go on with that one leave "
                f"--{name} out, to give it more add --continue, and to begin another choose another folder with --out."
            )


def extend_comparison(record: StudyRecord, folder: Path, request: ComparisonRequest, slots: WorkerSlots) -> StudyRecord:
    """The comparison with so many seeds in all, or with as many more as fit into the minutes by what its runs took.

    What is already planned and not done yet comes first, and the same call again asks for nothing more until it is."""
    spec = record.spec
    refuse_other_comparison(spec, folder, request)
    if request.seeds is not None:
        return StudyRecord(spec.replace(seeds=request.seeds), record.data, record.asked)
    minutes = request.minutes or MINUTES
    done = spec.seeds in read_analyses(folder).seeds
    if not done and (request.minutes is None or record.asked.get("continued") == minutes):
        return record
    ended = read_results(folder, spec)
    taken = [result.process_seconds for result in ended]
    if not taken:
        raise StudyError(
            f"{folder} has no finished run to reckon with; say how many seeds in all with --continue --seeds, or leave "
            "--continue out to go on as planned."
        )
    each = sum(taken) / len(taken) / slots.count
    left = 0 if done else count_runs(spec, find_grids(spec, ended)) - len(ended)
    more = int((60 * minutes / each - left) / len(spec.arms) / len(spec.corpora))
    spec = spec.replace(seeds=spec.seeds + max(int(done), more))
    return StudyRecord(spec, record.data, record.asked | {"continued": minutes})


def refuse_other_comparison(study: StudySpec, folder: Path, request: ComparisonRequest) -> None:
    """Raise if what was asked for is not what the comparison in the folder compares."""
    asked = (
        ("texts", list(request.texts) if request.texts else None, study.corpora),
        ("arms", None if request.arms is None else sorted(select_arms(request.arms)), sorted(study.arms)),
        ("a size", request.size, find_size(study)),
        ("final_tokens", request.final_tokens, study.base["evaluation"].get("final_tokens", 0)),
    )
    kept = study.base["corpus"]
    asked += tuple((name, value, kept.get(name, "left open")) for name, value in request.reading.items())
    for what, wanted, there in asked:
        if wanted is not None and wanted != there:
            raise StudyError(
                f"{folder} holds a comparison with {what} {join_words(there)}, but {join_words(wanted)} came; what is "
                "compared is fixed once it began, so choose another folder with --out."
            )


def join_words(names: str | int | Sequence[str]) -> str:
    return str(names) if isinstance(names, str | int) else ", ".join(names)


def default_comparison_folder(texts: Sequence[str], sizes: Sequence[str] | None = None) -> Path:
    """Where a comparison lives unless told otherwise."""
    return Path("comparisons") / (("-".join(Path(text).name for text in texts) or "stdlib") + "-sizes" * bool(sizes))
