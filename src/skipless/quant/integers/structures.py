"""What fused steps are told, field by field as in `kernels/decode.hpp`: structures of C (Q4).

Addresses only: whoever fills one keeps the tensors alive. Read by `integers.fused` and
`integers.stacked`.
"""

from __future__ import annotations

import ctypes

_I64, _I32, _F32, _ADDRESS = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
NORMS = {"none": 0, "rmsnorm": 1, "layernorm": 2}
ACTIVATIONS = {"gelu": 0, "relu": 1, "relu2": 2, "swiglu": 3}


class Linear(ctypes.Structure):
    """A linear layer on integers: its packed weight, and how codes of its input are made."""

    _fields_ = [
        ("w", _ADDRESS), ("column_scale", _ADDRESS), ("bias", _ADDRESS), ("inputs", _I64),
        ("groups", _I64), ("columns", _I64), ("block", _I64), ("form", _I32), ("limit", _I32),
        ("per_row", _I32), ("step", _F32),
    ]  # fmt: skip


class Norm(ctypes.Structure):
    """The norm in front of a sublayer, or none."""

    _fields_ = [("weight", _ADDRESS), ("bias", _ADDRESS), ("epsilon", _F32), ("kind", _I32)]


class Rounding(ctypes.Structure):
    """How new keys or values are rounded; kind 0 keeps float32."""

    _fields_ = [("kind", _I32), ("limit", _I32), ("per_head", _I32), ("step", _F32)]


class Store(ctypes.Structure):
    """Where keys or values of past tokens lie."""

    _fields_ = [("codes", _ADDRESS), ("scales", _ADDRESS), ("capacity", _I64)]


class Attention(ctypes.Structure):
    """An attention sublayer."""

    _fields_ = [
        ("norm", Norm), ("q", Linear), ("k", Linear), ("v", Linear), ("o", Linear),
        ("key", Rounding), ("value", Rounding), ("heads", _I64), ("groups", _I64),
        ("size", _I64), ("head_scale", _ADDRESS), ("identity_bias", _ADDRESS),
    ]  # fmt: skip


class Mlp(ctypes.Structure):
    """An MLP; `gate` is empty unless it is gated."""

    _fields_ = [
        ("norm", Norm), ("gate", Linear), ("up", Linear), ("down", Linear),
        ("activation", _I64),
    ]  # fmt: skip


class Join(ctypes.Structure):
    """y = a x + b f + c x0 and the norm after it; an address is None where the number is 0 or 1."""

    _fields_ = [
        ("a", _ADDRESS), ("b", _ADDRESS), ("c", _ADDRESS), ("a_is_one", _I64), ("after", Norm),
    ]  # fmt: skip


class Sublayer(ctypes.Structure):
    """One sublayer of a stack: kind 0 attention, 1 MLP, 2 nothing but the join."""

    _fields_ = [
        ("kind", _I64), ("attention", _ADDRESS), ("mlp", _ADDRESS), ("join", Join),
        ("keys", Store), ("values", Store),
    ]  # fmt: skip
