"""The report: one self-contained HTML page about runs and studies, built from their directories alone."""

from qklab.report.build import build_report
from qklab.report.card import write_card
from qklab.report.serve import serve_report

__all__ = ["build_report", "serve_report", "write_card"]
