"""Where kernels run: on a GPU, or on the CPU in Triton's interpreter.

Triton decides on import whether it compiles or interprets, so the interpreter cannot be switched on halfway: without a
GPU `test_interpreter.py` runs the kernels' tests in a process of their own.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch

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
