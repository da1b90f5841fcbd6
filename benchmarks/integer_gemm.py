"""Integer products against torch's float32 product, and that they are exact at these sizes.

    python benchmarks/integer_gemm.py [--quick] [--threads N] [--tokens 1 16 256]

768 -> 3072 and 3072 -> 768. For each engine that is exact here (`quant.hardware`): the product
with dequantisation and bias from codes that are there already, and the whole layer, which makes
the codes of a float32 activation first (dynamic absmax, per tensor). The peer is `F.linear` in
float32 on the same machine with the same threads, timed in turn with ours, so that a busy machine
slows both; medians, of the thread's own time when there is one, else of the clock. Weights of 12
layers (3 with --quick, and fewer rounds) are visited round robin, as in a network, so that neither
side finds them in a cache smaller than that. Figures are those of the whole layer with the engine
that `pick` chooses, geometric mean over the two shapes; `exact` is 1 when every sum equalled
int64's.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
from torch.nn import functional as F

from skipless.quant.engines import ENGINES, Problem
from skipless.quant.hardware import pick, probe, table
from skipless.quant.integer import activation_codes

SHAPES = ((768, 3072), (3072, 768))
SCHEMES = ((8, 8), (8, 12), (4, 8))
TARGETS = {"w8a8_b1": 3.5, "w8a12_b1": 3.5, "w8a8_b16": 1.5, "w8a12_b16": 1.5,
           "w8a8_b256": 1.0, "w8a12_b256": 1.0, "w4a8_b1": 5.0}  # fmt: skip


def seconds(action, rounds: int, num_layers: int) -> list[float]:
    """Seconds of each of `rounds` calls of action(layer); with one thread those it ran itself."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken = []
    for i in range(rounds):
        start = clock()
        action(i % num_layers)
        taken.append(clock() - start)
    return taken


def compare(
    shape: tuple[int, int], widths: tuple[int, int], tokens: int, rounds: int, num_layers: int
) -> dict[str, dict[str, float]]:
    """{engine: {"product", "layer" (speed over float32), "exact"}}."""
    width, out = shape
    problem = Problem(
        weight_bits=widths[0], activation_bits=widths[1], in_features=width, out_features=out
    )
    generator = torch.Generator().manual_seed(0)
    limit = problem.largest_weight
    weights = [
        torch.randint(-limit, limit + 1, (out, width), generator=generator, dtype=torch.int16)
        for _ in range(num_layers)
    ]
    scale = torch.rand(out, generator=generator) / limit
    bias = torch.randn(out, generator=generator)
    full = [(codes * scale[:, None]) for codes in weights]
    x = torch.randn(tokens, width, generator=generator)
    codes, row_scale = activation_codes(x, widths[1])
    names = [r.engine for r in probe() if r.usable and not ENGINES[r.engine].refuses(problem)]
    prepared = {name: [ENGINES[name].prepare(w, scale, problem) for w in weights] for name in names}
    expected = codes.to(torch.int64) @ weights[0].to(torch.int64).t()

    def product(name: str):
        return lambda i: ENGINES[name].linear(prepared[name][i], codes, row_scale, bias)

    def layer(name: str):
        def call(i: int) -> None:
            made, made_scale = activation_codes(x, widths[1])
            ENGINES[name].linear(prepared[name][i], made, made_scale, bias)

        return call

    actions = {("float32", "layer"): lambda i: F.linear(x, full[i], bias)}
    for name in names:
        actions[name, "product"], actions[name, "layer"] = product(name), layer(name)
    times: dict = {key: [] for key in actions}
    for action in actions.values():
        action(0)
    for _ in range(3):  # in turn
        for key, action in actions.items():
            times[key] += seconds(action, rounds, num_layers)
    peer = statistics.median(times["float32", "layer"])
    return {
        name: {
            part: peer / statistics.median(times[name, part]) for part in ("product", "layer")
        } | {"exact": float(torch.equal(
            ENGINES[name].sums(prepared[name][0], codes).to(torch.int64), expected
        ))}
        for name in names
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 3 layers instead of 12")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_layers = 3 if arguments.quick else 12
    for row in table(probe()):
        print("  ".join(str(value) for value in row.values()))
    print(f"\nspeed over F.linear in float32, {arguments.threads} thread(s)")
    print(f"{'tokens':>6} {'scheme':>7} {'shape':>11} {'engine':>8} {'product':>8} {'layer':>8}")
    figures: dict[str, dict] = {}
    is_exact = 1.0
    for tokens in arguments.tokens:
        rounds = max(3, (12 if arguments.quick else 60) // max(1, tokens // 16))
        for widths in SCHEMES:
            logs = []
            for shape in SHAPES:
                problem = Problem(weight_bits=widths[0], activation_bits=widths[1],
                                  in_features=shape[0], out_features=shape[1])  # fmt: skip
                chosen = pick(problem).name
                for name, row in compare(shape, widths, tokens, rounds, num_layers).items():
                    mark = "*" if name == chosen else " "
                    label, size = f"W{widths[0]}A{widths[1]}", f"{shape[0]}x{shape[1]}"
                    print(f"{tokens:6d} {label:>7} {size:>11} {name:>8}{mark}"
                          f"{row['product']:7.2f} {row['layer']:8.2f}", flush=True)  # fmt: skip
                    is_exact = min(is_exact, row["exact"])
                    if name == chosen:
                        logs.append(math.log(row["layer"]))
            key = f"w{widths[0]}a{widths[1]}_b{tokens}"
            figures[key] = {"value": round(math.exp(sum(logs) / len(logs)), 3), "better": "higher"}
            if key in TARGETS:
                figures[key]["target"] = TARGETS[key]
    figures["exact"] = {"value": is_exact, "target": 1.0, "better": "higher"}
    print(json.dumps({"benchmark": "integer_gemm", "threads": arguments.threads,
                      "figures": figures}))  # fmt: skip


if __name__ == "__main__":
    main()
