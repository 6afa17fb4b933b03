"""Attention maps for the page: lower triangles of 16-bit numbers, and computed once per checkpoint."""

import base64
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HEADS = 8  # more than these are left out of the page
FULL = 65_535
TEXT = "When the sun had set behind the hills, the old sailor told the children what he had seen at sea."


class Maps:
    """Attention maps of runs on one text. The same checkpoint is looked at once."""

    def __init__(self, text: str = ""):
        self.text = text
        self.kept: dict[tuple[Path, str], dict[str, Any]] = {}

    def of(self, runs: Mapping[str, Path | None]) -> dict[str, Any]:
        """Arm → its maps, or a sentence about why there are none."""
        try:
            from qklab.report.inspect import attention_of
        except ImportError:
            return {arm: {"why": "attention maps are not available in this installation."} for arm in runs}
        return {
            arm: {"why": "no run of this arm has begun."} if run is None else self.one(run, attention_of)
            for arm, run in runs.items()
        }

    def one(self, run: Path, attention_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        folder = run / "checkpoints"
        saved = sorted(path.name for path in folder.glob("step-*")) if folder.is_dir() else []
        if not saved:
            return {"why": "no checkpoint yet."}
        key = (run, saved[-1])
        if key not in self.kept:
            self.kept = {old: value for old, value in self.kept.items() if old[0] != run}
            why = ""
            for text in dict.fromkeys((self.text, TEXT)):  # the corpus may not be on this machine
                try:
                    self.kept[key] = {"run": run.name, **packed(attention_of(run, text))}
                    break
                except (ValueError, OSError) as error:
                    why = why or str(error)
            else:
                return {"why": why}
        return self.kept[key]


def packed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens and, per layer, the mean over heads followed by each head, as base64 of little-endian 16-bit numbers."""
    layers: list[dict[str, Any]] = []
    for place in sorted(found["layers"], key=lambda place: place == "middle"):
        layer = found["layers"][place]
        if any(other["index"] == layer["index"] for other in layers):
            continue  # a model of one or two layers
        heads: list[list[list[float]]] = layer["maps"]
        size = range(len(heads[0]))
        mean = [[sum(head[i][j] for head in heads) / len(heads) for j in size] for i in size]
        layers.append(
            {
                "place": place,
                "index": layer["index"],
                "heads": len(heads),
                "maps": [triangle(each) for each in [mean, *heads[:HEADS]]],
            }
        )
    layers.sort(key=lambda layer: layer["index"])
    return {"tokens": list(found["tokens"]), "layers": layers, "notes": list(found.get("notes", ()))}


def triangle(rows: list[list[float]]) -> str:
    """The part of a causal map that can be other than 0, row by row."""
    numbers = array("H", [round(FULL * min(1.0, max(0.0, x))) for i, row in enumerate(rows) for x in row[: i + 1]])
    return base64.b64encode(numbers.tobytes()).decode("ascii")
