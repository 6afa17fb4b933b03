"""The packages of qklab and which of them import which, read from their source."""

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise, permutations, product
from pathlib import Path

import qklab

from .sketch import Point, Sketch

SOURCE = Path(qklab.__file__).parent
OUTSIDE = ["testing"]  # used by tests, and may import anything
FOLLOWED = ["data", "model", "attention", "ops"]  # what a batch meets in a training step


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, also inside functions, but not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported_names(node)


def read_imports() -> dict[str, set[str]]:
    """Package → packages it imports."""
    names = [path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    imports: dict[str, set[str]] = {name: set() for name in names if name not in OUTSIDE}
    for name, found in imports.items():
        for path in (SOURCE / name).rglob("*.py"):
            for full in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
                package = full.split(".")[1] if full.startswith("qklab.") else ""
                if package in imports and package != name:
                    found.add(package)
    return imports


def reachable(imports: dict[str, set[str]], name: str) -> set[str]:
    return {name}.union(*(reachable(imports, other) for other in imports[name]))


def needed_arrows(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others: a way of two arrows needs no third."""
    return {
        name: {one for one in found if not any(one in reachable(imports, other) for other in found - {one})}
        for name, found in imports.items()
    }


def number_rows(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Every package stands one row below the lowest that imports it."""
    row = dict.fromkeys(arrows, 0)
    for _ in arrows:
        for name, found in arrows.items():
            for below in found:
                row[below] = max(row[below], row[name] + 1)
    return row


Slot = tuple[str, str, int]  # an arrow (from, to) or, where both are the same, a package; and its row


def fill_rows(arrows: dict[str, set[str]]) -> list[list[Slot]]:
    """What stands in each row: packages, and the bends of arrows that pass through it on their way."""
    row = number_rows(arrows)
    slots: list[list[Slot]] = [[] for _ in range(max(row.values()) + 1)]
    for name in sorted(arrows):
        slots[row[name]].append((name, name, row[name]))
        for below in sorted(arrows[name]):
            for i in range(row[name] + 1, row[below]):
                slots[i].append((name, below, i))
    return slots


def place_slots(slots: Iterable[Iterable[Slot]]) -> dict[Slot, Point]:
    place = {}
    for i, line in enumerate(map(list, slots)):
        for j, slot in enumerate(line):
            place[slot] = (Sketch.width * (j + 1) / (len(line) + 1), 40.0 + 72 * i)
    return place


def draw_house() -> Sketch:
    arrows = needed_arrows(read_imports())
    row = number_rows(arrows)

    def bends(name: str, below: str) -> list[Slot]:
        return [(name, below, i) for i in range(row[name] + 1, row[below])]

    paths: list[list[Slot]] = [
        [
            (name, name, row[name]),
            *((name, below, i) for i in range(row[name] + 1, row[below])),
            (below, below, row[below]),
        ]
        for name in sorted(arrows)
        for below in sorted(arrows[name])
    ]

    def length(place: dict[Slot, Point]) -> float:
        return sum(abs(place[one][0] - place[other][0]) for path in paths for one, other in pairwise(path))

    slots = fill_rows(arrows)
    place = min(map(place_slots, product(*map(permutations, slots))), key=length)
    s = Sketch(72 * len(slots) + 8, "The packages of qklab; every arrow is an import, and all of them lead down")
    for path in paths:
        (x0, y0), *between, (x1, y1) = (place[slot] for slot in path)
        s.arrow((x0, y0 + 18), *between, (x1, y1 - 19))
    for name in sorted(arrows):
        x, y = place[name, name, row[name]]
        s.box(x, y, 108, 36, name, "q" if name in FOLLOWED else "paper", 15)
    return s
