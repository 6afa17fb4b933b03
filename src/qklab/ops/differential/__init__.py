"""Differential attention, composed from plain attention."""

from qklab.ops.differential.api import FORMS, Form, differential, differential_v2

__all__ = ["FORMS", "Form", "differential", "differential_v2"]
