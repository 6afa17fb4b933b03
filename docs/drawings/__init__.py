"""Every picture of the documentation by its file below docs/: drawings of mechanisms, and charts of results."""

from collections.abc import Callable

from . import cache, couple, finish, house, look_back, mix, project, rotate, stages
from .evidence import CLAIMS
from .results import MEASUREMENTS, Chart
from .sketch import Sketch
from .tasks import TASKS

__all__ = ["CHARTS", "DRAWINGS"]

CHARTS: dict[str, Chart] = MEASUREMENTS | CLAIMS
DRAWINGS: dict[str, Callable[[], Sketch]] = {
    "stages.svg": stages.stages,
    "house.svg": house.draw_house,
    "mechanisms/separate.svg": project.separate,
    "mechanisms/shared-key-value.svg": project.shared_key_value,
    "mechanisms/shared-query-key.svg": project.shared_query_key,
    "mechanisms/shared-all.svg": project.shared_all,
    "mechanisms/latent.svg": project.latent,
    "mechanisms/coupling.svg": couple.coupling,
    "mechanisms/euler.svg": couple.euler,
    "mechanisms/symplectic-euler.svg": couple.symplectic_euler,
    "mechanisms/leapfrog.svg": couple.leapfrog,
    "mechanisms/affine.svg": couple.affine,
    "mechanisms/uncoupled.svg": couple.uncoupled,
    "mechanisms/linear.svg": couple.linear,
    "mechanisms/cca.svg": look_back.cca,
    "mechanisms/short-convolution.svg": look_back.short_convolution,
    "mechanisms/key-shift.svg": look_back.key_shift,
    "mechanisms/qk-norm.svg": rotate.qk_norm,
    "mechanisms/rope.svg": rotate.rope,
    "mechanisms/rope-once.svg": rotate.rope_once,
    "mechanisms/learned-positions.svg": rotate.learned_positions,
    "mechanisms/asymmetry-2d.svg": rotate.asymmetry_2d,
    "mechanisms/softmax.svg": mix.softmax,
    "mechanisms/differential.svg": mix.differential,
    "mechanisms/differential-v2.svg": mix.differential_v2,
    "mechanisms/window.svg": finish.window,
    "mechanisms/sinks.svg": finish.sinks,
    "mechanisms/exclusive.svg": finish.exclusive,
    "mechanisms/gate.svg": finish.gate,
    "mechanisms/value-norm.svg": finish.value_norm,
    "mechanisms/cache.svg": cache.cache,
} | TASKS
