"""What warming up interpolators on a trained model is worth: steps to a loss, against none.

    python benchmarks/universal_warmup.py [--quick] [--out runs/universal_warmup.jsonl]

The recipe `connections-4-residual` (width 128, shakespeare + kjv, 300 steps of 8 x 128) is trained
and its (stream, branch) pairs of 4 batches are recorded; a universal model's interpolators are
fitted to them in 40 steps (`skipless.model.warmup`). They are then put before

  scratch      a trunk with random weights, another seed: 300 steps at 4e-3
  pretrained   the residual model's own trunk: 100 steps at 1e-3

and the whole is trained. Starts: `cold` (rho 1, kappa 2, gate 1/2, no warm-up; the peer), `warm`
(rho 1, kappa 2, warmed up) and `neutral` (rho 0, kappa 2: exactly x + F, no warm-up). Same batches,
AdamW (0.9, 0.98), decay 0.01, 50 or 10 steps of warm-up of the rate and a cosine, gradients clipped
to 1. The loss is of 16,384 held-out tokens every 10 steps.

Figures: steps that `cold` needs for its own final loss over those that `warm` and `neutral` need
for it (infinite: never reached, shown as 0); the literature claims 3.2 for warm-up. Median of 3
seeds. Finished runs stand in --out and are not repeated. --quick: 1 seed, few steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from _finished import Finished
from torch import Tensor, nn

from skipless import recipes
from skipless.config import ConnectionConfig, ModelConfig, UniversalConfig
from skipless.data import Loader, evaluation_batches, prepare
from skipless.model import Transformer
from skipless.model.warmup import record_pairs, warm_up

CLAIM = 3.2
STARTS = ("cold", "warm", "neutral")
SETTINGS = {"scratch": (300, 4e-3, 50), "pretrained": (100, 1e-3, 10)}
"""Steps, rate, steps of rate warm-up."""
SEEDS, EVERY, BATCH, LENGTH = (0, 1, 2), 10, 8, 128

Batch = tuple[Tensor, Tensor]


@lru_cache
def corpus() -> Any:
    config = recipes.get("connections-4-residual")
    return prepare(config.data, config.model.vocab_size)


def model_config(start: str | None) -> ModelConfig:
    """Of the residual model (None), or the universal one with this start."""
    config = recipes.get("connections-4-residual").model
    if start is None:
        return config
    universal = UniversalConfig(rho=0.0 if start == "neutral" else 1.0, kappa=2.0)
    return replace(config, connection=ConnectionConfig(kind="universal", universal=universal))


def held_out() -> list[Batch]:
    return evaluation_batches(corpus().held_out, LENGTH, 32, 16_384)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    model.eval()
    loss = statistics.fmean(float(model(ids, labels=labels).loss) for ids, labels in held_out())
    model.train()
    return loss


def train(model: nn.Module, steps: int, lr: float, warmup: int, seed: int) -> list[float]:
    """Train in place; held-out losses at step 0 and every EVERY steps."""
    loader = Loader(corpus().train, LENGTH, BATCH, seed=seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    curve = [held_out_loss(model)]
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = lr * min((step + 1) / warmup, cosine)
        ids, labels = loader.batch(step)
        model(ids, labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            curve.append(held_out_loss(model))
    return curve


def pretrain(seed: int, steps: int) -> dict[str, Tensor]:
    """Weights of a trained residual model."""
    torch.manual_seed(seed)
    model = Transformer(model_config(None), seed=seed)
    train(model, steps, 4e-3, min(50, steps // 2), seed)
    return model.state_dict()


def begin(setting: str, start: str, seed: int, trained: dict[str, Tensor]) -> Transformer:
    """The universal model before joint training."""
    torch.manual_seed(seed)
    model = Transformer(model_config(start), seed=seed + 100)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(trained, strict=False)
    if start == "warm":
        loader = Loader(corpus().train, LENGTH, BATCH, seed=seed + 50)
        # Pairs are those of the residual model, so they are recorded while the joins are neutral.
        source = Transformer(model_config("neutral"), seed=seed)
        source.load_state_dict(trained, strict=False)
        pairs = record_pairs(source, [loader.batch(i)[0] for i in range(4)])
        fits = warm_up(model, pairs, steps=40)
        print(f"  objective {statistics.fmean(f.before for f in fits.values()):.2f} -> "
              f"{statistics.fmean(f.after for f in fits.values()):.2f}", flush=True)  # fmt: skip
    if setting == "scratch":
        trunk = {name: value for name, value in fresh.items() if "_connection." not in name}
        model.load_state_dict(trunk, strict=False)
    return model


def steps_to(curve: list[float], goal: float) -> float:
    """Steps until the loss is at most `goal`, between evaluations by a straight line."""
    for i, loss in enumerate(curve):
        if loss <= goal:
            if i == 0:
                return 0.0
            return EVERY * (i - (goal - loss) / max(curve[i - 1] - loss, 1e-12))
    return math.inf


def report(runs: list[dict[str, Any]]) -> dict[str, dict]:
    """Print a table; the figures."""
    figures = {}
    print("| setting | start | at once | after 30 steps | at the end | steps to cold's end |\n"
          + "|---" * 6 + "|")  # fmt: skip
    for setting in SETTINGS:
        found = {(r["start"], r["seed"]): r["curve"] for r in runs if r["setting"] == setting}
        for start in STARTS:
            curves = [curve for (s, _), curve in found.items() if s == start]
            pairs = [(curve, found["cold", seed]) for (s, seed), curve in found.items()
                     if s == start]  # fmt: skip
            needed = [steps_to(curve, cold[-1]) for curve, cold in pairs]
            own = [steps_to(cold, cold[-1]) for _, cold in pairs]
            last = [curve[-1] for curve in curves]
            spread = statistics.stdev(last) if len(last) > 1 else float("nan")
            middle = [statistics.fmean(c[i] for c in curves) for i in (0, min(3, len(last)))]
            print(f"| {setting} | {start} | {middle[0]:.3f} | {middle[1]:.3f} | "
                  f"{statistics.fmean(last):.3f} ± {spread:.3f} | "
                  f"{statistics.median(needed):.0f} |")  # fmt: skip
            if start != "cold":
                ratio = statistics.median(
                    o / max(n, EVERY / 2) for o, n in zip(own, needed, strict=True)
                )
                figures[f"{setting}_{start}"] = {
                    "value": round(ratio, 3), "target": CLAIM, "better": "higher",
                }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small runs: shows that it works")
    parser.add_argument("--out", type=Path, help="file of finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    done = Finished(options.out, f"universal_warmup{'-quick' * quick}.jsonl")
    trained = lru_cache(maxsize=1)(lambda seed: pretrain(seed, 40 if quick else 300))

    def run(setting: str, start: str, seed: int) -> dict[str, Any]:
        steps, lr, warmup = SETTINGS[setting]
        model = begin(setting, start, seed, trained(seed))
        curve = train(model, 40 if quick else steps, lr, warmup, seed)
        print(f"{setting} {start} seed {seed}: {curve[-1]:.4f}", flush=True)
        return {"curve": curve}

    runs = [
        done.get({"setting": setting, "start": start, "seed": seed},
                 partial(run, setting, start, seed))
        for seed in (SEEDS[:1] if quick else SEEDS)
        for setting in SETTINGS
        for start in STARTS
    ]  # fmt: skip
    figures = report(runs)
    print(json.dumps({"benchmark": "universal_warmup", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
