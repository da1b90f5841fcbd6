"""`fold` of our Transformer: gains, norm gains and temperatures into the weights beside them."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.fallback import double
from skipless.model import IDENTITY, Connection, Transformer
from skipless.model.block import Sublayer
from skipless.surgery.slimming.scaling import Tally, join_weights, scale_output

__all__ = ["fold_own"]


def fold_own(model: Transformer, tally: Tally, norm_gains: bool) -> Transformer:
    """Our Transformer with plain connections, its stream carried as x / c (F3); changes `model`.

    Raises UserError where no weight can hold a join's weights.
    """
    config, carried = model.config, 1.0
    free: dict[Sublayer, list[int]] = {"attention": [], "mlp": []}
    dropped: dict[Sublayer, list[int]] = {"attention": [], "mlp": []}
    pre = config.norm_placement == "pre"
    for index, block in enumerate(model.blocks):
        attention, mlp = block.self_attn, block.mlp
        places: tuple[tuple[Sublayer, nn.Linear | None, Connection | None], ...] = (
            ("attention", attention and attention.o_proj, block.attention_connection),
            ("mlp", mlp and mlp.down_proj, block.mlp_connection),
        )
        for sublayer, linear, connection in places:
            if linear is None or connection is None:
                dropped[sublayer].append(index)
                continue
            name = f"layers.{index}.{sublayer}_connection"
            a, b = join_weights(name, connection)
            if a not in (0, 1) and not pre:
                raise UserError(
                    f"{name} weighs the stream by {a:.4g} without a norm in front of the next "
                    "sublayer; F3 needs norm_placement 'pre'"
                )
            if a == 0:
                free[sublayer].append(index)
            carried = carried * a if a else 1.0
            scale_output(linear, b / carried)
            tally.joined(connection)
    if norm_gains and pre:
        _fold_norms(model, tally)
    temperature = _fold_temperature(model, tally)
    return _rebuilt(model, _plain(config, free, dropped, temperature))


def _fold_norms(model: Transformer, tally: Tally) -> None:
    pairs: list[tuple[str, nn.Module, list[nn.Module]]] = []
    for index, block in enumerate(model.blocks):
        attention, norm = block.self_attn, block.input_layernorm
        if attention is not None and norm is not None:
            pairs.append((f"layers.{index}.input_layernorm", norm,
                          [attention.q_proj, attention.k_proj, attention.v_proj]))  # fmt: skip
        mlp, norm = block.mlp, block.post_attention_layernorm
        if mlp is not None and norm is not None:
            pairs.append((f"layers.{index}.post_attention_layernorm", norm,
                          [m for m in (mlp.gate_proj, mlp.up_proj) if m is not None]))  # fmt: skip
    if model.config.num_labels is not None:
        tally.kept.append("norm: its output is pooled before the head")
    elif model.config.tie_word_embeddings:
        tally.kept.append("norm: the head is tied to the embedding")
    else:
        pairs.append(("norm", model.norm, [model.lm_head]))
    for name, norm, readers in pairs:
        tally.norm(name, norm, readers)


@torch.no_grad()
def _fold_temperature(model: Transformer, tally: Tally) -> TemperatureConfig:
    """Temperatures into W_Q (F6); a length-scaled factor depends on the position and stays."""
    for block in model.blocks:
        attention = block.self_attn
        if attention is None:
            continue
        temperature = attention.temperature
        tau = temperature.tau
        if tau is None:
            tau = torch.tensor([temperature.start], dtype=torch.float64)
        if temperature.tau is not None or temperature.start != 1:
            tally.counts["F6"] += 1
            heads = double(tau).expand(attention.num_heads)
            scale_output(attention.q_proj, heads.repeat_interleave(attention.head_dim))
    return dataclasses.replace(model.config.temperature, kind="constant", beta=1.0)


def _plain(
    config: ModelConfig,
    free: dict[Sublayer, list[int]],
    dropped: dict[Sublayer, list[int]],
    temperature: TemperatureConfig,
) -> ModelConfig:
    everywhere, none = ConnectionConfig(), ConnectionConfig(kind="none")
    if sum(map(len, (*free.values(), *dropped.values()))) == 2 * config.num_hidden_layers:
        everywhere = none
    rules = tuple(
        ConnectionOverride(connection=connection, layers=tuple(layers), sublayer=sublayer)
        for connection, places in ((none, free), (IDENTITY, dropped))
        for sublayer, layers in places.items()
        if layers and connection != everywhere
    )
    return dataclasses.replace(
        config, connection=everywhere, connection_overrides=rules, temperature=temperature
    )


def _rebuilt(model: Transformer, config: ModelConfig) -> Transformer:
    weight = model.embed_tokens.weight
    with torch.device("meta"):
        plain = Transformer(config)
    plain = plain.to_empty(device=weight.device).to(weight.dtype)
    wanted = plain.state_dict().keys()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in wanted})
    return plain
