"""Parameter roles, optimisers chosen by role, and learning-rate schedules."""

from qklab.optim.optimiser import Optimiser, OptimiserSpec
from qklab.optim.roles import Role, role, roles
from qklab.optim.schedule import ScheduleSpec

__all__ = ["Optimiser", "OptimiserSpec", "Role", "ScheduleSpec", "role", "roles"]
