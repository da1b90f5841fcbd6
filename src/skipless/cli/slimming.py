"""The subcommands that make trained models smaller: `prune` and `fold`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from skipless.cli.arguments import (
    AsJson,
    Positional,
    Switch,
    as_options,
    new_folder,
    option,
    whole_number,
)
from skipless.cli.surgery import NewFolder
from skipless.cli.terminal import print_json
from skipless.errors import UserError

Model = Annotated[
    Positional[str],
    option("MODEL", help="a run directory, a Hugging Face folder or a name of `models list`"),
]
Text = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="TEXT [TEXT ...]",
        aliases=["--data"],
        help_behavior_hint="(default: the run's own; sotu for other models)",
    ),
]
Tokens = Annotated[str, option("TOKENS")]


def prune(
    model: Model,
    out: NewFolder = None,
    tolerance: Annotated[float | None, option("SHARE", default="")] = None,
    loss_budget: Annotated[float | None, option("NATS", default="")] = None,
    unit: Literal["sublayer", "layer"] = "sublayer",
    text: Text = (),
    num_tokens: Tokens = "4096",
    json: AsJson = False,
) -> None:
    """Drop the sublayers that a model hardly needs, and save what is left.

    Each attention and MLP is ranked by its share of the stream and by the loss without it. A run
    becomes a run. A Hugging Face model is read by `skipless.surgery.load`, or by stock transformers
    where only whole layers went (docs/surgery.md).

    For example: skipless prune runs/mine --loss-budget 0.02 --out runs/pruned

    Args:
        tolerance: drop what stays below this share of the stream for every token; 1e-3 where no
            budget is given.
        loss_budget: drop the cheapest one after the other, as long as the loss rises by no more.
        unit: layer drops whole layers only.
        text: named texts (`skipless data list`), files or folders. Held-out documents check what
            the others choose.
        num_tokens: tokens to choose on, and as many to check on.
    """
    path = new_folder(out)
    _positive("--tolerance", tolerance)
    _positive("--loss-budget", loss_budget)
    tokens = _tokens(num_tokens)
    from skipless.surgery.slimming.folders import prune_folder

    with as_options({"unit='sublayer'": "--unit sublayer"}):
        done = prune_folder(
            model, path, text=text, tolerance=tolerance, loss_budget=loss_budget, unit=unit,
            num_tokens=tokens,
        )  # fmt: skip
    pruned = done.pruned
    if json:
        print_json({
            "path": str(done.path), "kind": done.kind, **dataclasses.asdict(pruned),
            "held_out_before": done.held_out_before, "held_out_after": done.held_out_after,
            f"num_held_out_{done.counted}": done.num_held_out,
        })  # fmt: skip
        return
    print(pruned.table())
    print(pruned.describe())
    change = done.held_out_after - done.held_out_before
    print(
        f"held-out loss {done.held_out_before:.5f} -> {done.held_out_after:.5f} ({change:+.5f}) on "
        f"{done.num_held_out:,} {done.counted}; the loss above is on {done.num_chosen:,} that it "
        "chose by"
    )
    readers = {
        "run": "a run: skipless eval, quantize, fold read it",
        "patched": "skipless.surgery.load reads it",
        "plain": "stock transformers reads it",
    }
    print(f"{done.path}  ({readers[done.kind]})")


def fold(
    model: Model,
    out: NewFolder = None,
    norm_gains: Switch = False,
    text: Text = (),
    num_tokens: Tokens = "4096",
    json: AsJson = False,
) -> None:
    """Multiply gains and temperatures into the weights, for stock transformers.

    A run, or a patched Hugging Face model, becomes a folder that stock transformers loads, with
    the same logits: they are compared after reading it back. Weight ranges widen, so the loss
    under simulated integers is measured before and after, of models that predict the next token.

    For example: skipless fold runs/pruned --out runs/plain

    Args:
        norm_gains: also multiply the gains of norms into the layers behind them (F4).
        text: named texts (`skipless data list`), files or folders; their held-out documents are
            measured on.
        num_tokens: held-out tokens.
    """
    path = new_folder(out)
    tokens = _tokens(num_tokens)
    from skipless.surgery.slimming.folders import fold_folder

    with as_options({"try norm_gains=False": "leave --norm-gains out"}):
        done = fold_folder(model, path, text=text, norm_gains=norm_gains, num_tokens=tokens)
    folded = done.folded
    if json:
        print_json({
            "path": str(done.path), "model": done.model, "folded": folded.folded,
            "kept": folded.kept, "zeroed": folded.zeroed, "difference": folded.difference,
            "losses": {n: {"before": b, "after": a} for n, (b, a) in done.losses.items()},
            "num_held_out_tokens": done.num_held_out, "unmeasured": done.unmeasured,
        })  # fmt: skip
        return
    print(folded.describe())
    if done.losses:
        print(f"held-out loss on {done.num_held_out:,} tokens:")
    for name, (before, after) in done.losses.items():
        change = round(after - before, 5) + 0.0  # no negative 0
        print(f"  {name:<14}  {before:.5f} -> {after:.5f} ({change:+.5f})")
    if done.unmeasured:
        print(f"no held-out loss: {done.unmeasured}")
    print(f"{done.path}  ({done.model}; stock transformers reads it)")


def _tokens(words: str) -> int:
    found: Any = whole_number("--num-tokens", words)
    return found


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{name} is {value:g}; a positive number was expected")
