import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# also for the processes that tests start: threads of many tiny programs on few cores mostly wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # asleep, where there are several after all


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the contract suite runs, e.g. cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: no collection of garbage, of which Trainer asks for one a training,
    has to look at it."""
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _one_thread_per_worker() -> None:
    """The tests' tensors are tiny, and pytest-xdist already uses all cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests and the processes they start would keep in the user's cache lies in pytest's temporary folder."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which all workers share
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKLAB_CACHE", str(root / "qklab-cache"))
        yield root / "qklab-cache"
