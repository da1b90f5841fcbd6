"""What the command prints: JSON for programs, one line or aligned columns for people."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipless.errors import UserError

NUM_WORST = 5


def print_json(value: Any) -> None:
    """One strict JSON document on stdout: what is not finite is null."""
    from skipless.files import to_strict_json

    print(to_strict_json(value, indent=2))


def overview(groups: Mapping[str, Mapping[str, Callable]]) -> str:
    """Of {title: {subcommand: function}}: the first line of each docstring, as wide as the terminal
    up to 100 columns."""
    indent = 4 + max(len(name) for commands in groups.values() for name in commands)
    width = max(indent + 20, min(100, shutil.get_terminal_size().columns))
    lines = []
    for title, commands in groups.items():
        lines += ["", title]
        for name, function in commands.items():
            text = (function.__doc__ or "").splitlines()[0]
            first = f"  {name}".ljust(indent)
            lines += textwrap.wrap(
                text, width, initial_indent=first, subsequent_indent=" " * indent
            )
    return "\n".join(lines[1:])


def evaluation_line(result: dict[str, Any]) -> str:
    """Of eval.json: loss, perplexity, bits per byte, or accuracy; what is not known is left out or
    said."""
    if "accuracy" in result:
        return (
            f"accuracy {result['accuracy']:.2%} ± {result['standard_error']:.2%}, loss "
            f"{result['held_out_loss']:.4f} nats ({result['num_passages']:,} held-out passages)"
        )
    error, bits = result["standard_error"], result["bits_per_byte"]
    return (
        f"loss {result['held_out_loss']:.4f}"
        + (f" ± {error:.4f} nats, " if error is not None else " nats, ")
        + f"perplexity {result['perplexity']:.2f}"
        + (f", {bits:.4f} bits per byte" if bits is not None else "")
        + f" ({result['num_tokens']:,} held-out tokens"
        + ("" if error is not None else " of one sequence, too few for a standard error")
        + ")"
    )


def frequency_lines(loss: float, run: str | Path) -> list[str]:
    """A line where the loss of a run is above that of token frequencies alone, which it noted."""
    from skipless.rundir import DATA, RunDir

    try:
        known = RunDir(run).read_json(DATA, {}).get("unigram_loss")
    except (UserError, AttributeError):
        return []
    if not isinstance(known, float) or not loss > known:
        return []
    return [
        f"token frequencies alone reach {known:.4f} nats: this model knows less of the text than "
        "which tokens are frequent, and needs a longer training (--train.num_tokens)"
    ]


def probe_lines(result: dict[str, Any]) -> list[str]:
    """Of probe.json: the statistics of every site."""
    head = ("site", "kurtosis", "max/sd", "sd")
    rows = [
        (row["site"], _show(row["kurtosis"], ".2f"), _show(row["max_over_std"], ".1f"),
         _show(row["std"], ".4g"))
        for row in result["sites"]
    ]  # fmt: skip
    return aligned([head, *rows])


def quantize_lines(result: dict[str, Any]) -> list[str]:
    """Of quant.json: the loss by scheme and scope, the worst tensors, the error by depth."""
    rows = [
        (row["scheme"], row["scope"], f"{row['loss']:.4f}", f"{row['increase']:+.4f} nats")
        for row in result["rows"]
    ]
    lines = [
        f"full precision {result['full_precision']:.4f} nats on {result['num_tokens']:,} held-out "
        "tokens", *aligned(rows, left=2),
    ]  # fmt: skip
    simulated = [r["scheme"] for r in result["rows"] if r.get("computed") == "simulated"]
    if simulated:
        names = ", ".join(dict.fromkeys(simulated))
        lines.append(f"simulated in floating point, as integers do not cover it: {names}")
    if "methods" in result:
        lines += _methods([*result["rows"], *result["methods"]])
    if "sqnr" in result:
        lines += _worst(result["sqnr"])
    if "error" in result:
        lines += _depth(result["error"])
    if "sensitivity" in result:
        lines += _layers(result["sensitivity"])
    return lines


def _methods(rows: list[dict[str, Any]]) -> list[str]:
    """The increase by method, a line a scheme and scope, the best one marked."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["scope"]), {})[row.get("method", "rtn")] = row
    names = list(dict.fromkeys(row.get("method", "rtn") for row in rows))
    table = [("scheme", "scope", *names)]
    for key, found in cells.items():
        known = [r["increase"] for r in found.values() if r["increase"] is not None]
        shown = []
        for name in names:
            value = found[name]["increase"] if name in found else None
            best = value is not None and value == min(known)
            shown.append(_show(value, "+.4f") + ("*" if best else " "))
        table.append((*key, *shown))
    refused = {r["method"]: r["refused"] for r in rows if r.get("refused")}
    return [
        "", "increase in nats by method; * is the least", *aligned(table, left=2),
        *(f"{name}: {reason}" for name, reason in refused.items()),
    ]  # fmt: skip


def method_lines(found: dict[str, Any]) -> list[str]:
    """Of `diagnose.methods.compare_methods`: the damage by scheme, scope and method; by layer."""
    rows, lines = found["rows"], _methods(found["rows"])
    lines = [f"in {rows[0]['unit']}, by method; * is the least", *lines[2:]]
    errors = [row["standard_error"] for row in rows if row["standard_error"] is not None]
    if errors:
        lines.append(f"paired standard errors up to {max(errors):.4f}")
    elif rows[0]["unit"].startswith("nats"):
        lines.append("of one sequence, so without a standard error; give more --num-tokens")
    return lines + (_layers(found["sensitivity"]) if "sensitivity" in found else [])


def suggestion_lines(found: Any, command: str) -> list[str]:
    """Of an `evaluate.Suggestion`: the scheme, what it costs, why the search ended, and the line
    that begins with `command` to measure it."""
    from skipless.diagnose.result import paste_line

    by = "" if found.method == "rtn" else f" by {found.method}"
    error = "" if found.standard_error is None else f" ± {found.standard_error:.4f}"
    return [
        found.scheme,
        f"loss {found.loss:.4f} on {found.num_tokens:,} tokens, {found.increase:+.4f}{error} nats "
        "over full precision; "
        f"{found.weight_bits:.2f} bits a weight",
        f"in scope {found.scope}{by}; target {'' if found.met else 'not '}met: {found.reason}",
        f"to try it: {paste_line(command, found.scheme, found.scope, found.method)}",
    ]


def _worst(sqnr: dict[str, Any]) -> list[str]:
    """The tensors with the lowest ratio, activations and weights apart: their widths differ."""
    lines = []
    for what, rows in (("activations", sqnr["rows"]), ("weights", sqnr.get("weights", ()))):
        known = sorted((r for r in rows if r["sqnr"] is not None), key=lambda r: r["sqnr"])
        if not known:
            continue
        bits = sorted({row["bits"] for row in known})
        lines += [
            "",
            f"worst {what} at {sqnr['scheme']}, scope {sqnr['scope']}: signal to rounding noise in "
            f"dB, of a Gaussian at {' or '.join(map(str, bits))} bits, and what is missing to it",
        ]
        lines += aligned([
            ("site", "SQNR", "ideal", "gap"),
            *((r["site"], *(f"{r[key]:.1f}" for key in ("sqnr", "ideal", "gap")))
              for r in known[:NUM_WORST]),
        ])  # fmt: skip
    return lines


def _depth(error: dict[str, Any]) -> list[str]:
    """R_l, the layer where it grows most marked."""
    rows = error["rows"]
    growth = [b["r"] - a for a, b in zip([0.0, *(r["r"] for r in rows)], rows, strict=False)]
    cells = [
        (str(r["layer"]), r["sublayer"] or "", f"{r['r']:.4f}", f"{step:+.4f}")
        for r, step in zip(rows, growth, strict=True)
    ]
    lines = aligned([("layer", "after", "R", "growth"), *cells], left=2)
    if len(rows) > 1:
        lines[1 + growth.index(max(growth))] += "  <- grows most"
    title = f"error of the stream by depth at {error['scheme']}, scope {error['scope']}: R = |x_q "
    return ["", title + "- x| / |x|, earlier layers included", *lines]


def _layers(table: dict[str, Any]) -> list[str]:
    """The loss with one layer quantised, and with all but one, worst first."""
    where = f"{table['scheme']}, scope {table['scope']}"
    lines = [
        "", f"increase of the loss in nats with one layer alone at {where}",
        *_costs(table["rows"], "increase", "standard_error"),
    ]  # fmt: skip
    if "all_but_one" in table:
        rows = table["all_but_one"]
        everything = rows[0]["increase"] + rows[0]["recovered"]
        lines += [
            "", f"what one layer in full precision takes off the {everything:+.5f} nats of all at "
            f"{where}", *_costs(rows, "recovered", "recovered_error"),
        ]  # fmt: skip
    return lines


def _costs(rows: Sequence[dict[str, Any]], what: str, error: str) -> list[str]:
    cells = [
        (str(r["layer"]), f"{r[what]:+.5f}", "± " + _show(r[error], ".5f"))
        for r in sorted(rows, key=lambda row: -row[what])
    ]
    return aligned([("layer", what, ""), *cells])


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Columns as wide as their widest cell, the first `left` flush left, the rest flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
