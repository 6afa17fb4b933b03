"""qklab's decoder as a Transformers model: the decoder's own modules, Transformers' way in and out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from qklab.attention.mix import LatentSoftmax
from qklab.attention.rotate import LearnedPositions
from qklab.hf.cache import QKLabCacheLayer, adopt_cache_layers, make_cache_layers
from qklab.hf.config import QUANTISED, QKLabConfig
from qklab.hf.function import OWN, describe_layers, find_for_function, give_function, refuse_function
from qklab.hf.padding import (
    check_mask_shape,
    check_one_piece,
    check_positions,
    count_left_padding,
    ends_in_padding,
    find_packed_texts,
    update_padding,
)
from qklab.hf.paged import PagedLayer, locate_pages
from qklab.model.decoder import Block, Located, call_block, locate_tokens, new_last_norm, run_blocks
from qklab.model.dropout import Dropout
from qklab.model.initialise import initialise


class QKLabPreTrainedModel(PreTrainedModel):
    """What the models below share: loading, initialisation, which attention implementations there are."""

    config_class = QKLabConfig
    config: QKLabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("quantization_config") is not None:
            raise ValueError(QUANTISED)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        refuse_function(self.config.decoder_spec.attentions, attn_implementation)
        self._supports_flash_attn = True  # only here: where it is True, generate_batch takes it without being asked
        try:
            return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        finally:
            self._supports_flash_attn = False

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, int(torch.randint(2**62, (), device="cpu")))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw what no checkpoint brought, as the table in `qklab.model.initialise` says."""
        every = [
            (module, name)
            for module in self.modules()
            for name, value in module._parameters.items()
            if value is not None
        ]
        brought = [(module, name) for module, name in every if is_initialised(module, name)]
        if len(brought) == len(every):
            return
        kept = [cast(nn.Parameter, module._parameters[name]) for module, name in brought]
        for (module, name), value in zip(brought, kept, strict=True):
            module._parameters[name] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
        self._init_weights(self)
        for (module, name), value in zip(brought, kept, strict=True):
            module._parameters[name] = value
        for module in self.modules():
            setattr(module, INITIALISED, True)

    @staticmethod
    def create_masks_for_generate(
        config: QKLabConfig, attention_mask: Tensor | None = None, past_key_values: Cache | None = None, **_: Any
    ) -> Tensor | None:
        """`generate` asks for a mask of fixed size before each step over a static cache. There the cache itself knows
        the padding, which is checked and noted here, outside the compiled graph."""
        held = [] if past_key_values is None else past_key_values.layers
        layers = [layer for layer in held if isinstance(layer, QKLabCacheLayer)]
        if not layers:
            layers = adopt_cache_layers(past_key_values, config.decoder_spec.attentions)
        if attention_mask is None or not layers[0].started:
            return attention_mask
        update_padding(layers, attention_mask)
        return None


class QKLabModel(QKLabPreTrainedModel):
    """ids [B, T] → what the output matrix sees [B, T, width]: `qklab.Decoder` without its head."""

    def __init__(self, config: QKLabConfig):
        super().__init__(config)
        spec = config.decoder_spec
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.positions = LearnedPositions(spec.context, spec.width) if spec.learns_positions else None
        self.dropout = Dropout(spec.dropout, 0)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        describe_layers(self)
        self.norm = new_last_norm(spec)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """ids or embeddings [B, T(, width)] that follow what `past_key_values` holds → hidden states [B, T, width].

        `attention_mask` [B, S], 1 for text, says which of all S tokens so far are padding: on the left, or without
        a cache on the right. `position_ids` may restart from 0 within a row, which packs several texts into it. Without
        `use_cache` a cache is made in evaluation and none in training.
        """
        if output_attentions or self.config.output_attentions:
            raise ValueError(
                "qklab models do not return attention weights through output_attentions, since their attention never "
                "forms them; see qklab.model.diagnose, or `qklab inspect`, for maps of a decoder."
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "give one of input_ids and inputs_embeds, but " + ("none" if input_ids is None else "both") + " came."
            )
        x = self.embed(input_ids.long()) if input_ids is not None else cast(Tensor, inputs_embeds)
        if "cache" in kwargs:  # under generate_batch
            layers, past, located = self.locate_paged(x, attention_mask, cast(Tensor, position_ids), kwargs)
        else:
            layers, past, located = self.locate_inputs(x, attention_mask, position_ids, past_key_values, use_cache)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if wanted else None
        call = self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else call_block
        eager = str(self.config._attn_implementation).removeprefix("paged|") == "eager"
        with sdpa_kernel(SDPBackend.MATH) if eager else contextlib.nullcontext():
            x = self.norm(run_blocks(self, x, located, layers, call, states))
        return BaseModelOutputWithPast(
            last_hidden_state=cast(Any, x),
            past_key_values=past,
            hidden_states=None if states is None else cast(Any, (*states, x)),
        )

    def locate_paged(
        self, x: Tensor, mask: Any, positions: Tensor, given: dict[str, Any]
    ) -> tuple[list[PagedLayer], None, list[Located]]:
        """`locate_inputs` of the tokens x [1, T, width] of all requests of a continuous batch."""
        self.check_cache()
        layers = [PagedLayer(layer, given) for layer in range(self.spec.layers)]
        located = locate_pages(self.spec.pattern, x, mask, positions, given)
        return layers, None, located if mask is not None else give_function(self, located)

    def locate_inputs(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, past: Cache | None, use_cache: bool | None
    ) -> tuple[list[QKLabCacheLayer] | None, Cache | None, list[Located]]:
        """The layers of the cache, the cache itself, and where the tokens x [B, T, width] stand."""
        spec, (batch, tokens) = self.spec, x.shape[:2]
        layers = None if past is None else adopt_cache_layers(past, spec.attentions)
        if layers is not None and layers[0].started:
            self.check_continuation(layers, x, mask, positions)
            self.check_cache()
            return layers, past, self.locate(x, None, [layer.cache for layer in layers])
        self.check_room(tokens)
        given = None
        if mask is not None and not torch.compiler.is_compiling():
            check_mask_shape(mask, batch, tokens)
            check_one_piece(mask)
            given, mask = mask, None if bool((mask != 0).all()) else mask
        segments = None if mask is None else (mask != 0).long()
        if positions is not None and not (torch.compiler.is_compiling() and (mask is not None or layers is not None)):
            texts = find_packed_texts(positions, mask, batch, tokens)
            if texts is not None and (layers is not None or use_cache):
                raise ValueError(
                    "position_ids restart within a row, which packs several texts into it, but nothing can follow "
                    "these in a cache; leave the cache out, or give the texts as separate rows."
                )
            segments, use_cache = (segments, use_cache) if texts is None else (texts, False)
        if layers is None and self.makes_cache(use_cache):
            layers = make_cache_layers(spec.attentions, None)
            past = Cache(layers=layers)
        if layers is not None:
            self.check_cache()
            ends = mask is not None and not torch.compiler.is_compiling() and ends_in_padding(mask)
            for layer in layers:
                layer.pad(None if mask is None else count_left_padding(mask))
                layer.right_padded = ends
            layers[0].seen = None if given is None else given.clone()
        return layers, past, self.locate(x, segments, None)

    def locate(self, x: Tensor, segments: Tensor | None, caches: Sequence[Any] | None) -> list[Located]:
        """`locate_tokens`, for whatever function computes attention."""
        if self.config._attn_implementation in OWN:
            return locate_tokens(self.spec.pattern, x, segments, caches)
        find = functools.partial(find_for_function, self.config)
        return give_function(self, locate_tokens(self.spec.pattern, x, segments, caches, find))

    def check_continuation(
        self, layers: list[QKLabCacheLayer], x: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> None:
        """Raise where mask [B, S] or positions [B, T] do not continue what the cache holds."""
        if torch.compiler.is_compiling():
            return
        first, batch, tokens = layers[0], *x.shape[:2]
        if first.right_padded:
            raise ValueError(
                "the rows in this cache are padded on the right, so nothing can follow them; pad on the left "
                "(tokenizer.padding_side = 'left')."
            )
        before, room = int(first.get_seq_length()), first.get_max_length()
        if 0 <= room < before + tokens:
            raise ValueError(
                f"this static cache has room for {room} tokens and holds {before}, but {tokens} more came; "
                f"make it with max_cache_len={before + tokens} or more."
            )
        self.check_room(before + tokens)
        if mask is not None:
            check_mask_shape(mask, batch, before + tokens)
            update_padding(layers, mask)
        if positions is not None:
            check_positions(positions, before, first.left_padding)

    def makes_cache(self, use_cache: bool | None) -> bool:
        """Whether to make one where none came: in evaluation unless told otherwise, never where layers run twice."""
        if self.training and self.gradient_checkpointing:
            return False
        if use_cache is None:
            return self.config.use_cache and self.spec.causal and not self.training
        return use_cache

    def check_cache(self) -> None:
        """Raise where this model cannot fill a cache or decode from it."""
        if self.training and self.gradient_checkpointing:
            raise ValueError("gradient checkpointing runs each layer twice and so cannot fill a cache; leave it out.")
        if not self.spec.causal:
            raise ValueError("only a causal model can use a cache, but this one was built with causal=False.")
        mixes = [cast(Block, block).attention.mix for block in self.blocks]
        ups = [up for mix in mixes if isinstance(mix, LatentSoftmax) for up in (mix.up_key, mix.up_value)]
        if not all(type(up) is nn.Linear for up in ups):
            raise ValueError(
                "decoding from a latent reads the weights of up_key and up_value themselves, but an adapter lies on "
                "them; merge it first, or train one on config.lora_targets."
            )

    def check_room(self, tokens: int) -> None:
        if self.positions is not None and tokens > self.spec.context:
            raise ValueError(
                f"this model has learned positions for {self.spec.context} tokens, but {tokens} came; shorten the text."
            )


INITIALISED = "_is_hf_initialized"  # Transformers' mark on what is loaded or drawn


def is_initialised(module: nn.Module, name: str) -> bool:
    return any(getattr(each, INITIALISED, False) for each in (module, module._parameters[name]))
