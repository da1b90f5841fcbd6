"""A plain decoder's weights as GGUF has them: names, order of rows, kinds of numbers.

llama.cpp turns neighbouring pairs of a head's channels where transformers turns its two halves, so
that the rows of q and k change places. Kinds:

    f32    as it is
    f16    matrices; vectors stay f32, as llama.cpp wants them
    Q8_0   32 neighbours share a half float d, value = d q, q in int8: the codes of W8Afp-w:g32,
           its scales rounded to half floats: by at most 2^-11 of their size, more below 6e-5, and
           never so far that a value moves by half a step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from skipless.errors import UserError
from skipless.quant import quantization
from skipless.scheme import Scheme

BLOCK = 32
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
_Q8 = np.dtype([("d", "<f2"), ("q", "i1", BLOCK)])


@dataclass(frozen=True)
class Stored:
    """One tensor of the file."""

    kind: str
    """F32, F16 or Q8_0."""
    data: np.ndarray
    """What is written; bytes [out, n] for Q8_0."""
    values: np.ndarray
    """What it says, float32, rows in GGUF's order."""


def gguf_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight."""
    words = name.removeprefix("model.").removesuffix(".weight").split(".")
    block = f"blk.{words[1]}." if words[0] == "layers" else ""
    return f"{block}{NAMES['.'.join(words[2:] if block else words)]}.weight"


def own_name(name: str) -> str:
    """The other way round, in the names of transformers."""
    back = {short: long for long, short in NAMES.items()}
    *block, short, _ = name.split(".")
    if block:
        return f"model.layers.{block[1]}.{back[short]}.weight"
    return "lm_head.weight" if short == "output" else f"model.{back[short]}.weight"


def pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k, halves of each head woven into neighbouring pairs."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The other way round."""
    woven = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(woven.swapaxes(1, 2)).reshape(weight.shape)


def turning_heads(name: str, config: Any) -> int | None:
    """How many heads turn in the tensor `name` of the file; None for those that do not."""
    kind = name.split(".")[-2]
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)


def check_scheme(scheme: Scheme) -> None:
    """Raise UserError unless Q8_0 says the same as `scheme`."""
    for part in scheme.parts():
        fits = (part.weight_bits, part.activation_bits, part.group_size) == (8, None, BLOCK)
        if not fits or not part.symmetric or part.kv_bits or part.probability_bits:
            raise UserError(
                f"{part} has no counterpart in GGUF, whose only kind that is one of our schemes is "
                "Q8_0, W8Afp-w:g32; take that one, or leave --scheme out and take --dtype f16"
            )


def stored_tensors(model: Any, dtype: str) -> dict[str, Stored]:
    """{name in the file: tensor} of a LlamaForCausalLM or ArceeForCausalLM, quantised or not.

    `dtype`, f32 or f16, is for what is not quantised. Raises UserError where a half float cannot
    hold a weight or the scale of a block.
    """
    record = quantization(model)
    rounded = {} if record is None else {weight.name: weight for weight in record.weights}
    found = {}
    for own, parameter in model.named_parameters():  # a tied head once, as GGUF wants it
        name = gguf_name(own)
        heads = turning_heads(name, model.config)
        if own in rounded:
            codes, scale = rounded[own].codes()
            q, s = codes.cpu().numpy().astype(np.int8), scale.cpu().float().numpy()[..., 0]
            if heads is not None:
                q, s = pairs(q, heads), pairs(s, heads)
            found[name] = _blocks(own, q, s)
            continue
        value = parameter.detach().cpu().float().numpy()
        if heads is not None:
            value = pairs(value, heads)
        if dtype == "f16" and value.ndim > 1:
            if np.abs(value).max() > np.finfo(np.float16).max:
                raise UserError(
                    f"{own} reaches {np.abs(value).max():.3g}, beyond a half float's 65,504; take "
                    "--dtype f32"
                )
            half = value.astype(np.float16)
            found[name] = Stored("F16", half, half.astype(np.float32))
        else:
            found[name] = Stored("F32", value, value)
    return found


def _blocks(name: str, codes: np.ndarray, scale: np.ndarray) -> Stored:
    """Codes [out, groups, 32] and scales [out, groups] as Q8_0."""
    half = scale.astype(np.float16)
    error = np.abs(half.astype(np.float32) - scale) / scale
    used = codes.any(-1)  # a block of zeros has no scale to speak of
    if used.any() and error[used].max() > 1 / 254:
        raise UserError(
            f"a block of {name} has the scale {scale[used][error[used].argmax()]:.2g}, which a "
            "half float rounds too far; leave --scheme out and take --dtype f16"
        )
    blocks = np.empty(scale.shape, _Q8)
    blocks["d"], blocks["q"] = np.where(used, half, 0), codes
    values = (blocks["d"].astype(np.float32)[..., None] * codes).reshape(len(codes), -1)
    return Stored("Q8_0", blocks.view(np.uint8).reshape(len(codes), -1), values)
