"""The ladder of model sizes that a comparison chooses from, and how fast this machine trains each."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from qklab.model.decoder import Decoder
from qklab.model.recipes import recipe
from qklab.study.executors import WorkerSlots
from qklab.study.spec import StudySpec
from qklab.train.objective import Objective
from qklab.train.spec import RunSpec


@dataclass(frozen=True)
class Size:
    """Settings that all arms share, the learning rates each arm tries, and how many runs share a GPU: small ones alone
    would leave most of it idle."""

    settings: dict[str, Any]
    lrs: tuple[float, ...]
    together: int = 1


SIZES: dict[str, Size] = {  # from small to large
    "pico": Size(
        {
            "model": {"recipe": "nano", "layers": 2, "width": 64, "context": 128, "tied": False},
            "attention": {"heads": 4},
            "corpus": {"vocab": 2048},
            "batch": {"sequences": 4},
            "schedule": {"warmup": 0.2},  # in runs of a few hundred steps much of the spread over seeds comes from less
        },
        (3e-3, 6e-3, 1.2e-2),
        together=8,
    ),
    "nano": Size({"model": {"recipe": "nano"}, "batch": {"sequences": 16}}, (2e-3, 4e-3, 8e-3), together=8),
    "micro": Size(
        {"model": {"recipe": "micro"}, "corpus": {"vocab": 8192}, "batch": {"sequences": 16}}, (1e-3, 2e-3, 4e-3)
    ),
    "mini": Size(
        {"model": {"recipe": "mini"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 16}}, (1e-3, 2e-3, 4e-3)
    ),
    "34m": Size(
        {"model": {"recipe": "34m"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 32}}, (7e-4, 1.5e-3, 3e-3)
    ),
    "51m": Size({"model": {"recipe": "51m"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 32}}, (1e-3, 3e-3)),
    "124m": Size({"model": {"recipe": "124m"}, "corpus": {"vocab": 16_384}, "batch": {"sequences": 32}}, (6e-4, 2e-3)),
}
NEIGHBOURS = {"cpu": 1.0, "cuda": 1.5}  # by how much runs at the same time slow each other down


def find_size(study: StudySpec) -> str:
    """The size the models of a comparison are of."""
    model = study.run(study.baseline, study.corpora[0], study.lrs[0], 0).model
    for name, size in SIZES.items():
        shape = size.settings["model"]
        plain = recipe(shape["recipe"])
        wanted = (
            shape.get("layers", plain.layers),
            shape.get("width", plain.width),
            shape.get("context", plain.context),
        )
        if (model.layers, model.width, model.context) == wanted:
            return name
    return "of its own"


def share_gpus(slots: WorkerSlots, size: str, at_once: int | None) -> WorkerSlots:
    """The slots for runs of a size: small ones share a GPU, unless it was said how many run at once."""
    together = SIZES[size].together if size in SIZES and slots.gpus and at_once is None else 1
    cores = slots.count * slots.threads
    count = max(slots.count, min(slots.count * together, cores))
    return dataclasses.replace(slots, count=count, threads=max(1, cores // count))


def measure_arm_speed(run: RunSpec, slots: WorkerSlots) -> float:
    """Tokens that runs like this one, of one arm and size, train on in a second, all of this machine's together."""
    return slots.count * run.tokens_per_step / measure_step(run, slots.device, slots.threads)


def measure_step(spec: RunSpec, device: str, threads: int, repeats: int = 5) -> float:
    """How long a training step takes while others run beside it, measured on random tokens."""
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
