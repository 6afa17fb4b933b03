"""Attention by a function of Transformers' interface: what `attn_implementation` names beside "sdpa" and "eager".

FlexAttention, FlashAttention, a kernel from the hub, or a function of one's own: each gets queries, keys and values as
the softmax compares them, after coupling, norm and rotation, and the mask in the form that Transformers has for it.
Under "sdpa" and "eager" attention is qklab's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel

from qklab.attention.positions import TokenSlots
from qklab.attention.spec import AttentionSpec
from qklab.attention.visibility import Visibility, may_see, state_visibility
from qklab.model.decoder import Located

OWN = (None, "sdpa", "eager", "paged|sdpa", "paged|eager")


def refuse_function(specs: Sequence[AttentionSpec], implementation: str | None) -> None:
    """Raise where the function of this name cannot compute what one of the specs says."""
    if implementation in OWN:
        return
    name = implementation.removeprefix("paged|")
    flash = "flash" in name or "/" in name  # what the hub has takes what FlashAttention takes
    for spec in specs:
        reason = None
        if spec.asymmetry_2d:
            reason = "its 2-D asymmetry adds a bias to the scores, which the function does not take"
        elif flash and spec.mix == "differential":
            reason = "its values are twice as wide as its keys, and FlashAttention takes none wider"
        elif flash and spec.sinks and name not in cast(Any, GptOssPreTrainedModel)._compatible_flash_implementations:
            reason = "it does not take sinks"
        if reason is not None:
            raise ValueError(
                f"attn_implementation={implementation!r} cannot compute {spec.name}: {reason}; leave it out, or choose "
                "'sdpa' or 'eager'."
            )


def describe_layers(model: Any) -> None:
    """Tell the attention layers of a model what Transformers' functions look for on the layer that calls them."""
    for number, block in enumerate(model.blocks):
        layer, spec = block.attention, block.attention.spec
        layer.config, layer.layer_idx, layer.is_causal = model.config, number, spec.causal
        layer.num_key_value_groups = spec.query_heads // spec.kv_heads


def give_function(model: Any, located: Sequence[Located]) -> list[Located]:
    """Where the tokens of every layer stand, the function that the layer calls among it."""
    name = model.config._attn_implementation.removeprefix("paged|")  # which would write to pages itself
    attend = ALL_ATTENTION_FUNCTIONS[name]
    found = []
    for layer, block in enumerate(model.blocks):
        positions, visibility = located[layer % len(located)]
        assert visibility.function is not None
        call = functools.partial(visibility.function, attend, block.attention)
        found.append((positions, visibility._replace(function=call)))
    return found


def call_function(
    order: Tensor | None,
    options: dict[str, Any],
    attend: Callable[..., Any],
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [B, T, H, D], k [B, S, G, D] and v [B, S, G, E] → [B, T, H, E]."""
    if order is not None:
        k, v = k[:, order], v[:, order]
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    given = options if sinks is None else options | {"s_aux": sinks}
    return attend(layer, *heads, scaling=scale, dropout=0.0, **given)[0].to(q.dtype)


def find_for_function(config: Any, spec: AttentionSpec, slots: TokenSlots, x: Tensor) -> Visibility:
    """`find_visibility` with nothing rendered but what Transformers' function takes; a layer is still to be named."""
    visibility, order = state_visibility(spec, slots, x), None
    if slots.cached and spec.window is not None and x.shape[1] == 1:
        order = slots.every.argsort()[-spec.window :]  # a ring, whose first slot need not hold the first token
    every = slots.every if order is None else slots.every[order]
    options = write_mask(config, visibility, every, x) | {"is_causal": spec.causal}
    if spec.window is not None:
        options["sliding_window"] = spec.window
    triangle = spec.causal and not slots.cached and is_whole(visibility)
    return visibility._replace(function=functools.partial(call_function, order, options), triangle=triangle)


def is_whole(visibility: Visibility) -> bool:
    """Whether nothing is hidden but what comes later."""
    slots, *rest = visibility
    return slots.texts is None and slots.starts is None and tuple(rest) == Visibility(slots, visibility.causal)[1:]


def write_mask(config: Any, visibility: Visibility, every: Tensor, x: Tensor) -> dict[str, Any]:
    """Who of the tokens x [B, T, width] sees whom of `every` [S], as the function of this configuration is told it."""
    slots, (batch, tokens) = visibility.slots, x.shape[:2]
    whole = is_whole(visibility)
    if slots.cached and tokens == 1 and is_whole(visibility._replace(window=None)):
        return {"attention_mask": None}  # it sees them all
    name = config._attn_implementation
    write = ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask)
    text = None
    if write is flash_attention_mask:
        if slots.texts is not None:
            return {"attention_mask": None} | count_texts(slots.texts)
        if slots.cached and tokens > 1 and slots.lengths is not None:
            raise ValueError(
                f"{tokens} tokens at once came behind others in a static cache, of which attn_implementation={name!r} "
                "cannot tell which are filled; use a growing cache, or 'sdpa'."
            )
        if slots.starts is not None:
            text = (every >= slots.starts[:, None]) & (every >= 0) & (every <= slots.new[-1])

    def see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return may_see(visibility, row, slots.new[query], every[key]) & (every[key] >= 0)

    mask = write(
        batch_size=batch,
        q_length=tokens,
        kv_length=len(every),
        mask_function=see,
        attention_mask=text,
        allow_is_causal_skip=whole and visibility.causal and not slots.cached,
        allow_is_bidirectional_skip=whole and not visibility.causal,
        dtype=x.dtype,
        config=config,
        device=x.device,
    )
    return {"attention_mask": mask}


def count_texts(texts: Tensor) -> dict[str, Any]:
    """Where each of the packed texts [B, T] ends, counted over all rows, as FlashAttention is told it."""
    (batch, tokens), starts = texts.shape, torch.ones_like(texts, dtype=torch.bool)
    starts[:, 1:] = texts[:, 1:] != texts[:, :-1]
    ends = torch.cat([starts.flatten().nonzero()[:, 0], starts.new_tensor([batch * tokens], dtype=torch.long)]).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": tokens, "max_length_k": tokens}
