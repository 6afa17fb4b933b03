"""One checkpoint on disk: a folder whose manifest says what must be in it, down to the last byte.

    step-0000000100/
        model.safetensors       one file per prefix of the tensors' names, or shard-….safetensors, one per rank
        optimiser.safetensors
        manifest.json           run, step, state, all tensors, every file's SHA-256; and the hash of all that

A manifest has exactly one spelling, so a changed byte in it is noticed even where JSON would not care.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qklab.optim.rows import is_dtensor
from qklab.runs.files import hash_file, write_bytes, write_tensors
from qklab.schema import format_value
from qklab.train.checkpoint.distributed import load_shards, part_offsets

FORMAT = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"(?:\.replaced-)?step-(\d{10,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, trusted or loaded, in one sentence."""


@dataclass(frozen=True)
class Snapshot:
    """What is saved: tensors by flat name ("model.…", "optimiser.…") and everything else as JSON."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def describe(self, run: str | None, best: bool) -> dict[str, Any]:
        """The manifest without its files. Refuses now what could not be written or told apart later."""
        step, state = self.step, self.state
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"a checkpoint's step is a whole number ≥ 0, but {format_value(step)} came.")
        if state.get("step", step) != step:
            came = format_value(state["step"])
            raise CheckpointError(f"a checkpoint of step {step} came with the state of step {came}.")
        for name in self.tensors:
            if not re.fullmatch(r"\w+\..+", name):
                came = format_value(name)
                raise CheckpointError(f"tensors are named 'model.…', 'optimiser.…' and so on, but {came} came.")
        try:
            state = json.loads(json.dumps({**state, "step": step}))
            tensors = {name: describe_tensor(name, tensor) for name, tensor in self.tensors.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"this state cannot be saved: {error}") from error
        return {"format": FORMAT, "run": run, "step": step, "best": best, "state": state, "tensors": tensors}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed verification."""

    step: int
    path: Path
    state: dict[str, Any]
    shapes: dict[str, str] = field(repr=False)  # dtype and full shape by name, "float32 [3, 4]"
    files: list[str] = field(repr=False)

    def read_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Those whose names start with `prefix`, whole, on the CPU, however many ranks wrote them."""
        whole = {}
        for name, described in self.shapes.items():
            if name.startswith(prefix):
                dtype, shape = described.split(" ", 1)
                whole[name] = torch.empty(json.loads(shape), dtype=getattr(torch, dtype))
        self._copy_into(whole, prefix)
        return whole

    def load_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` in place; they may be sharded in any way, but names, dtypes and shapes must be those saved.

        Where some are DTensors all ranks call this together.
        """
        wanted = {name: describe_tensor(name, tensor) for name, tensor in tensors.items()}
        for name in sorted(self.shapes.keys() | wanted.keys()):
            saved, asked = self.shapes.get(name, "absent"), wanted.get(name, "absent")
            if saved != asked:
                raise CheckpointError(
                    f"{self.path} does not fit what it is loaded into: {name} is {saved} in the checkpoint and "
                    f"{asked} in the run; resume with the configuration it was saved with."
                )
        if any(map(is_dtensor, tensors.values())):
            load_shards(self.path, tensors)
        else:
            self._copy_into(tensors)

    @torch.no_grad()
    def _copy_into(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        missing = {name: tensor.numel() for name, tensor in tensors.items()}
        try:
            for name, part, offset in self._read_parts(prefix):
                target = tensors[name]
                for dim, (start, length) in enumerate(zip(offset, part.shape, strict=True)):
                    target = target.narrow(dim, start, length)
                target.copy_(part)
                missing[name] -= part.numel() if part.dtype == target.dtype else 0
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} passed verification but cannot be read now: {error}.") from error
        for name, elements in missing.items():
            if elements:
                raise CheckpointError(f"{self.path} does not hold all of {name}; resume from another checkpoint.")

    def _read_parts(self, prefix: str) -> Iterator[tuple[str, Tensor, list[int]]]:
        """name, tensor and its offset in the whole, for every tensor of every file."""
        for file in self.files:
            with safe_open(self.path / file, framework="pt") as opened:
                offsets = part_offsets(opened.metadata())
                for name in opened.keys():  # noqa: SIM118 (it is not a dictionary)
                    if name.startswith(prefix):
                        part: Tensor = opened.get_tensor(name)
                        yield name, part, offsets.get(name) or [0] * part.dim()


def describe_tensor(name: str, tensor: Tensor) -> str:
    """dtype and full shape, as in "float32 [3, 4]"."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        came = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise ValueError(f"only dense tensors of real, whole or boolean numbers can be saved, but {name} is {came}.")
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder, −1 for any other name."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def write_files(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors into `folder`; the files' hashes by name."""
    files = {}
    for prefix in sorted({name.split(".")[0] for name in tensors}):
        path = folder / f"{prefix}.safetensors"
        own = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] == prefix}
        write_tensors(path, own, {"format": "pt"})
        files[path.name] = hash_file(path)
    return files


def write_checkpoint_manifest(folder: Path, body: dict[str, Any], files: dict[str, str]) -> None:
    for name in files:
        if not (folder / name).exists():
            raise CheckpointError(
                f"{name} was written to {folder.parent} by another rank but rank 0 does not see it there; "
                "checkpoints must lie on a file system that all machines share."
            )
    write_bytes(folder / MANIFEST, format_manifest({**body, "files": files}))


def format_manifest(body: dict[str, Any]) -> bytes:
    """The one spelling of a manifest: sorted, indented, and with the hash of what it says without that hash."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(content: bytes) -> dict[str, Any] | None:
    """What `format_manifest` was given, None if it never wrote this."""
    try:
        body = json.loads(content)
        del body["sha256"]
        return body if format_manifest(body) == content else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_manifest(path: Path, run: str | None) -> dict[str, Any]:
    """The manifest of the checkpoint at `path` if it is whole, of that step and of this run (None: of any)."""
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError("manifest.json is missing") from None
    except OSError as error:
        raise CheckpointError(f"manifest.json cannot be read ({error.strerror})") from error
    body = parse_manifest(content)
    if body is None:
        raise CheckpointError("manifest.json does not match its own hash")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"it is of format {body.get('format')} and this version reads format {FORMAT}")
    if body["step"] != step_of(path):
        raise CheckpointError(f"its manifest is that of step {body['step']}")
    if run is not None and body["run"] != run:
        raise CheckpointError(f"it belongs to run {body['run']!r} and this is run {run!r}")
    return body


def verify_checkpoint(path: Path, run: str | None) -> Checkpoint:
    """Read every byte of the checkpoint at `path`; raises CheckpointError with what is wrong, as half a sentence."""
    body = read_manifest(path, run)
    try:
        present = set(os.listdir(path))
        for name in sorted(present - body["files"].keys()):
            if name.endswith(".safetensors"):
                raise CheckpointError(f"{name} is not in its manifest")
        for name, digest in body["files"].items():
            if name not in present:
                raise CheckpointError(f"{name} is missing")
            if hash_file(path / name) != digest:
                raise CheckpointError(f"{name} does not match its hash")
    except OSError as error:
        raise CheckpointError(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from error
    return Checkpoint(body["step"], path, body["state"], body["tensors"], list(body["files"]))
