"""The report on runs and studies, written to one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qklab.report.data import gather_data
from qklab.report.maps import MapCache
from qklab.report.page import fill_template
from qklab.runs.directory import RunError
from qklab.runs.files import describe_os_error, write_text


def build_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report on study folders and run directories, finished or not, to `out`."""
    page = render_report(gather_data([Path(path) for path in paths], MapCache()))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise RunError(
            f"the report {out} cannot be written: {describe_os_error(error)}; choose another place with --out."
        ) from None
    return out


def render_report(data: dict[str, Any], watch: float | None = None) -> str:
    """The page; with `watch` it asks its server every so many seconds for news, otherwise it asks for nothing."""
    names = ", ".join(dict.fromkeys(group["title"] for group in data["groups"]))
    return fill_template(f"{names} · qklab report", "report.js", data, watch)
