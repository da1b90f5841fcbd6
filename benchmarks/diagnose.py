"""What measuring every site costs over the plain forward pass.

    python benchmarks/diagnose.py [--quick]

1. `all_sites_vs_forward`: CPU time of a forward pass of SmolLM2-135M (16 x 512 tokens in batches of
   4) with S1 to S3 measured at all sites and extreme and sampled tokens kept, over that of the
   plain pass of the same model (the peer). One thread, the two in turn, median of the ratios.
2. `extra_memory_mib`: how much higher the largest resident size is, each in a process of its own.

`--quick` takes 6 of the 30 layers, no head and 2 x 512 tokens: costs add up over layers, and the
head, of which only the input is measured, would make the share look smaller. Without a registry
weights are random in the same shape, which costs the same. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipless.data import UnreachableError
from skipless.diagnose.collect import Collector
from skipless.pretrained import fetch_model

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
BITS = (8,)
LENGTH = 512


def build(quick: bool) -> tuple[Any, str]:
    """(model, what it is)."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if quick:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).model
        return model.eval(), "6 layers of SmolLM2's shape, no head, random weights"
    try:
        return AutoModelForCausalLM.from_pretrained(fetch_model("smollm2-135m")).eval(), "SmolLM2"
    except UnreachableError:
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), "SmolLM2's shape, random weights"


def batches(quick: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size, number = (2, 1) if quick else (4, 4)
    return [
        torch.randint(SHAPE["vocab_size"], (size, LENGTH), generator=generator)
        for _ in range(number)
    ]


def ways(model: Any, data: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The plain pass and the measured one."""

    def forward() -> None:
        with torch.no_grad():
            for ids in data:
                model(ids)

    def sites() -> None:
        collector = Collector(model, BITS)
        with torch.no_grad(), collector.active():
            for ids in data:
                collector.run(ids)
        for record in collector.finished():
            record.moments.summary()

    return {"forward": forward, "sites": sites}


def peak_mib(way: str, quick: bool) -> float:
    """The largest resident size of a process that does nothing else."""
    command = [sys.executable, __file__, "--child", way, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a share of the layers and tokens")
    parser.add_argument("--child", choices=("forward", "sites"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, what = build(given.quick)
    data = batches(given.quick)
    both = ways(model, data)
    if given.child:
        both[given.child]()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    for action in both.values() if given.quick else ():
        action()
    times: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(5 if given.quick else 3):
        for name, action in both.items():
            start = time.process_time()
            action()
            times[name].append(time.process_time() - start)
    ratios = [b / a for a, b in zip(times["forward"], times["sites"], strict=True)]
    ratio = statistics.median(ratios)
    peaks = {name: peak_mib(name, given.quick) for name in both}
    extra = peaks["sites"] - peaks["forward"]
    tokens = sum(ids.numel() for ids in data)
    print(f"{what}, {tokens:,} tokens, one thread")
    for name, seconds in times.items():
        print(f"  {name:8s} {statistics.median(seconds):8.2f} CPU s  peak {peaks[name]:7.0f} MiB")
    print(
        f"  ratio {ratio:.2f} (from {min(ratios):.2f} to {max(ratios):.2f}), extra {extra:.0f} MiB"
    )
    figures = {
        "all_sites_vs_forward": {"value": round(ratio, 3), "target": 1.3, "better": "lower"},
        "extra_memory_mib": {"value": round(extra), "target": 300, "better": "lower"},
    }
    print(json.dumps({"benchmark": "diagnose", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
