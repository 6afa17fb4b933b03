"""Files of tensors (safetensors): written, flushed and hashed in one pass, and what their headers say."""

import errno
import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

PIECE = 1 << 24  # bytes written or hashed at a time
WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {word: dtype for dtype, word in WORDS.items()}


def kind(name: str, tensor: Tensor) -> str:
    """dtype and full shape, as in "F32 [3, 4]"."""
    if tensor.dtype not in WORDS or tensor.layout != torch.strided or tensor.is_meta:
        came = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise ValueError(f"only dense tensors of real, whole or boolean numbers can be saved, but {name} is {came}.")
    return f"{WORDS[tensor.dtype]} {list(tensor.shape)}"


def read_kind(text: str) -> tuple[torch.dtype, list[int]]:
    """dtype and shape of "F32 [3, 4]" or "F32 [1, 4] at [2, 0]"."""
    word, shape = text.split(" at ")[0].split(" ", 1)
    return DTYPES[word], json.loads(shape)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """Write contiguous CPU tensors; gives size and hash.

    safetensors' own writer would leave the file to be read again for its hash, and does not say why a disk refused.
    """
    # Widest elements first keeps every tensor aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": WORDS[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    contents = (tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in order)
    return write(path, [struct.pack("<Q", len(text)) + text, *contents])


def write(path: Path, buffers: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Write `buffers` one after the other into a new file, flushed to the disk; gives size and hash."""
    views = map(memoryview, buffers)
    pieces = [view[start : start + PIECE] for view in views for start in range(0, len(view), PIECE)]
    digest = hashlib.sha256()
    hashing = threading.Thread(target=lambda: [digest.update(piece) for piece in pieces])
    hashing.start()
    try:
        with open(path, "xb", buffering=0) as file:
            for piece in pieces:
                written = 0
                while written < len(piece):
                    written += file.write(piece[written:])
            os.fsync(file.fileno())
    finally:
        hashing.join()
    return {"size": sum(map(len, pieces)), "sha256": digest.hexdigest()}


def measured(path: Path) -> dict[str, Any]:
    """Size and hash of a file that is there."""
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def flush_names(folder: Path) -> None:
    """Without this a rename may not survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush folders
            raise
    finally:
        os.close(handle)


def offsets(metadata: dict[str, str] | None) -> dict[str, list[int]]:
    """Where each part lies in the whole, from a header's metadata; empty for a file of whole tensors."""
    places = json.loads((metadata or {}).get("DCP_SHARDING_INFO", "{}"))
    return {name: list(place["saved_offsets"]) for name, place in places.items()}


def headers(path: Path) -> dict[str, str]:
    """What a file says of its tensors: "F32 [3, 4]", or "F32 [1, 4] at [2, 0]" for a part, by name."""
    with safe_open(path, framework="pt") as file:
        places = {name: f" at {offset}" for name, offset in offsets(file.metadata()).items()}
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is not a dictionary)
        return {name: f"{p.get_dtype()} {p.get_shape()}{places.get(name, '')}" for name, p in parts.items()}


def read_parts(path: Path, prefix: str) -> Iterator[tuple[str, Tensor, list[int]]]:
    """name, tensor and its place in the whole, for every tensor of the file whose name starts with `prefix`."""
    with safe_open(path, framework="pt") as file:
        places = offsets(file.metadata())
        for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
            if name.startswith(prefix):
                part: Tensor = file.get_tensor(name)
                yield name, part, places.get(name) or [0] * part.dim()
