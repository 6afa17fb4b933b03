import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the contract suite runs, e.g. cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _one_thread_per_worker() -> None:
    """The tests' tensors are tiny, and pytest-xdist already uses all cores."""
    torch.set_num_threads(1)
