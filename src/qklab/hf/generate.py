"""How `generate` and `generate_batch` begin for qklab's own models: which cache, and pages of which shape."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from qklab.hf.function import OWN
from qklab.hf.paged import choose_page_shape, shape_pages

# What compiling a step takes over what each step then saves: 30 s, and 21.4 − 6.3 ms (docs/findings.md). Both grow with
# the number of layers, so that their ratio is much the same for every model whose steps the host's launches limit.
STEPS_TO_COMPILE = 2_000
PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def choose_cache(
    asked: GenerationConfig, mode: GenerationMode, steps: int, needed: int, free: int | None, compiled: bool
) -> str | None:
    """The implementation of the cache for so many steps after the prompt: "static", which Transformers compiles, where
    nothing else was asked for and it pays, else what was asked for.

    `needed` bytes are those of the static cache, `free` those of the GPU, if there is one; `compiled` is whether the
    step already is, for this many rows and this much room.
    """
    otherwise = (asked.disable_compile, asked.compile_config, asked.prefill_chunk_size, asked.is_assistant)
    plain = asked.cache_implementation is None and asked.use_cache is not False and not any(otherwise)
    pays = compiled or steps >= STEPS_TO_COMPILE
    fits = free is not None and 2 * needed <= free
    return "static" if plain and mode in PLAIN_MODES and pays and fits else asked.cache_implementation


def count_free_bytes(device: torch.device) -> int | None:
    """Of a GPU, what torch has taken and not used included; None of anything else."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


class QKLabGenerationMixin(GenerationMixin):
    """Transformers' ways to write text, begun with what qklab's models keep of it."""

    _static_rows: int | None = None  # of the last static cache

    def _prepare_cache_for_generation(
        self: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        positions, several = model_kwargs.get("position_ids"), len(set(getattr(self, "hf_device_map", {}).values())) > 1
        own = self.config._attn_implementation in OWN and model_kwargs.get("past_key_values") is None
        rows = batch_size * (generation_config.num_return_sequences or 1)
        if own and positions is not None and not several:
            room = getattr(self, "_previous_max_cache_length", 0)
            generation_config.cache_implementation = choose_cache(
                generation_config,
                generation_mode,
                steps=max_cache_length - positions.shape[-1],
                needed=rows * self.config.decoder_spec.cache_bytes(max(room, max_cache_length), self.dtype),
                free=count_free_bytes(self.device),
                compiled=hasattr(self, "_compiled_call") and rows == self._static_rows and max_cache_length <= room,
            )
        if generation_config.cache_implementation == "static":
            self._static_rows = rows
        return cast(Any, super())._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def init_continuous_batching(self: Any, *args: Any, workload_hints: Any = None, **kwargs: Any) -> Any:
        """What `generate_batch` begins with."""
        shape, changes = choose_page_shape(self.model.spec.attentions)
        if workload_hints is not None:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length - 1  # the last is not read
            self.model.check_room(longest)
        manager = super().init_continuous_batching(*args, workload_hints=workload_hints, **kwargs)
        return shape_pages(manager, shape, changes)
