"""What each way to quantise costs, on a residual and a residual-free model and on real weights.

    python benchmarks/mitigation.py [--quick] [--runs DIR DIR] [--only runs|pretrained] [--out FILE]

1. Increase of the held-out loss (nats a token, paired standard error) of two small trained models,
   by scheme, scope and method. The peer of every method is rounding to the nearest at the same
   scheme, which is what a library does without calibration. Methods are calibrated on 4,096
   training tokens. `--runs` names finished runs; without it demo-residual-muon and demo-rf-muon are
   trained (demo-fast-* with `--quick`) into runs/mitigation.
2. Distance of the outputs of MiniLM-L6 (trained by others) at W4, GPTQ against rounding to the
   nearest, calibrated and measured on different tokens of `shakespeare`. Left out offline.

Small models trained for minutes: the order of methods is worth something, the numbers are not those
of large models. Prints Markdown tables and one JSON line; every row goes to `--out` as JSON, a line
each, with which means over seeds are made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from skipless.data import UnreachableError, open_batches
from skipless.diagnose.methods import compare_methods

ACTIVATIONS = ["rtn", "smooth", "awq", "hadamard", "stream", "rotation:learned", "outliers:1%",
               "gptq", "smooth+gptq", "stream+hadamard+gptq", "rotation:learned+gptq"]  # fmt: skip
WEIGHTS = ["rtn", "awq", "gptq", "gptq:order", "codebook"]
FULL = {
    ("linear", "block"): (["W8A6", "W4A8-w:channel", "W4A4"], ACTIVATIONS),
    ("linear",): (["W4Afp-w:channel", "W3Afp-w:channel", "W3Afp-w:g32", "W2Afp-w:channel-clip:mse",
                   "W2Afp-w:g32-asym"], WEIGHTS),
}  # fmt: skip
QUICK = {
    ("block",): (["W4A4"], ["rtn", "smooth", "stream", "gptq"]),
    ("linear",): (["W3Afp-w:channel"], ["rtn", "gptq"]),
}


def trained(names: list[str], quick: bool) -> dict[str, Any]:
    """The finished runs, trained first where no name is given."""
    from skipless import recipes
    from skipless.train import load_run, train

    if not names:
        kind = "demo-fast" if quick else "demo"
        names = [f"runs/mitigation/{kind}-{join}-muon" for join in ("residual", "rf")]
        for name in names:
            train(recipes.get(Path(name).name).replace(probe={"every": 0}), name)
    return {name: load_run(name) for name in names}


def on_run(run: Any, plan: dict, tokens: int) -> list[dict[str, Any]]:
    """Rows of one run."""
    size = run.config.train.batch_size
    calibration = open_batches(run.config, run.data, "train", size, 4096)
    held_out = open_batches(run.config, run.data, "held_out", size, tokens)
    rows = []
    for scopes, (schemes, methods) in plan.items():
        rows += compare_methods(
            run.model, held_out, schemes, scopes, methods, calibration=calibration, on_row=tell
        )
    return rows


def tell(row: dict[str, Any]) -> None:
    """A row on stderr as it is measured: a table takes minutes."""
    print(row["scheme"], row["scope"], row["method"], row["increase"], file=sys.stderr, flush=True)


def on_minilm(quick: bool) -> list[dict[str, Any]]:
    """Rows of MiniLM-L6; UnreachableError offline."""
    from skipless.diagnose.loading import load_subject
    from skipless.diagnose.texts import read_batches

    subject = load_subject("minilm-l6")
    ids = torch.cat(
        read_batches(subject, None, "shakespeare", 1024 if quick else 4096, 256).batches
    )
    calibration, held_out = ids.chunk(2)
    schemes = ["W4Afp-w:channel"] + ([] if quick else ["W3Afp-w:channel", "W4A8-w:channel"])
    methods = ["rtn", "gptq"] + ([] if quick else ["smooth+gptq", "codebook"])
    return compare_methods(
        subject.model, held_out.split(4), schemes, ["linear"], methods,
        calibration=calibration.split(4), on_row=tell,
    )  # fmt: skip


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """One Markdown table for each set of methods."""
    sets: dict[tuple[str, ...], dict[tuple[str, str], dict[str, dict]]] = {}
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["scope"]), {})[row["method"]] = row
    for key, found in cells.items():
        sets.setdefault(tuple(found), {})[key] = found
    print(f"\n{title}: {rows[0]['unit']}")
    for names, part in sets.items():
        print(f"\n| scheme | scope | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
        for (scheme, scope), found in part.items():
            shown = [_cell(row) for row in found.values()]
            print(f"| {scheme} | {scope} | {' | '.join(shown)} |", flush=True)


def keep(path: Path | None, model: str, rows: list[dict[str, Any]]) -> None:
    """Add rows to a file of JSON lines."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps({"model": model, **row}) + "\n" for row in rows)


def _cell(row: dict[str, Any]) -> str:
    if row["increase"] is None:
        return "refused"
    error = row["standard_error"]
    return f"{row['increase']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def ratio(rows: list[dict[str, Any]], scheme: str, scope: str, method: str) -> float:
    """Damage of a method over that of rounding to the nearest."""
    found = {
        r["method"]: r["increase"] for r in rows if (r["scheme"], r["scope"]) == (scheme, scope)
    }
    return found[method] / found["rtn"]


def main() -> None:
    """Measure, print, and give the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few schemes")
    parser.add_argument("--runs", nargs="*", default=[], help="finished runs")
    parser.add_argument("--only", choices=("runs", "pretrained"), help="one of the two parts")
    parser.add_argument("--tokens", type=int, help="held-out tokens")
    parser.add_argument("--out", type=Path, help="file that rows are added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, dict] = {}

    def figure(name: str, value: float, target: float | None) -> None:
        figures[name] = {"value": float(f"{value:.3g}"), "target": target, "better": "lower"}

    if options.only != "pretrained":
        tokens = options.tokens or (1024 if options.quick else 8192)
        for name, run in trained(options.runs, options.quick).items():
            began, short = time.process_time(), Path(name).name
            rows = on_run(run, QUICK if options.quick else FULL, tokens)
            table(f"{short}, {tokens:,} held-out tokens", rows)
            keep(options.out, short, rows)
            print(f"\n{time.process_time() - began:.0f} s of processor time")
            figure(f"gptq_w3_{short}", ratio(rows, "W3Afp-w:channel", "linear", "gptq"), 1.0)
            figure(f"stream_w4a4_block_{short}", ratio(rows, "W4A4", "block", "stream"), None)
    if options.only != "runs":
        try:
            rows = on_minilm(options.quick)
            table("MiniLM-L6", rows)
            keep(options.out, "minilm-l6", rows)
            figure("gptq_w4_minilm", ratio(rows, "W4Afp-w:channel", "linear", "gptq"), 1.0)
        except UnreachableError as error:
            print(f"\nMiniLM-L6 left out: {error}")
    print(json.dumps({"benchmark": "mitigation", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
