"""Attention maps of the arms of a report, computed once per checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qklab.report.inspect import read_attention
from qklab.report.page import pack_maps
from qklab.study.records import find_newest_checkpoint

HEADS = 8  # more than these are left out of the page
TEXT = "When the sun had set behind the hills, the old sailor told the children what he had seen at sea."


class MapCache:
    """Attention maps of runs on the beginning of their validation text; each checkpoint is read once."""

    def __init__(self) -> None:
        self.packed: dict[tuple[Path, str], dict[str, Any]] = {}

    def read_arms(self, runs: Mapping[str, Path | None]) -> dict[str, Any]:
        """Arm → its maps, or a sentence about why there are none."""
        return {
            arm: {"why": "no run of this arm has begun."} if run is None else self.read_run(run)
            for arm, run in runs.items()
        }

    def read_run(self, run: Path) -> dict[str, Any]:
        newest = find_newest_checkpoint(run)
        if not newest:
            return {"why": "no checkpoint yet."}
        key = (run, newest)
        if key not in self.packed:
            self.packed = {old: value for old, value in self.packed.items() if old[0] != run}
            why = ""
            for text in ("", TEXT):  # the corpus may not be on this machine
                try:
                    self.packed[key] = {"run": run.name, **pack_maps(read_attention(run, text), HEADS)}
                    break
                except (ValueError, OSError) as error:
                    why = why or str(error)
            else:
                return {"why": why}
        return self.packed[key]
