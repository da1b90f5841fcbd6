"""`to_stock`: our decoder as a class that stock transformers has, after folding.

Gated MLPs become LlamaForCausalLM, others ArceeForCausalLM with the matching activation. Names and
the rotary layout are the same on both sides, so weights are copied as they are. Everything that
these classes cannot express is refused with the reason; a sublayer that `prune` dropped alone gets
weights of 0. See docs/surgery.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.model import Transformer, is_absent
from skipless.packages import need
from skipless.surgery.slimming.folding import LIMIT, Folded, difference, fold, sample_inputs

__all__ = ["fold_to_stock", "to_stock"]

_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "relu2": "relu2", "swiglu": "silu"}


def to_stock(model: Transformer, *, norm_gains: bool = False) -> Any:
    """A LlamaForCausalLM or ArceeForCausalLM that computes what `model` computes, in eval mode.

    Gains and temperatures are folded first, norm gains too if asked; the logits are compared and
    differ by less than 1e-5 of the largest. A sublayer that was dropped alone is there with
    weights of 0: the same logits, at its former cost. Raises UserError for what neither class has:
    a sublayer without a skip, LayerNorm, learned positions, another norm placement, an identity
    bias, a length-scaled temperature, a bidirectional model or a classification head.
    """
    return fold_to_stock(model, norm_gains=norm_gains).model


def fold_to_stock(model: Transformer, *, norm_gains: bool = False) -> Folded:
    """`to_stock` with what was folded and how far the stock model's logits are from `model`'s."""
    if not isinstance(model, Transformer):
        raise UserError(f"to_stock takes our Transformer; a patched model needs fold() instead "
                        f"of {type(model).__name__} as it is")  # fmt: skip
    reason = _obstacle(model.config)
    if reason:
        raise UserError(f"stock transformers has no class for this model: {reason}")
    result = fold(model, norm_gains=norm_gains)
    folded, zeroed = result.model, []
    assert isinstance(folded, Transformer), "fold keeps what a model is"
    for index in range(folded.config.num_hidden_layers):
        for sublayer in ("attention", "mlp"):
            connection = folded.config.connection_at(index, sublayer)
            if is_absent(connection):
                zeroed.append(f"layers.{index}.{sublayer}_connection")
            elif connection.kind != "residual":
                raise UserError(
                    "stock transformers has no class for this model: layers."
                    f"{index}.{sublayer}_connection has no skip"
                )
    stock = _build(folded.config)
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in folded.state_dict().items()
    }
    found = stock.load_state_dict(weights, strict=not zeroed)
    assert not found.unexpected_keys, f"{type(stock).__name__} has no {found.unexpected_keys}"
    _zero(stock, found.missing_keys)
    weight = model.embed_tokens.weight
    stock = stock.to(weight.device, weight.dtype).eval()
    found = difference(model, stock, sample_inputs(model, None))
    if not found < LIMIT:
        raise UserError(
            f"the logits differ by {found:.2g} of the largest, and {LIMIT:g} is the limit"
        )
    return dataclasses.replace(result, model=stock, difference=found, zeroed=tuple(zeroed))


@torch.no_grad()
def _zero(stock: Any, names: list[str]) -> None:
    """Weights of sublayers that are not there; a norm keeps its start, 1."""
    for name in names:
        parameter = stock.get_parameter(name)
        if parameter.ndim > 1:
            parameter.zero_()


def _obstacle(config: ModelConfig) -> str:
    found = {
        "it is bidirectional": not config.causal,
        "it has a classification head": config.num_labels is not None,
        "its norms are LayerNorm": config.norm != "rmsnorm",
        f"its norm placement is {config.norm_placement!r}": config.norm_placement != "pre",
        f"its positions are {config.position!r}": config.position != "rope",
        "its attention has an identity bias": config.init.identity_bias is not None,
        "its temperature depends on the length": config.temperature.length_scaled,
    }
    return ", ".join(reason for reason, holds in found.items() if holds)


def _build(config: ModelConfig) -> Any:
    need("transformers")
    import transformers

    family = "Llama" if config.hidden_act == "swiglu" else "Arcee"
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.mlp_width, num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.key_value_heads, head_dim=config.head_dim,
        hidden_act=_ACTIVATIONS[config.hidden_act], rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings, attention_bias=False, mlp_bias=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # its random start must not disturb the caller's
        return getattr(transformers, f"{family}ForCausalLM")(settings)
