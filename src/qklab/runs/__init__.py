"""The run directory: what a run was, what it measured, and how it ended. Needs no torch to be read."""

from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.metrics import MetricsFile, read_metrics

__all__ = ["MetricsFile", "RunDirectory", "RunError", "read_metrics"]
