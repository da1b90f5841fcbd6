"""Whether a stack of layers looks ahead, read off the model that holds it.

What is read, in this order:

1. `is_causal` of the layers' self-attention, which transformers' attention functions obey where no
   mask is given. True settles it (Llama, GPT-2, Whisper's decoder, BERT with `is_decoder`).
2. False does not: CLIP's text tower sets it to False and passes `is_causal=True` from above. So the
   source of every module between the model's nearest `save_pretrained` and the layers is read.
   `is_causal=True` in a call means causal; no call that makes a causal mask means whole sequences
   (ViT, Whisper's encoder).
3. A causal mask made under `is_decoder` (BERT) is made only where the config says so.

Everything else is refused. A mask of the running call that contradicts "whole sequences" stops it
(`contexts.py`). Read by `patching.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.sublayers import sublayer_of
from skipless.surgery.stacks import Stack

__all__ = ["is_causal"]

_MASK = re.compile(r"causal\w*mask|mask\w*causal", re.IGNORECASE)


def is_causal(model: nn.Module, stack: Stack) -> bool:
    """True when a token of the stack sees its predecessors only, False when it sees all.

    Raises UserError where the model does not say.
    """
    said = {flag for layer in stack.layers for flag in _flags(layer.module)}
    if said == {True}:
        return True
    reason = "their attention does not say is_causal the same way in every layer"
    if said == {False}:
        above = _above(model, stack.name)
        sources = [tree for module in above if (tree := _source(type(module))) is not None]
        if above and len(sources) == len(above):
            if any(map(_passes_causal, sources)):
                return True
            if not any(map(_makes_causal_mask, sources)):
                return False
            decides = any(_reads_decoder(tree) for tree in sources)
            is_decoder = getattr(getattr(above[0], "config", None), "is_decoder", None)
            if decides and is_decoder is False:
                return False
            reason = "their attention says is_causal=False, and the model makes a causal mask"
        else:
            reason = "no transformers model with readable source holds them"
    raise UserError(
        f"whether the layers of {stack.name or type(model).__name__} see later tokens is unknown "
        f"({reason}), so universal interpolation could show them the future; choose another "
        "connection, or another stack with stacks="
    )


def _flags(layer: nn.Module) -> list[bool]:
    """What the layer's attention modules say of themselves, cross-attention left out."""
    found: list[Any] = [
        getattr(module, "is_causal", None) for name, module in layer.named_modules()
        if sublayer_of(name) != "cross_attention"
    ]  # fmt: skip
    return [flag for flag in found if isinstance(flag, bool)]


def _above(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around the list of layers `name`, from the nearest that can be saved inwards."""
    parts = name.split(".")[:-1] if name else []
    path = [model]
    for part in parts:
        path.append(path[-1].get_submodule(part))
    owners = [i for i, module in enumerate(path) if hasattr(type(module), "save_pretrained")]
    return path[owners[-1] :] if owners else []


def _source(cls: type) -> ast.AST | None:
    """The syntax tree of the class as transformers wrote it: ours have no source of their own."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            return None
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
    return None


def _passes_causal(tree: ast.AST) -> bool:
    """Whether a call is handed a literal `is_causal=True`."""
    return any(
        isinstance(node, ast.keyword) and node.arg == "is_causal"
        and isinstance(node.value, ast.Constant) and node.value.value is True
        for node in ast.walk(tree)
    )  # fmt: skip


def _makes_causal_mask(tree: ast.AST) -> bool:
    names = (n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(tree))
    return any(_MASK.search(name) for name in names)


def _reads_decoder(tree: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "is_decoder" for n in ast.walk(tree))
