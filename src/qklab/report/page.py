"""A page as one HTML file: template, style and scripts of page/ with the data inside."""

import base64
import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

IMPORT = re.compile(r'^import [^;]*"\./([\w.]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=const|let|function|async|class)", re.MULTILINE)
FULL, LOST = 65_534, 65_535  # a weight of 1, and what is not a number
MapRows = Sequence[Sequence[float | None]]


def fill_template(title: str, script: str, data: dict[str, Any], watch: float | None = None) -> str:
    """The page that `script` makes of the data; with `watch` it may ask its server for news, otherwise for nothing."""
    parts = {
        "TITLE": escape(title),
        "WATCH": "" if watch is None else f' data-watch="{watch:g}"',
        "CONNECT": "'none'" if watch is None else "'self'",
        "STYLE": read_part("style.css").strip(),
        "SCRIPT": "".join(bundle_scripts(script, set())).strip(),
        "DATA": embed_json(data),
    }
    page = read_part("template.html")
    for name, value in parts.items():  # the data last, so that nothing in it is taken for a place to fill
        page = page.replace(f"{{{{{name}}}}}", value, 1)
    return page


def read_part(name: str) -> str:
    return (files("qklab.report") / "page" / name).read_text(encoding="utf-8")


def bundle_scripts(name: str, seen: set[str]) -> Iterator[str]:
    """A module after those it imports, each once and without import and export: all of them share one scope."""
    seen.add(name)
    text = read_part(name)
    for needed in IMPORT.findall(text):
        if needed not in seen:
            yield from bundle_scripts(needed, seen)
    yield EXPORT.sub("", IMPORT.sub("", text))


def embed_json(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element: no "<" can end it, and no NaN."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def pack_maps(attention: Mapping[str, Any], heads: int | None = None) -> dict[str, Any]:
    """Tokens and, per layer, the mean over heads followed by each head, as base64 of little-endian 16-bit numbers."""
    layers: dict[int, dict[str, Any]] = {}
    for place in ("middle", "last", "first"):  # in a model of one or two layers the later name stands
        layer = attention["layers"][place]
        maps: list[MapRows] = layer["maps"]
        packed = [pack_triangle(rows) for rows in [mean_map(maps), *maps[:heads]]]
        layers[layer["index"]] = {"place": place, "index": layer["index"], "heads": len(maps), "maps": packed}
    ordered = [layers[index] for index in sorted(layers)]
    return {"tokens": attention["tokens"], "layers": ordered, "notes": attention["notes"]}


def mean_map(maps: Sequence[MapRows]) -> MapRows:
    stacked = np.array(maps, dtype=float)  # None becomes nan
    return [[None if math.isnan(x) else x for x in row] for row in stacked.mean(0).tolist()]


def pack_triangle(rows: MapRows) -> str:
    """The part of a causal map that can be other than 0, row by row."""
    weights = (weight for i, row in enumerate(rows) for weight in row[: i + 1])
    numbers = array("H", [LOST if x is None else round(FULL * min(1.0, max(0.0, x))) for x in weights])
    return base64.b64encode(numbers.tobytes()).decode("ascii")
