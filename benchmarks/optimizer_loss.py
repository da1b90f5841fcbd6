"""What the optimisers reach: default against reference KL-Shampoo, and all six on one recipe.

    python benchmarks/optimizer_loss.py [--quick] [--out runs/optimizers] [--plot FILE.svg]

Two experiments on one model (8 layers, width 128, shakespeare + kjv, 300,000 tokens; recipes
`optim-*`), loss in nats per token over 65,536 held-out tokens:

  parity   KL-Shampoo's default mode and its reference mode, 3 seeds each, from the same start. The
           default must not buy its speed with loss.
  table    six optimisers of the hidden matrices, with and without skip connections, each at the
           same three learning rates, and at further ones by factors of two while the best is the
           last. Updates have AdamW's size (`update_rms=0.2`, Muon's "rms").

Figures (nats, lower is better):

    kl_fast_minus_reference   mean over seeds of default minus reference; its target is the spread
                              of the reference over seeds (one standard deviation)
    lr_transfer_worst         how much the worst of the other five loses, over both kinds of model,
                              when its rate is looked for only within a factor of 2 of AdamW's best

Finished runs are kept and not repeated, so the command may be interrupted; the whole takes some
two hours on two cores. --quick has one seed, two optimisers, two rates and 10,240 tokens: it shows
that the machinery works, its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from skipless.files import write_atomic
from skipless.recipes.optimizers import KINDS, METHODS
from skipless.sweep import run_sweep

RATES = ("1e-3", "2e-3", "4e-3")
FURTHER = 3  # times that the grid may grow
SEEDS = ("0", "1", "2")
FAST, REFERENCE = "optim-parity-fast", "optim-parity-reference"
Losses = dict[str, dict[str, float]]
"""Held-out loss by recipe, then by the value of the swept setting."""


def losses(names: Iterable[str], setting: str, values: tuple[str, ...], **sweep) -> Losses:
    """Train what is missing. A run that failed has loss infinity."""
    found: Losses = {}
    for row in run_sweep(tuple(names), setting=setting, values=values, **sweep):
        loss = row["held_out_loss"]
        found.setdefault(row["recipe"], {})[row[setting]] = float("inf") if loss is None else loss
    return found


def searched(names: Iterable[str], rates: tuple[str, ...], further: int, **sweep) -> Losses:
    """`losses` at `rates`, then at half the lowest or twice the highest for recipes whose best is
    there, at most `further` times. Rates of a recipe are in ascending order."""
    found = losses(names, "optim.lr", rates, **sweep)
    for _ in range(further):
        wanted: dict[str, list[str]] = {}
        for name, row in found.items():
            grid = sorted(row, key=float)
            best = min(row, key=row.__getitem__)
            if best == grid[0]:
                wanted.setdefault(spelled(float(best) / 2), []).append(name)
            elif best == grid[-1]:
                wanted.setdefault(spelled(float(best) * 2), []).append(name)
        for rate, group in wanted.items():
            for name, row in losses(group, "optim.lr", (rate,), **sweep).items():
                found[name] |= row
    return {
        name: dict(sorted(row.items(), key=lambda x: float(x[0]))) for name, row in found.items()
    }


def spelled(rate: float) -> str:
    """5e-4 rather than 0.0005: as rates are written here."""
    digits, exponent = f"{rate:.6e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def print_parity(found: Losses) -> dict[str, dict]:
    """The default and the reference mode seed by seed; the figure."""
    fast, reference = found[FAST], found[REFERENCE]
    gaps = [fast[seed] - reference[seed] for seed in fast]
    print(f"{'seed':>24s}" + "".join(f"{seed:>9s}" for seed in fast) + f"{'mean':>9s}")
    for words, row in (("KL-Shampoo, default", fast), ("KL-Shampoo, reference", reference)):
        numbers = [*row.values(), statistics.fmean(row.values())]
        print(f"{words:>24s}" + "".join(f"{x:9.4f}" for x in numbers))
    print(f"{'difference':>24s}" + "".join(f"{x:9.4f}" for x in [*gaps, statistics.fmean(gaps)]))
    noise = statistics.stdev(reference.values()) if len(reference) > 1 else None
    value = round(statistics.fmean(gaps), 4)
    target = None if noise is None else round(noise, 4)
    return {"kl_fast_minus_reference": {"value": value, "target": target, "better": "lower"}}


def print_table(found: Losses) -> dict[str, dict]:
    """Loss by optimiser and rate, as Markdown; the figure."""
    worst = 0.0
    for kind, (_, words) in KINDS.items():
        rows = {
            METHODS[method][0]: found[f"optim-{kind}-{method}"]
            for method in METHODS
            if f"optim-{kind}-{method}" in found
        }
        rates = sorted({rate for row in rows.values() for rate in row}, key=float)
        print(f"\n| {words} | " + " | ".join(f"lr {rate}" for rate in rates) + " |")
        print("|---" * (len(rates) + 1) + "|")
        for label, row in rows.items():
            cells = {rate: f"{loss:.3f}" for rate, loss in row.items()}
            best = min(row, key=row.__getitem__)
            cells[best] = f"**{cells[best]}**"
            print(f"| {label} | " + " | ".join(cells.get(rate, "") for rate in rates) + " |")
        adamw = min(rows["AdamW"], key=rows["AdamW"].__getitem__)
        for row in rows.values():
            near = [rate for rate in row if 0.49 < float(rate) / float(adamw) < 2.01]
            # Where none is so near (the search went elsewhere) the nearest is a lower bound.
            near = near or [min(row, key=lambda rate: abs(math.log(float(rate) / float(adamw))))]
            worst = max(worst, min(row[rate] for rate in near) - min(row.values()))
    return {"lr_transfer_worst": {"value": round(worst, 4), "target": None, "better": "lower"}}


def plot(found: Losses, path: Path) -> None:
    """Loss over learning rate, a panel a kind of model, a line an optimiser."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    rates = sorted({rate for row in found.values() for rate in row}, key=float)
    with matplotlib.rc_context({"svg.hashsalt": "skipless", "font.size": 9}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        panels = figure.subplots(1, len(KINDS), sharey=True)
        for (kind, (_, words)), axes in zip(KINDS.items(), panels, strict=True):
            for (method, (label, _)), marker in zip(METHODS.items(), "os^vDP", strict=True):
                row = found.get(f"optim-{kind}-{method}")
                if row:
                    at = [float(rate) for rate in row]
                    axes.plot(at, list(row.values()), marker=marker, markersize=4, label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks([float(rate) for rate in rates], rates)
            axes.set_title(words)
            axes.set_xlabel("learning rate of hidden matrices")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("held-out loss (nats per token)")
        panels[-1].legend(frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, drawn.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny runs: shows that it works")
    parser.add_argument("--out", type=Path, help="where the runs lie (default: runs/optimizers)")
    parser.add_argument("--plot", type=Path, help="also draw the table, as SVG")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one a core)")
    options = parser.parse_args()
    quick = options.quick
    out = options.out or Path("runs/optimizers-quick" if quick else "runs/optimizers")
    methods = ("adamw", "kl") if quick else tuple(METHODS)
    settings = {"train.num_tokens": "10240", "train.warmup_steps": "2"} if quick else {}
    common = {"jobs": options.jobs, "settings": settings}

    parity = losses(
        (FAST, REFERENCE), "train.seed", SEEDS[:1] if quick else SEEDS,
        out=out / "parity", **common,
    )  # fmt: skip
    table = searched(
        (f"optim-{kind}-{method}" for kind in KINDS for method in methods),
        RATES[:2] if quick else RATES, 0 if quick else FURTHER, out=out / "table", **common,
    )  # fmt: skip
    figures = print_parity(parity) | print_table(table)
    if options.plot:
        plot(table, options.plot)
    print(json.dumps({"benchmark": "optimizer_loss", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
