"""A decoder without its head: embedding, blocks, final norm.

`Transformer` adds a head; the classes of `skipless.hf` inherit from this and from transformers.
Legend: B batch, T tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.model import layout
from skipless.model.block import Block
from skipless.model.cache import KeyValueCache
from skipless.model.context import ForwardContext
from skipless.model.norms import build_norm
from skipless.model.rope import RotaryTables


class Stack(nn.Module):
    """Everything of a model but its head. A subclass calls `build_stack` in its `__init__`."""

    config: Any

    @property
    def settings(self) -> ModelConfig:
        """The settings; a subclass whose `config` is of another kind says them here."""
        return self.config

    def build_stack(self, config: ModelConfig) -> None:
        """Make all modules, without values: call it under the meta device."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self._rotary = (
            RotaryTables(config.head_dim, config.rope_theta, config.num_attention_heads)
            if config.position == "rope"
            else None
        )

    def run_stack(
        self,
        input_ids: Tensor | None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        outside: Callable[..., Tensor] | None = None,
        streams: list[Tensor] | None = None,
    ) -> Tensor:
        """What the head reads, [B, T, D]; of `input_ids` int64 [B, T] or `inputs_embeds` [B, T, D].

        `position_ids` [B, T] replace those that count the tokens of `attention_mask` [B, S].
        `outside` computes attention where a layer's implementation is not one of ours. `streams`
        takes up what each block receives, [B, T, D]. Raises UserError as `Transformer.forward`.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        assert given is not None, "ids or their embeddings"
        layout.check_input(self.settings, given, attention_mask, cache)
        positions, context = layout.build_context(
            self.settings, given, attention_mask, cache, self._rotary, self._compute_dtype(),
            position_ids,
        )  # fmt: skip
        context.outside = outside
        stream = self._embed(input_ids, inputs_embeds, positions)
        context.embedding = stream
        for block in self.layers:
            if streams is not None:
                streams.append(stream)
            stream = self._run_block(block, stream, context)
            if context.is_finished:
                break
        if cache is not None:
            cache.advance(given.shape[1])
        return self.norm(stream)

    def _run_block(self, block: nn.Module, stream: Tensor, context: ForwardContext) -> Tensor:
        return block(stream, context)

    def _embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, positions: Tensor
    ) -> Tensor:
        stream = self._looked_up(input_ids) if inputs_embeds is None else inputs_embeds
        if self.settings.position == "learned":
            stream = stream + self.embed_positions(positions)
        return stream if self.dropout is None else self.dropout(stream)

    def _looked_up(self, input_ids: Any) -> Tensor:
        try:
            return self.embed_tokens(input_ids)
        except IndexError:
            raise UserError(
                f"token id {int(input_ids.max())} (smallest {int(input_ids.min())}) is outside the "
                f"vocabulary of {self.embed_tokens.num_embeddings}; the text was encoded with "
                "another tokenizer"
            ) from None

    def _compute_dtype(self) -> torch.dtype:
        device = self.embed_tokens.weight.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.embed_tokens.weight.dtype

    @property
    def blocks(self) -> list[Block]:
        """The blocks, typed: a ModuleList does not say what it holds."""
        return cast("list[Block]", list(self.layers))

    @property
    def layer_list(self) -> nn.ModuleList:
        """The blocks; what compile, FSDP and activation checkpointing wrap."""
        return self.layers

    def tie_gains(self) -> None:
        """Share C4's block gains within their block."""
        for block in self.blocks:
            block.tie_gains()

    def _apply(self, fn, recurse=True):
        # leaving the meta device replaces each Parameter, and so unties shared ones
        super()._apply(fn, recurse)
        self.tie_gains()
        return self
