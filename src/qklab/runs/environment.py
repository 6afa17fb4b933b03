"""Where a number was made: versions, processor, commit."""

import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

COMPUTING = (
    "attention",
    "data",
    "model",
    "ops",
    "optim",
    "train",
)  # the parts of qklab that decide what a run computes
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "transformers", "liger-kernel")


def describe_environment(device: dict[str, Any]) -> dict[str, Any]:
    """Versions, processor and command of this process; `device` is what the trainer says about its own."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := find_version(name)) is not None},
        "device": device,
    }


def find_cache_root() -> Path:
    """The folder for what can be made again: the one QKLAB_CACHE names, else one in the user's cache."""
    return Path(os.environ.get("QKLAB_CACHE") or Path.home() / ".cache" / "qklab")


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


@functools.cache
def hash_code() -> str:
    """SHA-256 of the source files that decide what a run computes."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for part in COMPUTING for path in (package / part).rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def find_commit() -> str | None:
    """The commit of the checkout this package was imported from, with "+changes" if it differs; None outside one."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            ran = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", "environment.py") is None:
        return None
    return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no", "..") else "")
