"""The Triton kernel of decoding against the reference (see `kernels.py` for where it runs)."""

from typing import Any

import pytest
import torch
from kernels import DEVICE, RUNS, on_gpu, on_kernel
from torch import Tensor

from qklab.ops.decode import decode
from qklab.testing.numerics import check_all_is_written, within_budget

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a row, with several blocks each, already at these sizes."""
    if RUNS:
        from qklab.ops.decode import triton

        monkeypatch.setattr(triton, "SHORTEST", 32)
        monkeypatch.setattr(triton, "LONGEST", 64)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


# B, T, H, G, D, S, then what is shared: "v" nothing, "k" key and value, a number the value's width in the key
SHAPES: dict[str, tuple[Any, ...]] = {
    "gqa": (2, 1, 6, 2, 32, 150, "v"),
    "mqa, odd width": (1, 2, 3, 1, 40, 131, "v"),
    "one slot": (2, 1, 2, 2, 16, 1, "v"),
    "shared": (2, 1, 4, 2, 32, 150, "k"),
    "shared, many rows": (1, 5, 16, 1, 16, 70, "k"),
    "latent": (2, 1, 4, 1, 48, 90, 32),
    "latent, odd widths": (1, 3, 2, 1, 36, 33, 28),
}
RAGGED: dict[str, tuple[list[int] | None, list[int] | None]] = {
    "full": (None, None),
    "starts": ([7, 0], None),
    "lengths": (None, [0, 100]),
    "both": ([5, 60], [30, 62]),
}


def example(
    B: int, T: int, H: int, G: int, D: int, S: int, share: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    source = torch.Generator().manual_seed(11)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, D))
    q, k, v = (torch.randn(shape, generator=source).to(DEVICE, dtype) for shape in shapes)
    return q, k, (v if share == "v" else None), ({"value_width": share} if isinstance(share, int) else {})


def table(positions: int, rotated: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 0.6 ** torch.arange(rotated // 2).to(torch.float64)
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


def rows(numbers: list[int] | None, B: int) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers[:B], device=DEVICE)


def check(q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The kernel's error against float64 is within twice that of the reference in q's own precision."""
    exact_v = None if v is None else v.double()
    exact = decode(q.double(), k.double(), exact_v, impl="reference", **options)
    low_options = dict(options)
    if "angles" in options:
        low_options["angles"] = tuple(entry.float() for entry in options["angles"])
    low = decode(q, k, v, impl="reference", **low_options)
    actual = decode(q, k, v, impl="triton", **low_options)
    assert actual.dtype == low.dtype
    assert actual.shape == low.shape
    within_budget(actual, low, exact)
    return actual


@on_kernel
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.bfloat16) for shape in SHAPES), *(("gqa", dtype) for dtype in DTYPES[::2])]
)
def test_errors_stay_within_the_budget(shape: str, dtype: torch.dtype) -> None:
    q, k, v, options = example(*SHAPES[shape], dtype=dtype)
    check(q, k, v, options)


@on_kernel
@pytest.mark.parametrize(
    ("shape", "ragged"),
    [("gqa", "starts"), ("gqa", "lengths"), ("gqa", "both"), ("shared", "both"), ("latent", "both")],
)
def test_rows_of_different_lengths(shape: str, ragged: str) -> None:
    q, k, v, options = example(*SHAPES[shape], dtype=torch.float16)
    starts, lengths = (rows(numbers, len(q)) for numbers in RAGGED[ragged])
    o = check(q, k, v, {**options, "starts": starts, "lengths": lengths})
    if ragged == "lengths":
        assert not o[0].any()


@on_kernel
@pytest.mark.parametrize(
    ("rotated", "ragged", "dtype"),
    [(32, "full", torch.bfloat16), (12, "both", torch.float16), (32, "both", torch.float32)],
)
def test_keys_turn_on_reading(rotated: int, ragged: str, dtype: torch.dtype) -> None:
    q, k, _, _ = example(*SHAPES["shared"], dtype=dtype)
    starts, lengths = (rows(numbers, len(q)) for numbers in RAGGED[ragged])
    check(q, k, None, {"angles": table(150, rotated), "starts": starts, "lengths": lengths})


@on_kernel
@pytest.mark.parametrize(
    ("shape", "window", "starts", "lengths", "sinks"),
    [
        ("gqa", 70, None, None, False),  # of 150 slots in order
        ("gqa", 150, [0, 230], [240, 240], True),  # a ring, of which the second row sees ten
        ("mqa, odd width", 20, [3], None, True),
        ("shared", 40, None, [33, 400], False),
        ("latent", 90, [0, 95], [91, 200], True),
        ("one slot", 1, None, None, True),  # a single program
    ],
)
def test_windows_rings_and_sinks(
    shape: str, window: int, starts: list[int] | None, lengths: list[int] | None, sinks: bool
) -> None:
    q, k, v, options = example(*SHAPES[shape], dtype=torch.float16)
    options |= {"window": window, "starts": rows(starts, len(q)), "lengths": rows(lengths, len(q))}
    if sinks:
        options["sinks"] = torch.linspace(-2, 3, q.shape[2] * len(q), device=DEVICE).view(len(q), -1)
    check(q, k, v, options)


@on_kernel
def test_a_sink_alone_takes_everything() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    sinks = torch.full((6,), 300.0, device=DEVICE)
    assert decode(q, k, v, lengths=rows([0, 150], 2), sinks=sinks, impl="triton").abs().max() < 1e-25


@on_kernel
def test_only_the_window_is_read() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    assert v is not None
    expected = decode(q, k, v, window=20, impl="triton")
    k[:, :130], v[:, :130] = torch.nan, torch.nan
    assert torch.equal(decode(q, k, v, window=20, impl="triton"), expected)


@on_kernel
def test_nothing_is_read_that_no_query_sees() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    starts, lengths = torch.tensor([5, 60], device=DEVICE), torch.tensor([30, 62], device=DEVICE)
    slot = torch.arange(k.shape[1], device=DEVICE)
    unseen = (slot < starts[:, None]) | (slot >= lengths[:, None])
    expected = decode(q, k, v, starts=starts, lengths=lengths, impl="triton")
    assert v is not None
    k, v = (tensor.masked_fill(unseen[:, :, None, None], torch.nan) for tensor in (k, v))
    assert torch.equal(decode(q, k, v, starts=starts, lengths=lengths, impl="triton"), expected)


@on_kernel
def test_any_strides_are_welcome() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    assert v is not None
    plain = decode(q, k, v, impl="triton")
    room = torch.full((3, 200, 2, 80), torch.nan, device=DEVICE)
    held_k, held_v = room[1:, 20:170, :, :32], room[1:, 20:170, :, 40:72]
    held_k.copy_(k)
    held_v.copy_(v)
    torch.testing.assert_close(decode(q, held_k, held_v, impl="triton"), plain)
    swapped_k = k.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    swapped_q = q.transpose(1, 2).contiguous().transpose(1, 2).repeat_interleave(2, -1)[..., ::2]
    torch.testing.assert_close(decode(swapped_q, swapped_k, v, impl="triton"), plain)


@on_kernel
@pytest.mark.parametrize("share", ["v", "k"])
def test_every_output_is_written_and_repeats_are_bit_equal(share: str) -> None:
    q, k, v, _ = example(2, 3, 6, 2, 24, 150, share, torch.float32)
    lengths = torch.tensor([150, 40], device=DEVICE)
    check_all_is_written(lambda: [decode(q, k, v, lengths=lengths, impl="triton")])


@on_kernel
def test_large_scores_do_not_overflow() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    check(1e4 * q, k, v, {})


@on_kernel
def test_nothing_to_do() -> None:
    for B, T, S in ((0, 1, 5), (2, 0, 5), (2, 1, 0)):
        q, k, v, _ = example(B, T, 2, 1, 16, S, "v", torch.float32)
        lengths = torch.zeros(B, dtype=torch.int64, device=DEVICE)
        o = decode(q, k, v, lengths=lengths, impl="triton")
        assert o.shape == q.shape
        assert not o.any()


@on_kernel
def test_a_cache_of_another_precision() -> None:
    q, k, v, _ = example(*SHAPES["gqa"], dtype=torch.float32)
    assert v is not None
    k, v = k.bfloat16(), v.bfloat16()
    expected = decode(q, k.float(), v.float(), impl="triton")
    torch.testing.assert_close(decode(q, k, v, impl="triton"), expected)


@on_kernel
def test_the_operator_keeps_its_promises_to_the_compiler() -> None:
    q, k, v, _ = example(2, 1, 2, 1, 16, 20, "v", torch.float32)
    starts = torch.tensor([1, 0], device=DEVICE)
    operator = torch.ops.qklab.decode.default
    sinks = torch.zeros(2, device=DEVICE)
    torch.library.opcheck(operator, (q, k, v, None, None, starts, None, sinks, 5, 16, 0.25))
    torch.library.opcheck(operator, (q, k, None, None, None, None, starts + 9, None, None, 12, 0.25))


@on_kernel
def test_gradients_are_refused() -> None:
    q, k, v, _ = example(*SHAPES["one slot"], dtype=torch.float32)
    with pytest.raises(ValueError, match="impl='triton' cannot run: it has no gradients"):
        decode(q.requires_grad_(), k, v, impl="triton")
    with torch.no_grad():
        decode(q, k, v, impl="triton")


@on_kernel
def test_the_context_is_split() -> None:
    """So that the tests above are about several chunks a row."""
    from qklab.ops.decode.triton import choose_chunk

    assert choose_chunk(S=150, programs=4, at_once=6, block_n=32) == 64
    assert choose_chunk(S=150, programs=4, at_once=396, block_n=32) == 64
    assert choose_chunk(S=1, programs=4, at_once=396, block_n=32) == 32


@on_gpu
@pytest.mark.parametrize("share", ["v", "k", 512])
def test_large_shapes(share: Any) -> None:
    shape = (4, 1, 16, 1, 576, 5000) if share == 512 else (4, 1, 16, 4, 128, 5000)
    q, k, v, options = example(*shape, share=share, dtype=torch.bfloat16)
    starts = torch.tensor([0, 100, 4999, 2000], device="cuda")
    check(q, k, v, options)
    check(q, k, v, {**options, "starts": starts})
    if share == "k":
        check(q, k, v, {"starts": starts, "angles": table(5000, 128)})


@on_gpu
def test_caches_beyond_32_bits() -> None:
    """More than 2³¹ entries; the last row gives what it gives alone."""
    k = torch.zeros(3, 2**20, 8, 128, device="cuda", dtype=torch.bfloat16)
    k[2].normal_()
    q = torch.randn(3, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    expected = decode(q[2:], k[2:], impl="sdpa").double()
    torch.testing.assert_close(decode(q, k, impl="triton")[2:].double(), expected, rtol=2e-2, atol=2e-4)


@on_gpu
def test_no_copy_of_the_cache_is_made() -> None:
    cache = torch.randn(8, 9000, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(8, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    for impl in ("triton", "sdpa"):
        decode(q, cache[:, :8192], impl=impl)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decode(q, cache[:, :8192], impl=impl)
        assert torch.cuda.max_memory_allocated() - before < cache.numel() / 2  # a quarter of its bytes


@on_gpu
def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: 2 * decode(torch.tanh(q), k), fullgraph=True, dynamic=True)
    for slots in (3000, 5000):
        q, k, _, _ = example(2, 1, 8, 2, 64, slots, "k", torch.bfloat16)
        with torch.no_grad():
            expected = 2 * decode(torch.tanh(q), k, impl="triton")
            torch.testing.assert_close(compiled(q, k), expected, rtol=2e-2, atol=1e-3)
