"""pytest's options for the contracts of registered mechanisms: `pytest --pyargs qklab.testing --mechanism NAME`.

A module of its own, since pytest imports it in every environment that has qklab: it must not import torch.
"""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("qklab")
    group.addoption(
        "--mechanism",
        action="append",
        default=[],
        metavar="NAME",
        help="check a registered coupling, norm, mix or pattern in every combination that it allows",
    )
    group.addoption("--mechanism-device", default="cpu", metavar="DEVICE", help="where to, e.g. cuda")
