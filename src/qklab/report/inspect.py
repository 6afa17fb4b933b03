"""What the attention of a trained model does on a text: the numbers as JSON, and one page that shows them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qklab.data.batches import EvaluationWindows
from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.data.tokenizer import Tokenizer
from qklab.model.decoder import Decoder
from qklab.model.diagnose import Diagnosis, diagnose, singular_values
from qklab.report.page import fill_template, pack_maps
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import find_commit
from qklab.runs.files import describe_os_error, write_text
from qklab.train.load import Which, find_checkpoint_of_run, load_decoder
from qklab.train.probe import round_numbers
from qklab.train.spec import RunSpec

FORMAT = 1
SHOWN = 48  # tokens of an attention map


@dataclass(frozen=True)
class Inspection:
    """A trained model and the text it reads: ids and segments [1, T]; `notes` says what is not as was asked."""

    record: dict[str, Any]
    spec: RunSpec
    step: int
    model: Decoder
    tokenizer: Tokenizer
    ids: Tensor
    segments: Tensor | None
    notes: list[str]

    def diagnose(self, tokens: int | None = None, layers: Sequence[int] | None = None, maps: bool = False) -> Diagnosis:
        segments = None if self.segments is None else self.segments[:, :tokens]
        return diagnose(self.model, self.ids[:, :tokens], segments, layers=layers, maps=maps)

    @property
    def tokens(self) -> list[str]:
        return [decode_token(self.tokenizer, int(token)) for token in self.ids[0]]

    def measure_attention(self, tokens: int) -> dict[str, Any]:
        last = self.spec.model.layers - 1
        chosen = {"first": 0, "middle": (last + 1) // 2, "last": last}
        diagnosis = self.diagnose(tokens, sorted(set(chosen.values())), maps=True)
        assert diagnosis.maps is not None
        measured = zip(diagnosis.layers, diagnosis.heads, diagnosis.maps, strict=True)
        maps = {layer: round_maps(weights[0, :heads]) for layer, heads, weights in measured}
        layers = {name: {"index": layer, "maps": maps[layer]} for name, layer in chosen.items()}
        return {"tokens": self.tokens[:tokens], "layers": layers, "notes": self.notes}

    def measure_all(self, which: Which) -> dict[str, Any]:
        """All of inspect.json."""
        diagnosis, record, spec = self.diagnose(), self.record, self.spec
        sigma = singular_values(diagnosis.logits.queries, diagnosis.logits.keys)[:, 0]  # [layers, H, rank]
        return {
            "format": FORMAT,
            "model": spec.model.name,
            "parameters": spec.model.parameters(),
            "heads": "heads" if all(each.mix == "softmax" for each in spec.model.pattern) else "softmaxes",
            "text": self.tokenizer.decode(self.ids[0].tolist()),
            "tokens": self.tokens,
            "notes": self.notes,
            "diagnostics": {name: round_numbers(values.tolist()) for name, values in diagnosis.items()},
            "largest_entropy": float(diagnosis.visible.sum(-1).float().log().mean()),
            "singular_values": round_numbers((sigma / sigma[..., :1]).tolist()),
            "layers": self.measure_attention(SHOWN)["layers"],
            "provenance": {
                "run": record["id"],
                "checkpoint": which,
                "step": self.step,
                "seed": spec.seed,
                "commit": record.get("commit"),
                "fingerprint": record.get("fingerprint"),
                "corpus": spec.corpus.source,
                "data": record["data"].get("hash"),
                "inspected_at_commit": find_commit(),
            },
        }


def read_attention(run: Path, text: str, *, which: Which = "newest", tokens: int = SHOWN) -> dict[str, Any]:
    """The attention of three layers on the first `tokens` tokens of a text, or of the validation split if it is empty.

    {"tokens": [T texts], "layers": {"first" | "middle" | "last": {"index": layer, "maps": [H][T][T]}}, "notes": […]}
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens must be a whole number above 0, but {tokens!r} came.")
    return load_inspection(run, text, which, tokens).measure_attention(tokens)


def inspect_run(
    run: Path, text: str, out: Path, *, which: Which = "newest", say: Callable[[str], None] = lambda sentence: None
) -> list[Path]:
    """Measure the model of `run` on `text`; write inspect.html and inspect.json into `out`."""
    inspection = load_inspection(run, text, which)
    for note in inspection.notes:
        say(note)
    content = inspection.measure_all(which)
    page = fill_template(f"{content['model']} · qklab inspect", "inspect.js", content | pack_maps(content))
    files = {"inspect.html": page, "inspect.json": json.dumps(content, ensure_ascii=False) + "\n"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, written in files.items():
            write_text(out / name, written)
    except OSError as error:
        raise RunError(
            f"{out} cannot be written: {describe_os_error(error)}; choose another folder with --out."
        ) from None
    return [out / name for name in files]


def load_inspection(run: Path, text: str, which: Which = "newest", tokens: int | None = None) -> Inspection:
    """The model and its text; what is inspected is the first `tokens` of it, at most a context."""
    run = Path(run)
    refuse_other_folders(run)
    directory, spec, checkpoint = find_checkpoint_of_run(run, which)
    record, tokenizer = directory.read(), Tokenizer.load(run / "tokenizer.json")
    notes: list[str] = []
    if text.strip():
        ids, segments = encode_text(tokenizer, text, spec.model.context, notes), None
    else:
        ids, segments = read_validation_window(record, spec, tokenizer)
        notes.append(f"No text came, so this is the first validation window of the corpus {spec.corpus.source}.")
    shown = min(SHOWN if tokens is None else tokens, len(ids))
    if shown < len(ids):
        notes.append(f"Attention maps show the first {shown} of {len(ids)} tokens.")
    segments = None if segments is None else segments[None]
    model = load_decoder(spec, checkpoint)
    return Inspection(record, spec, checkpoint.step, model, tokenizer, ids[None], segments, notes)


def refuse_other_folders(run: Path) -> None:
    """What is not a run directory, told apart."""
    if not run.exists():
        raise RunError(f"there is no run directory {run}; give one that `qklab train` has written.")
    if not run.is_dir():
        raise RunError(f"{run} is a file, but a run directory was expected.")
    if (run / "study.json").exists():
        runs = sorted(path.parent for path in run.glob("runs/*/*/*/run.json"))
        advice = f"give one of them, e.g. {runs[0]}" if runs else "none of them has begun yet"
        raise RunError(f"{run} is a study of {len(runs)} runs so far and not a run; {advice}.")
    if run.parent.name == "checkpoints" and RunDirectory(run.parent.parent).exists():
        raise RunError(f"{run} is a checkpoint of the run {run.parent.parent}; give the run directory itself.")


def encode_text(tokenizer: Tokenizer, text: str, context: int, notes: list[str]) -> Tensor:
    """The text's tokens after the end-of-text that begins every document, cut to the context."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not UTF-8: {text[error.start]!r} is at character {error.start + 1}.") from None
    ids = torch.from_numpy(np.concatenate([[tokenizer.eot], tokenizer.encode([text])[0].astype(np.int64)]))
    if len(ids) > context:
        notes.append(f"The text is {len(ids)} tokens long and was cut to the model's context of {context}.")
    return ids[:context]


def read_validation_window(record: dict[str, Any], spec: RunSpec, tokenizer: Tokenizer) -> tuple[Tensor, Tensor | None]:
    folder = record["data"]["folder"]
    try:
        split = Corpus.open(folder).splits["valid"]
    except (DataError, KeyError):
        raise RunError(
            f"no text came, and the run's corpus is no longer in {folder} to take one from; give a text."
        ) from None
    windows = EvaluationWindows(split, spec.model.context, tokenizer.eot, spec.batch.packing == "packed")
    ids, targets, segments = windows.batch(np.array([0]))
    real = int((targets[0] >= 0).sum())
    return ids[0, :real], None if segments is None else segments[0, :real]


def decode_token(tokenizer: Tokenizer, token: int) -> str:
    if token == tokenizer.eot:
        return "<|endoftext|>"
    return tokenizer.pieces[token].decode(errors="backslashreplace")


def round_maps(maps: Tensor) -> list[Any]:
    """Nested lists with three digits after the point; None where a model has diverged."""
    return [[[round(v, 3) if v == v else None for v in row] for row in rows] for rows in maps.tolist()]
