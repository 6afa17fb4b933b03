import dataclasses
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """One self-contained HTML page from studies or runs, also while they are going on.

    Args:
        folders: studies, comparisons or run directories
        out: the page, or the card; by default report.html or card.png in the first folder
        card: instead of the page a picture and a paragraph in Markdown, fit for a pull request
        watch: serve the page on this machine and keep it up to date
        port: where to serve it
    """

    folders: Positional[tuple[Path, ...]]
    out: Path | None = None
    card: bool = False
    watch: bool = False
    port: int = 8000

    def execute(self) -> int:
        from qklab import report

        if not self.folders:
            raise ValueError("a report needs a study or a run directory, e.g. qklab report comparisons/stdlib.")
        if self.watch:
            report.serve_report(self.folders, self.port)
            return 0
        if self.card:
            print("\n".join(map(str, report.write_card(self.folders, self.out or self.folders[0] / "card.png"))))
            return 0
        print(report.build_report(self.folders, self.out or self.folders[0] / "report.html"))
        return 0
