import dataclasses
import sys
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class EvalCommand:
    """Score a model on tasks of lm-evaluation-harness.

    Args:
        model: a run directory, or a folder with a Transformers model
        tasks: names of the harness, which downloads their data, or local-NAME for NAME.jsonl under --data
        data: the folder with the .jsonl files of local tasks
        limit: only so many questions of each task
        batch_size: texts per forward pass
        fewshot: examples before every question; by default what the task says
        device: cpu or cuda; auto takes a GPU if there is one
        seed: decides which examples are drawn
        best: the best checkpoint of a run instead of the newest
        out: a JSON file for scores, settings and where they come from
    """

    model: Positional[Path]
    tasks: tuple[str, ...] = ()
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    fewshot: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    best: bool = False
    out: Path | None = None

    def execute(self) -> int:
        from rich.console import Console

        try:
            from qklab.hf import evaluate, scores
        except ImportError as error:
            raise ValueError(str(error)) from error
        from qklab.runs.files import write_json

        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"--out {self.out} cannot be written: there is no folder {self.out.parent}.")
        names = ("device", "data", "limit", "batch_size", "fewshot", "seed")
        which = "best" if self.best else "newest"
        found = evaluate.evaluate_folder(
            self.model, self.tasks, which=which, **{name: getattr(self, name) for name in names}
        )
        if self.out is not None:
            write_json(self.out, found)
        Console(width=None if sys.stdout.isatty() else 140).print(scores.make_score_table(found))
        for remark in scores.list_remarks(found):
            print(remark)
        return 0
