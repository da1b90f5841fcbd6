"""What surrounds the blocks of a `Transformer`: input checks, masks and positions, pooling, and
the lists of sites and gains. Read by `transformer.py`.

Legend: B batch, T new tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.model.attention import Attention
from skipless.model.block import is_absent
from skipless.model.cache import KeyValueCache
from skipless.model.connections import Connection
from skipless.model.context import ForwardContext
from skipless.model.rope import RotaryTables
from skipless.sites import Site


def check_input(
    config: ModelConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: KeyValueCache | None,
) -> None:
    """Raise UserError for inputs whose shape cannot be computed."""
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise UserError(
            f"input_ids have shape {list(input_ids.shape)}; [batch, tokens] with at least one "
            "token was expected"
        )
    total = input_ids.shape[1] + (cache.length if cache is not None else 0)
    if total > config.max_position_embeddings:
        raise UserError(
            f"{total} tokens exceed model.max_position_embeddings "
            f"{config.max_position_embeddings}; cut the text, or build the model for longer ones"
        )
    if cache is not None and not config.causal:
        raise UserError("a bidirectional model cannot use a cache: past tokens see later ones")
    if attention_mask is not None and attention_mask.shape != (input_ids.shape[0], total):
        raise UserError(
            f"attention_mask has shape {list(attention_mask.shape)}; "
            f"{[input_ids.shape[0], total]} (batch, past plus new tokens) was expected"
        )


def build_context(
    config: ModelConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: KeyValueCache | None,
    rotary: RotaryTables | None,
    dtype: torch.dtype,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, ForwardContext]:
    """Positions [T] or [B, T], and the context without its embedding. `position_ids` [B, T] are
    taken for positions as they are; what a query sees does not depend on them."""
    past = cache.length if cache is not None else 0
    num_new, device = input_ids.shape[1], input_ids.device
    total = past + num_new
    if attention_mask is not None and attention_mask.device.type == "cpu":
        # a mask of ones would only switch the faster triangular kernel off
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    if attention_mask is None:
        positions = torch.arange(past, total, device=device)
        visible = None
        if config.causal and past and num_new > 1:
            visible = torch.ones(num_new, total, dtype=torch.bool, device=device).tril(past)
    else:
        attention_mask = attention_mask.bool()
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
        visible = attention_mask[:, None, None, :]
        ones = torch.ones(num_new, total, dtype=torch.bool, device=device)
        if config.causal:
            visible = visible & ones.tril(past)
        # padding sees itself, since a softmax over nothing is NaN
        visible = visible | ones.tril(past).triu(past)
    context = ForwardContext(
        visible=visible,
        is_causal=config.causal and (past == 0 or visible is not None),
        cache=cache,
        tokens=attention_mask,
    )
    placed = positions if position_ids is None else position_ids
    if rotary is not None:
        context.rotary = rotary.at(placed, config.max_position_embeddings, dtype)
    if config.temperature.length_scaled:
        if config.causal:
            context.num_visible = positions + 1
        elif attention_mask is None:
            context.num_visible = torch.full_like(positions, total)
        else:
            context.num_visible = attention_mask.sum(-1, keepdim=True).expand(-1, num_new)
    return placed, context


def pool(stream: Tensor, attention_mask: Tensor | None, past: int, causal: bool) -> Tensor:
    """One vector per text [B, D]: the last token of a causal model, else the mean of tokens.

    Tokens are counted in whole numbers: bfloat16 cannot tell 513 from 512.
    """
    if attention_mask is None:
        return stream[:, -1] if causal else stream.mean(dim=1)
    mask = attention_mask[:, past:].bool()
    if causal:
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
        return stream[torch.arange(len(stream), device=stream.device), last]
    wide = torch.promote_types(stream.dtype, torch.float32)
    total = (stream * mask[..., None]).sum(dim=1, dtype=wide)
    return (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(stream.dtype)


def gains(model: nn.Module) -> dict[str, Tensor]:
    """Connection weights, identity biases and learned temperatures by name, detached."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, Connection):
            found |= {f"{name}.{key}": value for key, value in module.gains().items()}
        elif isinstance(module, Attention):
            if module.identity_bias is not None:
                found[f"{name}.identity_bias"] = module.identity_bias.detach()
            if module.temperature.tau is not None:
                found[f"{name}.temperature.tau"] = module.temperature.tau.detach()
    return found


_IN_ATTENTION = (
    ("q_proj", "input", "linear_input"), ("q_proj", "output", "linear_output"),
    ("k_proj", "input", "linear_input"), ("k_proj", "output", "linear_output"),
    ("v_proj", "input", "linear_input"), ("v_proj", "output", "linear_output"),
    ("query", "output", "query"), ("key", "output", "key"), ("value", "output", "value"),
    ("probabilities", "output", "probabilities"),
    ("o_proj", "input", "linear_input"), ("o_proj", "output", "linear_output"),
)  # fmt: skip


def sites(config: ModelConfig) -> list[Site]:
    """Every site of a `Transformer`, in order of computation."""
    found: list[Site] = []

    def add(module: str, direction: str, kind: str, layer=None, sublayer=None) -> None:
        label = f"{module}:{direction}"
        found.append(
            Site(name=label, module=module, direction=direction, kind=kind, layer=layer,
                 sublayer=sublayer)
        )  # fmt: skip

    add("embed_tokens", "output", "embedding")
    gated = config.hidden_act == "swiglu"
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        for sublayer, module, norm, post_norm in (
            ("attention", "self_attn", "input_layernorm", "post_attention_layernorm"),
            ("mlp", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
        ):
            where = {"layer": layer, "sublayer": sublayer}
            if is_absent(config.connection_at(layer, sublayer)):
                if config.norm_placement == "post":
                    add(at + post_norm, "output", "norm_output", **where)
                continue
            if config.norm_placement == "pre":
                add(at + norm, "output", "norm_output", **where)
            add(at + module, "input", "sublayer_input", **where)
            if sublayer == "attention":
                for name, direction, kind in _IN_ATTENTION:
                    add(f"{at}self_attn.{name}", direction, kind, **where)
            else:
                for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
                    add(f"{at}mlp.{name}", "input", "linear_input", **where)
                    add(f"{at}mlp.{name}", "output", "linear_output", **where)
                add(f"{at}mlp.act", "output", "activation_output", **where)
                add(f"{at}mlp.down_proj", "input", "linear_input", **where)
                add(f"{at}mlp.down_proj", "output", "linear_output", **where)
            add(at + module, "output", "sublayer_output", **where)
            add(f"{at}{sublayer}_connection", "output", "stream", **where)
            if config.norm_placement == "post":
                add(at + post_norm, "output", "norm_output", **where)
    add("norm", "output", "norm_output")
    head = "lm_head" if config.num_labels is None else "score"
    add(head, "input", "linear_input")
    add(head, "output", "linear_output")
    return found
