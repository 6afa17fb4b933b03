"""The largest logits of Transformers' attention layers, measured where they call their attention function."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qklab.attention.mix import largest_logits

REGISTRY, LOOKUP = "ALL_ATTENTION_FUNCTIONS", "get_interface"
ROWS = 512  # queries measured together


def watch_logits(module: nn.Module, largest: Tensor) -> None:
    """Raise `largest` [heads] to the largest scaled logit of every pass of `module` in training mode.

    Every attention layer of Transformers asks its file's `ALL_ATTENTION_FUNCTIONS` for the function of the chosen
    implementation (eager, sdpa, flash, flex, …). Here that answer is given with a measurement of queries and keys
    before the call, for layers that are watched; the function, its arguments, the masks and the configuration stay what
    they are.
    """
    files = attention_files(module)
    if not files:
        raise ValueError(
            f"the logits of {type(module).__name__} cannot be watched, as it does not ask Transformers for its "
            "attention function; pass a mapping of its query, key and heads, and tell its logits to QKClip.observe."
        )
    for names in files:
        registry = names[REGISTRY]
        if LOOKUP not in vars(registry):
            own = copy.copy(registry)  # the same functions, also those registered later
            setattr(own, LOOKUP, functools.partial(get_measured, registry))
            names[REGISTRY] = own
    module.watched = largest


def attention_files(module: nn.Module) -> list[dict[str, Any]]:
    """The global names of the files whose `forward` looks up an attention function for this layer."""
    found = []
    for kind in type(module).__mro__:
        forward = inspect.unwrap(vars(kind).get("forward", watch_logits))
        words = getattr(getattr(forward, "__code__", None), "co_names", ())
        if REGISTRY in words and LOOKUP in words:
            found.append(forward.__globals__)
    return found


def get_measured(registry: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function `registry` has under `name`, with the logits of its arguments measured first."""
    return functools.partial(call_measured, registry.get_interface(name, default), name)


def call_measured(
    function: Callable[..., Any],
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> Any:
    largest = getattr(module, "watched", None)
    if largest is not None and module.training:
        with torch.no_grad():
            seen = measure_largest(name, module, query, key, attention_mask, options)
            largest.copy_(torch.maximum(largest, seen.to(largest)))
    return function(module, query, key, value, attention_mask, *rest, **options)


def measure_largest(
    name: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> Tensor:
    """max over visible pairs of scale · q·k, per query head: query [B, H, T, D], key [B, G, S, D] → [H].

    Logits count as they are before a soft cap, since that is what W_q and W_k scale.
    """
    scale, causal, bias = (options.get(option) for option in ("scaling", "is_causal", "position_bias"))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    q, k, queries = query.transpose(1, 2), key.transpose(1, 2), query.shape[2]
    find_pairs: Callable[[int, int], tuple[Tensor | None, Tensor | None]]
    if "flash" in name or (isinstance(mask, Tensor) and mask.dim() == 2):
        find_pairs = functools.partial(pairs_of_flash, query, key, mask, causal, options)
    elif hasattr(mask, "mask_mod"):
        find_pairs = functools.partial(pairs_of_blocks, query.device, mask)
    elif mask is not None:
        find_pairs = functools.partial(pairs_of_mask, mask[..., : key.shape[2]], queries)
    elif causal and queries > 1 and name not in ("eager", "flex_attention"):  # these two mask nothing of themselves
        if bias is None:
            return largest_logits(q, k, scale, None, True).amax(0)
        k = k[:, :queries]  # as sdpa does: the first query sees the first key alone
        find_pairs = functools.partial(pairs_of_flash, query, query, None, True, {})
    else:
        find_pairs = all_pairs
    largest = []
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        visible, added = find_pairs(start, stop)
        if bias is not None:
            own = bias[..., : k.shape[1]].expand(-1, -1, queries, -1)[:, :, start:stop]
            added = own if added is None else added + own
        largest.append(largest_logits(q[:, start:stop], k, scale, visible, False, added).amax(0))
    return torch.stack(largest).amax(0)


def all_pairs(start: int, stop: int) -> tuple[None, None]:
    """All pairs."""
    return None, None


def pairs_of_mask(mask: Tensor, queries: int, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
    """The pairs a mask allows, and what an additive one adds to them; it broadcasts to [B, H, T, S]."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(-1, -1, queries, -1)[:, :, start:stop]
    return (mask, None) if mask.dtype == torch.bool else (mask > torch.finfo(mask.dtype).min / 2, mask)


def pairs_of_blocks(device: torch.device, blocks: Any, start: int, stop: int) -> tuple[Tensor, None]:
    """The pairs a flex attention's block mask allows."""
    from torch.nn.attention.flex_attention import create_mask

    def shift_mask(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return blocks.mask_mod(batch, head, q + start, k)

    batch, heads, _, keys = blocks.shape
    return create_mask(shift_mask, batch, heads, stop - start, keys, str(device)), None


def pairs_of_flash(
    query: Tensor, key: Tensor, padding: Tensor | None, causal: bool, options: dict[str, Any], start: int, stop: int
) -> tuple[Tensor, None]:
    """The pairs flash attention visits: of tokens that are not `padding` [B, S], not after the query (the last query is
    the last key), inside the sliding window and inside one packed text."""
    queries, keys = query.shape[2], key.shape[2]
    j = torch.arange(keys, device=query.device)
    i = j[keys - queries + start : keys - queries + stop, None]
    window, lengths, positions = (options.get(o) for o in ("sliding_window", "cu_seq_lens_k", "position_ids"))
    visible = (j <= i if causal else j == j)[None, None].expand(1, 1, stop - start, keys)
    if window is not None:
        visible = visible & ((i - j).abs() < window)
    text = None
    if padding is not None:
        real = padding.bool()
        visible = visible & real[:, None, None, :] & real[:, None, i[:, 0], None]
    elif lengths is not None:
        text = torch.searchsorted(lengths, j.to(lengths.dtype), right=True)
    elif positions is not None and len(query) == 1 and queries == keys:
        text = (positions.view(-1) == 0).cumsum(0)
    return visible if text is None else visible & (text[i] == text), None
