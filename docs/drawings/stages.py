"""The one picture of the five stages."""

from qklab import register
from qklab.attention.project import PROJECTIONS, Latent
from qklab.attention.rotate import POSITIONS

from .sketch import CACHED, LINE, Sketch


def stages() -> Sketch:
    """The five stages from top to bottom, with what can be chosen in each; read from the registries."""
    s = Sketch(510, "Five stages: project, couple, normalise, rotate, mix, then output; the cache stands after rotate")
    positions = {"rope": "RoPE", "learned": "learned positions", "none": "none"}
    choices = {
        "project": [kind.tuple_name for kind in PROJECTIONS.values()] + [Latent.tuple_name, "GQA", "MQA"],
        "couple": ["none", *register.coupling],
        "normalise": ["none", "QK-norm", "value norm"],
        "rotate": [positions.get(name, name) for name in POSITIONS] + ["k=v: once", "k=v: on-read", "2-D asymmetry"],
        "mix": [*register.mix, "window", "sinks", "XSA", "gate"],
    }
    tops = dict(zip(choices, (82, 156, 230, 300, 424), strict=True))
    s.text(88, 24, "x of every token")
    y = 34.0
    for stage, names in choices.items():
        centre = tops[stage]
        s.arrow((88, y), (88, centre - 24))
        s.box(88, centre, 136, 46, stage, "paper", 18)
        chips(s, 176, centre, names)
        y = centre + 24
    s.node(88, 366, "")
    s.arrow((88, 366), (171, 366), colour=CACHED)
    s.box(372, 366, 392, 34, "k and v  ·  one tensor where k = v  ·  MLA's latent", "paper", 14)
    s.cached(372, 366, 392, 34, "")
    s.text(128, 354, "cache", 14, colour=CACHED)
    s.arrow((88, y), (88, 474))
    s.text(88, 488, "output  y = W_o o", 15)
    s.text(176, 488, "a cached key is already coupled and normalised", 13, "start", LINE)
    return s


def chips(s: Sketch, x: float, y: float, names: list[str], right: float = 624) -> None:
    """Small boxes in a row, in as many lines as they need."""
    lines: list[list[tuple[str, float]]] = [[]]
    at = x
    for name in names:
        wide = 18 + 7.4 * len(name)
        if at + wide > right:
            lines.append([])
            at = x
        lines[-1].append((name, wide))
        at += wide + 7
    for i, line in enumerate(lines):
        at, centre = x, y + 30 * (i - (len(lines) - 1) / 2)
        for name, wide in line:
            s.box(at + wide / 2, centre, wide, 25, name, "", 13)
            at += wide + 7
