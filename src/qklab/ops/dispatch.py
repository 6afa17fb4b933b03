"""One rule for which implementation of an operation runs.

"reference" is torch only and runs everywhere; "triton" is a kernel and raises where it cannot run; "auto" takes the
kernel where it can run, else the reference, and logs once per operation and device what it chose and why.
"""

import functools
import importlib.util
import logging
import os
from typing import Literal

import torch

from qklab.schema import suggest_name

Impl = Literal["auto", "reference", "triton"]
IMPLS: tuple[str, ...] = ("auto", "reference", "triton")


def check_impl(impl: str) -> None:
    if impl not in IMPLS:
        known = ", ".join(map(repr, IMPLS))
        raise ValueError(f"impl must be one of {known}{suggest_name(impl, IMPLS)}, but {impl!r} came.")


def chosen(operation: str, impl: str, device: torch.device) -> Literal["reference", "triton"]:
    """What runs for tensors on `device`."""
    check_impl(impl)
    if impl == "reference":
        return "reference"
    obstacle = why_no_triton(device.type)
    if impl == "triton":
        if obstacle:
            raise ValueError(f"{operation}: impl='triton' cannot run: {obstacle}; use impl='reference' or 'auto'.")
        return "triton"
    return announced(operation, device.type, obstacle)


def why_no_triton(device: str) -> str | None:
    """What keeps a Triton kernel from running on tensors of this kind of device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs tensors on a GPU, and these are on {device}"
    return None


@functools.cache
def announced(operation: str, device: str, obstacle: str | None) -> Literal["reference", "triton"]:
    """The automatic choice, said once."""
    # Triton's interpreter is for tests: whoever wants it on the CPU asks for "triton" by name
    takes_kernel = device == "cuda" and obstacle is None
    choice = "triton" if takes_kernel else "reference"
    reason = "the tensors are on a GPU" if takes_kernel else obstacle or f"the tensors are on {device}"
    logging.getLogger("qklab").info("%s: impl='auto' takes %r, since %s.", operation, choice, reason)
    return choice
