import dataclasses
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """The folder holds weights, configuration, tokenizer and model card.

    Args:
        run: a run directory
        folder: where to, a folder that is new or empty
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    folder: Positional[Path]
    best: bool = False

    def execute(self) -> int:
        try:
            from qklab.hf.export import export_run
        except ImportError as error:
            raise ValueError(str(error)) from error
        print(export_run(self.run, self.folder, "best" if self.best else "newest"))
        return 0
