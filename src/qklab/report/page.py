"""The report as one HTML file: template, style and scripts of page/ with the data inside."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from qklab.report.data import gather
from qklab.report.maps import Maps
from qklab.runs.directory import RunError
from qklab.runs.files import describe_os_error, write_text

SCRIPTS = ("core.js", "plot.js", "figures.js", "main.js")


def build(paths: Sequence[Path], out: Path, *, text: str = "", maps: bool = True) -> Path:
    """Write the report on study folders and run directories, finished or not, to `out`; attention maps are of `text`,
    by default the beginning of the validation text."""
    page = rendered(gather([Path(path) for path in paths], Maps(text) if maps else None))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise RunError(
            f"the report {out} cannot be written: {describe_os_error(error)}; choose another place with --out."
        ) from None
    return out


def rendered(data: dict[str, Any], watch: float | None = None) -> str:
    """The page; with `watch` it asks its server every so many seconds for news, otherwise it asks for nothing."""
    folder = files("qklab.report") / "page"

    def part(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    names = ", ".join(dict.fromkeys(group["title"] for group in data["groups"]))
    parts = {
        "TITLE": escape(f"{names} · qklab report"),
        "WATCH": "" if watch is None else f' data-watch="{watch:g}"',
        "CONNECT": "'none'" if watch is None else "'self'",
        "STYLE": part("style.css").strip(),
        "SCRIPT": "".join(part(name) for name in SCRIPTS).strip(),
        "DATA": embedded(data),
    }
    page = part("template.html")
    for name, value in parts.items():  # the data last, so that nothing in it is taken for a place to fill
        page = page.replace(f"{{{{{name}}}}}", value, 1)
    return page


def embedded(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element: no "<" can end it, and no NaN."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
