import dataclasses
import os
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.spec import AttentionSpec, LatentSpec
from qklab.cli.flags import annotate_optional, collect_given, make_optional_flags
from qklab.data.spec import DataSpec
from qklab.model.spec import DecoderSpec
from qklab.optim.spec import LogitControlSpec, OptimiserSpec, ScheduleSpec
from qklab.train.spec import BatchSpec, BenchmarkSpec, BudgetSpec, EvaluationSpec, ExecutionSpec, RunSpec


def make_run_flags() -> type:
    """Every field of a run as a flag, as in its TOML file: --model.recipe, --attention.share, --optimiser.lr, …"""
    coupling = make_optional_flags(CouplingSpec, {"kind": "none"}, kind=Literal[("none", *register.coupling)])
    sized: dict[str, str] = dict.fromkeys(("heads", "position", "bias"), "the recipe's")
    latent = make_optional_flags(LatentSpec)
    attention = make_optional_flags(AttentionSpec, sized, width=None, coupling=coupling, latent=latent)
    sized = dict.fromkeys(("width", "layers", "context", "mlp", "norm", "bias"), "the recipe's")
    model = make_optional_flags(DecoderSpec, sized | {"vocab": "the tokenizer's"}, attention=None)
    recipe = [("recipe", annotate_optional(str, "nano"), dataclasses.field(default=None))]
    model = dataclasses.make_dataclass("ModelFlags", recipe, bases=(model,), frozen=True)
    model.__doc__ = "A recipe's name (nano, micro, mini, 34m, 51m, …) and changes to it."
    parts = {
        "corpus": make_optional_flags(DataSpec),
        "batch": make_optional_flags(BatchSpec),
        "optimiser": make_optional_flags(OptimiserSpec),
        "logit_control": make_optional_flags(LogitControlSpec, {"method": "none"}),
        "schedule": make_optional_flags(ScheduleSpec),
        "budget": make_optional_flags(BudgetSpec),
        "evaluation": make_optional_flags(EvaluationSpec),
        "benchmarks": make_optional_flags(BenchmarkSpec),
    }
    more = {"attention": attention, "execution": make_optional_flags(ExecutionSpec)}
    extra = [(name, kind, dataclasses.field(default=kind())) for name, kind in more.items()]
    return dataclasses.make_dataclass(
        "RunFlags", extra, bases=(make_optional_flags(RunSpec, model=model, **parts),), frozen=True
    )


@dataclasses.dataclass(frozen=True)
class TrainCommand(make_run_flags()):
    """Settings come from FILE, overridden by flags, and else from the defaults.

    Args:
        file: a TOML file with the settings
        out: the run directory; if a run is there it is continued
        data: where corpora are looked for by name; by default $QKLAB_DATA
        quiet: show no progress, only what is wrong
    """

    file: Positional[Path | None] = None
    out: Path | None = None
    data: Path | None = None
    quiet: bool = False

    def execute(self) -> int:
        from qklab.runs.progress import QuietDisplay, Terminal
        from qklab.train import launch
        from qklab.train.resume import resolve_request

        values = collect_given(self)
        file, out, data, quiet = (values.pop(name, None) for name in ("file", "out", "data", "quiet"))
        spec, execution = resolve_request(values, file, out)
        outcome = launch.train(spec, out, execution, data=data, display=QuietDisplay() if quiet else Terminal())
        if int(os.environ.get("RANK", 0)) == 0:
            print(launch.describe_outcome(outcome))
        return launch.EXIT_CODES[outcome.status]
