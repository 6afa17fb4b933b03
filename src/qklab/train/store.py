"""One checkpoint on disk: a folder whose manifest says what must be in it, down to the last byte.

    step-0000000100/
        model.safetensors       one file per prefix of the tensors' names, or shard-….safetensors, one per rank
        optimiser.safetensors
        state.json              step, schedule, counters, …
        manifest.json           run, step, and for every file its size, SHA-256 and tensors; and the hash of all that

A manifest has exactly one spelling, so a changed byte in it is noticed even where JSON would not care.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from qklab.train import shards, tensorfile

FORMAT = 1
NAME = re.compile(r"(?:\.replaced-)?step-(\d{10,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, trusted or loaded, in one sentence."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed verification."""

    step: int
    path: Path
    state: dict[str, Any]
    kinds: dict[str, str] = field(repr=False)  # dtype and full shape by name, "F32 [3, 4]"
    files: list[str] = field(repr=False)  # those that hold tensors

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Those whose names start with `prefix`, whole, on the CPU, however many ranks wrote them."""
        whole = {}
        for name, kind in self.kinds.items():
            if name.startswith(prefix):
                dtype, shape = tensorfile.read_kind(kind)
                whole[name] = torch.empty(shape, dtype=dtype)
        self.copy_into(whole, prefix)
        return whole

    def load_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` in place; they may be sharded in any way, but names, dtypes and shapes must be those saved.

        Where some are DTensors all ranks call this together.
        """
        self.refuse_differences({name: tensorfile.kind(name, tensor) for name, tensor in tensors.items()})
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            shards.load(self.path, tensors)
        else:
            self.copy_into(tensors)

    @torch.no_grad()
    def copy_into(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        try:
            for file in self.files:
                for name, part, place in tensorfile.read_parts(self.path / file, prefix):
                    target = tensors[name]
                    for dim, (start, length) in enumerate(zip(place, part.shape, strict=True)):
                        target = target.narrow(dim, start, length)
                    target.copy_(part)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} passed verification but cannot be read now: {error}.") from error

    def refuse_differences(self, wanted: dict[str, str]) -> None:
        for name in sorted(self.kinds.keys() | wanted.keys()):
            saved, asked = self.kinds.get(name, "absent"), wanted.get(name, "absent")
            if saved != asked:
                raise CheckpointError(
                    f"{self.path} does not fit what it is loaded into: {name} is {saved} in the checkpoint and "
                    f"{asked} in the run; resume with the configuration it was saved with."
                )


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder, −1 for any other name."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def manifest(run: str | None, step: int, best: bool, kinds: dict[str, str], files: dict[str, Any]) -> bytes:
    return spelt({"format": FORMAT, "run": run, "step": step, "best": best, "tensors": kinds, "files": files})


def spelt(body: dict[str, Any]) -> bytes:
    """The one spelling of a manifest: sorted, indented, and with the hash of what it says without that hash."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def read_back(came: bytes) -> dict[str, Any] | None:
    """What `spelt` was given, None if it never spelt this."""
    try:
        body = json.loads(came)
        del body["sha256"]
        return body if spelt(body) == came else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_manifest(path: Path, run: str | None) -> dict[str, Any]:
    """The manifest of the checkpoint at `path` if it is whole, of that step and of this run (None: of any)."""
    try:
        came = (path / "manifest.json").read_bytes()
    except FileNotFoundError:
        raise CheckpointError("manifest.json is missing") from None
    except OSError as error:
        raise CheckpointError(f"manifest.json cannot be read ({error.strerror})") from error
    body = read_back(came)
    if body is None:
        raise CheckpointError("manifest.json does not match its own hash")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"it is of format {body.get('format')} and this version reads format {FORMAT}")
    if body["step"] != step_of(path):
        raise CheckpointError(f"its manifest is that of step {body['step']}")
    if run is not None and body["run"] != run:
        raise CheckpointError(f"it belongs to run {body['run']!r} and this is run {run!r}")
    return body


def verify(path: Path, run: str | None) -> Found:
    """Read every byte of the checkpoint at `path`; raises CheckpointError with what is wrong, as half a sentence."""
    body = read_manifest(path, run)
    try:
        present = set(os.listdir(path))
        for name in sorted(present - body["files"].keys()):
            if name.endswith(".safetensors"):
                raise CheckpointError(f"{name} is not in its manifest")
        for name, entry in body["files"].items():
            if name not in present:
                raise CheckpointError(f"{name} is missing")
            verify_file(path / name, entry)
        state = json.loads((path / "state.json").read_bytes())
    except OSError as error:
        raise CheckpointError(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from error
    if state["step"] != body["step"]:
        raise CheckpointError(f"its state is that of step {state['step']}")
    refuse_gaps(body)
    files = [name for name, entry in body["files"].items() if "tensors" in entry]
    return Found(body["step"], path, state, body["tensors"], files)


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != entry["size"]:
        raise CheckpointError(f"{path.name} has {size:,} bytes instead of {entry['size']:,}")
    if tensorfile.measured(path)["sha256"] != entry["sha256"]:
        raise CheckpointError(f"{path.name} does not match its hash")
    if "tensors" in entry:
        try:
            same = tensorfile.headers(path) == entry["tensors"]
        except SafetensorError:
            same = False
        if not same:
            raise CheckpointError(f"{path.name} does not hold the tensors its manifest lists")


def refuse_gaps(body: dict[str, Any]) -> None:
    """The parts of a tensor in all files must add up to its size."""
    held = dict.fromkeys(body["tensors"], 0)
    for entry in body["files"].values():
        for name, kind in entry.get("tensors", {}).items():
            held[name] += math.prod(tensorfile.read_kind(kind)[1])
    for name, kind in body["tensors"].items():
        if held[name] != math.prod(tensorfile.read_kind(kind)[1]):
            raise CheckpointError(f"{name} is only there in part")
