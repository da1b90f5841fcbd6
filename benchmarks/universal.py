"""What universal interpolation costs in training: tokens per second and peak memory.

    python benchmarks/universal.py [--quick] [--profile ROW] [--device cpu]

Figures, each a ratio to the residual connection (C1) in the same run:

    gate_mean      tokens/s with the gate and the aligner `mean`, no encoder
    gate_diagonal  tokens/s with the gate and the aligner `diagonal`, no encoder
    full           tokens/s with encoder, `diagonal` and gate
    memory         bytes that a training step of `full` adds at its peak

A step is forward, backward and AdamW of 2 layers, D = 1,024, 16 heads, vocabulary 2,048, one
sequence of 512 tokens, fp32, one thread. Each row is a model in one process; they take turns step
by step, each round in another order, and a ratio is the median over rounds of ratios of CPU times
(on CUDA of the clock), which a busy machine disturbs least. Freed memory is kept between steps, as
`skipless train` does.

Memory is what a step of four sequences adds at its peak, in a process of its own that gives freed
memory back: on the CPU the peak resident size over the size before the first step, on CUDA
max_memory_allocated over what was allocated. The gradients and the optimiser's state are in it, the
weights are not. Beside it the peak of forward and backward alone.

Without --quick also 256 and 1,024 tokens, the other aligners (cholesky and bures renew D x D
covariances every 64 tokens; sinkhorn belongs to encoders, against a residual encoder), fewer
rounds each. --profile prints torch's per-operator table of one row instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from connection_cost import resident

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 1_024, 2, 16, 2_048, 512
BATCH = 4
"""Sequences of a step whose memory is measured."""

PEER = "residual"
ROWS: dict[str, dict | None] = {
    "residual": None,
    "gate_mean": {"aligner": "mean", "encoder": False},
    "gate_diagonal": {"aligner": "diagonal", "encoder": False},
    "full": {"aligner": "diagonal"},
    "gate": {"aligner": "none", "encoder": False},
    "encoder_gate": {"aligner": "none"},
    "gate_cholesky": {"aligner": "cholesky", "encoder": False},
    "gate_bures": {"aligner": "bures", "encoder": False},
    "gate_sinkhorn": {"aligner": "sinkhorn", "encoder": False},
}
TARGETS = {"gate_mean": 0.95, "gate_diagonal": 0.85, "full": 0.75, "memory": 1.15}


def build(row: str, length: int, device: str, *, causal: bool = True, batch: int = 1,
          optimise: bool = True) -> Callable[[], None]:  # fmt: skip
    """A training step of the row's model; without `optimise` forward and backward only."""
    import torch

    from skipless.config import ConnectionConfig, ModelConfig, OptimizerRecipe, UniversalConfig
    from skipless.model import Transformer
    from skipless.optim import build_optimizer

    torch.set_num_threads(1)
    settings = ROWS[row]
    connection = ConnectionConfig(kind="residual") if settings is None else ConnectionConfig(
        kind="universal", universal=UniversalConfig(**settings)
    )  # fmt: skip
    config = ModelConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, causal=causal,
        vocab_size=VOCABULARY, max_position_embeddings=length, connection=connection,
    )  # fmt: skip
    model = Transformer(config).to(device)
    optimizer = build_optimizer(OptimizerRecipe(name="adamw"), model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch, length), generator=generator).to(device)

    def step() -> None:
        model(ids, labels=ids.roll(-1, 1)).loss.backward()
        if optimise:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def times(
    rows: list[str], length: int, device: str, rounds: int, causal: bool = True
) -> dict[str, list[float]]:
    """Seconds of each row's steps, taken in turns; the first round is not counted."""
    import torch

    from skipless.train.memory import keep_freed_memory

    keep_freed_memory()
    steps = {row: build(row, length, device, causal=causal) for row in rows}
    found: dict[str, list[float]] = {row: [] for row in rows}
    on_cuda = device.startswith("cuda")
    clock: Callable[[], float] = time.perf_counter if on_cuda else time.process_time
    for turn in range(rounds + 1):
        for shift in range(len(rows)):
            row = rows[(turn + shift) % len(rows)]
            began = clock()
            steps[row]()
            if on_cuda:
                torch.cuda.synchronize()
            if turn:
                found[row].append(clock() - began)
    return found


def memory(row: str, length: int, device: str, optimise: bool) -> int:
    """Bytes that the first step of the row adds at its peak, in this process."""
    import torch

    step = build(row, length, device, batch=BATCH, optimise=optimise)
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    warm = torch.zeros(1)
    (warm @ warm).item()
    before, earlier = resident()
    step()
    peak = resident()[1]
    return peak - before if peak > earlier else 0  # a step that importing torch exceeded


def in_process(row: str, length: int, optimise: bool, device: str) -> int:
    """`memory` in a fresh interpreter, so that no row sees another's."""
    command = [sys.executable, __file__, "--one", row, str(length), str(int(optimise)),
               "--device", device]  # fmt: skip
    # every large block is mapped and given back by itself, so that the peak is that of live tensors
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **malloc})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def compare(rows: list[str], length: int, device: str, rounds: int, causal: bool = True) -> dict:
    """Print one part of the table of times; ratios of tokens/s to the residual row."""
    found = times([PEER, *rows], length, device, rounds, causal)
    ratios = {}
    for row, seconds in found.items():
        pairs = zip(found[PEER], seconds, strict=True)
        ratios[row] = statistics.median(peer / own for peer, own in pairs)
        middle = statistics.median(seconds)
        kind = "" if causal else ", encoder"
        print(f"| {length} | {row}{kind} | {1000 * middle:,.0f} ms | {length / middle:,.0f} | "
              f"{ratios[row]:.3f} |", flush=True)  # fmt: skip
    return ratios


def profile(row: str, device: str) -> None:
    """torch's table of operators by their own time, over three steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step = build(row, LENGTH, device)
    step()
    activities = [ProfilerActivity.CPU]
    sort_by = "self_cpu_time_total"
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
        sort_by = "self_cuda_time_total"
    with profiler(activities=activities) as profiled:
        for _ in range(3):
            step()
    print(profiled.key_averages().table(sort_by=sort_by, row_limit=25))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the figures alone")
    parser.add_argument("--profile", metavar="ROW", choices=list(ROWS), help="table of operators")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    if options.one:
        row, length, optimise = options.one
        print(memory(row, int(length), device, optimise == "1"))
        return
    if options.profile:
        profile(options.profile, device)
        return
    print("| tokens | row | step | tokens/s | of residual |\n" + "|---" * 5 + "|")
    main_rows = ["gate_mean", "gate_diagonal", "full"]
    rounds = 7 if options.quick else 15
    ratios = compare(main_rows, LENGTH, device, rounds)
    if not options.quick:
        compare(["gate", "encoder_gate"], LENGTH, device, 5)
        for length in (256, 1_024):
            compare(main_rows, length, device, 5)
        compare(["gate_cholesky", "gate_bures"], LENGTH, device, 1)
        compare(["gate_sinkhorn"], LENGTH, device, 3, causal=False)
    print("\n| row | a step adds | of residual | forward and backward | of residual |\n"
          + "|---" * 5 + "|")  # fmt: skip
    peers: list[int] = []
    share = float("nan")
    for row in (PEER, *main_rows[:: 1 if not options.quick else -3]):
        used = [in_process(row, LENGTH, optimise, device) for optimise in (True, False)]
        peers = peers or used
        shares = [
            own / peer if peer else float("nan") for own, peer in zip(used, peers, strict=True)
        ]
        print(f"| {row} | {used[0] / 2**20:,.0f} MiB | {shares[0]:.3f} | "
              f"{used[1] / 2**20:,.0f} MiB | {shares[1]:.3f} |", flush=True)  # fmt: skip
        share = shares[0]
    figures = {
        name: {"value": round(value, 3), "target": TARGETS[name],
               "better": "lower" if name == "memory" else "higher"}
        for name, value in {**{row: ratios[row] for row in main_rows}, "memory": share}.items()
    }  # fmt: skip
    print(json.dumps({"benchmark": "universal", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
