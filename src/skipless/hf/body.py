"""The body of our models in transformers: `Stack` under transformers' base class.

Heads are in `modeling.py`. What is here is what transformers asks for around the blocks: loading,
caches, masks, activation checkpointing, hidden states.

Legend: B batch, T new tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutputWithPast

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.hf.arguments import (
    as_asked,
    attention_probabilities,
    check_given,
    checked_positions,
)
from skipless.hf.attention import OWN, outside
from skipless.hf.configuration import SkiplessConfig, holds_packed_run
from skipless.hf.past import CACHE_NAME, Past, the_cache
from skipless.model import Attention, initialize, layout
from skipless.model.connections import Anneal, Connection, ReZero
from skipless.model.interpolation import Universal
from skipless.model.stack import Stack
from skipless.sites import Site

__all__ = ["SkiplessModel", "SkiplessPreTrainedModel"]

_RECORD = "_skipless_quantization"
"""Where `skipless.quant` keeps what it did to a module. Not imported: a folder with code
(`remote.py`) has no part of that room."""


class SkiplessPreTrainedModel(PreTrainedModel):
    """What the three classes share."""

    config_class = SkiplessConfig
    config: SkiplessConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    open_packed: ClassVar[Callable[..., Any] | None] = None
    """Reads the packed folder of a run; put here by `packed.py`, which needs these classes."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As transformers' own.

        Raises UserError for a config.json of a later skipless or with settings out of range, and
        for weights that cannot be read.
        """
        source = args[0] if args else options.get("pretrained_model_name_or_path")
        if cls.open_packed is not None and holds_packed_run(source):
            options.pop("pretrained_model_name_or_path", None)
            return cls.open_packed(cls, Path(str(source)), **options)
        try:
            found = super().from_pretrained(*args, **options)
        except SafetensorError as error:
            raise UserError(
                f"{args[0] if args else cls.__name__} holds weights that cannot be read ({error}); "
                "the file is cut short or damaged: get it anew"
            ) from None
        model: Any = found[0] if isinstance(found, tuple) else found
        for module in model.modules():
            if isinstance(module, Anneal):  # which keeps its buffer's value as a float
                module.load_state_dict(module.state_dict())
        for parameter in model.parameters():
            # Mapped files are laid out by byte. Vectors that start within a cache line are summed
            # in another order: a loaded model would differ from the saved one by rounding.
            if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                parameter.data = parameter.data.clone()
        return found

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """As transformers' own. Raises UserError while a part of the model is quantised by itself,
        as the whole does (`skipless.quant.record`)."""
        for name, module in self.named_modules():
            if module is not self and (part := getattr(module, _RECORD, None)):
                raise UserError(
                    f"{name} is quantised by itself with {part.scheme}, and save_pretrained would "
                    f"write its rounded weights alone; call restore(model.{name}), and quantise "
                    "the whole model for skipless.export.save_quantized"
                )
        super().save_pretrained(*args, **options)

    def initialize_weights(self) -> None:
        """Fill what no file held: the body by the role of each matrix (I1-I7), a head normally."""
        super().initialize_weights()
        self._body.fill()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A head, or a vocabulary that was resized; transformers calls this module by module."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = self.config.to_model_config().init.std
            initialization.normal_(module.weight, mean=0.0, std=std)

    @property
    def _body(self) -> SkiplessModel:
        body = self.base_model
        assert isinstance(body, SkiplessModel)
        return body

    def gains(self) -> dict[str, Tensor]:
        """Current connection weights, identity biases and learned temperatures, detached."""
        return layout.gains(self)

    def set_training_progress(self, fraction: float) -> None:
        """Tell every connection the share of training done, in [0, 1] (C7)."""
        for module in self.modules():
            if isinstance(module, Connection):
                module.set_training_progress(fraction)

    def sites(self) -> list[Site]:
        """Every place where a tensor can be measured or quantised, in order of computation."""
        settings, prefix = self.config.to_model_config(), f"{self.base_model_prefix}."
        body = self.base_model is self
        if not body and not hasattr(self, "lm_head"):
            settings = replace(settings, num_labels=max(self.config.num_labels or 2, 2))
        found = []
        for site in layout.sites(settings):
            if site.module in ("lm_head", "score"):
                found += [] if body else [site]
            elif body:
                found.append(site)
            else:
                found.append(replace(site, name=prefix + site.name, module=prefix + site.module))
        return found

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        every = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **every)
        self._body.checkpointed_every = every_n_layers

    @staticmethod
    def create_masks_for_generate(attention_mask: Any = None, **_: Any) -> Any:
        """The mask [B, S] as it is, also where a static cache would get one of four dimensions."""
        return attention_mask


class SkiplessModel(SkiplessPreTrainedModel, Stack):
    """Embedding, blocks and final norm: hidden states without a head."""

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        self._settings = config.to_model_config()
        self.gradient_checkpointing, self.checkpointed_every = False, 1
        device = torch.get_default_device()
        with torch.device("meta"):  # default draws would cost time
            self.build_stack(self._settings)
        present = [i for i, block in enumerate(self.blocks) if block.self_attn is not None]
        self._numbers = {layer: number for number, layer in enumerate(present)}
        self.has_attention = bool(present)
        self._keeps_state = any(isinstance(m, Universal) for m in self.modules())
        self._attention, self._filled = "", False
        if device.type != "meta":
            self.to_empty(device=device)
        self.tie_gains()
        self._tell_attention()
        names = {id(module): name for name, module in self.named_modules()}
        self._tied_weights_keys = {
            f"{names[id(second)]}.alpha": f"{names[id(first)]}.alpha"
            for block in self.blocks
            if isinstance(first := block.attention_connection, ReZero)
            and isinstance(second := block.mlp_connection, ReZero)
            and first.alpha is second.alpha
        }
        self.post_init()

    @property
    def settings(self) -> ModelConfig:
        """The settings as `skipless.model` has them."""
        return self._settings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """`last_hidden_state` [B, T, D] after the final norm, of ids [B, T] or `inputs_embeds`.

        `attention_mask` [B, S] is 1 on tokens and 0 on padding, past tokens included. The cache is
        `cache` or `past_key_values`, two names of one. `hidden_states`, where asked for, are what
        each block received and, last, what the final norm returned; `attentions` need
        attn_implementation "eager". Raises UserError for shapes that do not fit, ids beyond the
        vocabulary (on the CPU), texts longer than the context, and packed documents.
        """
        held = the_cache(cache, past_key_values)
        embeds = inputs_embeds
        check_given(input_ids, embeds, attention_mask, kwargs, self._settings.hidden_size)
        given = input_ids if embeds is None else embeds[..., 0]
        assert given is not None, "one of the two was given"
        held = self._cache_for(held, use_cache)
        past = None
        if held is not None:
            past = Past(held, self._numbers, given.shape[0], self._keeps_state)
            past.check_room(given.shape[1])
        layout.check_input(self._settings, given, attention_mask, past)
        seen = past.length if past is not None else 0
        position_ids = checked_positions(position_ids, attention_mask, given, seen, self._settings)
        streams: list[Tensor] | None = (
            [] if self._wants(output_hidden_states, "hidden_states") else None
        )
        with attention_probabilities(self, self._wants(output_attentions, "attentions")) as shown:
            stream = self.run_stack(
                input_ids, inputs_embeds=embeds, attention_mask=attention_mask,
                position_ids=position_ids, cache=past, streams=streams,
                outside=self._outside(attention_mask, given, seen),
            )  # fmt: skip
        out = BaseModelOutputWithPast(
            last_hidden_state=stream, **{CACHE_NAME: held},
            hidden_states=None if streams is None else (*streams, stream),
            attentions=None if shown is None else tuple(shown),
        )  # fmt: skip
        return as_asked(out, self.config, return_dict)

    @torch.no_grad()
    def fill(self) -> None:
        """Draw every parameter and buffer that no file held, once, from a seed that torch's global
        generator gives."""
        named = [*self.named_parameters(), *self.named_buffers()]
        if self._filled or any(tensor.is_meta for _, tensor in named):
            return
        self._filled = True
        loaded = [t for _, t in named if getattr(t, "_is_hf_initialized", False)]
        if len(loaded) < len(named):
            kept = [(tensor, tensor.detach().clone()) for tensor in loaded]
            initialize(self, int(torch.randint(2**31, (), device="cpu")))
            for tensor, values in kept:
                tensor.copy_(values)

    def _init_weights(self, module: nn.Module) -> None:
        if self._filled:  # else `fill` will do it
            super()._init_weights(module)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """Alphas that the sublayers of a block share; transformers' own asks for tied embeddings
        first."""
        return dict(self._tied_weights_keys or {})

    def _cache_for(self, held: Any, use_cache: bool | None) -> Any:
        """The cache of this pass, or None; a new one where it was asked for."""
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        wanted = held is not None or bool(use_cache)
        if use_cache is None and not self.training:
            wanted = wanted or (
                self.config.use_cache and self.config.causal and bool(self._numbers)
            )
        idle = self.config.causal and not self._numbers
        if not wanted or (held is None and (checkpointing or idle)):
            return None
        if checkpointing:
            raise UserError(
                "activation checkpointing runs layers again, which would fill the cache twice; "
                "call model.gradient_checkpointing_disable() or leave the cache out"
            )
        if idle:
            raise UserError(
                "no layer of this model has attention, so a cache has nothing to keep; leave it "
                "out (use_cache=False; no --kv-bits)"
            )
        return DynamicCache() if held is None else held

    def _outside(
        self, mask: Tensor | None, given: Tensor, past: int
    ) -> Callable[..., Tensor] | None:
        """What computes attention where that is none of ours."""
        name = self._tell_attention()
        if name in OWN:
            return None
        like = self.embed_tokens.weight.new_empty((), dtype=self._compute_dtype())
        return outside(self.config, mask, (given.shape[0], given.shape[1]), past, like)

    def _tell_attention(self) -> str:
        """The implementation, told to the layers where the config names a new one: a probe may have
        made them eager meanwhile."""
        name = self.config._attn_implementation or OWN[0]
        if name != self._attention:
            self._attention = name
            for module in self.modules():
                if isinstance(module, Attention):
                    module.implementation = name
        return name

    def _wants(self, asked: bool | None, what: str) -> bool:
        return bool(getattr(self.config, f"output_{what}", False) if asked is None else asked)

    def _run_block(self, block: Any, stream: Tensor, context: Any) -> Tensor:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            index = next(i for i, layer in enumerate(self.layers) if layer is block)
            if index % self.checkpointed_every == 0:
                return self._gradient_checkpointing_func(block.__call__, stream, context)
        return block(stream, context)
