"""The kernels' tests in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import GPU, INSTALLED, INTERPRETED


@pytest.mark.long
@pytest.mark.skipif(GPU or INTERPRETED or not INSTALLED, reason="the kernels run in this process, or not at all")
@pytest.mark.timeout(600)
def test_the_kernels_in_the_interpreter() -> None:
    names = "coupling_kernel", "convolution_kernel", "decode_kernel", "loss"
    files = [Path(__file__).with_name(f"test_{name}.py") for name in names]
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "kernel or triton"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    answer = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " passed" in answer.stdout
    skipped = [line for line in answer.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("needs a real GPU" in line for line in skipped), skipped
