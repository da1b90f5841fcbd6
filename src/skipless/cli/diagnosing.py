"""The subcommand that diagnoses any model: `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from skipless.cli.arguments import AsJson, Positional, Switch, option, whole_number
from skipless.cli.terminal import print_json

Subject = Annotated[
    Positional[str],
    option("MODEL", help="a run directory, a Hugging Face folder or hub name, or a name of "
           "`models list`"),
]  # fmt: skip
Out = Annotated[
    str | None, option("DIR", default="", help="folder to write the report to (required)")
]


def diagnose(
    model: Subject,
    text: Annotated[str | None, option("FILE", default="")] = None,
    data: Annotated[str | None, option("NAME", default="a run's held-out text")] = None,
    schemes: Annotated[tuple[str, ...], option("SCHEME [SCHEME ...]")] = ("W8A8", "W4A4"),
    out: Out = None,
    scope: Annotated[
        Literal["linear", "block", "all"] | None,
        option("{linear,block,all}", default="block, linear for a model without blocks"),
    ] = None,
    num_tokens: Annotated[str, option("TOKENS")] = "8192",
    layer_tokens: Annotated[str, option("TOKENS")] = "1024",
    sequence_length: Annotated[
        str | None, option("TOKENS", default="512, or what the model takes")
    ] = None,
    measure: Annotated[
        Literal["auto", "loss", "distance"], option("{auto,loss,distance}")
    ] = "auto",
    no_layers: Switch = False,
    json: AsJson = False,
) -> None:
    """Find the layer, channel and token where quantising breaks a model, and why.

    Writes DIR/index.html, its numbers (diagnosis.json, *.csv) and figures (*.png), and prints ten
    lines, worst first. Interrupted, the same command goes on where it was (docs/diagnose.md).

    For example: skipless diagnose smollm2-135m --data sotu --schemes W8A8 --out runs/diagnosis

    Args:
        text: a .txt, .jsonl or .parquet file, or a folder of them.
        data: a name of `data list`.
        schemes: such as W8A8,W4A4 (docs/quantise.md); the first is what the ten lines are about.
        num_tokens: read once, for the statistics of every site.
        layer_tokens: of them, for what takes a pass a layer: damage by layer, error by depth.
        measure: of damage: loss of the next token, distance of the outputs, or what fits.
        no_layers: leave out what takes a pass a layer.
    """
    from skipless.errors import UserError
    from skipless.scheme import Scheme

    names = [name for text_ in schemes for name in text_.split(",") if name]
    if not names:
        raise UserError("--schemes is empty; name one such as W8A8")
    for name in names:
        Scheme.parse(name)
    tokens = whole_number("--num-tokens", num_tokens)
    few = whole_number("--layer-tokens", layer_tokens)
    length = whole_number("--sequence-length", sequence_length)
    if out is None or not out.strip():
        raise UserError("--out is missing; name the folder to write")
    if text is not None and not Path(text).exists():
        raise UserError(f"--text is {text!r}, which does not exist; name a file or folder of text")
    assert tokens is not None and few is not None, "they have defaults"
    from skipless.diagnose.loading import load_subject, read_batches
    from skipless.diagnose.parts import check_free
    from skipless.diagnose.running import diagnose as run
    from skipless.diagnose.writing import PAGE
    from skipless.log import say

    check_free(Path(out))
    subject = load_subject(model)
    read = read_batches(subject, text, data, tokens, length)
    result = run(
        subject.model, read.batches, names,
        scope=scope, measure=measure, tokenizer=subject.tokenizer,
        layer_batches=cut_batches(read.batches, few), layers=not no_layers, name=subject.name,
        about=read.about, out=out, say=lambda line: None if json else say(line),
    )  # fmt: skip
    if json:
        print_json(result.to_dict())
        return
    print(*(f"{place:2d}. {line}" for place, line in enumerate(result.lines(), 1)), sep="\n")
    for line in result.missing:
        print(f"not measured: {line}")
    print(f"{Path(out) / PAGE}  (beside it diagnosis.json, *.csv and *.png)")


def cut_batches(batches: list, num_tokens: int) -> list:
    """The first batches, cut to whole sequences of `num_tokens` tokens together, at least one."""
    found, left = [], num_tokens
    for batch in batches:
        pair = batch if isinstance(batch, tuple) else (batch,)
        number = max(1, left // pair[0].shape[1])
        cut = tuple(part[:number] for part in pair)
        found.append(cut if isinstance(batch, tuple) else cut[0])
        left -= cut[0].numel()
        if left < pair[0].shape[1]:
            break
    return found
