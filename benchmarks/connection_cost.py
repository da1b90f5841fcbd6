"""What a connection costs: time per step and peak memory at equal batch and length.

    python benchmarks/connection_cost.py [--quick] [--kinds KIND ...] [--profile KIND]

Every kind in a process of its own: 4 layers, D = 128, 4 heads, vocabulary 2,048, one sequence a
step, forward, backward and AdamW, with and without activation checkpointing. Time is the median CPU
time of a step on one thread (on CUDA the clock). Memory is what a step adds at its peak: on the
CPU the peak resident size over the size before the first step, on CUDA max_memory_allocated over
what was allocated; the optimiser's state is in it, the weights are not. The peer is the residual
connection, measured in the same run.

--quick has length 512 only, else 512, 2,048 and 8,192. --profile prints torch's per-operator table
of one kind instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = (
    "residual", "rezero", "layerscale", "none", "interpolate", "learned", "gated", "sphere",
    "universal",
)  # fmt: skip
PEER = KINDS[0]
LENGTHS = (512, 2_048, 8_192)
VOCABULARY = 2_048


def build(kind: str, length: int, checkpointing: bool, device: str):
    """(step(), model): one training step of a small model, and that model."""
    import torch

    from skipless.config import ConnectionConfig, ModelConfig, OptimizerRecipe, TrainConfig
    from skipless.model import Transformer
    from skipless.optim import build_optimizer
    from skipless.train.distributed import World, parallelise

    torch.set_num_threads(1)
    config = ModelConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=length, connection=ConnectionConfig(kind=kind),
    )  # fmt: skip
    model = Transformer(config).to(device)
    parallelise(model, TrainConfig(activation_checkpointing=checkpointing), World())
    optimizer = build_optimizer(OptimizerRecipe(name="adamw"), model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, length), generator=generator).to(device)

    def step() -> None:
        model(ids, labels=ids.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model


def resident() -> tuple[int, int]:
    """(now, peak) resident bytes of this process; Linux only."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(rest.split()[0]) * 1024
    return found["VmRSS"], found["VmHWM"]


def measure(kind: str, length: int, checkpointing: bool, device: str, steps: int) -> dict:
    """Seconds per step and bytes that a step adds at its peak, in this process."""
    import torch

    step, _ = build(kind, length, checkpointing, device)
    on_cuda = device.startswith("cuda")
    if on_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        memory = torch.cuda.max_memory_allocated() - before
    else:
        # The peak so far is that of importing torch; a step must exceed it to be seen at all.
        warm = torch.zeros(1)
        (warm @ warm).item()
        before, imported = resident()
        step()
        memory = resident()[1] - before
        if resident()[1] == imported:
            memory = 0
    seconds = []
    for _ in range(steps):
        began = time.perf_counter() if on_cuda else time.process_time()
        step()
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() if on_cuda else time.process_time()) - began)
    return {"seconds": statistics.median(seconds), "memory": memory}


def in_process(kind: str, length: int, checkpointing: bool, options) -> dict:
    """`measure` in a fresh interpreter, so that no kind sees another's memory."""
    command = [sys.executable, __file__, "--one", kind, str(length), str(int(checkpointing)),
               "--device", options.device, "--steps", str(options.steps)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def profile(kind: str, length: int, device: str) -> None:
    """torch's table of operators by their own time, over three steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step, _ = build(kind, length, False, device)
    step()
    activities = [ProfilerActivity.CPU]
    sort_by = "self_cpu_time_total"
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
        sort_by = "self_cuda_time_total"
    with profiler(activities=activities, profile_memory=True) as profiled:
        for _ in range(3):
            step()
    print(profiled.key_averages().table(sort_by=sort_by, row_limit=20))


def table(lengths: tuple[int, ...], kinds: tuple[str, ...], options) -> dict[str, dict]:
    """Print the Markdown table; the figures are ratios to the residual connection."""
    figures: dict[str, dict] = {}
    print("| length | connection | step | of residual | memory | of residual | checkpointing: step "
          "| memory |\n" + "|---" * 8 + "|")  # fmt: skip
    for length in lengths:
        peer: dict = {}
        for kind in kinds:
            plain = in_process(kind, length, False, options)
            recomputed = in_process(kind, length, True, options)
            peer = peer or plain
            time_ratio = plain["seconds"] / peer["seconds"]
            memory_ratio = plain["memory"] / peer["memory"] if peer["memory"] else float("nan")
            print(
                f"| {length} | {kind} | {1000 * plain['seconds']:.0f} ms | {time_ratio:.2f} | "
                f"{plain['memory'] / 2**20:.0f} MiB | {memory_ratio:.2f} | "
                f"{1000 * recomputed['seconds']:.0f} ms | {recomputed['memory'] / 2**20:.0f} MiB |",
                flush=True,
            )
            if kind != PEER:
                name = f"{kind}_{{}}_vs_residual_at_{length}"
                figures[name.format("time")] = {
                    "value": round(time_ratio, 3), "target": None, "better": "lower"
                }  # fmt: skip
                figures[name.format("memory")] = {
                    "value": round(memory_ratio, 3), "target": None, "better": "lower"
                }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="length 512 and fewer kinds")
    parser.add_argument("--kinds", nargs="+", choices=KINDS[1:], help="beside residual")
    parser.add_argument("--profile", metavar="KIND", help="per-operator table of one kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, length, checkpointing = options.one
        found = measure(kind, int(length), checkpointing == "1", options.device, options.steps)
        print(json.dumps(found))
    elif options.profile:
        profile(options.profile, LENGTHS[0], options.device)
    else:
        quick = tuple(k for k in KINDS if k not in ("interpolate", "learned", "sphere"))
        kinds = (PEER, *options.kinds) if options.kinds else quick if options.quick else KINDS
        figures = table(LENGTHS[:1] if options.quick else LENGTHS, kinds, options)
        print(json.dumps({"benchmark": "connection_cost", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
