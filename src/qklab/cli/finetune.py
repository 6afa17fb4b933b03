import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class FinetuneCommand:
    """Fine-tune models on a task of GLUE and compare them, paired by seed.

    Args:
        models: run directories or Transformers folders, the first of which is the baseline; or the folder of one study,
            of which every arm's runs are taken
        task: cola, sst2, mrpc, stsb, rte or wnli
        data: the folder with GLUE's files, as glue/SST-2/train.tsv; else QKLAB_DATA, else the hub, through datasets
        lrs: the learning rates that every model tries
        seeds: fine-tunings of each model and learning rate; a study has as many as its arms have seeds
        epochs: how often the training examples are seen
        limit: only so many training examples
        margin: a difference of the score, in points of 100, that does not matter
        device: cpu or cuda; auto takes a GPU if there is one
        out: the folder for what comes of each fine-tuning; the same command goes on where it was, also within one
    """

    models: Positional[tuple[Path, ...]]
    task: str = "sst2"
    data: Path | None = None
    lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4)
    seeds: int = 5
    epochs: int = 3
    limit: int | None = None
    margin: float = 1.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("finetuned")

    def execute(self) -> int:
        try:
            from qklab.hf.finetune import finetune_all
        except ImportError as error:
            raise ValueError(str(error)) from error
        from qklab.study.downstream import find_models, write_downstream_answer
        from qklab.train.spec import ExecutionSpec

        if not self.models or self.seeds < 1 or not self.lrs:
            raise ValueError("fine-tuning needs a model, a seed and a learning rate; see qklab finetune --help.")
        models = find_models(self.models, self.seeds)
        found = finetune_all(
            models,
            self.task,
            data=self.data,
            out=self.out,
            lrs=self.lrs,
            limit=self.limit,
            epochs=self.epochs,
            execution=ExecutionSpec(device=self.device),
        )
        print(write_downstream_answer(found, self.margin))
        return 0
