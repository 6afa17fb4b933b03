"""What stands on qklab's model under Transformers: heads for the next token, for masked ones and for whole texts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from qklab.hf.config import QKLabConfig
from qklab.hf.generate import QKLabGenerationMixin
from qklab.hf.model import QKLabModel, QKLabPreTrainedModel


class QKLabForCausalLM(QKLabPreTrainedModel, QKLabGenerationMixin):
    """ids [B, T] → logits [B, T, vocab] for the token after each."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: QKLabConfig):
        super().__init__(config)
        if not config.decoder_spec.causal:
            raise ValueError(
                "a language model is causal, but the spec says causal=False; use QKLabForMaskedLM, "
                "QKLabForSequenceClassification, or QKLabModel for the hidden states."
            )
        self.model = QKLabModel(config)
        self.lm_head = nn.Linear(config.decoder_spec.width, config.decoder_spec.vocab, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Inputs as in `QKLabModel`. `labels` [B, T] are the ids themselves, −100 where no loss is wanted, and are
        shifted here; `logits_to_keep` asks for the last so many logits (0: all), or for those of some positions."""
        found = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )


class QKLabForMaskedLM(QKLabPreTrainedModel):
    """ids [B, T] → logits [B, T, vocab] for each token itself, of a model that sees both ways: masked text, or the
    answers of a task."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: QKLabConfig):
        super().__init__(config)
        if config.decoder_spec.causal:
            raise ValueError(
                "masked tokens are for models with causal=False, but this one is causal; use QKLabForCausalLM."
            )
        self.model = QKLabModel(config)
        self.lm_head = nn.Linear(config.decoder_spec.width, config.decoder_spec.vocab, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Inputs as in `QKLabModel`; `labels` [B, T] are what stands at each token, −100 where nothing is asked."""
        found = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=cast(Any, loss), logits=logits, hidden_states=found.hidden_states)


class QKLabForSequenceClassification(QKLabPreTrainedModel):
    """ids [B, T] → logits [B, labels], read off each row's last token of text, or, of a model that sees both ways, off
    the mean of its tokens."""

    def __init__(self, config: QKLabConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = QKLabModel(config)
        self.score = nn.Linear(config.decoder_spec.width, cast(int, config.num_labels), bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Inputs as in `QKLabModel`; `labels` [B], or [B, labels] for several at once or for regression."""
        found = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)
        logits = self.score(self.pool(found.last_hidden_state, input_ids, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )

    def pool(self, x: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """What of x [B, T, width] stands for the row [B, width]."""
        batch, tokens = x.shape[:2]
        text = self.find_text(ids, mask, batch, tokens).to(x.device)
        if not self.model.spec.causal:
            share = text.to(x.dtype) / text.sum(-1, keepdim=True).clamp(min=1)
            return (share[..., None] * x).sum(1)
        last = torch.where(text, torch.arange(tokens, device=x.device), 0).amax(-1)
        return x[torch.arange(batch, device=x.device), last]

    def find_text(self, ids: Tensor | None, mask: Tensor | None, batch: int, tokens: int) -> Tensor:
        """Which tokens are text [B, T]: by the mask, else by the padding token."""
        if mask is not None:
            return mask[:, -tokens:] != 0
        if ids is not None and self.config.pad_token_id is not None:
            return ids != self.config.pad_token_id
        if batch == 1:
            return torch.ones(1, tokens, dtype=torch.bool)
        raise ValueError(
            f"{batch} rows came without an attention_mask, and the config has no pad_token_id that would tell "
            "text from padding; give one of the two."
        )
