"""What probing costs in training, and whether streaming equals one-shot.

    python benchmarks/probe_cost.py [--quick]

1. `cost_share`: CPU time of one measurement at the default settings (every 50 steps, 2,048 held-out
   tokens, all default sites, geometry and attention, gradient norms) over that of the 50 training
   steps it belongs to (8 x 128 tokens, D = 128, 8 layers, AdamW, the cheapest optimiser, so the
   share is the largest). One thread; the two are timed in turn so that a busy machine slows both.
2. `streaming_difference`: the largest difference |a - b| / max(1, |b|) between the probe's kurtosis
   over many batches and numpy's over all tokens at once, in every pooling, over all sites.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from skipless.config import ConnectionConfig, ModelConfig, OptimizerRecipe, ProbeConfig
from skipless.model import Transformer
from skipless.optim import build_optimizer
from skipless.probes import Probe, gradient_norms
from skipless.sites import first_tensor

BATCH, LENGTH, VOCABULARY = 8, 128, 2048


def build(kind: str) -> Transformer:
    """The model of the cost target: D = 128, 8 layers, context 128, vocabulary 2,048."""
    return Transformer(
        ModelConfig(
            hidden_size=128, num_hidden_layers=8, num_attention_heads=4, vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH, connection=ConnectionConfig(kind=kind),
        )
    )  # fmt: skip


def tokens(num_sequences: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (num_sequences, LENGTH), generator=generator)


def cpu_seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def cost(kind: str, num_rounds: int) -> dict[str, float]:
    """Median CPU seconds of a training step and of each part of a measurement."""
    settings = ProbeConfig()
    model = build(kind)
    optimizer = build_optimizer(OptimizerRecipe(name="adamw"), model)
    generator = torch.Generator().manual_seed(0)
    held_out = tokens(settings.num_tokens // LENGTH, generator)

    def step() -> None:
        ids = tokens(BATCH, generator)
        model(ids, labels=ids.roll(-1, 1)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad():
            model(held_out)

    def measure(stats: tuple[str, ...]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad(), Probe(model, stats=stats) as probe:
                model(held_out)
            if "moments" in stats:
                probe.table()
            if "geometry" in stats:
                probe.geometry()
            if "attention" in stats:
                probe.attention()

        return run

    parts: dict[str, Callable[[], object]] = {
        "training step": step,
        "forward alone": forward,
        **{f"with {stat}": measure((stat,)) for stat in settings.stats},
        "whole measurement": measure(settings.stats),
    }
    for action in parts.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in [*parts, "gradient norms"]}
    for _ in range(num_rounds):
        for name, action in parts.items():
            for _ in range(4 if name == "training step" else 1):
                times[name].append(cpu_seconds(action))
        ids = tokens(BATCH, generator)
        model(ids, labels=ids).loss.backward()
        times["gradient norms"].append(cpu_seconds(lambda: gradient_norms(model)))
        optimizer.zero_grad(set_to_none=True)
    return {name: statistics.median(values) for name, values in times.items()}


def streaming_difference(kind: str, num_batches: int) -> float:
    """The largest relative difference between streaming and one-shot kurtosis."""
    model = build(kind)
    generator = torch.Generator().manual_seed(1)
    kept: dict[str, list[np.ndarray]] = {}
    probe = Probe(model, stats=("moments",))
    modules = dict(model.named_modules())

    def keep(name: str, value: object) -> None:
        tensor = first_tensor(value)
        kept.setdefault(name, []).append(tensor.reshape(-1, tensor.shape[-1]).double().numpy())

    handles = []
    for site in probe.sites:
        module = modules[site.module]
        handles.append(
            module.register_forward_pre_hook(lambda _, args, n=site.name: keep(n, args))
            if site.direction == "input"
            else module.register_forward_hook(lambda _, __, y, n=site.name: keep(n, y))
        )
    with torch.no_grad(), probe:
        for number in range(num_batches):
            model(tokens(1 + number % 3, generator)[:, : LENGTH - 7 * number])
    for handle in handles:
        handle.remove()
    worst = 0.0
    for site in probe.sites:
        x, moments = np.concatenate(kept[site.name]), probe.moments[site.name]
        one_shot = [kurtosis(x, None), kurtosis(x, 1).mean(), *kurtosis(x, 0)]
        streamed = [moments.kurtosis(), moments.kurtosis_per_token()]
        streamed += moments.kurtosis_per_channel().tolist()
        difference = np.abs(np.array(streamed) - one_shot) / np.maximum(1, np.abs(one_shot))
        worst = max(worst, float(difference.max()))
    return worst


def kurtosis(x: np.ndarray, axis: int | None) -> np.ndarray:
    """S1 in float64 numpy, two passes."""
    centred = x - x.mean(axis, keepdims=True)
    return (centred**4).mean(axis) / (centred**2).mean(axis) ** 2 - 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    every = ProbeConfig().every
    shares = {}
    for kind in ("residual", "none"):
        times = cost(kind, 3 if quick else 12)
        step = times["training step"]
        measurement = times["whole measurement"] + times["gradient norms"]
        shares[kind] = measurement / (every * step)
        print(f"connection {kind}: CPU milliseconds, and share of {every} training steps")
        for name, seconds in times.items():
            share = "" if name == "training step" else f"{seconds / (every * step):8.2%}"
            print(f"  {name:20s} {seconds * 1e3:9.1f} {share}")
        print(f"  {'cost share':20s} {'':9s} {shares[kind]:8.2%}")
    difference = max(streaming_difference(kind, 4 if quick else 10) for kind in shares)
    print(f"streaming against one-shot: largest relative difference {difference:.2e}")
    figures = {
        "cost_share": {"value": round(max(shares.values()), 5), "target": 0.10, "better": "lower"},
        "streaming_difference": {"value": difference, "target": 1e-10, "better": "lower"},
    }
    print(json.dumps({"benchmark": "probe_cost", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
