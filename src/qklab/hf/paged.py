"""Continuous batching: what `generate_batch` keeps in its pages, and how attention reads it.

Transformers' pages hold two tensors of equal width for every token. Where one tensor is all there is to remember,
(Q,K=V) or MLA's latent, its two halves are stored in their places, and pages of so many tokens take half the bytes. Who
owns which page, and which slots a request reads, is all theirs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from qklab.attention.cache import cache_class
from qklab.attention.positions import Positions, TokenSlots, make_angles
from qklab.attention.spec import AttentionSpec
from qklab.attention.visibility import Visibility
from qklab.hf.function import call_function
from qklab.model.decoder import Located

FULL, SLIDING = "full_attention", "sliding_attention"
UPDATE: Any = vars(PagedAttentionCache)["update"]
TAKES_ALL = "kwargs" in inspect.signature(UPDATE).parameters  # newer than 5.17: one dict of them


class PageShape(NamedTuple):
    """What pages hold of a token in a layer: two tensors [heads, width], or one that is as wide as both."""

    heads: int
    width: int
    one_tensor: bool


class PagedManager(ContinuousBatchingManager):
    """Makes its pages after `shape` instead of after the heads of the configuration."""

    shape: PageShape
    changes: Mapping[str, Any]  # what else of the configuration is said otherwise

    def _create_batch_processor(self) -> Any:
        model = self.model
        self.model = PagedView(model, self.shape, self.changes)
        try:
            return super()._create_batch_processor()
        finally:
            self.model = model


class PagedView:
    """A model as whoever makes its pages sees it."""

    def __init__(self, model: Any, shape: PageShape, changes: Mapping[str, Any]):
        self.viewed = model
        self.config = copy.copy(model.config.get_text_config())
        queries = self.config.num_attention_heads * (1 + shape.one_tensor)  # heads of half the width, for the estimates
        paged = {"num_key_value_heads": shape.heads, "head_dim": shape.width, "num_attention_heads": queries}
        for name, value in {**paged, "qklab_pages": shape, **changes}.items():
            PreTrainedConfig.__setattr__(self.config, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.viewed, name)


def shape_pages(manager: Any, shape: PageShape, changes: Mapping[str, Any]) -> Any:
    """Let a manager that was just made have its pages in this shape."""
    if type(manager) is ContinuousBatchingManager:
        manager.__class__ = PagedManager
        vars(manager).update(shape=shape, changes=changes)
        manager.continuous_batching_config.max_blocks_per_request = 0  # that way kernels read pages by themselves
    return manager


class StartsBatching:
    """`init_continuous_batching` of one model, whose class is not ours: set on the model itself, which it does not keep
    alive."""

    def __init__(self, model: Any):
        self.model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        manager = type(model).init_continuous_batching(model, *args, **kwargs)
        return manager if width % 2 else shape_pages(manager, PageShape(heads, width // 2, True), {})

    def __reduce__(self) -> Any:
        return StartsBatching, (self.model(),)


def hold_one_tensor(model: Any, one: bool) -> None:
    """Let the pages of a model, whose keys and values are one tensor, hold that, or again what its family's do."""
    model.__dict__.pop("init_continuous_batching", None)
    if one and hasattr(model, "init_continuous_batching"):
        model.__dict__["init_continuous_batching"] = StartsBatching(model)


def holds_one_tensor(pages: Any) -> bool:
    """Whether these are pages, and `shape_pages` was asked for such."""
    shape = getattr(pages.config, "qklab_pages", None) if isinstance(pages, PagedAttentionCache) else None
    return shape is not None and shape.one_tensor


def update_pages(pages: Any, layer: int, new: Sequence[Tensor], given: dict[str, Any]) -> list[Tensor]:
    """Write new tokens [1, T, heads, width], one tensor or two, to a layer's pages, and read back all tokens of their
    requests [1, S, heads, width]. `given` is what Transformers hands to the model; it is changed to what the layer's
    attention function takes."""
    k, v = (tensor.transpose(1, 2) for tensor in (new if len(new) == 2 else new[0].chunk(2, -1)))
    if TAKES_ALL:
        held = pages.update(k, v, layer, given)
    else:
        held = pages.update(k, v, layer, given["read_index"], given["write_index"])
        held = [tensor.transpose(0, 1)[None] for tensor in held]
        kind = FULL if pages.sliding_windows[layer] == 1 else SLIDING
        given |= name_lengths(given, kind)
    k, v = (tensor.transpose(1, 2) for tensor in held)
    return [k, v] if len(new) == 2 else [torch.cat([k, v], -1)]


def find_key_positions(position_ids: Tensor, keys: int, queries_end: Tensor, keys_end: Tensor) -> Tensor:
    """Positions [1, S] of the tokens that are read, of new ones [1, T]: the last of a request stands where its last new
    one does. `queries_end` and `keys_end` [requests + 1] say where each request's tokens end, from 0."""
    if keys == position_ids.shape[1]:
        return position_ids
    slots = torch.arange(keys, device=position_ids.device, dtype=keys_end.dtype)
    request = torch.searchsorted(keys_end[1:], slots, right=True).clamp(max=len(keys_end) - 2)
    last = position_ids[0, (queries_end[1:] - 1).clamp(min=0)[request]]
    return (last - (keys_end[1:][request] - 1 - slots)).clamp(min=0)[None]


class PagedLayer:
    """A layer's pages as `Attention` uses a cache."""

    def __init__(self, layer: int, given: Mapping[str, Any]):
        self.layer, self.given = layer, given

    def append(self, *new: Tensor) -> list[Tensor]:
        return update_pages(self.given["cache"], self.layer, new, dict(self.given))

    def recall(self) -> list[Tensor]:
        return []

    def remember(self, seen: Sequence[Tensor]) -> None:
        """Nothing: `refuse_paging` keeps away what looks back."""


def locate_pages(
    pattern: Sequence[AttentionSpec], x: Tensor, mask: Any, position_ids: Tensor, given: Mapping[str, Any]
) -> list[Located]:
    """Where the tokens x [1, T, width] of all requests stand, for each spec of the pattern. `mask` [1, 1, T, S] is what
    Transformers adds to scores, one for each kind of layer where there are two; without it a function is told where
    requests end."""
    located = []
    for layer, spec in enumerate(pattern):
        kind = name_layer_kind(spec)
        visible = None if mask is None else choose_kind(mask, kind) >= 0
        ends = given["cu_seq_lens_q"], choose_kind(given["cu_seq_lens_k"], kind)
        keys = count_read(given, layer, x.shape[1]) if visible is None else visible.shape[-1]
        every = find_key_positions(position_ids, keys, *ends)
        positions = Positions(position_ids)
        if spec.rotated_width:
            later = None if spec.rotation.turns_key else make_angles(spec, every, x.dtype)
            positions = Positions(position_ids, make_angles(spec, position_ids, x.dtype), every_angles=later)
        visibility = Visibility(TokenSlots(position_ids[0], every[0]), True, mask=visible)
        if visible is None:
            options = name_lengths(given, kind) | {"attention_mask": None, "is_causal": True}
            window = {} if spec.window is None else {"sliding_window": spec.window}
            visibility = visibility._replace(function=functools.partial(call_function, None, options | window))
        located.append((positions, visibility))
    return located


def count_read(given: Mapping[str, Any], layer: int, tokens: int) -> int:
    """How many tokens, `tokens` new ones among them, `update_pages` gives back."""
    pages = given["cache"]
    group = pages.layer_to_allocator[layer].index if TAKES_ALL else pages.layer_index_to_group_indices[layer][0]
    return len(given["read_index"][group]) or tokens


def name_lengths(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Where requests end and how long the longest is, under the names that FlashAttention is told them by."""
    longest = "max_length" if TAKES_ALL else "max_seqlen"
    ends = {f"cu_seq_lens_{side}": choose_kind(given[f"cu_seq_lens_{side}"], kind).int() for side in "qk"}
    return ends | {f"max_length_{side}": choose_kind(given[f"{longest}_{side}"], kind) for side in "qk"}


def choose_kind(given: Any, kind: str) -> Any:
    """What is given for layers of a kind, or for all."""
    return given[kind] if isinstance(given, dict) else given


def name_layer_kind(spec: AttentionSpec) -> str:
    """As Transformers calls it."""
    return FULL if spec.window is None else SLIDING


def choose_page_shape(specs: Sequence[AttentionSpec]) -> tuple[PageShape, dict[str, Any]]:
    """The shape of the pages of these layers, and what the configuration says of their kinds."""
    refuse_paging(specs)
    held = cache_class(specs[0])
    heads, widths = held.heads(specs[0]), held.widths(specs[0])
    shape = PageShape(heads, sum(widths) // (2 * heads), len(widths) == 1)
    window = next((spec.window for spec in specs if spec.window is not None), None)
    return shape, {"layer_types": [name_layer_kind(spec) for spec in specs], "sliding_window": window}


def refuse_paging(specs: Sequence[AttentionSpec]) -> None:
    """Raise for attention that pages do not serve."""
    reasons = [
        f"{spec.name} looks back on the tokens before, which pages do not keep" for spec in specs if spec.token_rings
    ]
    held = {(cache_class(spec).heads(spec), cache_class(spec).widths(spec)) for spec in specs}
    if len(held) > 1:
        reasons.append("its layers keep tensors of different shapes, and pages have one")
    windows = {spec.window for spec in specs if spec.window is not None}
    if len(windows) > 1 or 1 in windows:
        reasons.append(f"its windows are {sorted(windows)}, and pages know one of 2 or more tokens")
    heads, widths = min(held)
    if len(widths) == 1 and widths[0] // heads % 2:
        reasons.append(f"it keeps {widths[0] // heads} numbers of a token and head, and pages take two equal parts")
    if reasons:
        raise ValueError(f"this model does not run under generate_batch: {reasons[0]}; use generate.")
