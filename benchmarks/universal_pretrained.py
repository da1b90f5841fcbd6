"""A pretrained decoder trained on, with other connections in place of its skips.

    python benchmarks/universal_pretrained.py [--quick] [--out runs/universal_pretrained.jsonl]

SmolLM2-135M, every weight trained on presidents' addresses (`sotu`), 40 steps of 2 x 256 tokens:
as it is (the peer), and patched from the neutral start, where all are the same function:

  layerscale     x + gamma F, a gamma a channel from 1
  universal      rho 0, kappa 2
  universal-only the same, and nothing but the interpolators is trained

AdamW (0.9, 0.95) without decay, 2e-5 for the model's own weights and 3e-4 for those of
connections, 8 steps of warm-up, then constant, gradients clipped to 1, the same batches for all.
Held-out loss is of 16 sequences of the last addresses, every 10 steps. Memory is the peak resident
size of a run's own process, CPU time is its thread's.

Figures: held-out loss minus the peer's in nats at equal tokens, and at equal time (the peer's loss
at the last evaluation that a run has reached when the peer is done), mean over 2 seeds (which
passages a run reads). Finished runs stand in --out and are not repeated. --quick is a random model
of 2 layers for 4 steps: it shows that the machinery works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _finished import Finished
from torch import Tensor, nn

from skipless.config import ConnectionConfig
from skipless.data.preparing import DataConfig, resolve
from skipless.pretrained import fetch_model
from skipless.surgery import patch

PEER = "residual"
ROWS = (PEER, "universal", "layerscale", "universal-only")
SEEDS, STEPS, EVERY, BATCH, LENGTH, HELD_OUT = (0, 1), 40, 10, 2, 256, 16
LR, CONNECTION_LR, WARMUP = 2e-5, 3e-4, 8


def build(row: str, quick: bool) -> Any:
    """The model with this row's connections, in training mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if quick:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=256))  # fmt: skip
    else:
        model = AutoModelForCausalLM.from_pretrained(fetch_model("smollm2-135m"))
    kind = row.removesuffix("-only")
    if kind != PEER:
        by_channel = ConnectionConfig(kind="layerscale", init=1.0)
        patch(model, by_channel if kind == "layerscale" else kind)
    return model.train()


def read(quick: bool) -> tuple[Tensor, Tensor]:
    """Token ids to train on, and of the last addresses, held out: [n, LENGTH] each."""
    if quick:
        ids = torch.randint(256, (120, LENGTH), generator=torch.Generator().manual_seed(0))
        return ids[:-HELD_OUT], ids[-HELD_OUT:]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch_model("smollm2-135m"))
    texts = [document.text for document in resolve("sotu", DataConfig()).documents()]

    def rows(part: list[str], count: int) -> Tensor:
        ids, at = [], 0
        while len(ids) < count * LENGTH and at < len(part):
            ids += tokenizer(part[at], verbose=False)["input_ids"]
            at += 1
        return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)[:count]

    return rows(texts[:-20], 1_000), rows(texts[-20:], HELD_OUT)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(the model's own parameters, those of connections)."""
    named = list(model.named_parameters())
    return (
        [p for name, p in named if "_connection." not in name],
        [p for name, p in named if "_connection." in name],
    )


def norm(parameters: list[Tensor]) -> float:
    """Of all gradients together; 0 where there are none."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return float(nn.utils.get_total_norm(grads)) if grads else 0.0


@torch.no_grad()
def held_out_loss(model: Any, ids: Tensor) -> float:
    model.eval()
    losses = [float(model(part, labels=part, use_cache=False).loss) for part in ids.split(BATCH)]
    model.train()
    return statistics.fmean(losses)


def train(row: str, seed: int, quick: bool) -> dict[str, Any]:
    """One run: losses over tokens and time, gradients, memory."""
    torch.set_num_threads(1)
    training, held_out = read(quick)
    model = build(row, quick)
    own, connections = split(model)
    if row.endswith("-only"):
        for p in own:
            p.requires_grad_(False)
    groups = [{"params": own, "lr": LR}, {"params": connections, "lr": CONNECTION_LR}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if any(p.requires_grad for p in g["params"])],
        betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / WARMUP, 1))
    steps, every = (4, 2) if quick else (STEPS, EVERY)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    curve, seconds, depth, share, clipped = [], 0.0, [], [], 0
    for step in range(steps + 1):
        if step % every == 0:
            curve.append([step, seconds, held_out_loss(model, held_out)])
        if step == steps:
            break
        ids = training[order[step * BATCH : (step + 1) * BATCH]]
        start = time.process_time()
        model(ids, labels=ids, use_cache=False).loss.backward()
        if step % every == 0:
            layers = [split(layer)[0] for layer in model.model.layers]
            depth.append([norm(layer) for layer in layers])
            share.append(norm(connections) / norm(own) if norm(own) else float("nan"))
        clipped += float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 1.0
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.process_time() - start
    return {
        "row": row, "seed": seed, "steps": steps, "curve": curve, "depth": depth, "share": share,
        "clipped": clipped, "tokens_per_second": steps * BATCH * LENGTH / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def at_time(run: dict[str, Any], seconds: float) -> float:
    """The held-out loss at the last evaluation before `seconds` of training."""
    return [loss for _, spent, loss in run["curve"] if spent <= seconds][-1]


def report(runs: list[dict[str, Any]]) -> dict[str, dict]:
    """Print the table; the figures."""
    peers = {run["seed"]: run for run in runs if run["row"] == PEER}
    print("| connection | before | held-out loss | minus peer, equal tokens | equal time | first / "
          "last layer's gradient | connections' gradient / model's | tokens/s | peak MiB |\n"
          + "|---" * 9 + "|")  # fmt: skip
    figures = {}
    for row in ROWS:
        found = [run for run in runs if run["row"] == row]
        gaps, timed = [], []
        for run in found:
            peer = peers[run["seed"]]
            gaps.append(run["curve"][-1][2] - peer["curve"][-1][2])
            timed.append(at_time(run, peer["curve"][-1][1]) - peer["curve"][-1][2])
        mean, median = statistics.fmean, statistics.median
        ends = [layers[0] / max(layers[-1], 1e-30) for run in found for layers in run["depth"]]
        print(
            f"| {row} | {mean(run['curve'][0][2] for run in found):.3f} "
            f"| {mean(run['curve'][-1][2] for run in found):.3f} "
            f"| {mean(gaps):+.4f} ({', '.join(f'{gap:+.4f}' for gap in gaps)}) "
            f"| {mean(timed):+.4f} | {median(ends) if any(ends) else float('nan'):.2f} "
            f"| {median(s for run in found for s in run['share']):.3g} "
            f"| {median(run['tokens_per_second'] for run in found):.0f} "
            f"| {median(run['peak_mib'] for run in found):.0f} |"
        )
        if row != PEER:
            for name, values in (("tokens", gaps), ("time", timed)):
                figures[f"{row}_equal_{name}"] = {
                    "value": round(mean(values), 4), "target": 0.0, "better": "lower",
                }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small runs: shows that it works")
    parser.add_argument("--out", type=Path, help="file of finished runs")
    options = parser.parse_args()
    quick = options.quick
    done = Finished(options.out, f"universal_pretrained{'-quick' * quick}.jsonl")

    def run(row: str, seed: int) -> dict[str, Any]:
        """In a process of its own, for its peak of memory."""
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(train, (row, seed, quick))
        print(f"{row}, seed {seed}: {found['curve'][-1][2]:.4f}", flush=True)
        return found

    runs = [
        done.get({"row": row, "seed": seed}, partial(run, row, seed))
        for row in ROWS
        for seed in SEEDS
    ]
    figures = report(runs)
    print(json.dumps({"benchmark": "universal_pretrained", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
