"""The subcommands that read trained runs: `probe`, `quantize` and `report`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import (
    AsJson,
    Positional,
    Switch,
    check_schemes,
    option,
    split_schemes,
    tell_fewer,
    whole_number,
)
from skipless.cli.material import Material
from skipless.cli.measuring_models import (
    is_plain_model,
    is_run,
    material_of_suggestion,
    quantize_model,
    refuse_beside_run,
)
from skipless.cli.terminal import (
    method_lines,
    print_json,
    probe_lines,
    quantize_lines,
    suggestion_lines,
)
from skipless.errors import UserError
from skipless.scheme import Scheme

OWN = "the run's own setting"
Run = Annotated[Positional[str], option("RUN", help="a run directory, such as runs/mine")]
Tokens = Annotated[
    str | None,
    option("TOKENS", default=OWN, help="held-out tokens to measure on, such as 20_000 or 1e5"),
]


def probe(run: Run, num_tokens: Tokens = None, json: AsJson = False) -> None:
    """Measure the activations at every site: kurtosis, outliers -> probe.json.

    For example: skipless probe runs/mine --num-tokens 1e3
    """
    tokens = whole_number("--num-tokens", num_tokens)
    loaded = open_run(run, tokens)
    from skipless.measure import probe_run

    result = probe_run(loaded, num_tokens=tokens)
    print_json(result) if json else print(*probe_lines(result), sep="\n")


def quantize(
    model: Annotated[
        Positional[str],
        option("RUN|MODEL", help="a run directory, or what `skipless diagnose` takes"),
    ],
    schemes: Annotated[tuple[str, ...], option("SCHEME [SCHEME ...]", default=OWN)] = (),
    scopes: Annotated[
        tuple[Literal["linear", "block", "all"], ...],
        option("{linear,block,all} [...]", default=OWN),
    ] = (),
    methods: Annotated[tuple[str, ...], option("METHOD [METHOD ...]", default="rtn")] = (),
    override: Annotated[tuple[str, ...], option("PATTERN=SCHEME [...]", default="")] = (),
    text: Annotated[str | None, option("FILE", default="a run's held-out text")] = None,
    data: Annotated[str | None, option("NAME", default="")] = None,
    images: Annotated[tuple[str, ...], option("FILE|DIR [FILE|DIR ...]", default="")] = (),
    audio: Annotated[tuple[str, ...], option("FILE [FILE ...]", default="")] = (),
    include_convolutions: Switch = False,
    num_tokens: Tokens = None,
    by_layer: Switch = False,
    all_but_one: Switch = False,
    suggest: Annotated[tuple[str, ...], option("LOW HIGH", default="")] = (),
    max_increase: Annotated[float | None, option("NATS", default="0.05")] = None,
    max_bits: Annotated[float | None, option("BITS", default="no limit")] = None,
    json: AsJson = False,
) -> None:
    """Measure held-out loss under quantisation -> quant.json.

    Also the worst tensors and the error by depth, at the lowest of the schemes named. A model that
    is no run is measured on --text, --data, --images or --audio, by its loss or by how far its
    outputs move; the first half of that calibrates, and nothing is written.

    For example: skipless quantize runs/mine --schemes W8A8 W4A8-a:token --by-layer

    Args:
        schemes: such as W8A8 W4A8-a:token W4Afp-w:g32 (docs/quantise.md).
        scopes: linear (inputs of linear layers), block (also sublayer outputs and the stream),
            all (also queries, keys, values, probabilities).
        methods: beside rounding to the nearest, calibrated on other text: smooth, awq, hadamard,
            stream, rotation:learned, outliers, gptq, codebook; smooth+gptq combines two.
        override: modules set apart in every scheme, by name: layers.0.mlp.*=W8A8, or =fp for full
            precision; the last that matches counts.
        text: a file or folder of text, for a model that is no run.
        data: a name of `data list`, for the same.
        images: .png or .jpg files or folders of them, for vision models.
        audio: uncompressed WAV files, for models that hear.
        include_convolutions: also nn.Conv1d to 3d and their inputs, the front ends of such models.
        by_layer: also the loss with one layer alone quantised, a pass over the text a layer.
        all_but_one: with --by-layer, also the loss with all layers quantised but one.
        suggest: instead, a scheme between two, such as W4A4 W8A8: layers are raised one by one.
        max_increase: what the suggestion may cost, in nats a token.
        max_bits: what it may take, in bits a weight.
    """
    tokens = whole_number("--num-tokens", num_tokens)
    material = Material(text, data, images, audio, tokens)
    schemes, suggest = split_schemes(schemes), split_schemes(suggest)
    if suggest:
        _refuse_beside_suggest(
            {"--schemes": schemes, "--override": override, "--by-layer": by_layer,
             "--all-but-one": all_but_one, "--include-convolutions": include_convolutions}
        )  # fmt: skip
        _suggest(model, material, suggest, scopes, methods, max_increase, max_bits, json)
        return
    if max_increase is not None or max_bits is not None:
        raise UserError("--max-increase and --max-bits go with --suggest LOW HIGH")
    if all_but_one and not by_layer:
        raise UserError("--all-but-one goes with --by-layer, beside whose rows it is read")
    Scheme.parse("W8A8").with_overrides(override)
    if _is_model(model, material):
        found = quantize_model(
            model, schemes, scopes, methods, override, material, include_convolutions, by_layer,
            all_but_one, json,
        )  # fmt: skip
        if json:
            print_json(found if by_layer else found["rows"])
        else:
            print(*method_lines(found), sep="\n")
        return
    check_schemes(model, schemes)
    refuse_beside_run(model, material)
    if include_convolutions:
        raise UserError(f"{model} is a run, whose model has no convolutions; leave the switch out")
    loaded = open_run(model, tokens)
    from skipless.log import say
    from skipless.measure import quantize_run

    result = quantize_run(
        loaded,
        schemes=schemes or None,
        scopes=scopes or None,
        methods=methods,
        overrides=override,
        num_tokens=tokens,
        by_layer=by_layer,
        all_but_one=all_but_one,
        say=lambda text: None if json else say(text),
    )
    print_json(result) if json else print(*quantize_lines(result), sep="\n")


def _refuse_beside_suggest(others: dict[str, Any]) -> None:
    for flag, value in others.items():
        if value:
            raise UserError(f"--suggest takes no {flag}; it searches one scheme on one text")


def _suggest(
    name: str,
    material: Material,
    between: tuple[str, ...],
    scopes: tuple[str, ...],
    methods: tuple[str, ...],
    max_increase: float | None,
    max_bits: float | None,
    json: bool,
) -> None:
    for what, given, number in (
        ("--suggest", between, 2), ("--scopes", scopes, 1), ("--methods", methods, 1)
    ):  # fmt: skip
        if len(given) != number and (given or number == 2):
            raise UserError(f"{what} names {len(given)} with --suggest; {number} was expected")
    method = methods[0] if methods else "rtn"
    needed = method != "rtn" or any(Scheme.parse(text).needs_calibration for text in between)
    if _is_model(name, material):
        model, calibration, batches = material_of_suggestion(name, material)
    else:
        check_schemes(name, between)
        refuse_beside_run(name, material)
        loaded = open_run(name, material.num_tokens)
        from skipless.measure import calibration_batches, held_out_batches, quantize_tokens

        model = loaded.model
        batches = held_out_batches(loaded, material.num_tokens or quantize_tokens(loaded))
        calibration = calibration_batches(loaded) if needed else ()
    from skipless.evaluate import suggest_scheme
    from skipless.log import say

    found = suggest_scheme(
        model, batches, *between, max_increase=max_increase, max_bits=max_bits,
        scope=scopes[0] if scopes else "linear", method=method,
        calibration=calibration if needed else None,
        on_step=None if json else lambda step: say(
            f"{step['layer']}: {step['increase']:+.4f} nats, {step['weight_bits']:.2f} bits"
        ),
    )  # fmt: skip
    tokens = material.num_tokens
    command = shlex.join([
        "skipless", "quantize", name, *material.words,
        *([] if tokens is None else ["--num-tokens", str(tokens)]),
    ])  # fmt: skip
    print_json(asdict(found)) if json else print(*suggestion_lines(found, command), sep="\n")


def _is_model(name: str, material: Material) -> bool:
    """Whether `name` is meant as a model of others: text for it was named, or it is no run's."""
    return not is_run(name) and (material.flag is not None or is_plain_model(name))


def report(
    runs: Annotated[Positional[tuple[str, ...]], option("RUN [RUN ...]", default="")],
    out: Annotated[str, option("FILE.html")] = "report.html",
) -> None:
    """Compare runs in one self-contained HTML file.

    A log that a ProbeLog wrote, given alone, is shown over time: heat maps site by step.

    For example: skipless report runs/mine runs/demo --out runs/mine.html

    Args:
        runs: run directories; a directory that contains run directories stands for them.
        out: where to write; its numbers (mine.json) and figures (mine-NAME.png) go beside it.
    """
    from skipless.report import build_report, find_runs, print_table
    from skipless.report.build import check_out
    from skipless.report.load import is_log
    from skipless.report.timeline_page import write_log

    check_out(out)
    if len(runs) == 1 and is_log(runs[0]):
        print(*write_log(runs[0], Path(out)), sep="\n")
        return
    directories = find_runs(runs)
    path = build_report(directories, Path(out))
    print_table(directories)
    figures = len(list(path.parent.glob(f"{path.stem}-*.png")))
    print(f"{path}  (beside it {path.stem}.json and {figures} figures, {path.stem}-*.png)")


def open_run(run: str, num_tokens: int | None = None) -> Any:
    """The loaded run; a directory that is none is told before torch is imported, and a held-out
    text of fewer than `num_tokens` afterwards."""
    from skipless.rundir import RunDir

    RunDir.open(run).config()  # torch takes its time to import, a mistake should not
    from skipless.data.loader import count_windows
    from skipless.train import load_run

    loaded = load_run(run)
    if loaded.config.model.num_labels is None:
        length = loaded.config.train.sequence_length
        tell_fewer(num_tokens, count_windows(loaded.data.held_out, length) * length, length)
    return loaded
