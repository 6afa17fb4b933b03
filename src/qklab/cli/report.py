import dataclasses
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """One self-contained HTML page from studies or runs, also while they are going on.

    Args:
        folders: studies, comparisons or run directories
        out: the page; by default report.html in the first folder
        watch: serve the page on this machine and keep it up to date
        port: where to serve it
    """

    folders: Positional[tuple[Path, ...]]
    out: Path | None = None
    watch: bool = False
    port: int = 8000

    def execute(self) -> int:
        from qklab import report

        if not self.folders:
            raise ValueError("a report needs a study or a run directory, e.g. qklab report comparisons/stdlib.")
        if self.watch:
            report.serve_report(self.folders, self.port)
            return 0
        print(report.build_report(self.folders, self.out or self.folders[0] / "report.html"))
        return 0
