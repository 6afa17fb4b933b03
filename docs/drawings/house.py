"""The packages of qklab and which of them import which, read from their source."""

import ast
from collections.abc import Iterator
from pathlib import Path

from .sketch import Sketch

SOURCE = Path(__file__).parent.parent.parent / "src/qklab"
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


def draw_house() -> Sketch:
    arrows = needed_arrows(read_imports())
    row = number_rows(arrows)
    slots: list[list[tuple[str, ...]]] = [[] for _ in range(max(row.values()) + 1)]
    for name in sorted(arrows, key=lambda name: (name in FOLLOWED, name)):
        slots[row[name]].append((name,))
        for below in sorted(arrows[name]):  # an arrow over several rows takes a place in those between
            for i in range(row[name] + 1, row[below]):
                slots[i].append((name, below))
    place = {
        (*slot, i) if len(slot) == 2 else slot[0]: (Sketch.width * (j + 1) / (len(line) + 1), 40.0 + 72 * i)
        for i, line in enumerate(slots)
        for j, slot in enumerate(line)
    }
    s = Sketch(72 * len(slots) + 8, "The packages of qklab; every arrow is an import, and all of them lead down")
    for name, found in arrows.items():
        for below in sorted(found):
            (x0, y0), (x1, y1) = place[name], place[below]
            bends = [place[name, below, i] for i in range(row[name] + 1, row[below])]
            s.arrow((x0, y0 + 18), *bends, (x1, y1 - 19))
    for name in arrows:
        x, y = place[name]
        s.box(x, y, 108, 36, name, "q" if name in FOLLOWED else "paper", 15)
    return s
