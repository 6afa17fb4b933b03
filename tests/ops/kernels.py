"""Where kernels run: on a GPU, or on the CPU in Triton's interpreter.

Triton decides on import whether it compiles or interprets, so the interpreter cannot be switched on halfway: without a
GPU `test_interpreter.py` runs the kernels' tests in a process of their own.
"""

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
RUNS = INSTALLED and (GPU or INTERPRETED)

on_kernel = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a real GPU")
