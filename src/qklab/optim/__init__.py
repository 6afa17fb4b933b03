"""Roles of parameters and of attention's weights, optimisers, logit control, and learning-rate schedules."""

from qklab.optim.logit_control import LogitControl
from qklab.optim.optimiser import Optimiser, ParameterRole, find_parameter_role
from qklab.optim.population import PopulationOptimiser, measure_gradient_norms
from qklab.optim.qk_clip import QKClip
from qklab.optim.roles import LayerRoles, Rows, attention_roles, layer_roles
from qklab.optim.spec import LogitControlSpec, OptimiserSpec, ScheduleSpec

__all__ = [
    "LayerRoles",
    "LogitControl",
    "LogitControlSpec",
    "Optimiser",
    "OptimiserSpec",
    "ParameterRole",
    "PopulationOptimiser",
    "QKClip",
    "Rows",
    "ScheduleSpec",
    "attention_roles",
    "find_parameter_role",
    "layer_roles",
    "measure_gradient_norms",
]
