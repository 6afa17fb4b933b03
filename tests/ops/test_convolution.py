"""The convolution where every machine runs it: what chooses the kernel, and what is refused."""

from typing import Any

import pytest
import torch

from qklab.ops.convolution import api, convolve_heads

B, T, H, G, D = 2, 3, 4, 2, 6


def example(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "q": torch.ones(B, T, H, D),
        "k": torch.ones(B, T, G, D),
        "weight": torch.ones(H + G, 3 * D, D),
        "bias": torch.ones(H + G, D),
        "temperature": torch.ones(G),
        "positions": torch.arange(T)[None],
        "eps": 1e-6,
    }
    return given | changes


def test_auto_takes_the_kernel_for_whole_texts_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(operation: str, impl: str, device: torch.device, obstacle: str | None, objection: str | None) -> str:
        asked.append((obstacle, objection))
        return "reference"

    monkeypatch.setattr(api, "choose_impl", choose)
    given = example()
    kept: Any = given["q"][:, :2], given["k"][:, :2]
    low: Any = {name: x.bfloat16() for name, x in given.items() if torch.is_tensor(x) and name != "positions"}
    wide: Any = {name: given[name].repeat_interleave(32, -1) for name in ("q", "k", "weight", "bias")}
    wide["weight"] = wide["weight"].repeat_interleave(32, -2)
    call: dict[str, Any]
    for call in (given, given | low, given | {"kept": kept}, given | wide):
        convolve_heads(**call)
    with torch.autocast("cpu", torch.bfloat16):
        convolve_heads(**given)
    products = "the products are wider than 16 bits"
    assert asked == [
        (None, products),
        (None, None),
        ("the kernel takes whole texts, and these tokens follow what a cache kept", products),
        ("the kernel takes heads of up to 128 entries, and these have 192", products),
        (None, None),
    ]


def test_a_kernel_that_cannot_go_on_from_a_cache_says_so() -> None:
    given = example(kept=(torch.ones(B, 2, H, D), torch.ones(B, 2, G, D)), impl="triton")
    with pytest.raises(ValueError, match=r"impl='triton' cannot run: the kernel takes whole texts, .*; use impl='ref"):
        convolve_heads(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(B, T + 1, G, D)}, r"q must have shape \[batch.*\[2, 3, 4, 6\] and \[2, 4, 2, 6\] came"),
        ({"k": torch.ones(B, T, 3, D)}, "the key heads must divide the 4 query heads, but 3 came"),
        ({"k": torch.ones(B, T, G, D).half()}, "of one dtype, on one device .* torch.float32 on cpu, torch.float16"),
        ({"members": 3}, "members must be at least 1 and divide the 2 rows, but 3 came"),
        ({"members": 2}, r"weight must have shape \[2, 6, 18, 6\], but \[6, 18, 6\] came"),
        ({"temperature": torch.ones(H)}, r"temperature must have shape \[2\], but \[4\] came"),
        ({"positions": torch.arange(T)}, r"positions must have shape \[2 or 1, 3\], but \[3\] came"),
        ({"kept": (torch.ones(B, 1, H, D),) * 2}, r"kept must be of shape \[2, 2, 4, 6\], but \[2, 1, 4, 6\] came"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convolve_heads(**example(**changes))
