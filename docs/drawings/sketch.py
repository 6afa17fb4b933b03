"""Boxes and arrows as SVG, in one visual language: query blue, key orange, value green, a shared tensor in the colours
of what it stands for, what is cached in a dashed violet frame. Every sketch brings its own light ground, so it reads
the same on light and dark pages; no fonts, scripts or styles from elsewhere."""

import math
import re
from collections.abc import Sequence
from html import escape

Rows = list[list[float | None]]

INK, LINE, FAINT, GROUND, EDGE = "#1f2933", "#52606d", "#b8bec5", "#fbfaf7", "#d9d5cc"
FILL = {"q": "#cfe0fa", "k": "#fbd9b8", "v": "#cdebd2", "": "#e9ecef", "paper": "#ffffff"}
STROKE = {"q": "#2459a9", "k": "#b4570a", "v": "#23763a", "": "#7b8794", "paper": FAINT}
CACHED, NEGATIVE = "#7048b6", "#b3261e"

Point = tuple[float, float]


class Sketch:
    """A drawing 640 wide; y grows downwards, boxes are placed by their centre."""

    width = 640

    def __init__(self, height: int, title: str):
        self.height, self.title = height, title
        self.gradients: dict[str, str] = {}
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "", size: float = 15) -> None:
        """A rounded box. `kind` is "q", "k", "v", several of them for a shared tensor, or "" for an operation."""
        stroke = STROKE[kind] if kind in STROKE else STROKE[kind[0]]
        self.parts.append(
            f'<rect x="{x - w / 2:g}" y="{y - h / 2:g}" width="{w:g}" height="{h:g}" rx="6" '
            f'fill="{self.paint(kind)}" stroke="{stroke}" stroke-width="1.5"/>'
        )
        if text:
            self.text(x, y, text, size)

    def paint(self, kind: str) -> str:
        """A plain colour, or for several letters a gradient of hard stripes, one per letter."""
        if kind in FILL:
            return FILL[kind]
        edges = [100 * i / len(kind) for i in range(len(kind) + 1)]
        stops = "".join(
            f'<stop offset="{at:.4g}%" stop-color="{FILL[letter]}"/>'
            for letter, start, end in zip(kind, edges, edges[1:], strict=False)
            for at in (start, end)
        )
        self.gradients[kind] = f'<linearGradient id="{kind}">{stops}</linearGradient>'
        return f"url(#{kind})"

    def cached(self, x: float, y: float, w: float, h: float, label: str = "cached") -> None:
        """A dashed frame around a box of this centre and size, with its label below."""
        self.parts.append(
            f'<rect x="{x - w / 2 - 5:g}" y="{y - h / 2 - 5:g}" width="{w + 10:g}" height="{h + 10:g}" rx="9" '
            f'fill="none" stroke="{CACHED}" stroke-width="2" stroke-dasharray="6 4"/>'
        )
        if label:
            self.text(x, y + h / 2 + 16, label, 13, colour=CACHED)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 14,
        anchor: str = "middle",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        """One line centred on y; `_q` or `_{2h}` after a single letter is a subscript."""
        pieces = re.split(r"(?<![a-z]{2})_(\{[^}]*\}|[A-Za-z0-9]+)", text)
        body, drop = escape(pieces[0]), round(0.25 * size, 1)
        for subscript, rest in zip(pieces[1::2], pieces[2::2], strict=True):
            body += f'<tspan dy="{drop}" font-size="{0.75 * size:g}">{escape(subscript.strip("{}"))}</tspan>'
            body += f'<tspan dy="-{drop}">{escape(rest)}</tspan>' if rest else ""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"'
            f'{weight} xml:space="preserve">{body}</text>'
        )

    def arrow(self, *points: Point, colour: str = LINE, head: bool = True, dashed: bool = False) -> None:
        """A line through the points, ending in an arrowhead."""
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        path = list(points)
        if head:
            path[-1] = (x1 - 6 * math.cos(angle), y1 - 6 * math.sin(angle))
        drawn = " ".join(f"{x:.5g},{y:.5g}" for x, y in path)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        if head:
            corners = [
                (x1 - r * math.cos(angle + turn), y1 - r * math.sin(angle + turn))
                for r, turn in ((0, 0), (10, 0.42), (10, -0.42))
            ]
            drawn = " ".join(f"{x:.5g},{y:.5g}" for x, y in corners)
            self.parts.append(f'<polygon points="{drawn}" fill="{colour}"/>')

    def line(self, *points: Point, colour: str = LINE, dashed: bool = False) -> None:
        self.arrow(*points, colour=colour, head=False, dashed=dashed)

    def node(self, x: float, y: float, sign: str = "+", radius: float = 12) -> None:
        """A round operation, such as + or −; "" is the dot where a line branches off."""
        if not sign:
            self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{LINE}"/>')
            return
        self.circle(x, y, radius, fill=FILL["paper"])
        self.text(x, y, sign, 16, bold=True)

    def circle(self, x: float, y: float, radius: float, fill: str = "none", stroke: str = LINE) -> None:
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
        )

    def bar(self, x: float, y: float, w: float, h: float, kind: str) -> None:
        """A filled rectangle from its top left corner."""
        stroke = STROKE[kind] if kind in STROKE else STROKE[kind[0]]
        self.parts.append(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{w:.5g}" height="{h:.5g}" '
            f'fill="{self.paint(kind)}" stroke="{stroke}"/>'
        )

    def map(self, x: float, y: float, values: Sequence[Sequence[float | None]], cell: float, kind: str = "q") -> None:
        """A matrix of numbers in [−1, 1] as shades from its top left corner: negative ones red, None left out."""
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if value is None:
                    continue
                colour = STROKE[kind] if value >= 0 else NEGATIVE
                self.parts.append(
                    f'<rect x="{x + j * cell:g}" y="{y + i * cell:g}" width="{cell:g}" height="{cell:g}" '
                    f'fill="{colour}" fill-opacity="{abs(value):.2f}" stroke="{EDGE}"/>'
                )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        ground = f'<rect x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="12"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            *([f"<defs>{''.join(self.gradients.values())}</defs>"] if self.gradients else []),
            f'{ground} fill="{GROUND}" stroke="{EDGE}" stroke-width="2"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
