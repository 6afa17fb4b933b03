"""Copies of the metrics for other tools. A sink that fails is told of once and left out; training goes on."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from qklab.schema import suggest_name


class Sink(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under RUN/tensorboard."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]):
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """Weights & Biases, and trackio, which has the same interface. The run's own name makes a resumed run go on."""

    package = "wandb"

    def __init__(self, folder: Path, name: str, config: dict[str, Any]):
        self.module = importlib.import_module(self.package)
        self.run = self.module.init(project="qklab", name=name, config=config, **self.options(folder, name))

    def options(self, folder: Path, name: str) -> dict[str, Any]:
        return {"dir": str(folder), "id": name, "resume": "allow"}

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


class Trackio(WandbLike):
    package = "trackio"

    def options(self, folder: Path, name: str) -> dict[str, Any]:
        return {"resume": "allow"}


SINKS: dict[str, Callable[..., Sink]] = {"tensorboard": TensorBoard, "wandb": WandbLike, "trackio": Trackio}


class Sinks:
    """All the sinks of a run."""

    def __init__(
        self, names: Sequence[str], folder: Path, run: str, config: dict[str, Any], say: Callable[[str], None]
    ):
        self.say = say
        self.open: dict[str, Sink] = {}
        for name in names:
            if name not in SINKS:
                raise ValueError(
                    f"a sink must be one of {', '.join(SINKS)}{suggest_name(name, SINKS)}, but {name!r} came."
                )
            self._try(name, lambda name=name: self.open.__setitem__(name, SINKS[name](folder, run, config)))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, sink in list(self.open.items()):
            self._try(name, lambda sink=sink: sink.log(values, step))

    def close(self) -> None:
        for name, sink in list(self.open.items()):
            self._try(name, sink.close)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a third party's logger throws must not cost the run
            self.open.pop(name, None)
            missing = f"; install it with: pip install {name}" if isinstance(error, ImportError) else ""
            self.say(f"{name} is left out from here on: {type(error).__name__}: {str(error)[:200]}{missing}.")
