"""The head of a model: the last linear layers, which make logits, found by structure.

One answer for every room: optimisers give the head AdamW, quantisation leaves it in full precision.
The block list and the embeddings tell where a model begins and ends, so that no name is needed; a
customary name helps only where they do not (a plain stack of layers). Read by `skipless.optim` and
`skipless.quant`.
"""

from __future__ import annotations

from torch import nn

from skipless.sites import block_names, is_linear, linear_widths

HEAD_NAMES = frozenset(
    {"lm_head", "score", "classifier", "head", "output_projection", "embed_out", "fc_out"}
)
"""What common libraries call a head."""


def find_heads(model: nn.Module) -> set[str]:
    """Dotted names of the linear layers that make logits; empty where nothing shows which do.

    The model's own answer (`get_output_embeddings`), and layers that share their weight with an
    embedding. Outside the blocks also: the last layer that is as wide as an embedding has rows,
    with others of its shape; and layers of a customary name. Without any of these, as in a
    classifier, the last layer of a model with blocks or an embedding if it leaves the stream's
    width.
    """
    ask = getattr(model, "get_output_embeddings", None)
    own = ask() if callable(ask) else None
    modules = dict(model.named_modules())
    tables = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
    heads = {
        name
        for name, module in modules.items()
        if is_linear(module) and (module is own or id(module.weight) in tables)
    }
    blocks = block_names(model)
    outside = {
        name: module
        for name, module in modules.items()
        if not any(name == block or name.startswith(block + ".") for block in blocks)
    }
    widths = {name: linear_widths(m) for name, m in outside.items() if is_linear(m)}
    embeddings = [m for m in outside.values() if isinstance(m, nn.Embedding)]
    heads |= {name for name in widths if name.rpartition(".")[2] in HEAD_NAMES}
    heads |= _onto(widths, {m.num_embeddings for m in embeddings}, any_place=bool(blocks))
    if heads or not widths or not (blocks or embeddings):
        return heads
    last, leaf = list(widths)[-1], _last_leaf(outside)
    if last == leaf and widths[last][1] in {m.num_embeddings for m in embeddings}:
        return {last}  # a vocabulary as large as the stream is wide
    stream = {m.embedding_dim for m in embeddings} | _block_widths(model, blocks)
    return set() if widths[last][1] in stream else {last}


def _onto(widths: dict[str, tuple[int, int]], rows: set[int], *, any_place: bool) -> set[str]:
    """The layers that project onto the vocabulary, whose size is among `rows`.

    In a plain stack an up projection may be as wide as the vocabulary, so that only the last layer
    counts unless `any_place`.
    """
    searched = list(widths) if any_place else list(widths)[-1:]
    found = [name for name in searched if widths[name][1] in rows - {widths[name][0]}]
    return {name for name in searched if widths[name] == widths[found[-1]]} if found else set()


def _last_leaf(modules: dict[str, nn.Module]) -> str:
    """The last module without children; a pooler's linear layer is followed by its activation."""
    return [name for name, module in modules.items() if not list(module.children())][-1]


def _block_widths(model: nn.Module, blocks: list[str]) -> set[int]:
    """Width of what enters the first linear layer of each block."""
    found = set()
    for block in blocks:
        inner = [m for m in model.get_submodule(block).modules() if is_linear(m)]
        if inner:
            found.add(linear_widths(inner[0])[0])
    return found
