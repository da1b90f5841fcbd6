"""`fold`: gains and temperatures multiplied into the weights next to them, so that they are gone.

Linear y = x W + bias; `out` is the linear that ends a sublayer. With y = a x + b f(norm(x)), and
the tags of docs/equations.md in front:

    F1, F2   out <- b out                                     rezero, layerscale
    F3       c <- a c, out <- (b / c) out                     interpolate, fixed, learned
             (the stream is carried as x / c, which a norm in front does not see, as long as the
             stream is large against the norm's eps; the comparison tells)
    F4       W <- diag(g) W, bias <- bias + beta W            norm gain g, norm bias beta
    F6       W_Q <- tau_l W_Q                                 temperature

Works on a copy, then compares: the largest difference of the logits, as a share of the largest
logit, is printed and must be below 1e-5. A patched Hugging Face model becomes a plain one that
stock transformers saves and loads; our Transformer becomes one with plain connections. Which
linear ends a sublayer and which ones read a norm is traced in a forward pass (`tracing.py`), never
taken from names.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.log import console
from skipless.model import IDENTITY, Connection, Transformer, is_absent
from skipless.quant import evaluation_mode, run_batch
from skipless.sites import bias_of, first_tensor, weight_of
from skipless.surgery.dropping import revive
from skipless.surgery.patching import CONSTANT_KINDS, patch, unpatch
from skipless.surgery.records import connections
from skipless.surgery.stacks import find_stacks
from skipless.surgery.tracing import trace

__all__ = ["Folded", "fold"]

LIMIT = 1e-5
"""Largest allowed difference of logits, as a share of the largest logit (section 7)."""
Sublayer = Literal["attention", "mlp"]
WORDS = {
    "F1": "gains", "F2": "gains by channel", "F3": "stream weights", "F4": "norm gains",
    "F6": "temperatures",
}  # fmt: skip
"""What a tag of `Folded.folded` counts, for readers."""
_TAGS = {"rezero": "F1", "layerscale": "F2", "interpolate": "F3", "fixed": "F3", "learned": "F3"}


@dataclass(frozen=True, kw_only=True)
class Folded:
    """What `fold` returns."""

    model: nn.Module
    """The folded copy, in the mode of the original."""
    difference: float
    """Largest |difference of a logit| / largest |logit|."""
    folded: dict[str, int]
    """How many gains of each kind are gone: {"F1": 24, "F4": 49}."""
    kept: tuple[str, ...]
    """Norm gains and temperatures that stay, each with its reason."""
    zeroed: tuple[str, ...] = ()
    """Connections of dropped sublayers that a plain class must have: there with weights of 0."""

    def describe(self) -> str:
        """One line of counts and the difference; one more each for what is kept and zeroed."""
        counts = ", ".join(
            f"{tag} x {n} ({WORDS[tag]})" for tag, n in sorted(self.folded.items())
        ) or "nothing"  # fmt: skip
        kept = f"\nnorm gains that stay: {'; '.join(self.kept)}" if self.kept else ""
        zeroed = f"\nweights of 0 for: {', '.join(self.zeroed)}" if self.zeroed else ""
        difference = f"largest relative logit difference {self.difference:.2g}"
        return f"folded {counts}: {difference}{kept}{zeroed}"


def fold(
    model: nn.Module, inputs: Tensor | Mapping[str, Any] | None = None, *, norm_gains: bool = True
) -> Folded:
    """Fold gains and temperatures into the weights of a copy of `model`, compare, print, return it.

    `model`: our Transformer, or a patched Hugging Face model in float32 or float64. `inputs`: a
    batch to trace and compare with, token ids or keyword arguments; random ids by default, for
    models that take ids. `norm_gains=False` leaves the norms as they are. Sublayers that `prune`
    dropped stay away from our Transformer; a plain Hugging Face class must have them, so there
    they come back with weights of 0. Raises UserError where
    the result would not be exact: a sublayer without a skip in a Hugging Face model, a stream
    weight per channel, a branch that no linear layer ends, annealing half done, or a difference
    of 1e-5 and more.
    """
    wide = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not wide <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in wide))
        raise UserError(f"the weights are {names}; fold in float32 (model.float()), cast later")
    batch = sample_inputs(model, inputs)
    work = copy.deepcopy(model)
    counts: Counter[str] = Counter()
    kept: list[str] = []
    zeroed = revive(work)
    with evaluation_mode(work):
        if isinstance(work, Transformer):
            result = _fold_own(work, counts, kept, norm_gains)
        else:
            result = _fold_patched(work, batch, counts, kept, norm_gains)
    result.train(model.training)
    distance = difference(model, result, batch)
    found = Folded(model=result, difference=distance, folded=dict(counts), kept=tuple(kept),
                   zeroed=zeroed)  # fmt: skip
    console.print(found.describe(), highlight=False, markup=False, soft_wrap=True)
    if not distance < LIMIT:
        hint = "; try norm_gains=False" if counts["F4"] else ""
        if counts["F3"]:
            hint += "; F3 changes what the norms' eps does where the stream is small"
        raise UserError(
            f"the folded model's logits differ by {distance:.2g} of the largest, and {LIMIT:g} "
            f"is the limit; nothing was changed{hint}"
        )
    return found


def _weights(name: str, connection: Connection) -> tuple[float, Tensor]:
    """a as a number and b as a float64 tensor [1] or [D] of y = a x + b f."""
    config, gains = connection.config, connection.gains()
    if config.kind not in CONSTANT_KINDS:
        raise UserError(
            f"{name} is {config.kind}: its weights depend on the token, and no weight can hold them"
        )
    if config.kind == "fixed" and config.c != 0:
        raise UserError(f"{name} adds {config.c} times the embedding, which no weight can hold")
    fixed = config.kind == "fixed"
    a = gains.get("a", torch.tensor([config.a if fixed else float(config.kind != "none")]))
    b = gains.get("b", torch.tensor([config.b if fixed else 1.0]))
    if config.kind == "anneal" and 0 < float(a) < 1:
        raise UserError(
            f"{name} is half annealed (stream weight {float(a):.4g}); finish it with "
            "set_training_progress(1.0) before folding"
        )
    if not bool((a == a[0]).all()):
        raise UserError(
            f"{name} weighs the stream per channel ({float(a.min()):.4g} to {float(a.max()):.4g}), "
            "and only one number a sublayer can be divided out (F3)"
        )
    return float(a[0].double()), b.double()


def _count(counts: Counter[str], connection: Connection) -> None:
    tag = _TAGS.get(connection.config.kind)
    if tag and not is_absent(connection.config):  # what was dropped had no gain to fold
        counts[tag] += 1


@torch.no_grad()
def scale_output(linear: nn.Module, gain: Tensor) -> None:
    """W <- W diag(gain) and the bias with it; transformers' Conv1D stores in x out."""
    weight, bias = weight_of(linear), bias_of(linear)
    gain = gain.to(weight.device)
    shape = (-1, 1) if isinstance(linear, nn.Linear) else (1, -1)
    weight.copy_(weight.double() * gain.view(shape))
    if bias is not None:
        bias.copy_(bias.double() * gain)


@torch.no_grad()
def fold_norm(norm: nn.Module, readers: list[nn.Module]) -> str:
    """Move the gain (and bias) of `norm` into all its readers (F4); a reason when it cannot be."""
    weight, bias = weight_of(norm), bias_of(norm)
    if bias is not None and bool(bias.any()) and any(bias_of(r) is None for r in readers):
        return "its bias has no bias to go to"
    gain = weight.double()
    for reader in readers:
        matrix, own = weight_of(reader), bias_of(reader)
        matrix = matrix if isinstance(reader, nn.Linear) else matrix.t()
        if bias is not None and own is not None:
            own.copy_(own.double() + matrix.double() @ bias.double())
        matrix.copy_(matrix.double() * gain)
    weight.fill_(1.0)
    if bias is not None:
        bias.zero_()
    return ""


def _fold_own(
    model: Transformer, counts: Counter[str], kept: list[str], norm_gains: bool
) -> Transformer:
    """Our Transformer with plain connections, its stream carried as x / c (F3)."""
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
            a, b = _weights(name, connection)
            if a not in (0, 1) and not pre:
                raise UserError(
                    f"{name} weighs the stream by {a:.4g} without a norm in front of the next "
                    "sublayer; F3 needs norm_placement 'pre'"
                )
            if a == 0:
                free[sublayer].append(index)
            carried = carried * a if a else 1.0
            scale_output(linear, b / carried)
            _count(counts, connection)
    if norm_gains and pre:
        _fold_own_norms(model, counts, kept)
    temperature = _fold_temperature(model, counts)
    return _rebuilt(model, _plain(config, free, dropped, temperature))


def _fold_own_norms(model: Transformer, counts: Counter[str], kept: list[str]) -> None:
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
        kept.append("norm: its output is pooled before the head")
    elif model.config.tie_word_embeddings:
        kept.append("norm: the head is tied to the embedding")
    else:
        pairs.append(("norm", model.norm, [model.lm_head]))
    for name, norm, readers in pairs:
        reason = fold_norm(norm, readers)
        if reason:
            kept.append(f"{name}: {reason}")
        else:
            counts["F4"] += 1


@torch.no_grad()
def _fold_temperature(model: Transformer, counts: Counter[str]) -> TemperatureConfig:
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
            counts["F6"] += 1
            heads = tau.double().expand(attention.num_heads)
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


def _fold_patched(
    model: nn.Module, batch: Any, counts: Counter[str], kept: list[str], norm_gains: bool
) -> nn.Module:
    """A patched Hugging Face model without its patch, its stream carried as x / c (F3)."""
    patched = connections(model)
    if not patched:
        raise UserError(
            f"{type(model).__name__} is not patched, so there is no gain to fold; fold takes "
            "patched Hugging Face models and our Transformer"
        )
    for stack in find_stacks(model):
        for layer in stack.layers:
            for join in layer.joins:
                if layer.path(join) not in patched:
                    patch(model, "residual", sites=join.sublayer, layers=layer.index,
                          stacks=stack.name)  # fmt: skip
    found = connections(model)
    seen = trace(model, found, batch)
    for stack in find_stacks(model):
        carried = 1.0
        for layer in stack.layers:
            for join in layer.joins:
                name = layer.path(join)
                a, b = _weights(name, found[name])
                if a == 0:
                    raise UserError(
                        f"{name} has no skip, which a plain {type(model).__name__} cannot express; "
                        "only sublayers with a skip fold into it"
                    )
                if name not in seen.outputs:
                    raise UserError(
                        f"{name}: the branch is not the output of a linear layer that was reached "
                        "(experts, a norm behind it, or another model part), so its gain cannot "
                        "be folded"
                    )
                carried *= a
                scale_output(seen.outputs[name], b / carried)
                if join.owner:  # a norm follows the join, and takes the factor out
                    carried = 1.0
                _count(counts, found[name])
    if norm_gains:
        for name, norm, readers in seen.norms:
            reason = "no linear layer reads it alone" if not readers else fold_norm(norm, readers)
            if reason:
                kept.append(f"{name}: {reason}")
            else:
                counts["F4"] += 1
    return unpatch(model)


def sample_inputs(model: nn.Module, given: Any) -> Any:
    """`given`, or random token ids [2, T] for a model that takes ids alone."""
    if given is not None:
        return given
    size = getattr(model.config, "vocab_size", None) if hasattr(model, "config") else None
    if size is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UserError(
            f"{type(model).__name__} does not take token ids alone; pass inputs=, a dict of what "
            "its forward takes"
        )
    longest = getattr(model.config, "max_position_embeddings", None) or 32
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (2, min(32, longest)), generator=generator)


def difference(model: nn.Module, other: nn.Module, batch: Any) -> float:
    """Largest difference of a logit as a share of the largest logit of `model`."""
    found = []
    for one in (model, other):
        with evaluation_mode(one):
            out = run_batch(one, batch)
        logits: Tensor | None = getattr(out, "logits", None)
        logits = first_tensor(out) if logits is None else logits
        if logits is None:
            raise UserError(f"{type(one).__name__} returns no tensor, so nothing can be compared")
        found.append(logits.double().cpu())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max().clamp(min=1e-300))
