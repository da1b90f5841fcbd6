"""Integer linear layers against torch's float32 and ONNX Runtime's int8, and that they are exact.

    python benchmarks/linear.py [--quick] [--threads N] [--tokens 1 16 256] [--engines vnni avx2]

768 -> 3072 and 3072 -> 768, the whole layer: codes of a float32 activation (dynamic absmax, per
tensor), product, scales, bias. Peers on the same machine with the same threads, timed in turn with
ours so that a busy machine slows all: `F.linear` in float32, and ONNX Runtime's dynamic int8
(DynamicQuantizeLinear, MatMulInteger; weights signed where the processor has VNNI, else unsigned,
the form that does not saturate) if it is installed. Medians; of the thread's own time when there is
one, else of the clock. Weights of 12 layers are visited round robin, as in a network, so that
neither side finds them in a cache smaller than that.

Figures are speeds over float32 with the engine that `pick` chooses, geometric means over the two
shapes; `*_vs_onnxruntime` the same over ONNX Runtime; `thread_scaling_vs_torch` what a second
thread gains ours at 256 tokens over what it gains torch, in the same minute; `exact` is 1 when
every sum equalled int64's.

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

from skipless.quant.integers.building import supported_levels
from skipless.quant.integers.codes import activation_codes
from skipless.quant.integers.engines import ENGINES, KernelEngine, Problem
from skipless.quant.integers.hardware import pick, probe, table

SHAPES = ((768, 3072), (3072, 768))
SCHEMES = ((8, 8), (8, 12), (4, 8))
TARGETS = {"w8a8_b1": 3.5, "w8a12_b1": 3.5, "w8a8_b16": 1.5, "w8a12_b16": 1.5,
           "w8a8_b256": 1.0, "w8a12_b256": 1.0, "w4a8_b1": 5.0}  # fmt: skip
PEER = "onnxruntime"


def medians(actions: dict, rounds: int, num_layers: int, repeats: int = 5) -> dict:
    """Median seconds of each action(layer), all taking turns."""
    alone = torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    taken: dict = {key: [] for key in actions}
    for action in actions.values():
        action(0)
    for _ in range(repeats):
        for key, action in actions.items():
            for i in range(rounds):
                start = clock()
                action(i % num_layers)
                taken[key].append(clock() - start)
    return {key: statistics.median(times) for key, times in taken.items()}


def layer(engine: str, weights: list, x: torch.Tensor, problem: Problem, bias: torch.Tensor):
    """action(i): our layer i on `x`."""
    kernel = ENGINES[engine]
    scale = torch.full((problem.out_features,), 0.01)
    prepared = [kernel.prepare(codes, scale, problem) for codes in weights]
    if isinstance(kernel, KernelEngine):
        return lambda i: kernel.from_floats(prepared[i], x, False, -1.0, bias)

    def call(i: int) -> torch.Tensor:
        codes, row_scale = activation_codes(x, problem.activation_bits)
        return kernel.linear(prepared[i], codes, row_scale, bias)

    return call


def onnx_layer(weights: list, x: torch.Tensor, bias: torch.Tensor):
    """action(i) of ONNX Runtime's dynamic int8, or None without the packages."""
    try:
        import numpy as np
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return None
    out, width = weights[0].shape
    signed = "vnni" in supported_levels()
    zero = 0 if signed else 128
    kind = np.int8 if signed else np.uint8
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = []
    for codes in weights:
        constants = {
            "w": (codes.t().numpy().astype(np.int16) + zero).astype(kind),
            "wz": np.array(zero, kind), "ws": np.array([0.01], np.float32), "b": bias.numpy(),
        }  # fmt: skip
        graph = helper.make_graph(
            nodes, "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", out])],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        sessions.append(
            onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        )
    feed = {"x": x.numpy()}
    return lambda i: sessions[i].run(None, feed)


def draw(shape: tuple[int, int], bits: int, num_layers: int) -> list[torch.Tensor]:
    """Weight codes [out, in] of some layers."""
    limit = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-limit, limit + 1, shape[::-1], generator=generator, dtype=torch.int16)
        for _ in range(num_layers)
    ]


def compare(shape, widths, tokens: int, rounds: int, num_layers: int, engines) -> dict:
    """{"float32", "onnxruntime", engine: median seconds} and whether each engine is exact."""
    problem = Problem(
        weight_bits=widths[0], activation_bits=widths[1], in_features=shape[0],
        out_features=shape[1],
    )  # fmt: skip
    weights = draw(shape, widths[0], num_layers)
    x, bias = torch.randn(tokens, shape[0]), torch.randn(shape[1])
    full = [codes.float() * 0.01 for codes in weights]
    actions = {"float32": lambda i: F.linear(x, full[i], bias)}
    if widths[1] <= 8 and (peer := onnx_layer(weights, x, bias)) is not None:
        actions[PEER] = peer
    names = [r.engine for r in probe() if r.usable and not ENGINES[r.engine].refuses(problem)]
    names = [name for name in names if not engines or name in engines]
    actions |= {name: layer(name, weights, x, problem, bias) for name in names}
    seconds = medians(actions, rounds, num_layers)
    codes, _ = activation_codes(x, widths[1])
    expected = codes.to(torch.int64) @ weights[0].to(torch.int64).t()
    exact = all(
        torch.equal(
            ENGINES[n]
            .sums(ENGINES[n].prepare(weights[0], torch.ones(shape[1]), problem), codes)
            .to(torch.int64),
            expected,
        )
        for n in names
    )
    return {"seconds": seconds, "exact": exact, "picked": pick(problem).name}


def thread_scaling(num_layers: int) -> float:
    """(our gain by a second thread) / (torch's gain), W8A8, 256 tokens, both shapes."""
    logs = []
    for shape in SHAPES:
        problem = Problem(
            weight_bits=8, activation_bits=8, in_features=shape[0], out_features=shape[1]
        )
        weights = draw(shape, 8, num_layers)
        x, bias = torch.randn(256, shape[0]), torch.randn(shape[1])
        full = [codes.float() * 0.01 for codes in weights]
        ours = layer(pick(problem).name, weights, x, problem, bias)
        theirs = lambda i, x=x, full=full, bias=bias: F.linear(x, full[i], bias)  # noqa: E731
        times: dict[tuple[int, int], list[float]] = {}
        for round_ in range(24):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for who, action in enumerate((ours, theirs)):
                    action(round_ % num_layers)  # wakes the threads
                    start = time.perf_counter()
                    action((round_ + 1) % num_layers)
                    times.setdefault((who, threads), []).append(time.perf_counter() - start)
        best = {key: statistics.median(taken) for key, taken in times.items()}
        gains = [best[who, 1] / best[who, 2] for who in (0, 1)]
        print(f"two threads, {shape[0]}x{shape[1]}: ours {gains[0]:.2f}x, torch {gains[1]:.2f}x")
        logs.append(math.log(gains[0] / gains[1]))
    return math.exp(sum(logs) / len(logs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--engines", nargs="+", help="only these (default: all that are exact)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_layers = 12
    for row in table(probe()):
        print("  ".join(str(value) for value in row.values()))
    print(f"\nspeed over F.linear in float32 (microseconds), {arguments.threads} thread(s)")
    figures: dict[str, dict] = {}
    is_exact = True
    for tokens in arguments.tokens:
        rounds = max(3, (24 if arguments.quick else 60) // max(1, tokens // 16))
        for widths in SCHEMES:
            over: dict[str, list[float]] = {"float32": [], PEER: []}
            for shape in SHAPES:
                found = compare(shape, widths, tokens, rounds, num_layers, arguments.engines)
                seconds, picked = found["seconds"], found["picked"]
                is_exact &= found["exact"]
                label = f"{tokens:4d} tokens  W{widths[0]}A{widths[1]:<3d}{shape[0]:5d}x{shape[1]}"
                print(label, f" float32 {seconds['float32'] * 1e6:.0f} us ", "  ".join(
                    f"{name}{'*' if name == picked else ''} {seconds['float32'] / taken:.2f}"
                    f" ({taken * 1e6:.0f})" for name, taken in seconds.items() if name != "float32"
                ), flush=True)  # fmt: skip
                for peer, logs in over.items():
                    if peer in seconds and picked in seconds:
                        logs.append(math.log(seconds[peer] / seconds[picked]))
            key = f"w{widths[0]}a{widths[1]}_b{tokens}"
            for peer, name in (("float32", key), (PEER, f"{key}_vs_{PEER}")):
                if over[peer]:
                    value = math.exp(sum(over[peer]) / len(over[peer]))
                    figures[name] = {"value": round(value, 3), "better": "higher"}
                    if name in TARGETS:
                        figures[name]["target"] = TARGETS[name]
    if arguments.threads == 1:
        figures["thread_scaling_vs_torch"] = {
            "value": round(thread_scaling(num_layers), 3), "target": 0.9, "better": "higher",
        }  # fmt: skip
    figures["exact"] = {"value": float(is_exact), "target": 1.0, "better": "higher"}
    print(json.dumps({"benchmark": "linear", "threads": arguments.threads, "figures": figures}))


if __name__ == "__main__":
    main()
