"""Where kernels run: on a GPU, or on the CPU in Triton's interpreter.

Triton decides on import whether it compiles or interprets, so the interpreter cannot be switched on halfway: without a
GPU `test_interpreter.py` runs the kernels' tests in a process of their own.
"""

import importlib.util
import os
import types
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
RUNS = INSTALLED and (GPU or INTERPRETED)

on_kernel = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a real GPU")

if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction

    # Triton's language is fitted for the interpreter when a kernel starts, and anew in every function it calls: half of
    # the time. For the functions of triton's own module once is enough, and ours have what the kernel has.
    fit_and_call, fitted = InterpretedFunction.__call__, set()

    def call_function(self: Any, *args: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module in fitted or module.startswith("qklab"):
            return self.rewrite()(*args, **options)
        fitted.add(module)
        return fit_and_call(self, *args, **options)

    InterpretedFunction.__call__ = call_function


def refuse_strays(monkeypatch: pytest.MonkeyPatch, launches: Any) -> None:
    """Let the interpreter read and write nothing but the tensors that a kernel was given: `launches`, a module, starts
    its kernels by `run`."""
    from triton.runtime import interpreter

    run, load, store = launches.run, interpreter._interpreter.load, interpreter._interpreter.store
    spans: list[tuple[int, int]] = []

    def check(places: Any, mask: Any) -> None:
        places = places[mask]
        if places.size:
            first, last = places.min(), places.max()
            assert any(start <= first and last < stop for start, stop in spans), "outside of all tensors"

    def checked_load(places: Any, mask: Any, *rest: Any) -> Any:
        check(places, mask)
        return load(places, mask, *rest)

    def checked_store(places: Any, values: Any, mask: Any) -> Any:
        check(places, mask)
        return store(places, values, mask)

    def tensors(arguments: Any) -> list[Tensor]:
        nested = [tensors(a) if isinstance(a, tuple) else [a] for a in arguments]
        return [a for part in nested for a in part if isinstance(a, Tensor)]

    def checked_run(kernel: Any, grid: Any, how: Any, *arguments: Any) -> None:
        storages = {a.untyped_storage().data_ptr(): a.untyped_storage() for a in tensors(arguments)}
        spans[:] = [(start, start + storage.nbytes()) for start, storage in storages.items()]
        run(kernel, grid, how, *arguments)

    monkeypatch.setattr(launches, "run", checked_run)
    fake = types.SimpleNamespace(**{**vars(interpreter._interpreter), "load": checked_load, "store": checked_store})
    monkeypatch.setattr(interpreter, "_interpreter", fake)
