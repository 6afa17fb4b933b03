"""Parameter roles, optimisers chosen by role, logit control, and learning-rate schedules."""

from qklab.optim.attention_roles import LayerRoles, Rows, attention_roles, layer_roles
from qklab.optim.control_spec import LogitControlSpec
from qklab.optim.logit_control import LogitControl, QKClip
from qklab.optim.optimiser import Optimiser, OptimiserSpec
from qklab.optim.roles import Role, role, roles
from qklab.optim.schedule import ScheduleSpec

__all__ = [
    "LayerRoles",
    "LogitControl",
    "LogitControlSpec",
    "Optimiser",
    "OptimiserSpec",
    "QKClip",
    "Role",
    "Rows",
    "ScheduleSpec",
    "attention_roles",
    "layer_roles",
    "role",
    "roles",
]
