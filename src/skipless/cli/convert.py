"""The subcommand `convert`: a trained residual model towards fewer skips."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import AsJson, Switch, as_options, new_folder, option
from skipless.cli.surgery import Model
from skipless.cli.terminal import aligned, print_json
from skipless.errors import UserError

_SETTINGS = (
    "to", "distill", "cross_entropy", "sites", "layers", "order", "skips_per_stage",
    "steps_per_stage", "start", "fit_batches", "lr", "train", "temperature", "loss_budget", "text",
    "sequence_length", "batch_size", "held_out_tokens", "model_name",
)  # fmt: skip
_OPTIONS = {name: "--" + name.replace("_", "-") for name in _SETTINGS} | {
    "steps_per_stage": "--steps", "model_name": "MODEL", "cross_entropy": "--distill",
}  # fmt: skip
NAMES = {
    "start 'anneal'": "--start anneal",
    **{f"convert.{name}": option for name, option in _OPTIONS.items()},
    **{f"({name} is": f"({option} is" for name, option in _OPTIONS.items()},
    **{name: option for name, option in _OPTIONS.items() if "_" in name},
}  # fmt: skip
"""What errors call a setting, and what it is called here."""


def convert(
    model: Model,
    out: Annotated[str | None, option("DIR", default="")] = None,
    to: Annotated[Literal["none"], option(default="")] = "none",
    distill: Switch = False,
    sites: Annotated[
        tuple[Literal["attention", "cross_attention", "mlp"], ...],
        option("{attention,cross_attention,mlp} [...]", default="all"),
    ] = (),
    layers: Annotated[tuple[int, ...], option("N [N ...]", default="all")] = (),
    order: Literal["last-first", "first-first", "by-share", "by-loss"] = "last-first",
    skips_per_stage: Annotated[int, option("N")] = 1,
    steps: Annotated[int, option("N")] = 100,
    start: Literal["fit", "anneal"] = "fit",
    fit_batches: Annotated[int, option("N")] = 8,
    lr: Annotated[float, option("LR")] = 1e-4,
    train: Literal["all", "layers"] = "all",
    temperature: Annotated[float, option("T")] = 1.0,
    loss_budget: Annotated[float | None, option("NATS", default="no limit")] = None,
    text: Annotated[tuple[str, ...], option("TEXT [TEXT ...]")] = ("sotu",),
    sequence_length: Annotated[
        int | None, option("N", default="256, or as many as the model sees")
    ] = None,
    batch_size: Annotated[int, option("N")] = 4,
    held_out_tokens: Annotated[int, option("N")] = 8192,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    untrained: Switch = False,
    json: AsJson = False,
) -> None:
    """Take skips out of a trained language model, taught by the original.

    Skips go stage by stage; after each the held-out loss is measured. The folder receives the model
    (`skipless.surgery.load` reads it), convert.json with every number, and convert.png: loss
    against the share of skips removed, beside the same skips removed without training.
    Interrupted, the same command goes on. See docs/convert.md.

    For example: skipless convert smollm2-135m --distill --sites mlp --layers -1 -2 --out runs/fewer

    With --untrained nothing is trained: it tells what removal costs as it is, and writes no more
    than untrained.png, that curve, into --out.

    Args:
        out: folder to write, or an unfinished one to go on with (required but with --untrained,
            which draws untrained.png there).
        to: what the skips become.
        distill: learn the original's distribution (KL); without it, to predict the text.
        sites: sublayers whose skips go.
        layers: their numbers, negative ones from the end.
        order: by depth, largest branch beside its stream first, or cheapest alone first.
        skips_per_stage: how many go at a time; 0 for all at once.
        steps: optimiser steps of each stage.
        start: a stage begins with a least-squares fit of the branch to the old join, or lets the
            skip's weight fall from 1 to 0 over half of its steps.
        fit_batches: batches of that fit.
        lr: learning rate (AdamW); it falls to a tenth over each stage.
        train: which weights learn: all, or those of the layers that lost a skip.
        temperature: of the distributions that are compared.
        loss_budget: nats above the unconverted model; a stage beyond it is undone and the last.
        text: named texts (`skipless data list`), files or folders.
        sequence_length: tokens a sequence.
        batch_size: sequences a step.
        held_out_tokens: tokens that the loss is measured on.
        device: where it runs; auto takes CUDA, then MPS, then the CPU.
        untrained: only measure what removal costs without training, by kind of site.
    """
    if not (out and out.strip()) and not untrained:
        raise UserError("--out is missing; name the folder to write")
    path = Path(out or "")
    if untrained and out is not None:
        new_folder(out)
    from skipless.report.conversion import draw_conversions, draw_untrained
    from skipless.sublayers import SUBLAYERS
    from skipless.surgery.conversion.folders import TextSource, convert_folder, measure_untrained
    from skipless.surgery.conversion.settings import ConversionConfig

    def draw(found: Any) -> None:
        label = ", ".join(sites) or "all skips"
        draw_conversions({label: found.to_dict()}, path / "convert.png")

    with as_options(NAMES):
        config = ConversionConfig(
            to=to, sites=sites or SUBLAYERS, layers=layers, order=order,
            skips_per_stage=skips_per_stage, steps_per_stage=steps, start=start,
            fit_batches=fit_batches, lr=lr, train=train, distill=float(distill),
            cross_entropy=float(not distill), temperature=temperature, loss_budget=loss_budget,
        )  # fmt: skip
        source = TextSource(
            model=model, text=text, sequence_length=sequence_length, batch_size=batch_size,
            held_out_tokens=held_out_tokens, device=device,
        )  # fmt: skip
    training = {
        "distill": distill, "skips_per_stage": skips_per_stage, "steps": steps, "start": start,
        "fit_batches": fit_batches, "lr": lr, "train": train, "temperature": temperature,
        "loss_budget": loss_budget,
    }  # fmt: skip
    _check_read(untrained, training)
    if untrained:
        with as_options(NAMES):
            measured = measure_untrained(source, config)
        curves = {site: [row.to_dict() for row in rows] for site, rows in measured.items()}
        if out is not None:
            draw_untrained(curves, path / "untrained.png")
        if json:
            print_json(curves)
        else:
            print(f"held-out loss in nats a token, on at most {source.held_out_tokens:,} tokens")
            print(*_curve_lines(curves), sep="\n")
        if out is not None and not json:
            print(path / "untrained.png")
        return
    with as_options(NAMES):
        record = convert_folder(source, path, config, draw).to_dict()
    if json:
        print_json(record)
        return
    print(*_stage_lines(record), sep="\n")
    print(f"{path}  (skipless.surgery.load reads it; in it convert.json and convert.png)")


def _check_read(untrained: bool, training: dict[str, Any]) -> None:
    """Raise UserError for an option that another one leaves without a meaning."""
    reasons = [
        ("--untrained", untrained, "trains nothing", tuple(training)),
        ("--start anneal", training["start"] == "anneal", "fits nothing", ("fit_batches",)),
        ("--steps 0", training["steps"] == 0, "trains nothing", ("lr", "train", "temperature")),
        ("a training without --distill", not training["distill"], "compares no distributions",
         ("temperature",)),
    ]  # fmt: skip
    defaults = inspect.signature(convert).parameters
    for word, holds, does, names in reasons:
        remedy = "leave one of them out" if word.startswith("--") else "add it, or leave this out"
        for name in names if holds else ():
            value = training[name]
            if value != defaults[name].default:
                typed = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise UserError(f"{word} {does}, so {typed} would be ignored; {remedy}")


def _stage_lines(record: dict[str, Any]) -> list[str]:
    """Of convert.json: loss and cost after every stage, beside the same skips gone untrained."""
    rows = [("skips gone", "share", "loss", "increase", "KL", "untrained", "tokens")]
    for row, control in zip(record["stages"], record["untrained"], strict=False):
        rows.append((
            f"{row['num_removed']} of {record['total']}", f"{row['share']:.0%}",
            f"{row['loss']:.4f}", _with_error(row), f"{row['kl']:.4f}",
            f"{control['increase']:+.4f}", f"{row['tokens']:,}",
        ))  # fmt: skip
    lines = [
        f"unconverted: held-out loss {record['loss']:.4f} nats a token on "
        f"{record['num_tokens']:,} tokens; increases over it, beside what the same skips cost "
        "untrained", *aligned(rows),
    ]  # fmt: skip
    if not record["stages"][-1]["kept"]:
        lines[-1] += "  <- beyond the budget, undone"
    return lines


def _with_error(row: dict[str, Any]) -> str:
    """The increase, and its standard error over sequences where there are some."""
    error = row["standard_error"]
    return f"{row['increase']:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def _curve_lines(curves: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Of `untrained_curves`: the loss by site and number of skips."""
    rows = [("site", "skips gone", "share", "loss", "increase")]
    for site, points in curves.items():
        rows += [
            (site, str(row["num_removed"]), f"{row['share']:.0%}", f"{row['loss']:.4f}",
             f"{row['increase']:+.4f}")
            for row in points
        ]  # fmt: skip
    return aligned(rows)
