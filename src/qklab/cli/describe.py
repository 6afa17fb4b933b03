import dataclasses
import json
from typing import Any, Literal

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.spec import AttentionSpec, LatentSpec
from qklab.cli.flags import make_flags, select_changed
from qklab.describe import describe_spec, format_spec
from qklab.schema import SpecError

CouplingFlags = make_flags(CouplingSpec, kind=(Literal[("none", *register.coupling)], "none"))
LatentFlags = make_flags(LatentSpec)
AttentionFlags = make_flags(
    AttentionSpec,
    width=(int | None, None),
    heads=(int, 8),
    coupling=(CouplingFlags, CouplingFlags()),
    latent=(LatentFlags, LatentFlags()),
)


@dataclasses.dataclass(frozen=True)
class DescribeCommand(AttentionFlags):
    __doc__ = AttentionFlags.__doc__
    json: bool = False

    def execute(self) -> int:
        spec = build_attention_spec(self)
        print(json.dumps(describe_spec(spec), indent=2, ensure_ascii=False) if self.json else format_spec(spec))
        return 0


def build_attention_spec(flags: Any) -> AttentionSpec:
    """Command-line flags → spec; the width is 64 per head unless given."""
    values = {name: v for name, v in select_changed(flags).items() if name not in ("coupling", "latent", "json")}
    coupling, latent = select_changed(flags.coupling), select_changed(flags.latent)
    if "kind" in coupling:
        values["coupling"] = coupling
    elif coupling:
        name = next(iter(coupling))
        raise SpecError(
            f"coupling.{name} came without a coupling; add --coupling.kind, e.g. leapfrog.", "coupling.kind"
        )
    if latent:
        values["latent"] = latent
    values.setdefault("width", max(flags.heads, 1) * (flags.head_width or 64))
    return AttentionSpec.from_dict(values | {"heads": flags.heads})
