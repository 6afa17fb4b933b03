"""A comparison for everyone: arms by name, and a model and a budget that fit the machine and the time there is."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qklab import register
from qklab.attention.project import PROJECTIONS
from qklab.data.sources import find_source
from qklab.model.decoder import Decoder
from qklab.model.recipes import recipe
from qklab.schema import suggest_name
from qklab.study.executors import WorkerSlots
from qklab.study.plan import count_runs, plan_tuning_runs
from qklab.study.records import read_result
from qklab.study.spec import StudyError, StudySpec
from qklab.train.objective import Objective
from qklab.train.progress import format_duration
from qklab.train.spec import RunSpec

BASELINE = "standard"
DEFAULT = (BASELINE, "leapfrog", "affine", "k=v", "qk-norm")
# sizes from small to large: settings that all arms share, and the learning rates each arm tries
SIZES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "pico": (
        {
            "model": {"recipe": "nano", "layers": 2, "width": 64, "context": 128, "tied": False},
            "attention": {"heads": 4},
            "corpus": {"vocab": 2048},
            "batch": {"sequences": 4},
            "schedule": {"warmup": 0.2},  # in runs of a few hundred steps much of the spread over seeds comes from less
        },
        (3e-3, 6e-3, 1.2e-2),
    ),
    "nano": ({"model": {"recipe": "nano", "context": 128}, "batch": {"sequences": 8}}, (2e-3, 5e-3)),
    "51m": ({"model": {"recipe": "51m"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 32}}, (1e-3, 3e-3)),
    "124m": ({"model": {"recipe": "124m"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 32}}, (6e-4, 2e-3)),
}
TOGETHER = {"pico": 8, "nano": 8}  # runs that share a GPU: alone they would leave most of it idle
TOKENS_PER_PARAMETER = 2.0  # with fewer a larger model is only further from the end of its training
SPLITS = {"valid": 0.02, "test": 0.03}
START = {"cpu": 2.0, "cuda": 20.0}  # seconds that a run takes beside its steps and evaluations
EVALUATIONS, EVALUATED = 8, 8192  # how often while training, on how many tokens
NEIGHBOURS = {"cpu": 1.0, "cuda": 1.5}  # by how much runs at the same time slow each other down
LEAST_BYTES, BYTES_PER_TOKEN = 8_000_000, 3.0
COMPILED = 3000  # steps of a run on a GPU that make up for the time it takes to compile it
MARGIN = 0.01
MINUTES = 5.0
SEEDS = 5  # with three, Holm over four arms and two analyses ask for a difference three times as large as with five
ANALYSES = 2  # one, and one after more seeds, which the answer itself may propose


def list_arms() -> dict[str, dict[str, Any]]:
    """Every arm that has a name, with the settings it changes: each registered mechanism, and a few others."""
    attention = {
        **{kind: {"coupling": {"kind": kind}} for kind in register.coupling},
        **{share: {"share": share} for share in PROJECTIONS if share != "none"},
        "gqa": {"kv_heads": 2},
        "mqa": {"kv_heads": 1},
        **{f"{norm}-norm": {"norm": norm} for norm in register.norm if norm != "none"},
        **{mix: {"mix": mix} for mix in register.mix if mix != "softmax"},
        "learned-positions": {"position": "learned"},
    }
    arms = {name: {"attention": choices} for name, choices in attention.items()}
    return {BASELINE: {}, **arms, "quack": {"logit_control": {"tau": 1.0}}}


def select_arms(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The named arms, the baseline first."""
    arms = list_arms()
    for name in names:
        if name not in arms:
            raise StudyError(f"there is no arm {name!r}{suggest_name(name, arms)}; there are {', '.join(arms)}.")
    if not set(names) - {BASELINE}:
        raise StudyError(f"a comparison needs an arm besides {BASELINE}; there are {', '.join(arms)}.")
    return {name: arms[name] for name in dict.fromkeys([BASELINE, *names])}


def share_gpus(slots: WorkerSlots, size: str, at_once: int | None) -> WorkerSlots:
    """The slots for runs of a size: small ones share a GPU, unless it was said how many run at once."""
    together = TOGETHER.get(size, 1) if slots.gpus and at_once is None else 1
    cores = slots.count * slots.threads
    count = max(slots.count, min(slots.count * together, cores))
    return dataclasses.replace(slots, count=count, threads=max(1, cores // count))


def plan_comparison(
    texts: Sequence[str],
    *,
    arms: Sequence[str] = DEFAULT,
    minutes: float = MINUTES,
    seeds: int = SEEDS,
    size: str | None = None,
    slots: WorkerSlots,
    at_once: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> StudySpec:
    """The study that answers in about `minutes`: the largest size that gets at least two tokens a parameter, or else
    the smallest; as many tokens as there is time for, the same for every arm."""
    if not 0 < minutes < 1e6:
        raise StudyError(f"minutes must be a number above 0, but {minutes:g} came.")
    if size is not None and size not in SIZES:
        raise StudyError(f"size must be one of {', '.join(SIZES)}{suggest_name(size, SIZES)}, but {size!r} came.")
    select_arms(arms)
    for text in texts:
        find_source(text, data)  # a name that is none is told before anything is measured
    say("measuring how fast this machine trains…")
    device = "cuda" if slots.gpus else "cpu"
    chosen = None
    for name in [size] if size is not None else list(SIZES):
        own = share_gpus(slots, name, at_once)
        study, tokens = plan_size(name, texts, arms, minutes, seeds, own, device)
        parameters = study.run(BASELINE, study.corpora[0], study.lrs[0], 0).model.parameters()
        if chosen is None or tokens >= TOKENS_PER_PARAMETER * parameters:
            chosen = study, tokens, name, own
        else:
            break
    assert chosen is not None
    study, tokens, name, own = chosen
    say(
        f"{len(study.arms)} arms × {len(study.lrs)} learning rates, then {study.seeds} seeds: {count_runs(study)} runs "
        f"of {name} on {tokens:,} tokens each, {own.count} at a time; about {format_duration(60 * minutes)}."
    )
    return study


def refuse_other_comparison(
    study: StudySpec, folder: Path, texts: Sequence[str], arms: Sequence[str] | None, size: str | None
) -> None:
    """Raise if what was asked for is not what the comparison in the folder compares."""
    asked = (
        ("texts", list(texts) if texts else None, study.corpora),
        ("arms", None if arms is None else sorted(select_arms(arms)), sorted(study.arms)),
        ("a size", size, find_size(study)),
    )
    for what, wanted, there in asked:
        if wanted is not None and wanted != there:
            raise StudyError(
                f"{folder} holds a comparison with {what} {join_words(there)}, but {join_words(wanted)} came; what is "
                "compared is fixed once it began, so choose another folder with --out."
            )


def find_size(study: StudySpec) -> str:
    """The size the models of a comparison are of."""
    model = study.run(study.baseline, study.corpora[0], study.lrs[0], 0).model
    shapes = {name: settings["model"] for name, (settings, _) in SIZES.items()}
    for name, shape in shapes.items():
        plain = recipe(shape["recipe"])
        if (model.layers, model.width) == (shape.get("layers", plain.layers), shape.get("width", plain.width)):
            return name
    return "of its own"


def join_words(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ", ".join(names)


def extend_comparison(
    study: StudySpec, folder: Path, slots: WorkerSlots, seeds: int | None, minutes: float | None
) -> StudySpec:
    """The study with so many more seeds, or with as many as fit into the time by what its runs took; at least one."""
    if seeds is None:
        ended = [result for run in plan_tuning_runs(study) if (result := read_result(folder, run)) is not None]
        taken = [result.process_seconds for result in ended]
        if not taken:
            raise StudyError(f"{folder} has no finished run to reckon with; continue it with --seeds, or without both.")
        minutes = MINUTES if minutes is None else minutes
        each = sum(taken) / len(taken) * len(study.arms) * len(study.corpora) / slots.count
        seeds = max(1, int(60 * minutes / each))
    if seeds < 1:
        raise StudyError(f"seeds to add must be a whole number of at least 1, but {seeds} came.")
    return study.replace(seeds=study.seeds + seeds)


def plan_size(
    name: str, texts: Sequence[str], arms: Sequence[str], minutes: float, seeds: int, slots: WorkerSlots, device: str
) -> tuple[StudySpec, int]:
    """The study of a size with as many tokens a run as the time allows, and that number."""
    settings, lrs = SIZES[name]
    values: dict[str, Any] = {
        "name": f"Attention on {', '.join(Path(text).name for text in texts) or 'stdlib'}",
        "baseline": BASELINE,
        "arms": select_arms(arms),
        "corpora": list(texts) or ["stdlib"],
        "lrs": list(lrs),
        "seeds": seeds,
        "margin": MARGIN,
        "analyses": ANALYSES,
    }

    def study(tokens: int) -> StudySpec:
        limit = max(LEAST_BYTES, 8 * tokens)  # so that no run sees text twice, where there is enough
        corpus = settings.get("corpus", {}) | SPLITS | {"limit_bytes": limit}
        often = {"times": EVALUATIONS, "tokens": EVALUATED}
        return StudySpec.from_dict(
            values | {"base": settings | {"corpus": corpus, "budget": {"tokens": tokens}, "evaluation": often}}
        )

    trial = study(2**20)
    runs = {arm: trial.run(arm, trial.corpora[0], trial.lrs[0], 0) for arm in trial.arms}
    each = runs[BASELINE].tokens_per_step
    seconds = [measure_step(run, device, slots.threads) for run in runs.values()]
    step = sum(seconds) / len(seconds)
    evaluated = EVALUATIONS * EVALUATED + (SPLITS["valid"] + SPLITS["test"]) * LEAST_BYTES / BYTES_PER_TOKEN
    beside = START[device] + step * evaluated / each / 3  # a forward pass is a third of a step
    steps = max(20, int((60 * minutes * slots.count / count_runs(trial) - beside) / step))
    return study(steps * each), steps * each


def choose_execution(study: StudySpec) -> dict[str, Any]:
    """How the runs of a comparison are carried out: compiled on a GPU where that pays. The study alone decides, so
    that runs added later are carried out alike."""
    steps = study.run(study.baseline, study.corpora[0], study.lrs[0], 0).steps
    return {"compile": "auto" if steps is None or steps >= COMPILED else "no"}


def measure_step(spec: RunSpec, device: str, threads: int, repeats: int = 5) -> float:
    """How long a training step takes, measured on random tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        objective = Objective(Decoder(spec.model, seed=0).to(device))
        optimiser = torch.optim.AdamW(objective.parameters())
        ids = torch.randint(spec.model.vocab, (spec.batch.sequences, spec.model.context + 1), device=device)
        taken: list[float] = []
        for _ in range(2 + repeats):
            began = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, _ = objective(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            loss.item()
            taken.append(time.perf_counter() - began)
        return NEIGHBOURS[device] * sorted(taken[2:])[repeats // 2]
    finally:
        torch.set_num_threads(before)


def default_comparison_folder(texts: Sequence[str]) -> Path:
    """Where a comparison lives unless told otherwise."""
    return Path("comparisons") / ("-".join(Path(text).name for text in texts) or "stdlib")
