"""Fine-tuning on GLUE: every model at every learning rate, the rate chosen on held-out training examples, the score on
dev.

A fine-tuning is a pure function of model, task, learning rate and seed, and leaves one file; the same command again
does those whose file is missing.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from qklab.data.glue import Examples, GlueTask, find_glue_task, read_glue, score_answers, score_constant
from qklab.data.order import make_permutation
from qklab.hf.evaluate import hash_weights, load_for_evaluation
from qklab.hf.export import ExportedModel
from qklab.hf.model import QKLabForCausalLM, QKLabForMaskedLM, QKLabForSequenceClassification
from qklab.runs.files import write_json

FORMAT = 1
LONGEST = 128  # tokens of a text, as is usual for GLUE


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned: AdamW, a linear way up over `warmup` of the steps and down to 0."""

    lr: float
    seed: int
    epochs: int = 3
    batch: int = 32
    warmup: float = 0.06
    weight_decay: float = 0.01

    def factor(self, step: int, steps: int) -> float:
        """Of the learning rate at a step, counted from 0, as Transformers' linear schedule has it."""
        rising = math.ceil(self.warmup * steps)
        return step / rising if step < rising else (steps - step) / max(1, steps - rising)


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


class EncodedExamples:
    """Examples as tokens, in batches padded on the right."""

    def __init__(self, examples: Examples, tokenizer: Any, longest: int):
        self.tokenizer, self.labels = tokenizer, torch.from_numpy(examples.labels)
        first, *second = ([text[i] for text in examples.texts] for i in range(len(examples.texts[0])))
        pairs = {"text_pair": second[0]} if second else {}
        self.ids = tokenizer(first, **pairs, truncation=True, max_length=longest)["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """ids, mask [B, T] and labels [B]."""
        rows = [self.ids[place] for place in places]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in rows])
        return ids, (torch.arange(width) < lengths[:, None]).long(), self.labels[torch.tensor(places)]


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], device: str) -> Tensor:
    """Cross-entropy, or the squared error where a label is a number."""
    ids, mask, labels = (tensor.to(device) for tensor in batch)
    outputs = model(input_ids=ids, attention_mask=mask).logits
    if labels.is_floating_point():
        return nn.functional.mse_loss(outputs[:, 0].float(), labels)
    return nn.functional.cross_entropy(outputs.float(), labels)


def fit_classifier(model: nn.Module, examples: EncodedExamples, how: FineTuning, device: str) -> list[float]:
    """Train on the examples in an order that follows from the seed; the loss of every step."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=how.lr)
    each = -(-len(examples) // how.batch)
    losses = []
    model.train()
    torch.manual_seed(how.seed)
    for epoch in range(how.epochs):
        order = make_permutation(len(examples), how.seed, epoch, 6)
        for first in range(0, len(examples), how.batch):
            for group in optimiser.param_groups:
                group["lr"] = how.lr * how.factor(len(losses), how.epochs * each)
            loss = compute_loss(model, examples.batch(order[first : first + how.batch].tolist()), device)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def predict(model: nn.Module, examples: EncodedExamples, device: str, batch: int = 64) -> np.ndarray:
    """The model's outputs [n, labels]."""
    model.eval()
    parts = []
    for first in range(0, len(examples), batch):
        ids, mask, _ = examples.batch(range(first, min(first + batch, len(examples))))
        parts.append(model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu())
    return torch.cat(parts).numpy()


def finetune(
    folder: Path, task: GlueTask, data: Mapping[str, Examples], how: FineTuning, device: str = "cpu"
) -> dict[str, Any]:
    """Fine-tune the model of a folder; its scores on the held-out examples and on dev."""
    model, tokenizer = load_classifier(folder, max(1, len(task.words)), how.seed, device)
    return finetune_classifier(model, tokenizer, task, data, how, device)


def finetune_classifier(
    model: Any, tokenizer: Any, task: GlueTask, data: Mapping[str, Examples], how: FineTuning, device: str
) -> dict[str, Any]:
    room = getattr(model.config, "max_position_embeddings", None) or getattr(tokenizer, "model_max_length", LONGEST)
    encoded = {split: EncodedExamples(own, tokenizer, min(LONGEST, room)) for split, own in data.items()}
    losses = fit_classifier(model, encoded["train"], how, device)
    scores = {
        split: score_answers(task, predict(model, encoded[split], device), data[split].labels)
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
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Arm → seed → folder of a model: fine-tune each at every learning rate, choose an arm's rate by its mean score on
    the held-out examples, and give the scores on dev at that rate: {"scores": {arm: {seed: …}}, "lrs", "chance"}."""
    task, examples = find_glue_task(name), read_glue(name, data, limit)
    found: dict[tuple[str, float, int], dict[str, Any]] = {}
    for arm, seeds in models.items():
        for lr in lrs:
            for seed, folder in seeds.items():
                how = FineTuning(lr, seed, epochs)
                found[arm, lr, seed] = finetune_once(folder, name, examples, how, out, device)
                score = found[arm, lr, seed]["scores"]["test"]["glue"]
                say(f"{arm} · {name} · lr {lr:g} · seed {seed}: {100 * score:.2f}")
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
    folder: Path, name: str, examples: Mapping[str, Examples], how: FineTuning, out: Path, device: str
) -> dict[str, Any]:
    """What a file of an earlier call says, or what comes of it now."""
    about = {
        "format": FORMAT,
        "task": name,
        "examples": {split: len(own.texts) for split, own in examples.items()},
        "weights": hash_weights(load_for_evaluation(folder, device="cpu")[0]),
        "how": how.__dict__,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = out / f"{name}-lr{how.lr:g}-seed{how.seed}-{key}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    result = about | {"model": str(folder)} | finetune(folder, find_glue_task(name), examples, how, device)
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result
