"""From a folder with a model to one with the converted model: load, convert, repair, judge, write.

While a repair is not done its state lies beside the result, in OUT.unfinished; the same command goes on from there, and
OUT appears when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from qklab.hf.convert.apply import convert, count_parameters
from qklab.hf.convert.cache import count_converted_bytes
from qklab.hf.convert.record import ConversionReport
from qklab.hf.convert.repair import DivergedError, Repair, RepairSettings
from qklab.hf.convert.text import TokenWindows, count_words, describe_losses, measure_loss, read_windows
from qklab.hf.evaluate import load_for_evaluation
from qklab.hf.export import new_folder, refuse_occupied
from qklab.hf.families import text_config
from qklab.hf.heads import QKLabForCausalLM
from qklab.hf.llama import rewrite_as_llama
from qklab.runs.environment import describe_environment, find_commit
from qklab.runs.files import lock_file, write_json
from qklab.runs.progress import Display
from qklab.train.checkpoint import Checkpoints

FORMAT = 1
RECORD, PLAN = "conversion.json", "plan.json"
CHANGING = {"share", "norm", "kv_heads"}  # choices that change the logits


@dataclass(frozen=True)
class FolderConversion:
    """What is to be done to the model of a folder.

    Args:
        choices: What `convert` is asked for: share, coupling, norm, kv_heads, merge.
        text: A file or folder to calibrate by, to judge on and to repair by.
        calibration: Tokens of it that the conversion is fitted to; 0 for none.
        context: Tokens in a window at most; fewer where the model knows fewer positions.
        minutes: How long a repair may take; the speed of its first steps decides how many that are.
        tokens: Or how many tokens it sees.
        repair: How; None where it is not to be repaired.
    """

    choices: dict[str, Any]
    text: str | None = None
    calibration: int = 16_384
    context: int = 1024
    minutes: float | None = None
    tokens: int | None = None
    repair: RepairSettings | None = None

    def check(self) -> None:
        for name in ("minutes", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} must be more than 0, but {value:g} came.")
        if self.context < 2 or self.calibration < 0:
            raise ValueError(
                f"--context must be at least 2 and --calibration-tokens at least 0, but {self.context} and "
                f"{self.calibration} came."
            )
        if self.repair is not None and not CHANGING & self.choices.keys():
            raise ValueError("a coupling alone leaves all logits as they are: there is nothing to --repair.")


@dataclass(frozen=True)
class ConvertedFolder:
    """Where the converted model lies (None: the repair was stopped, and is to be continued), its report and record."""

    folder: Path | None
    report: ConversionReport
    record: dict[str, Any]


def convert_folder(
    model: Path, out: Path, wanted: FolderConversion, *, device: str = "cpu", command: str = "", display: Display
) -> ConvertedFolder:
    """Convert the model of a run, an export or a Transformers folder, and write it and a record to `out`."""
    wanted.check()
    refuse_occupied(out)
    with hide_progress_bars():
        before, tokenizer, facts = load_for_conversion(model, device)
        converted, _, _ = load_for_conversion(model, device)
    words, dtype = count_words(before), before.dtype
    train = held_out = None
    if wanted.text is not None:
        longest = getattr(text_config(before), "max_position_embeddings", None) or wanted.context
        train, held_out = read_windows(wanted.text, tokenizer, words, min(wanted.context, longest))
    report = convert(converted, **wanted.choices, calibration=choose_calibration(train, wanted))
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": date.today().isoformat(),
        "commit": find_commit(),
        "command": command,
        "environment": describe_environment({"type": device}),
        "model": facts,
        "conversion": report.conversion.to_record(),
        "parameters": {"before": count_parameters(before), "after": count_parameters(converted)},
        "cache_bytes_per_token": {"before": measure_cache(before), "after": measure_cache(converted)},
    }
    losses: dict[str, float] = {}
    if train is not None and held_out is not None:
        losses = {"before": measure_loss(before, held_out), "converted": measure_loss(converted, held_out)}
        record |= {"text": {"source": wanted.text, "train_tokens": len(train.ids), "sha256": train.hash()}}
    if train is not None and wanted.repair is not None:
        with open_unfinished(out) as unfinished:
            done = repair_converted(converted, before, train, wanted, unfinished, record, display)
        if not done:
            return ConvertedFolder(None, report, record)
        converted.to(dtype)
    if held_out is not None:
        losses |= {"repaired": measure_loss(converted, held_out)} if wanted.repair is not None else {}
        record["held_out"] = describe_losses(losses, held_out, words)
    converted.requires_grad_(True)
    with new_folder(out) as folder, hide_progress_bars():
        converted.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / RECORD, record)
    shutil.rmtree(name_unfinished(out), ignore_errors=True)
    return ConvertedFolder(out, report, record)


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Without Transformers' bars, which come for every file."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_for_conversion(folder: Path, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """The model of a run, an export or a Transformers folder; of ours those that are a Llama, as one."""
    model, tokenizer, facts = load_for_evaluation(folder, device=device)
    if isinstance(model, QKLabForCausalLM):
        model: Any = rewrite_as_llama(model)
    return model.to(device), tokenizer, facts


def choose_calibration(train: TokenWindows | None, wanted: FolderConversion) -> torch.Tensor | None:
    """The first training windows, as many as the calibration may have tokens; nothing for a coupling alone."""
    if train is None or not wanted.calibration or not CHANGING & wanted.choices.keys():
        return None
    rows = min(len(train), max(1, wanted.calibration // train.context))
    return train.read(range(rows))[:, :-1]


@torch.no_grad()
def measure_cache(model: Any, tokens: int = 8) -> dict[str, float]:
    """Bytes per token of keys and values, and of what says where they stand, in the model's own precision."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    states, bookkeeping = count_converted_bytes(model(input_ids=ids, use_cache=True).past_key_values)
    return {"states": states / tokens, "bookkeeping": bookkeeping / tokens}


def name_unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


@contextmanager
def open_unfinished(out: Path) -> Iterator[Path]:
    """The folder of a repair that is not done; no other process has it."""
    folder = name_unfinished(out)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_file(folder / "lock")
    if lock is None:
        raise ValueError(f"another process is repairing in {folder}; wait for it, or choose another --out.")
    try:
        yield folder
    finally:
        os.close(lock)


def repair_converted(
    model: PreTrainedModel,
    before: PreTrainedModel,
    train: TokenWindows,
    wanted: FolderConversion,
    folder: Path,
    record: dict[str, Any],
    display: Display,
) -> bool:
    """Repair up to the end of the budget, or to a signal; whether it is done. `record` is told what was trained."""
    assert wanted.repair is not None
    repair = Repair(model, before, train, wanted.repair)
    how = repair.how.to_dict() | {"context": train.context}
    asked = {
        "model": record["model"]["weights"],
        "text": record["text"]["sha256"],
        "conversion": record["conversion"],
        "calibration": wanted.calibration,
        "budget": {"minutes": wanted.minutes, "tokens": wanted.tokens},
        "repair": how,
    }
    steps = plan_steps(folder, asked, repair)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, run=record["model"]["weights"], say=display.warn)
    try:
        done = repair.run(steps, checkpoints, display)
    except DivergedError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seen = steps * repair.how.batch
    record["repair"] = how | {"steps": steps, "tokens": seen * train.context, "epochs": seen / len(train)}
    return done


def plan_steps(folder: Path, asked: dict[str, Any], repair: Repair) -> int:
    """How many steps, decided when a repair begins and kept, so that going on later changes nothing."""
    path = folder / PLAN
    if path.exists():
        plan = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, value in asked.items() if plan["asked"].get(name) != value]
        if differing:
            raise ValueError(
                f"{folder} holds an unfinished repair with another {differing[0]}; finish it with its own command, "
                "delete that folder, or choose another --out."
            )
        return plan["steps"]
    each, budget = repair.how.batch * repair.windows.context, asked["budget"]
    if budget["tokens"] is not None:
        steps = max(1, round(budget["tokens"] / each))
    else:
        steps = max(1, int(60 * budget["minutes"] / repair.time_step()))
    write_json(path, {"asked": asked, "steps": steps})
    return steps


def describe_conversion(found: ConvertedFolder) -> str:
    """The report, what became of perplexity and cache, and where the model is."""
    record = found.record
    if found.folder is None:
        return "to be continued: the same command goes on with the repair."
    lines = [str(found.report), ""]
    cache = {name: sum(parts.values()) for name, parts in record["cache_bytes_per_token"].items()}
    judged = record.get("held_out", {"perplexity": {}})
    columns = "".join(name.rjust(12) for name in judged["perplexity"])
    if columns:
        figures = "".join(f"{value:12.4g}" for value in judged["perplexity"].values())
        lines += [
            f"            {columns}",
            f"perplexity  {figures}",
            f"per {judged['per']}; {judged['held_out_tokens']:,} held-out tokens, windows of {judged['context']:,}.",
        ]
    lines.append(f"cache bytes per token: {cache['before']:,.0f} before, {cache['after']:,.0f} now.")
    if "repair" in record:
        trained = record["repair"]
        times = f"{trained['epochs']:.2g} times the text"
        lines.append(f"repaired on {trained['tokens']:,} tokens, {times}, at a learning rate of {trained['lr']:.2g}.")
    return "\n".join([*lines, str(found.folder)])
