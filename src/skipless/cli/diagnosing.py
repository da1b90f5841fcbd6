"""The subcommand that diagnoses any model, two, or a training: `diagnose`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import AsJson, Positional, Switch, option, split_schemes, whole_number
from skipless.cli.material import Material
from skipless.cli.measuring_models import is_plain_model
from skipless.cli.terminal import print_json

Subject = Annotated[
    Positional[str],
    option("MODEL", help="a run directory or RUN/checkpoint/step-N, a Hugging Face folder or hub "
           "name, a name of `models list`, or the folder of a finished diagnosis"),
]  # fmt: skip
Out = Annotated[
    str | None, option("DIR", default="", help="folder to write the report to (required)")
]

Gradients = Annotated[
    bool,
    option(default="", help="also the gradients at every site and of every parameter, from one "
           "backward pass on a few sequences."),
]  # fmt: skip
Against = Annotated[
    str | None,
    option("OTHER", default="", help="another model: every site of both on the same tokens, OTHER "
           "minus MODEL; or, with MODEL a finished diagnosis, another one."),
]  # fmt: skip
Checkpoints = Annotated[
    tuple[str, ...],
    option("all|STEP [STEP ...]", default="", help="measure these steps of the training in MODEL: "
           "a run directory, or a folder with a Trainer's checkpoint-N."),
]  # fmt: skip
OverTime = Annotated[
    bool,
    option(default="", help="draw what probes.jsonl in MODEL, a run directory or a log of a "
           "ProbeLog, says of every site over training; runs no model."),
]  # fmt: skip


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
    layer_tokens: Annotated[str | None, option("TOKENS", default="1024")] = None,
    sequence_length: Annotated[
        str | None, option("TOKENS", default="512, or what the model takes")
    ] = None,
    measure: Annotated[
        Literal["auto", "loss", "distance"], option("{auto,loss,distance}")
    ] = "auto",
    no_layers: Switch = False,
    images: Annotated[tuple[str, ...], option("FILE|DIR [FILE|DIR ...]", default="")] = (),
    audio: Annotated[tuple[str, ...], option("FILE [FILE ...]", default="")] = (),
    layer_by_layer: Annotated[bool, option(default="for files larger than free memory")] = False,
    gradients: Gradients = False,
    against: Against = None,
    checkpoints: Checkpoints = (),
    over_time: OverTime = False,
    json: AsJson = False,
) -> None:
    """Find the layer, channel and token where quantising breaks a model, and why.

    Writes DIR/index.html, its numbers (*.json, *.csv) and figures (*.png), and prints ten lines,
    worst first. Interrupted, the same command goes on where it was (docs/diagnose.md).

    One model, two (--against), several checkpoints of one training (--checkpoints), or the log of
    a training (--over-time).

    For example: skipless diagnose smollm2-135m --data sotu --schemes W8A8 --out runs/diagnosis

    Args:
        text: a .txt, .jsonl or .parquet file, or a folder of them; for --images or --audio lines.
        data: a name of `data list`.
        schemes: such as W8A8,W4A4 (docs/quantise.md); the first is what the ten lines are about.
        num_tokens: read once, for the statistics of every site.
        layer_tokens: for what takes a pass a layer: damage by layer, error by depth.
        measure: of damage: loss of the next token, distance of the outputs, or what fits.
        no_layers: leave out what takes a pass a layer.
        images: .png or .jpg files or folders of them, for vision models.
        audio: uncompressed WAV files, for models that hear.
        layer_by_layer: hold one block of weights at a time, and leave out the same.
    """
    from skipless.errors import UserError

    chosen = [flag for flag, given in (("--against", against), ("--checkpoints", checkpoints),
                                       ("--over-time", over_time)) if given]  # fmt: skip
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]} and {chosen[1]} are both given; keep one of them")
    for flag, given in (("--scope", scope), ("--measure", measure != "auto"),
                        ("--no-layers", no_layers), ("--layer-tokens", layer_tokens),
                        ("--layer-by-layer", layer_by_layer and against is None)):  # fmt: skip
        if chosen and given:
            raise UserError(f"{flag} belongs to one model alone; leave it out of {chosen[0]}")
    if gradients and chosen not in ([], ["--checkpoints"]):
        raise UserError(f"--gradients measures models by themselves; leave it out of {chosen[0]}")
    names = list(split_schemes(schemes))
    if not names:
        raise UserError("--schemes is empty; name one such as W8A8")
    few = whole_number("--layer-tokens", layer_tokens or "1024")
    material = Material(
        text, data, images, audio, whole_number("--num-tokens", num_tokens),
        whole_number("--sequence-length", sequence_length),
    )  # fmt: skip
    if out is None or not out.strip():
        raise UserError("--out is missing; name the folder to write")
    material.check()
    from skipless.pretrained.naming import check_named

    for name in [model, against] if against else [model]:
        check_named(name)
    from skipless.diagnose.parts import check_free

    check_free(Path(out))
    if over_time:
        _over_time(model, material, out, json)
    elif checkpoints:
        _checkpoints(model, checkpoints, material, names, gradients, out, json)
    elif against is not None:
        _against(model, against, material, names, layer_by_layer, out, json)
    else:
        assert few is not None, "it has a default"
        options = {"scope": scope, "measure": measure, "layers": not no_layers,
                   "gradients": gradients}  # fmt: skip
        _alone(model, material, names, few, layer_by_layer, options, out, json)


def _alone(
    model: str,
    material: Material,
    schemes: list[str],
    layer_tokens: int,
    layer_by_layer: bool,
    options: dict[str, Any],
    out: str,
    json: bool,
) -> None:
    """One model; `options` go to `skipless.diagnose.diagnose`."""
    from skipless.diagnose.comparison.comparing import is_diagnosis
    from skipless.diagnose.loading import load_subject
    from skipless.diagnose.running import diagnose as run
    from skipless.diagnose.writing import PAGE
    from skipless.errors import UserError
    from skipless.log import say

    if is_diagnosis(model):
        raise UserError(
            f"{model} is a finished diagnosis; open {Path(model) / PAGE}, or name another one with "
            "--against"
        )
    if material.flag is None and is_plain_model(model):  # before it is loaded
        raise UserError(
            f"there is no text to run {model} on; give --text FILE, or --data NAME (`skipless data "
            "list` shows names), or --images or --audio to a model of those"
        )
    subject = load_subject(model, layer_by_layer=layer_by_layer)
    read = material.read(subject)
    few = cut_batches(read.batches, layer_tokens)
    tokens = _num_tokens(few)
    if subject.run is not None and material.flag is None and tokens is not None:
        from skipless.measure import held_out_batches

        few = held_out_batches(subject.run, tokens)  # what `quantize` reads for as many
    result = run(
        subject.model, read.batches, schemes, tokenizer=subject.tokenizer,
        layer_batches=few, name=subject.name, about=read.about,
        command=_command(model, subject.run is not None, material, tokens), out=out,
        say=lambda line: None if json else say(line), **options,
    )  # fmt: skip
    _show(result, Path(out) / PAGE, json)


def _num_tokens(batches: list) -> int | None:
    """Of text; None for images and sound, which come as dicts."""
    if isinstance(batches[0], dict):
        return None
    return sum((b[0] if isinstance(b, tuple) else b).numel() for b in batches)


def _command(model: str, is_run: bool, material: Material, num_tokens: int | None) -> str | None:
    """The start of the `skipless quantize` line for what was diagnosed, on as many tokens; of a run
    it reads its held-out text alone; None where there is none."""
    if is_run and not (Path(model) / "config.json").exists():  # a checkpoint of a run
        return None
    tokens = [] if num_tokens is None else ["--num-tokens", str(num_tokens)]
    return shlex.join(["skipless", "quantize", model, *([] if is_run else material.words), *tokens])


def _show(result: Any, page: Path, json: bool) -> None:
    """The ten lines of any of the results, what is missing, and where the page is."""
    if json:
        print_json(result.to_dict())
        return
    print(*(f"{place:2d}. {line}" for place, line in enumerate(result.lines(), 1)), sep="\n")
    for line in result.missing:
        print(f"not measured: {line}")
    chosen = result.recommended() if hasattr(result, "recommended") else None
    if chosen is not None and result.command is not None:
        print(f"to try it: {result.paste(chosen)}")
    print(f"{page}  (beside it every number as JSON and CSV, and figures as PNG)")


def _over_time(path: str, material: Material, out: str, json: bool) -> None:
    """The log of a training."""
    from skipless.errors import UserError
    from skipless.report.timeline import read_timeline
    from skipless.report.timeline_page import write_timeline

    if material.flag is not None:
        raise UserError(f"--over-time reads a log and runs no model; leave out {material.flag}")
    timeline = read_timeline(path)
    _show(timeline, write_timeline(timeline, Path(out) / "index.html"), json)


def _checkpoints(
    path: str,
    steps: tuple[str, ...],
    material: Material,
    schemes: list[str],
    gradients: bool,
    out: str,
    json: bool,
) -> None:
    """Several steps of one training."""
    from skipless.diagnose.checkpoints import find_checkpoints, measure_checkpoints
    from skipless.log import say

    wanted = [word for text in steps for word in text.split(",") if word]
    found = find_checkpoints(path, wanted)
    read = material.read(found[-1].load())
    timeline = measure_checkpoints(
        [(saved.step, lambda saved=saved: saved.load().model) for saved in found],
        read.batches, schemes, gradients=gradients, name=path, about=read.about,
        stamps={saved.step: saved.stamp for saved in found}, out=out,
        say=lambda line: None if json else say(line),
    )  # fmt: skip
    _show(timeline, Path(out) / "index.html", json)


def _against(
    model: str,
    other: str,
    material: Material,
    schemes: list[str],
    layer_by_layer: bool,
    out: str,
    json: bool,
) -> None:
    """Two models, or two finished diagnoses."""
    from skipless.diagnose.comparison import compare, compare_diagnoses, read_diagnosis
    from skipless.diagnose.comparison.comparing import is_diagnosis
    from skipless.diagnose.loading import load_subject
    from skipless.errors import UserError
    from skipless.log import say

    finished = [is_diagnosis(path) for path in (model, other)]
    if any(finished):
        if not all(finished):
            folder, rest = (model, other) if finished[0] else (other, model)
            raise UserError(
                f"{folder} is a finished diagnosis and {rest} is none; give two models, or "
                "diagnose that one too"
            )
        if material.flag is not None:
            raise UserError(
                f"{model} and {other} are finished diagnoses, which run no model; leave out "
                f"{material.flag}"
            )
        pair = read_diagnosis(model), read_diagnosis(other)
        result = compare_diagnoses(*pair, names=(model, other), out=out)
    else:
        subjects = [load_subject(name, layer_by_layer=layer_by_layer) for name in (model, other)]
        read = material.read_same(subjects)
        result = compare(
            subjects[0].model, subjects[1].model, read.batches, schemes, names=(model, other),
            about=read.about, out=out, say=lambda line: None if json else say(line),
        )  # fmt: skip
    _show(result, Path(out) / "index.html", json)


def cut_batches(batches: list, num_tokens: int) -> list:
    """The first batches, cut to whole sequences of `num_tokens` tokens together, at least one."""
    if isinstance(batches[0], dict):
        return batches[:1]  # images or sound
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
