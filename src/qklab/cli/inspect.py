import dataclasses
import sys
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class InspectCommand:
    """What the attention of a trained model does on a text: one page of figures, and the numbers as JSON.

    Args:
        run: a run directory
        text: the text; by default the first of validation
        out: the folder for what is written; by default inspect in the run directory
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    text: Positional[str] = ""
    out: Path | None = None
    best: bool = False

    def execute(self) -> int:
        from qklab.report.inspect import inspect_run

        which = "best" if self.best else "newest"
        out = self.out or self.run / "inspect"
        for path in inspect_run(self.run, self.text, out, which=which, say=lambda note: print(note, file=sys.stderr)):
            print(path)
        return 0
