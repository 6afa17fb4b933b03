import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class ConvertCommand:
    """Change the attention of a trained model, and repair what that cost by a short training.

    With a text, perplexity on a part of it that is never trained on is told before, after the conversion and after the
    repair. A repair that is stopped (Ctrl-C, SIGTERM) is continued by the same command.

    Args:
        model: a folder with a Transformers model, a run directory, or the export of one
        out: the new folder; by default the model's name with -converted
        share: k=v makes one tensor of keys and values, which halves the cache
        kv_heads: merge key/value heads until so many are left
        merge: how; by default least-squares
        coupling: insert a coupling of this kind, at identity
        norm: insert RMSNorm on queries and keys
        repair: a file or folder of text to train on: the model learns to give the logits it gave before
        calibration: the same text, where nothing is to be trained: the conversion is fitted to it and judged on it
        calibration_tokens: so many tokens of the text decide the fit; 0 for none
        minutes: how long the repair may take, by the speed of its first steps; by default 10
        tokens: how many tokens it sees, instead of minutes
        train: what is trained: all weights, or those of attention
        next_token: how much the text's own loss counts, from 0 to 1; the rest is the divergence from the logits before
        lr: the highest learning rate; by default one that fits the model's width
        batch: windows in a step
        context: tokens in a window at most
        seed: decides the order of the windows
        device: cpu or cuda; auto takes a GPU if there is one
        quiet: show no progress, only what is wrong
    """

    model: Positional[Path]
    out: Path | None = None
    share: Literal["k=v"] | None = None
    kv_heads: int | None = None
    merge: Literal["least-squares", "mean"] | None = None
    coupling: str | None = None
    norm: Literal["qk-norm"] | None = None
    repair: str | None = None
    calibration: str | None = None
    calibration_tokens: int = 16_384
    minutes: float | None = None
    tokens: int | None = None
    train: Literal["all", "attention"] = "all"
    next_token: float = 0.0
    lr: float | None = None
    batch: int = 8
    context: int = 1024
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quiet: bool = False

    def execute(self) -> int:
        try:
            from qklab.hf.convert.folder import FolderConversion, convert_folder, describe_conversion
            from qklab.hf.convert.repair import RepairSettings
        except ImportError as error:
            raise ValueError(str(error)) from error
        from qklab.hf.evaluate import choose_device
        from qklab.runs.progress import QuietDisplay, Terminal
        from qklab.train.launch import EXIT_CODES

        self.refuse_idle_flags()
        how = ("train", "next_token", "lr", "batch", "seed")
        settings = RepairSettings(**{name: getattr(self, name) for name in how}) if self.repair is not None else None
        wanted = FolderConversion(
            choices=self.collect_choices(),
            text=self.calibration if self.repair is None else self.repair,
            calibration=self.calibration_tokens,
            context=self.context,
            minutes=10.0 if self.minutes is None and self.tokens is None else self.minutes,
            tokens=self.tokens,
            repair=settings,
        )
        found = convert_folder(
            self.model,
            self.out or Path(f"{self.model.resolve().name}-converted"),
            wanted,
            device=choose_device(self.device),
            command=shlex.join(["qklab", *sys.argv[1:]]),
            display=QuietDisplay() if self.quiet else Terminal(),
        )
        print(describe_conversion(found))
        return EXIT_CODES["interrupted" if found.folder is None else "finished"]

    def collect_choices(self) -> dict[str, Any]:
        """What `convert` is asked for."""
        names = ("share", "kv_heads", "merge", "coupling", "norm")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def refuse_idle_flags(self) -> None:
        """Raise for a flag that would change nothing."""
        if self.repair is not None and self.calibration is not None:
            raise ValueError("--repair's text is the calibration's too; leave --calibration out.")
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("--minutes and --tokens both say how long the repair is; give one of them.")
        idle = next((name for name in ("minutes", "tokens", "lr") if getattr(self, name) is not None), None)
        if self.repair is None and idle is not None:
            raise ValueError(f"--{idle} is for the repair; give its text with --repair, or leave --{idle} out.")
