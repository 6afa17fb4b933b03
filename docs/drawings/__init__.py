"""Every drawing of the documentation: file below docs/ → the function that draws it."""

from collections.abc import Callable

from . import cache, couple, mix, project, results, rotate, stages
from .sketch import Sketch

DRAWINGS: dict[str, Callable[[], Sketch]] = {
    "stages.svg": stages.stages,
    "layer-costs.svg": results.layer_costs,
    "training-step.svg": results.training_step,
    "coupling-costs.svg": results.coupling_costs,
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
    "mechanisms/qk-norm.svg": rotate.qk_norm,
    "mechanisms/rope.svg": rotate.rope,
    "mechanisms/rope-once.svg": rotate.rope_once,
    "mechanisms/learned-positions.svg": rotate.learned_positions,
    "mechanisms/asymmetry-2d.svg": rotate.asymmetry_2d,
    "mechanisms/softmax.svg": mix.softmax,
    "mechanisms/differential.svg": mix.differential,
    "mechanisms/differential-v2.svg": mix.differential_v2,
    "mechanisms/cache.svg": cache.cache,
}
