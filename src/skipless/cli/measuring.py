"""The subcommands that read trained runs: `eval`, `probe`, `quantize` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from skipless.cli.arguments import AsJson, Positional, Switch, check_schemes, option, whole_number
from skipless.cli.terminal import evaluation_line, print_json, probe_lines, quantize_lines
from skipless.scheme import Scheme

OWN = "the run's own setting"
Run = Annotated[Positional[str], option("RUN", help="a run directory, such as runs/mine")]
Tokens = Annotated[
    str | None,
    option("TOKENS", default=OWN, help="held-out tokens to measure on, such as 20_000 or 1e5"),
]


def eval_(run: Run, num_tokens: Tokens = None, json: AsJson = False) -> None:
    """Measure held-out loss, perplexity and bits per byte -> eval.json.

    For example: skipless eval runs/mine --num-tokens 20_000
    """
    tokens = whole_number("--num-tokens", num_tokens)
    loaded = _load(run)
    from skipless.measure import evaluate_run

    result = evaluate_run(loaded, num_tokens=tokens)
    print_json(result) if json else print(evaluation_line(result))


def probe(run: Run, num_tokens: Tokens = None, json: AsJson = False) -> None:
    """Measure the activations at every site: kurtosis, outliers -> probe.json.

    For example: skipless probe runs/mine --num-tokens 1e3
    """
    tokens = whole_number("--num-tokens", num_tokens)
    loaded = _load(run)
    from skipless.measure import probe_run

    result = probe_run(loaded, num_tokens=tokens)
    print_json(result) if json else print(*probe_lines(result), sep="\n")


def quantize(
    run: Run,
    schemes: Annotated[tuple[str, ...], option("SCHEME [SCHEME ...]", default=OWN)] = (),
    scopes: Annotated[
        tuple[Literal["linear", "block", "all"], ...],
        option("{linear,block,all} [...]", default=OWN),
    ] = (),
    override: Annotated[tuple[str, ...], option("PATTERN=SCHEME [...]", default="")] = (),
    num_tokens: Tokens = None,
    by_layer: Switch = False,
    json: AsJson = False,
) -> None:
    """Measure held-out loss under simulated quantisation -> quant.json.

    Also the worst tensors and the error by depth, at the lowest of the schemes named.

    For example: skipless quantize runs/mine --schemes W8A8 W4A8-a:token --by-layer

    Args:
        schemes: such as W8A8 W4A8-a:token W4Afp-w:g32 (docs/quantise.md).
        scopes: linear (inputs of linear layers), block (also sublayer outputs and the stream),
            all (also queries, keys, values, probabilities).
        override: modules set apart in every scheme, by name: layers.0.mlp.*=W8A8, or =fp for full
            precision; the last that matches counts.
        by_layer: also the loss with one layer alone quantised, a pass over the text a layer.
    """
    tokens = whole_number("--num-tokens", num_tokens)
    check_schemes(run, schemes)
    Scheme.parse("W8A8").with_overrides(override)
    loaded = _load(run)
    from skipless.log import say
    from skipless.measure import quantize_run

    result = quantize_run(
        loaded,
        schemes=schemes or None,
        scopes=scopes or None,
        overrides=override,
        num_tokens=tokens,
        by_layer=by_layer,
        say=lambda text: None if json else say(text),
    )
    print_json(result) if json else print(*quantize_lines(result), sep="\n")


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


def _load(run: str) -> Any:
    from skipless.rundir import RunDir

    RunDir.open(run).config()  # torch takes its time to import, a mistake should not
    from skipless.train import load_run

    return load_run(run)
