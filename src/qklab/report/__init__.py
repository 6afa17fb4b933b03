"""The report: one self-contained HTML page about runs and studies, built from their directories alone."""

from qklab.report.page import build
from qklab.report.serve import serve

__all__ = ["build", "serve"]
