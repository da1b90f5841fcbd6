"""Which sublayer of a layer a module's name speaks of: one list of names for sites and surgery.

transformers has no rule for names; these are the ones that its families, torch and timm use.
"""

from __future__ import annotations

import re

__all__ = ["SUBLAYERS", "sublayer_of"]

SUBLAYERS = ("attention", "cross_attention", "mlp")

_CROSS = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|temporal|mixer", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|(^|[._])ff([._]|$)|feed_?forward|moe|experts|intermediate"
    r"|(^|\.)(fc|linear|lin)_?\d|(^|\.)output(\.|$)",
    re.IGNORECASE,
)


def sublayer_of(name: str) -> str | None:
    """One of SUBLAYERS for the dotted name of a module inside a layer, None where it says nothing.

    An attention's output module ("attention.output.dense" of BERT) is attention.
    """
    if _CROSS.search(name):
        return "cross_attention"
    if _ATTENTION.search(name):
        return "attention"
    return "mlp" if _MLP.search(name) else None
