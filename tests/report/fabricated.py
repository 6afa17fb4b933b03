"""Studies that were never trained: run directories as the trainer writes them, of known effect and noise; and the
settings of small runs that are."""

import base64
import hashlib
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qklab.data.tasks import parse_task
from qklab.study.parts import find_size_folder
from qklab.study.plan import PlannedRun
from qklab.study.records import FORMAT, StudyRecord
from qklab.study.sizes import split_sizes
from qklab.study.spec import StudySpec

ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "k=v": {"attention": {"share": "k=v"}},
    "leapfrog": {"attention": {"coupling": {"kind": "leapfrog"}}},
    "affine": {"attention": {"coupling": {"kind": "affine"}}},
    "qk-norm": {"attention": {"norm": "qk"}},
}
EFFECTS = {"standard": 0.0, "k=v": 0.035, "leapfrog": -0.024, "affine": -0.006, "qk-norm": 0.0005}
NOISE = {"affine": 0.012, "qk-norm": 0.001}
COMMIT, DATA = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210" * 4


CONTEXT, LAYERS, HEADS = 64, 3, 2
TINY: dict[str, Any] = {
    "corpus": {"tokenizer": "bytes"},
    "model": {"layers": LAYERS, "width": 32, "context": CONTEXT, "mlp_ratio": 2.0},
    "attention": {"heads": HEADS},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * CONTEXT * 12},
    "evaluation": {"times": 6, "tokens": 480, "probes": 1, "probe_tokens": 24},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 4, "keep": 4},
}
TrainTiny = Callable[..., Path]


def spec(**changes: Any) -> StudySpec:
    values: dict[str, Any] = {
        "name": "fabricated",
        "baseline": "standard",
        "arms": ARMS,
        "lrs": [1e-3, 3e-3],
        "seeds": 3,
        "base": {
            "model": {"layers": 4, "width": 64, "context": 64},
            "batch": {"sequences": 8},
            "budget": {"tokens": 512 * 200},
            "corpus": {"tokenizer": "bytes"},
        },
    }
    return StudySpec.from_dict(values | changes)


def fabricate(
    folder: Path,
    study: StudySpec,
    *,
    steps: int = 200,
    diverge: tuple[tuple[str, float], ...] = (),
    unfinished: tuple[PlannedRun, ...] = (),
    absent: tuple[PlannedRun, ...] = (),
    only: PlannedRun | None = None,
) -> Path:
    """Write the study; `diverge` names (arm, lr) whose runs diverge. Every learning rate for seeds that tune, for
    others the last one of the study."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "study.json", {"format": FORMAT, "fingerprint": study.fingerprint, "spec": study.to_dict()})
    for corpus in study.corpora:
        for arm in study.arms:
            for lr in study.lrs:
                for seed in range(study.seeds):
                    planned = PlannedRun(corpus, arm, lr, seed)
                    is_wanted = planned not in absent and (seed < study.tuning_seeds or lr == study.lrs[-1])
                    if planned == only or (only is None and is_wanted):
                        ends = (arm, lr) in diverge, planned not in unfinished
                        write_run(planned.folder_in(folder), study, planned, steps, *ends)
    return folder


def fabricate_sizes(folder: Path) -> Path:
    """A study of one, two and four layers with a claim."""
    sizes = [{"name": f"{n} layers", "model": {"layers": n, "width": 16 * n, "context": 64}} for n in (1, 2, 4)]
    claim = {"id": "B1", "arm": "k=v", "published": 3.1, "parameters": 3e8, "source": "arXiv 2606.04032"}
    base = {"batch": {"sequences": 8}, "corpus": {"tokenizer": "bytes"}}
    study = spec(name="sized", sizes=sizes, base=base, lrs=[3e-3], claims=[claim])
    for size, part in split_sizes(study).items():
        fabricate(find_size_folder(folder, size), part, steps=10)
    StudyRecord(study, []).write(folder)
    return folder


def fabricate_difficulties(folder: Path) -> Path:
    """A study of one task with ever more pairs."""
    base = {"model": {"layers": 4, "width": 64, "context": 64}, "batch": {"sequences": 8}}
    corpora = [f"task:mqar?pairs={pairs}" for pairs in (16, 4, 8)]
    study = spec(name="harder", corpora=corpora, metric="accuracy", margin=1.0, base=base, lrs=[3e-3])
    return fabricate(folder, study, steps=10)


def final_accuracy(loss: float, corpus: str) -> dict[str, float]:
    """Of a run on a task: the harder and the higher its loss, the less."""
    task = parse_task(corpus)
    if task is None:
        return {}
    hard = getattr(task, "pairs", 0) / 100
    return {"accuracy": 1.2 - loss / 10 - hard, "chance": 0.02 + hard / 10}


def final_loss(planned: PlannedRun, study: StudySpec) -> float:
    """What the run ends with on test text; a model of fewer layers does worse."""
    shared = np.random.default_rng(planned.seed).normal(0, 0.03)
    own = np.random.default_rng(number(planned.arm, planned.seed)).normal(0, NOISE.get(planned.arm, 0.004))
    own = 0.0 if planned.arm == study.baseline else own
    tuned = 0.05 * (len(study.lrs) - 1 - study.lrs.index(planned.lr))
    shared += 0.1 * (4 - study.base["model"]["layers"])
    return 2.0 + EFFECTS.get(planned.arm, 0.01) + shared + own + tuned


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def number(*parts: object) -> int:
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:12], 16)


def write_run(folder: Path, study: StudySpec, planned: PlannedRun, steps: int, diverged: bool, finished: bool) -> None:
    run = planned.resolve_spec(study)
    folder.mkdir(parents=True)
    write_json(
        folder / "run.json",
        {
            "format": 1,
            "id": f"{number(planned):032x}",
            "spec": run.to_dict(),
            "name": run.model.name,
            "fingerprint": run.fingerprint,
            "commit": COMMIT,
            "data": {"folder": "corpus", "hash": DATA, "tokenizer": DATA},
            "environment": {
                "python": "3.11.7",
                "system": "Linux x86_64",
                "processor": "Processor",
                "cores": 2,
                "packages": {"torch": "2.13.0"},
                "device": {"kind": "cpu", "name": "cpu", "ranks": 1, "threads": 1},
            },
        },
    )
    chance, end, each = np.random.default_rng(number(planned)), final_loss(planned, study), run.tokens_per_step
    last = steps if finished and not diverged else steps // 2
    speed = 20_000 / (1 + 0.1 * list(study.arms).index(planned.arm))
    noise = chance.normal(0, 0.03, last + 1)
    lines: list[dict[str, Any]] = []
    for step in range(1, last + 1):
        loss: Any = end + 3.0 * math.exp(-5 * step / steps) + noise[step]
        if diverged and step > last - 12:
            loss = "nan"
        clock = {"seconds": step * each / speed, "tokens_per_second": speed}
        lines.append({"kind": "train", "step": step, "tokens": step * each, "loss": loss, "time": clock})
        if step % (steps // 10) == 0 and loss != "nan":
            smooth = end + 3.0 * math.exp(-5 * step / steps)
            lines.append({"kind": "evaluation", "step": step, "split": "valid", **scores(smooth)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "probes").mkdir()
    layers, heads = run.model.layers, run.model.attention_of(0).heads
    for k in range(1, 11):
        if (step := steps * k // 10) > last:
            break
        grow = chance.uniform(0.9, 1.1, (layers, heads)) * (1 + np.arange(layers)[:, None] / 3)
        probe = {
            "entropy": (3.4 - 0.1 * k * grow).round(5).tolist(),
            "sink_mass": (0.05 + 0.02 * k * grow).round(5).tolist(),
            "largest_logit": ((0.5 + k) * grow).round(5).tolist(),
            "logit_change": None if k == 1 else (grow / k).round(5).tolist(),
        }
        (folder / "probes" / f"step-{step:010d}.json").write_text(json.dumps({"step": step, "layers": probe}))
    if not finished:
        return
    result = (
        {"status": "diverged", "evaluation": {}}
        if diverged
        else {"status": "finished", "evaluation": ended(end, planned.corpus)}
    )
    write_json(
        folder / "summary.json",
        {
            "format": 1,
            **result,
            "steps": last,
            "tokens": last * each,
            "skipped_steps": 11 if diverged else 0,
            "parameters": run.model.parameters(),
            "training_flops": last * run.flops_per_step,
            "cache_bytes_per_token": 512 if planned.arm == "k=v" else 1024,
            "seconds": last * each / speed,
            "tokens_per_second": speed,
            "peak_memory_bytes": 5 * 10**8,
        },
    )


def scores(loss: float) -> dict[str, Any]:
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}


def ended(loss: float, corpus: str) -> dict[str, Any]:
    return {"valid": scores(loss - 0.01), "test": scores(loss) | final_accuracy(loss, corpus)}


def make_attention(heads: int = 2) -> dict[str, Any]:
    """Maps of three tokens as the page gets them."""
    packed = base64.b64encode(array("H", [65_534, 32_767, 32_767, 65_534, 0, 0]).tobytes()).decode()
    layers = [
        {"place": place, "index": k, "heads": heads, "maps": [packed] * (heads + 1)}
        for k, place in enumerate(("first", "middle", "last"))
    ]
    return {"run": "r", "tokens": ["def", " <b>", "\n"], "layers": layers, "notes": []}
