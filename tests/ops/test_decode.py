"""Attention over a cache: the definition, the routes that need only torch, and refusals."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qklab import Attention, AttentionSpec
from qklab.ops.decode import DecodeImpl, decode
from qklab.testing.numerics import close

ROUTES: list[DecodeImpl] = ["reference", "sdpa"]


def example(
    B: int = 3, T: int = 2, H: int = 4, G: int = 2, D: int = 8, S: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(5)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, D))
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def angles(positions: int, rotated: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 10.0 ** -torch.arange(rotated // 2).to(torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def written_out(q: Tensor, k: Tensor, v: Tensor, scale: float, start: int, end: int) -> Tensor:
    """One query head's token over the slots start ≤ j < end: q [D], k [S, D], v [S, E] → [E]."""
    if start >= end:
        return torch.zeros_like(v[0])
    return (scale * (k[start:end] @ q)).softmax(0) @ v[start:end]


@pytest.mark.parametrize("impl", ROUTES)
@pytest.mark.parametrize("T", [1, 3])
def test_every_query_sees_its_row_from_the_start_up_to_its_own_slot(impl: DecodeImpl, T: int) -> None:
    q, k, v = example(T=T)
    starts, lengths = torch.tensor([0, 4, 2]), torch.tensor([11, 9, 2])
    for row_starts in (None, starts):
        for row_lengths in (None, lengths):
            o = decode(q, k, v, starts=row_starts, lengths=row_lengths, scale=0.3, impl=impl)
            for b in range(3):
                start = 0 if row_starts is None else int(row_starts[b])
                length = 11 if row_lengths is None else int(row_lengths[b])
                for t in range(T):
                    for h in range(4):
                        end = length - T + t + 1
                        expected = written_out(q[b, t, h], k[b, :, h // 2], v[b, :, h // 2], 0.3, start, end)
                        close(o[b, t, h], expected)


@pytest.mark.parametrize("sinks", [None, "of heads", "of rows"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("total", [None, [11, 25, 7]])
@pytest.mark.parametrize("window", [4, 9])
def test_windows_rings_and_sinks(window: int, total: list[int] | None, T: int, sinks: str | None) -> None:
    """Token p stands in slot p mod 11; a sink is one more score, of a value of nothing."""
    q, k, v = example(T=T)
    starts, lengths = torch.tensor([0, 9, 5]), None if total is None else torch.tensor(total)
    logits = torch.randn(3, 4, dtype=torch.float64)[slice(None) if sinks == "of rows" else 0]
    options: dict[str, Any] = {"starts": starts, "lengths": lengths, "window": window, "scale": 0.3}
    if sinks is not None:
        options["sinks"] = logits
    o = decode(q, k, v, impl="reference", **options)
    if sinks is None:
        close(decode(q, k, v, impl="sdpa", **options), o)
    for b in range(3):
        length = 11 if total is None else total[b]
        for t in range(T):
            own = length - T + t
            tokens = range(max(0, int(starts[b]), own - window + 1, length - 11), own + 1)
            slots = [p % 11 for p in tokens]
            for h in range(4):
                key, value = k[b, slots, h // 2], v[b, slots, h // 2]
                scores = 0.3 * (key @ q[b, t, h])
                if sinks is not None:
                    scores = torch.cat([scores, logits.expand(3, 4)[b, h, None]])
                    value = torch.cat([value, torch.zeros_like(v[b, :1, 0])])
                close(o[b, t, h], scores.softmax(0) @ value if len(slots) else torch.zeros_like(o[b, t, h]))


@pytest.mark.parametrize("impl", ROUTES)
def test_without_a_value_the_key_is_it(impl: DecodeImpl) -> None:
    q, k, _ = example()
    close(decode(q, k, impl=impl), decode(q, k, k.clone(), impl=impl))
    close(decode(q, k, value_width=5, impl=impl), decode(q, k, k[..., :5].clone(), impl=impl))


@pytest.mark.parametrize("impl", ROUTES)
@pytest.mark.parametrize("rotated", [8, 4])
def test_keys_turn_by_their_position_and_values_do_not(impl: DecodeImpl, rotated: int) -> None:
    q, k, _ = example()
    cos, sin = angles(12, rotated)
    starts = torch.tensor([0, 3, 1])
    key = k.clone()
    for b, start in enumerate(starts.tolist()):
        for j in range(start, 11):
            for i in range(rotated // 2):
                x, y = k[b, j, :, i], k[b, j, :, i + rotated // 2]
                c, s = cos[j - start, i], sin[j - start, i]
                key[b, j, :, i], key[b, j, :, i + rotated // 2] = x * c - y * s, y * c + x * s
    o = decode(q, k, angles=(cos, sin), starts=starts, impl=impl)
    close(o, decode(q, key, k, starts=starts, impl="reference"))


@pytest.mark.parametrize("impl", ROUTES)
def test_gradients_reach_queries_keys_and_values(impl: DecodeImpl) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in example(B=1, T=2, S=5))
    lengths = torch.tensor([4])
    assert torch.autograd.gradcheck(lambda q, k, v: decode(q, k, v, lengths=lengths, impl=impl), (q, k, v))


@pytest.mark.parametrize("impl", ROUTES)
def test_what_nobody_sees_may_be_anything(impl: DecodeImpl) -> None:
    q, k, v = example()
    starts, lengths = torch.tensor([1, 4, 2]), torch.tensor([11, 9, 5])
    expected = decode(q, k, v, starts=starts, lengths=lengths, impl=impl)
    slot = torch.arange(11)
    unseen = (slot < starts[:, None]) | (slot >= lengths[:, None])
    spoiled = [tensor.masked_fill(unseen[:, :, None, None], 1e300) for tensor in (k, v)]
    close(decode(q, *spoiled, starts=starts, lengths=lengths, impl=impl), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_of_another_precision_is_read_as_queries_are(dtype: torch.dtype) -> None:
    q, k, v = example(dtype=dtype)
    k, v = k.bfloat16(), v.bfloat16()
    for impl in ("reference", "sdpa", "auto"):
        o = decode(q, k, v, impl=impl)
        assert o.dtype == dtype
        torch.testing.assert_close(o, decode(q, k.to(dtype), v.to(dtype), impl="reference"))


class Copies(TorchDispatchMode):
    """Records every operation whose result is as large as the cache, and the memory it lies in."""

    def __init__(self, cache: Tensor):
        super().__init__()
        self.cache, self.found = cache, []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        results = operation(*arguments, **(options or {}))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, Tensor) and result.numel() >= self.cache.numel():
                self.found.append((str(operation), result.untyped_storage().data_ptr()))
        return results


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("T", [1, 2])
def test_the_cache_is_read_where_it_lies(shared: bool, T: int) -> None:
    """A cache with room for 20 tokens that holds 16 of them, as [B, S, G, D]."""
    q = example(T=T, H=2)[0]
    cache = torch.randn(3, 20, 2, 16, dtype=torch.float64)
    held = cache[:, :16]
    k, v = (held[..., :8], held[..., :8]) if shared else (held[..., :8], held[..., 8:])
    with Copies(cache[:, :16, :, :8]) as copies:
        decode(q, k, None if shared else v, impl="sdpa")
    assert {memory for _, memory in copies.found} <= {cache.untyped_storage().data_ptr()}


@pytest.mark.parametrize("choices", [{}, {"share": "k=v"}, {"mix": "differential-v2"}], ids=str)
@torch.no_grad()
def test_a_layer_reads_its_cache_where_it_lies(choices: dict[str, Any]) -> None:
    attention = Attention(AttentionSpec(width=32, heads=4, kv_heads=2, **choices))
    cache = attention.new_cache(2, 128)
    attention(torch.randn(2, 100, 32), cache=cache)
    held = cache.tensors[-1]
    with Copies(held[:, :101]) as copies:
        attention(torch.randn(2, 1, 32), cache=cache)
    own = {tensor.untyped_storage().data_ptr() for tensor in cache.tensors}
    assert [name for name, memory in copies.found if memory not in own] == []


@pytest.mark.parametrize("impl", ["sdpa", "auto"])
def test_compiles_as_one_graph_for_all_lengths(impl: DecodeImpl) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: decode(q, k, v, impl=impl), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for slots in (5, 9, 30):
        q, k, v = example(T=1, S=slots)
        close(compiled(q, k, v), decode(q, k, v, impl="reference"))


def test_scale_is_by_width_unless_given() -> None:
    q, k, v = example(T=1, H=2)
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    for impl in ROUTES:
        close(decode(q, k, v, impl=impl), expected)
        close(decode(q, k, v, scale=1 / math.sqrt(8), impl=impl), expected)


def test_wrong_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = example()
    table = angles(11, 8)

    def refused(match: str, *tensors: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            decode(*tensors, **options)

    refused(r"but q \[3, 2, 4, 8\] and k \[3, 11, 2, 7\]", q, k[..., :7])
    refused("with G dividing H", q[:, :, :3], k, v)
    refused(r"v must be torch.float64 of shape \[3, 11, 2, 'E'\]", q, k, v[:, :5])
    refused("v must be torch.float64", q, k, v.float())
    refused("floating-point", q.long(), k, v)
    refused("the 2 queries stand in the last of the slots, but there are 1", q, k[:, :1])
    refused("starts must be 3 whole numbers", q, k, v, starts=torch.zeros(2, dtype=torch.int64))
    refused("lengths must be 3 whole numbers", q, k, v, lengths=torch.zeros(3))
    refused("value_width says how many .* but 9 came", q, k, value_width=9)
    refused("but 4 came with a v", q, k, v, value_width=4)
    refused("angles turn a key that is its own value", q, k, v, angles=table)
    refused("angles turn a key that is its own value", q, k, value_width=4, angles=table)
    refused(r"positions ≥ 11, at most 4", q, k, angles=angles(10, 8))
    refused("window must be at least 1, .* but 0 came", q, k, v, window=0)
    refused("but 4 came with angles", q, k, angles=table, window=4)
    refused(r"sinks must be of shape \[4\] or \[3, 4\]", q, k, v, sinks=torch.zeros(3))
    refused("torch's own attention knows no sinks", q, k, v, sinks=torch.zeros(4), impl="sdpa")
    refused(r"did you mean 'sdpa'", q, k, v, impl="spda")
    refused("takes 16 and 32 bits", q, k, v, impl="triton")
    refused("needs tensors on a GPU.*; use impl='sdpa' or 'auto'", *(x.float() for x in (q, k, v)), impl="triton")
