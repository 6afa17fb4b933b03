"""One rule for which implementation of an operation runs.

"reference" is torch only and runs everywhere; "triton" is a kernel and raises where it cannot run; "auto" takes the
kernel where it can run, else what torch has to offer, and logs once per operation, device and reason what it chose.
What torch offers is the reference, or where that is only a definition, a faster way of its own (`fallback`).
"""

import functools
import importlib.util
import logging
import os
from typing import Literal

import torch

from qklab.schema import suggest_name

Impl = Literal["auto", "reference", "triton"]


def check_impl(impl: str, fallback: str = "reference") -> None:
    impls = list(dict.fromkeys(("auto", "reference", fallback, "triton")))
    if impl not in impls:
        known = ", ".join(map(repr, impls))
        raise ValueError(f"impl must be one of {known}{suggest_name(impl, impls)}, but {impl!r} came.")


def choose_impl(
    operation: str,
    impl: str,
    device: torch.device,
    obstacle: str | None = None,
    objection: str | None = None,
    fallback: str = "reference",
) -> str:
    """What runs for tensors on `device`: "triton", "reference" or `fallback`.

    An obstacle is what about the tensors keeps the kernel from taking them; an objection is why it is not taken,
    although it could be, unless it is asked for.
    """
    check_impl(impl, fallback)
    if impl == "auto":
        return choose_automatically(operation, device.type, obstacle or objection, fallback)
    if impl == "triton":
        obstacle = obstacle or explain_no_triton(device.type)
        if obstacle:
            raise ValueError(f"{operation}: impl='triton' cannot run: {obstacle}; use impl={fallback!r} or 'auto'.")
    return impl


# what torch.compiler.assume_constant_result does; calling it would import the whole compiler with qklab
setattr(choose_impl, "_dynamo_marked_constant", True)  # noqa: B010


def explain_no_triton(device: str) -> str | None:
    """What keeps a Triton kernel from running on tensors of this kind of device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs tensors on a GPU, and these are on {device}"
    return None


@functools.cache
def choose_automatically(operation: str, device: str, reason: str | None, fallback: str) -> str:
    """The automatic choice, said once; `reason` speaks against the kernel."""
    # Triton's interpreter is for tests: whoever wants it on the CPU asks for "triton" by name
    reason = explain_no_triton(device) or reason or (None if device == "cuda" else f"the tensors are on {device}")
    choice = fallback if reason else "triton"
    reason = reason or "the tensors are on a GPU"
    say_choice(operation, repr(choice), reason)
    return choice


def say_choice(operation: str, choice: str, reason: str) -> None:
    logging.getLogger("qklab").info("%s: impl='auto' takes %s, since %s.", operation, choice, reason)


log_once = functools.cache(say_choice)


def log_choice(operation: str, choice: str, reason: str) -> None:
    """Say once what was chosen, and why, also from within a compiled graph."""
    log_once(operation, choice, reason)


setattr(log_choice, "_dynamo_marked_constant", True)  # noqa: B010
