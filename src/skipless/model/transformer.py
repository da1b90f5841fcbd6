"""The decoder: embedding, blocks, final norm, head. docs/equations.md sections 1 and 2.

`Transformer(config, seed=0)` is built and initialised on the default device; under
`torch.device("meta")` it allocates nothing, and `initialize` fills it after `to_empty` with the
same numbers. Legend: B batch, T tokens, S past plus new tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.model import initializers, layout
from skipless.model.attention import Attention
from skipless.model.cache import KeyValueCache, Store
from skipless.model.connections import Connection
from skipless.model.generation import generate
from skipless.model.losses import cross_entropy
from skipless.model.relation_encoder import RelationEncoder
from skipless.model.stack import Stack
from skipless.sharded import is_sharded
from skipless.sites import Site, weight_of


@dataclass
class ModelOutput:
    """What `Transformer.forward` returns."""

    logits: Tensor
    """[B, T, V] (or the last `logits_to_keep` positions); [B, num_labels] when classifying."""
    loss: Tensor | None = None
    """Mean cross-entropy in nats, float32 scalar, when labels were given."""
    cache: KeyValueCache | None = None
    """The cache that was given, now with this pass's tokens."""


class Transformer(Stack):
    """Decoder (or, with `causal=False`, encoder) with a language-model or classification head."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # default draws would cost time and disturb the global seed
            self.build_stack(config)
            width, vocabulary = config.hidden_size, config.vocab_size
            if config.num_labels is None:
                self.lm_head = nn.Linear(width, vocabulary, bias=False)
            else:
                self.score = nn.Linear(width, config.num_labels, bias=False)
        self.new_store: Callable[[int, str], Store] | None = None
        """Makes the places where a cache keeps keys and values; None: floating point."""
        self.tie_weights()
        if device.type != "meta":
            self.to_empty(device=device)
            initialize(self, seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """Logits, and the loss when `labels` are given.

        `input_ids` int64 [B, T]. `labels` int64 [B, T] are the next tokens (already shifted),
        -100 where nothing is asked; [B] when classifying. `attention_mask` [B, S] is 1 on tokens
        and 0 on padding, past tokens included. `logits_to_keep` n computes the last n positions
        only, 0 all. Raises UserError for shapes that do not fit, ids beyond the vocabulary (on the
        CPU) and texts longer than `max_position_embeddings`.
        """
        past = cache.length if cache is not None else 0
        stream = self.run_stack(input_ids, attention_mask=attention_mask, cache=cache)
        if self.config.num_labels is not None:
            logits = self.score(layout.pool(stream, attention_mask, past, self.config.causal))
        else:
            logits = self.lm_head(stream[:, -logits_to_keep:] if logits_to_keep else stream)
        loss = None if labels is None else _loss(logits, labels)
        return ModelOutput(logits=logits, loss=loss, cache=cache)

    def new_cache(self) -> KeyValueCache:
        """An empty cache for this model's keys and values; of packed integers where `new_store`
        was set (`quant.kvcache`)."""
        return KeyValueCache(self.new_store)

    def tie_weights(self) -> None:
        """Share the embedding with the head, and C4's block gains within their block."""
        if self.config.num_labels is None and self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.tie_gains()

    def _apply(self, fn, recurse=True):
        # leaving the meta device replaces each Parameter, and so unties shared ones
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def set_training_progress(self, fraction: float) -> None:
        """Tell every connection the share of training done, in [0, 1] (C7)."""
        for module in self.modules():
            if isinstance(module, Connection):
                module.set_training_progress(fraction)

    def gains(self) -> dict[str, Tensor]:
        """Current connection weights, identity biases and learned temperatures, detached.

        Keys are module name and weight: "layers.0.mlp_connection.b". Empty for C1, C2, C3.
        """
        return layout.gains(self)

    def sites(self) -> list[Site]:
        """Every place where a tensor can be measured or quantised, in order of computation."""
        return layout.sites(self.config)

    def num_parameters(self, gains: bool = True) -> int:
        """Number of parameters, shared ones once; without `gains` only matrices count (no norm
        gains, connection gains, biases)."""
        return sum(p.numel() for p in self.parameters() if gains or p.ndim > 1)

    generate = generate


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != logits.shape[:-1]:
        raise UserError(
            f"labels have shape {list(labels.shape)} and the logits {list(logits.shape)}; "
            f"labels of shape {list(logits.shape[:-1])} were expected"
        )
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


@runtime_checkable
class _Resettable(Protocol):
    """A module that fills its own parameters."""

    def reset_parameters(self) -> None: ...


@torch.no_grad()
def initialize(model: Stack, seed: int = 0) -> None:
    """Fill every parameter and buffer (I1-I7); the same numbers on any device, sharded or not.

    For a model that left the meta device by `to_empty`, and for starting over.
    """
    tie: Any = getattr(model, "tie_weights", model.tie_gains)
    tie()
    config, written = model.settings, set()

    def write(parameter: Tensor, value: Tensor) -> None:
        written.add(id(parameter))
        parameter.copy_(_like(parameter, value))

    def write_normal(name: str, module: nn.Module) -> None:
        weight = weight_of(module)
        rows, columns = weight.shape
        generator = initializers.generator_for(seed, name)
        write(weight, initializers.normal(rows, columns, config.init.std, generator))

    for name in ("lm_head", "score", "embed_positions", "embed_tokens"):
        if hasattr(model, name):
            write_normal(name, getattr(model, name))  # a tied head is overwritten by the embedding
    for index, block in enumerate(model.layers):
        for name, value in initializers.layer_weights(config, index, seed).items():
            if getattr(block, name.partition(".")[0]) is not None:  # else a dropped sublayer
                write(weight_of(block.get_submodule(name)), value)
    for name, module in model.named_modules():
        if isinstance(module, RelationEncoder):
            start = module.start(initializers.generator_for(seed, name))
            for leaf, value in start.items():
                write(module.get_parameter(leaf), value)
        if isinstance(module, Attention) and module.identity_bias is not None:
            assert config.init.identity_bias is not None, "it is why the parameter exists"
            module.identity_bias.fill_(config.init.identity_bias)
            written.add(id(module.identity_bias))
        own = list(module.parameters(recurse=False))
        if own and any(id(p) not in written for p in own) or isinstance(module, Connection):
            assert isinstance(module, _Resettable), f"{name} has parameters and no start"
            module.reset_parameters()
            written.update(id(p) for p in own)
    missing = [n for n, p in model.named_parameters() if id(p) not in written]
    assert not missing, f"parameters without an initialiser: {missing}"


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` in the parameter's dtype and device, sharded as the parameter is."""
    value = value.to(parameter.dtype)
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor  # only where a process group exists

    local = value.to(parameter.device)
    # every rank drew the same matrix, so each takes its slice and nothing is sent
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
