"""Skipless models in transformers: a language model and a classifier on the body in `body.py`.

    model = SkiplessForCausalLM(SkiplessConfig(connection="rezero", hidden_size=64, ...))
    model.generate(**tokenizer(["The king"], return_tensors="pt"), max_new_tokens=20)

Parameters have the names that they have in `skipless.model.Transformer`, with "model." in front of
all but the head. Importing `skipless.hf` registers the Auto classes.

Legend: B batch, T new tokens, S past plus new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

from skipless.hf.arguments import (
    as_asked,
    check_classes,
    check_labels,
    check_length,
    check_padding_side,
)
from skipless.hf.body import SkiplessModel, SkiplessPreTrainedModel
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.past import CACHE_NAME, the_cache
from skipless.model import layout

__all__ = ["SkiplessForCausalLM", "SkiplessForSequenceClassification"]


class SkiplessForCausalLM(SkiplessPreTrainedModel, GenerationMixin):
    """The body with a language-model head, tied to the embedding unless the config says not."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        self.model = SkiplessModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if not self.model.has_attention and self.generation_config is not None:
            self.generation_config.use_cache = False  # `generate` would make one for every model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits [B, T, V], and the mean loss in nats when `labels` [B, T] are given.

        As everywhere in transformers, labels are the ids themselves, shifted here, -100 where
        nothing is asked. `logits_to_keep` n computes the last n positions only, a tensor those
        positions, 0 all. The rest is as in `SkiplessModel.forward`.
        """
        out = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds,
            cache=the_cache(cache, past_key_values), use_cache=use_cache,
            output_hidden_states=output_hidden_states, output_attentions=output_attentions,
            return_dict=True, **kwargs,
        )  # fmt: skip
        stream = out.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            stream = stream[:, logits_to_keep]
        elif logits_to_keep:
            stream = stream[:, -logits_to_keep:]
        logits, loss = self.lm_head(stream), None
        if labels is not None:
            check_labels(labels, tuple(logits.shape[:2]), logits.shape[-1])
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs
            )
        whole = CausalLMOutputWithPast(
            loss=loss, logits=logits, **{CACHE_NAME: getattr(out, CACHE_NAME)},
            hidden_states=out.hidden_states, attentions=out.attentions,
        )  # fmt: skip
        return as_asked(whole, self.config, return_dict)

    def generate(self, *args: Any, **options: Any) -> Any:
        """As transformers' own.

        Raises UserError, before anything is computed, for prompts padded on the right and for
        lengths beyond `config.max_position_embeddings`.
        """
        check_padding_side(options.get("attention_mask"))
        theirs: Any = super()  # whose types ask for a protocol of transformers' own
        return theirs.generate(*args, **options)

    def _prepare_attention_mask_for_generation(self, *args: Any, **options: Any) -> Tensor:
        """The mask that transformers tells by `pad_token_id` where none was given."""
        mask = super()._prepare_attention_mask_for_generation(*args, **options)
        check_padding_side(mask)
        return mask

    def _prepare_generated_length(
        self,
        generation_config: Any,
        *,
        input_ids_length: int,
        inputs_tensor: Tensor,
        **options: Any,
    ) -> Any:
        """Here transformers knows how long the texts may become, and has computed nothing yet."""
        theirs: Any = super()
        made = theirs._prepare_generated_length(
            generation_config, input_ids_length=input_ids_length, inputs_tensor=inputs_tensor,
            **options,
        )  # fmt: skip
        total = made.max_length
        if not input_ids_length:  # embeddings, whose tokens transformers does not count
            input_ids_length = inputs_tensor.shape[1]
            total += input_ids_length
        check_length(input_ids_length, total, self.config.max_position_embeddings)
        return made


class SkiplessForSequenceClassification(SkiplessPreTrainedModel):
    """The body with a linear head over one vector a text: the last token's, or with causal=False
    the mean of all tokens."""

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.model = SkiplessModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits [B, num_labels], and the loss when `labels` are given: [B] classes, or as
        `config.problem_type` says. Padding is told by `attention_mask`, never by a token's id."""
        if (
            attention_mask is None
            and input_ids is not None
            and self.config.pad_token_id is not None
        ):
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        kwargs.pop("use_cache", None)
        out = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False,
            output_hidden_states=output_hidden_states, output_attentions=output_attentions,
            return_dict=True, **kwargs,
        )  # fmt: skip
        pooled = layout.pool(out.last_hidden_state, attention_mask, 0, self.config.causal)
        logits, loss = self.score(pooled), None
        if labels is not None:
            check_classes(labels, logits.shape[0], self.config)
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        whole = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )
        return as_asked(whole, self.config, return_dict)
