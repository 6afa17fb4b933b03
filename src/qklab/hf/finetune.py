"""Fine-tuning on GLUE: every model at every learning rate, the rate chosen on held-out training examples, the score on
dev.

A fine-tuning is a pure function of model, task, learning rate and seed, and leaves one file; the same command again
does those whose file is missing, the one that was interrupted from where it was.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from qklab.data.glue import Examples, GlueTask, find_glue_task, read_glue, score_answers, score_constant
from qklab.hf.evaluate import choose_device, hash_weights, load_for_evaluation
from qklab.hf.export import ExportedModel
from qklab.hf.fit import EncodedExamples, FineTuning, FitProgress, fit_classifier
from qklab.hf.heads import QKLabForCausalLM, QKLabForMaskedLM, QKLabForSequenceClassification
from qklab.runs.directory import RunDirectory
from qklab.runs.files import write_json
from qklab.runs.signals import StopRequest
from qklab.train.checkpoint import Checkpoints
from qklab.train.launch import EXIT_CODES
from qklab.train.score import ScoringWork
from qklab.train.spec import ExecutionSpec
from qklab.train.summary import InterruptedEvaluationError

FORMAT = 2  # 1 drew dropout otherwise
LONGEST = 128  # tokens of a text, as is usual for GLUE


class FineTuningInterrupted(ValueError):  # noqa: N818
    """Fine-tunings that were asked to stop and have saved how far they are; `code` is the exit code that says so."""

    code: ClassVar[int] = EXIT_CODES["interrupted"]


def load_classifier(folder: Path, labels: int, seed: int, device: str = "cpu") -> tuple[nn.Module, Any]:
    """The model of a run, an export or a Transformers folder, with a new head for so many labels drawn from `seed`, and
    its tokenizer."""
    refuse_converted_folder(folder)
    model, tokenizer, _ = load_for_evaluation(folder, device="cpu")
    classifier: Any
    if isinstance(model, QKLabForCausalLM | QKLabForMaskedLM):
        classifier = make_classifier(model, labels, seed)
    else:
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=labels, local_files_only=True, use_safetensors=True
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    classifier.config.pad_token_id = tokenizer.pad_token_id
    return classifier.to(device), tokenizer


def make_classifier(model: ExportedModel, labels: int, seed: int) -> QKLabForSequenceClassification:
    """A model of ours with a new head for so many labels; its weights are copies."""
    torch.manual_seed(seed)
    model.config.num_labels = labels
    classifier = QKLabForSequenceClassification(model.config)
    classifier.model.load_state_dict(model.model.state_dict())
    return classifier


def refuse_converted_folder(folder: Path) -> None:
    """Transformers would load a converted model's classifier without its conversion, and say nothing."""
    path = folder / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any("qklab" in part for part in (saved, *saved.values()) if isinstance(part, dict)):
        raise ValueError(
            f"{folder} holds a converted model, whose classifier cannot be loaded; give a run, an export or a model as "
            "it was before."
        )


@torch.no_grad()
def predict(
    model: nn.Module,
    examples: EncodedExamples,
    device: str,
    batch: int = 64,
    tick: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The model's outputs [n, labels]; `tick` is called before each batch."""
    model.eval()
    parts = []
    for first in range(0, len(examples), batch):
        tick()
        ids, mask, _ = examples.batch(range(first, min(first + batch, len(examples))))
        parts.append(model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu())
    return torch.cat(parts).numpy()


def finetune(
    folder: Path,
    task: GlueTask,
    data: Mapping[str, Examples],
    how: FineTuning,
    device: str = "cpu",
    progress: FitProgress | None = None,
) -> dict[str, Any]:
    """Fine-tune the model of a folder; its scores on the held-out examples and on dev."""
    model, tokenizer = load_classifier(folder, max(1, len(task.words)), how.seed, device)
    return finetune_classifier(model, tokenizer, task, data, how, device, progress)


def finetune_classifier(
    model: Any,
    tokenizer: Any,
    task: GlueTask,
    data: Mapping[str, Examples],
    how: FineTuning,
    device: str,
    progress: FitProgress | None = None,
) -> dict[str, Any]:
    room = getattr(model.config, "max_position_embeddings", None) or getattr(tokenizer, "model_max_length", LONGEST)
    encoded = {split: EncodedExamples(own, tokenizer, min(LONGEST, room)) for split, own in data.items()}
    losses = fit_classifier(model, encoded["train"], how, device, progress)

    def tick() -> None:
        if progress is not None:
            progress.note(losses)

    scores = {
        split: score_answers(task, predict(model, encoded[split], device, tick=tick), data[split].labels)
        for split in ("valid", "test")
    }
    return {"scores": scores, "first_loss": losses[0], "last_loss": losses[-1], "steps": len(losses)}


def finetune_all(
    models: Mapping[str, Mapping[int, Path]],
    name: str,
    *,
    data: Path | None,
    out: Path,
    lrs: Sequence[float],
    limit: int | None = None,
    epochs: int = 3,
    execution: ExecutionSpec | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Arm → seed → folder of a model: fine-tune each at every learning rate, choose an arm's rate by its mean score on
    the held-out examples, and give the scores on dev at that rate: {"scores": {arm: {seed: …}}, "lrs", "chance"}."""
    task, examples, execution = find_glue_task(name), read_glue(name, data, limit), execution or ExecutionSpec()
    device = choose_device(execution.device)
    found: dict[tuple[str, float, int], dict[str, Any]] = {}
    with StopRequest() as stop:
        work = ScoringWork(out, execution, stop)
        for arm, lr, seed in [(arm, lr, seed) for arm, seeds in models.items() for lr in lrs for seed in seeds]:
            folder, how = models[arm][seed], FineTuning(lr, seed, epochs)
            weights = hash_weights(load_for_evaluation(folder, device="cpu")[0])

            def begin(progress: FitProgress, folder: Path = folder, how: FineTuning = how) -> dict[str, Any]:
                return {"model": str(folder)} | finetune(folder, task, examples, how, device, progress)

            which = f"{arm} · {name} · lr {lr:g} · seed {seed}"
            try:
                found[arm, lr, seed] = finetune_once(name, examples, weights, how, work, begin)
            except InterruptedEvaluationError:
                raise FineTuningInterrupted(
                    f"stopped by {stop.came} in {which}, everything is saved; the same command continues."
                ) from None
            say(f"{which}: {100 * found[arm, lr, seed]['scores']['test']['glue']:.2f}")
    chosen = {
        arm: max(lrs, key=lambda lr: fmean(found[arm, lr, seed]["scores"]["valid"]["glue"] for seed in seeds))
        for arm, seeds in models.items()
    }
    scores = {
        arm: {seed: 100 * found[arm, chosen[arm], seed]["scores"]["test"]["glue"] for seed in seeds}
        for arm, seeds in models.items()
    }
    chance = 100 * score_constant(task, examples["train"].labels, examples["test"].labels)
    return {"task": name, "scores": scores, "lrs": chosen, "chance": chance}


def finetune_once(
    name: str,
    examples: Mapping[str, Examples],
    weights: str,
    how: FineTuning,
    work: ScoringWork,
    begin: Callable[[FitProgress], dict[str, Any]],
) -> dict[str, Any]:
    """What a file in the work's folder says of a fine-tuning of these weights, or what `begin` gives now, from where
    that was left. Beside the file lies, until it is there, what the fit goes on from."""
    about = {
        "format": FORMAT,
        "task": name,
        "examples": {split: len(own.texts) for split, own in examples.items()},
        "weights": weights,
        "how": how.__dict__,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = work.folder / f"{name}-lr{how.lr:g}-seed{how.seed}-{key}.json"
    unfinished = RunDirectory(path.with_suffix(""))
    if not path.exists():
        work.leave_if_asked()
        with unfinished.lock():
            checkpoints = Checkpoints(unfinished.checkpoints_path, keep=1, run=key)
            write_json(path, about | begin(FitProgress(checkpoints, work)))
            checkpoints.wait()
    shutil.rmtree(unfinished.path, ignore_errors=True)
    return json.loads(path.read_text(encoding="utf-8"))
