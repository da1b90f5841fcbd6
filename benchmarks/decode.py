"""Greedy decoding on integers against our float32 and ONNX Runtime's int8.

    python benchmarks/decode.py [--quick] [--threads N] [--connection residual] [--scheme W8A8-KV8]

A model of 12 layers, D = 512, 8 heads, a vocabulary of 8,192; one text, a prompt of 64 tokens, then
tokens one by one. Three ways, taking turns so that a busy machine slows all: ours in float32; ours
at the scheme, on integers with the packed cache and fused steps; and ONNX Runtime, if installed:
the same graph with dynamic int8 products for the same linear layers (signed weights where the
processor has VNNI, else unsigned), its fused attention with rotation and a float32 cache written in
place through an IO binding, its fused norm and activation. Head and embedding are float32 in all
three. ONNX Runtime's logits are compared with ours before anything is timed.

Figures: tokens a second over float32 (`vs_fp32`) and over ONNX Runtime (`vs_onnxruntime`), medians
over rounds of the thread's own time, or of the clock with more threads; `cache_bytes` and
`weight_bytes` as shares of float32's.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch

from skipless.config import ConnectionConfig, ModelConfig
from skipless.decoding import fuse
from skipless.model import Transformer
from skipless.packages import not_installed
from skipless.quant import integer_layers, quantize, to_integer
from skipless.quant.integers.building import supported_levels
from skipless.quant.integers.layers import integer_state

PROMPT = 64


class Ours:
    """A model of ours that is told one token after the other."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @torch.no_grad()
    def start(self, ids: torch.Tensor) -> int:
        self.cache = self.model.new_cache()
        return self._next(ids)

    @torch.no_grad()
    def step(self, token: int) -> int:
        return self._next(torch.tensor([[token]]))

    def _next(self, ids: torch.Tensor) -> int:
        self.logits = self.model(ids, cache=self.cache, logits_to_keep=1).logits[0, -1]
        return int(self.logits.argmax())


class Runtime:
    """The same model in ONNX Runtime."""

    def __init__(self, model: Transformer, threads: int, capacity: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            onnx_graph(model, capacity), options, providers=["CPUExecutionProvider"]
        )
        config = model.config
        shape = (1, config.key_value_heads, capacity, config.head_dim)
        self.layers, self.capacity = config.num_hidden_layers, capacity
        self.new = lambda: onnxruntime.OrtValue.ortvalue_from_numpy(torch.zeros(shape).numpy())

    def start(self, ids: torch.Tensor) -> int:
        self.past = {
            f"{kind}_{n}": self.new() for n in range(self.layers) for kind in ("key", "value")
        }
        self.length = 0
        return self._next(ids.numpy())

    def step(self, token: int) -> int:
        import numpy as np

        return self._next(np.array([[token]], np.int64))

    def _next(self, ids) -> int:
        import numpy as np

        binding = self.session.io_binding()
        self.length += ids.shape[1]
        binding.bind_cpu_input("ids", ids)
        binding.bind_cpu_input("seqlens", np.array([self.length - 1], np.int32))
        binding.bind_cpu_input("total", np.array(self.length, np.int32))
        for name, value in self.past.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"new_{name}", value)  # in place
        binding.bind_output("logits", "cpu")
        binding.bind_output("token", "cpu")
        self.session.run_with_iobinding(binding)
        found = dict(
            zip((o.name for o in self.session.get_outputs()), binding.get_outputs(), strict=True)
        )
        self.logits = torch.from_numpy(found["logits"].numpy()[0, -1].copy())
        return int(found["token"].numpy()[0, -1])


def onnx_graph(model: Transformer, capacity: int) -> bytes:
    """The integer model as a graph: the same codes and scales, DynamicQuantizeLinear in front."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    config = model.config
    signed = "vnni" in supported_levels()
    zero, kind = (0, np.int8) if signed else (128, np.uint8)
    nodes: list[Any] = []
    constants: dict[str, Any] = {"wz": np.array(zero, kind)}

    def node(op: str, inputs: list[str], output: str | list[str], domain: str = "", **attributes):
        outputs = [output] if isinstance(output, str) else output
        nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def norm(x: str, module, name: str) -> str:
        constants[f"{name}.g"] = module.weight.detach().numpy()
        return node("SimplifiedLayerNormalization", [x, f"{name}.g"], f"{name}.y", axis=-1,
                    epsilon=module.eps, stash_type=1)  # fmt: skip

    def quantized(x: str, name: str) -> list[str]:
        node("DynamicQuantizeLinear", [x], [f"{name}.q", f"{name}.s", f"{name}.z"])
        return [f"{name}.q", f"{name}.s", f"{name}.z"]

    def linear(codes: list[str], module, name: str) -> str:
        from skipless.quant.integers.packing import unpack_panels

        own = integer_state(module)
        problem, prepared = own.prepared.problem, own.prepared
        form = _kernel(own).form(prepared)[0]
        weight = unpack_panels(
            prepared.data, problem.out_features, problem.in_features, quads=form >= 2,
            nibbles=form % 2 == 1,
        )  # fmt: skip
        constants[f"{name}.w"] = (weight.t().numpy().astype(np.int16) + zero).astype(kind)
        scale = prepared.column_scale[: problem.out_features].numpy()
        constants[f"{name}.ws"] = scale[:1] if (scale == scale[0]).all() else scale
        node("MatMulInteger", [codes[0], f"{name}.w", codes[2], "wz"], f"{name}.i")
        node("Cast", [f"{name}.i"], f"{name}.f", to=TensorProto.FLOAT)
        node("Mul", [codes[1], f"{name}.ws"], f"{name}.t")
        return node("Mul", [f"{name}.f", f"{name}.t"], f"{name}.y")

    positions = np.arange(capacity)[:, None]
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    angle = positions * config.rope_theta ** -exponent[None]
    constants |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    constants["embed"] = model.embed_tokens.weight.detach().numpy()
    stream = node("Gather", ["embed", "ids"], "stream")
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "new"]),
        helper.make_tensor_value_info("seqlens", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
    ]
    outputs = []
    cache_shape = [1, config.key_value_heads, capacity, config.head_dim]
    for n, block in enumerate(model.blocks):
        at, attention, mlp = f"l{n}", block.self_attn, block.mlp
        assert attention is not None and mlp is not None
        codes = quantized(norm(stream, block.input_layernorm, f"{at}.n1"), f"{at}.in")
        q, k, v = (
            linear(codes, getattr(attention, f"{name}_proj"), f"{at}.{name}") for name in "qkv"
        )
        for name in ("key", "value"):
            info = (TensorProto.FLOAT, cache_shape)
            inputs.append(helper.make_tensor_value_info(f"{name}_{n}", *info))
            outputs.append(helper.make_tensor_value_info(f"new_{name}_{n}", *info))
        node(
            "GroupQueryAttention",
            [q, k, v, f"key_{n}", f"value_{n}", "seqlens", "total", "cos", "sin"],
            [f"{at}.a", f"new_key_{n}", f"new_value_{n}"], domain="com.microsoft", do_rotary=1,
            num_heads=config.num_attention_heads, kv_num_heads=config.key_value_heads,
            scale=attention.temperature.scaling,
        )  # fmt: skip
        branch = linear(quantized(f"{at}.a", f"{at}.oin"), attention.o_proj, f"{at}.o")
        stream = node("Add", [stream, branch], f"{at}.s1")
        codes = quantized(norm(stream, block.post_attention_layernorm, f"{at}.n2"), f"{at}.up_in")
        up = linear(codes, mlp.up_proj, f"{at}.up")
        up = node("Gelu", [up], f"{at}.act", domain="com.microsoft")
        branch = linear(quantized(up, f"{at}.down_in"), mlp.down_proj, f"{at}.down")
        stream = node("Add", [stream, branch], f"{at}.s2")
    last = norm(stream, model.norm, "final")
    constants |= {"from": np.array([-1]), "to": np.array([2**31]), "axis": np.array([1])}
    last = node("Slice", [last, "from", "to", "axis"], "last")
    constants["head"] = model.lm_head.weight.detach().numpy().T.copy()
    node("MatMul", [last, "head"], "logits")
    node("ArgMax", ["logits"], "token", axis=-1, keepdims=0)
    outputs += [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1, config.vocab_size]),
        helper.make_tensor_value_info("token", TensorProto.INT64, [1, 1]),
    ]
    initializers = [numpy_helper.from_array(v, name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, initializers)
    made = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )
    made.ir_version = 8
    return made.SerializeToString()


def _kernel(own) -> Any:
    from skipless.quant.integers.engines import ENGINES

    return ENGINES[own.engine]


def weight_bytes(model: Transformer) -> int:
    """Bytes of the linear layers of the blocks, as they are multiplied."""
    total = 0
    for block in model.blocks:
        for module in block.modules():
            own = integer_state(module)
            if own is not None:
                total += own.prepared.num_bytes
            elif isinstance(module, torch.nn.Linear):
                total += module.weight.numel() * module.weight.element_size()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--connection", default="residual", help="kind; ONNX Runtime: residual")
    parser.add_argument("--scheme", default="W8A8-KV8")
    parser.add_argument("--vocab-size", type=int, default=8192)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds, per_round = (8, 16) if arguments.quick else (24, 16)
    capacity = PROMPT + rounds * per_round + 1
    config = ModelConfig(
        hidden_size=512, num_hidden_layers=12, num_attention_heads=8,
        vocab_size=arguments.vocab_size, max_position_embeddings=capacity,
        connection=ConnectionConfig(kind=arguments.connection),
    )  # fmt: skip
    plain = Transformer(config, seed=0).eval()
    integer = copy.deepcopy(plain)
    quantize(integer, arguments.scheme)
    to_integer(integer)
    engines = set(integer_layers(integer).values())
    ways: dict[str, Any] = {"float32": Ours(plain), "integers": Ours(integer)}
    if arguments.connection == "residual":
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401

            ways["onnxruntime"] = Runtime(integer, arguments.threads, capacity)
        except ImportError:
            print(f"{not_installed('onnx', 'onnxruntime')}, to compare with it")
    ids = torch.randint(config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    tokens = {name: way.start(ids) for name, way in ways.items()}
    for name, other in (("integers", "float32"), ("onnxruntime", "integers")):
        if name in ways:
            mine, theirs = ways[name].logits, ways[other].logits
            distance = float((mine - theirs).norm() / theirs.norm())
            print(f"logits of the prompt, {name} from {other}: {distance:.3f}")
            if name == "onnxruntime":
                assert distance < 0.15, "ONNX Runtime computes something else"
    fuse(integer)
    alone = arguments.threads == 1
    clock = time.process_time if alone else time.perf_counter
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            token, start = tokens[name], clock()
            for _ in range(per_round):
                token = way.step(token)
            speeds[name].append(per_round / (clock() - start))
            tokens[name] = token
    speed = {name: statistics.median(found) for name, found in speeds.items()}
    size = {"float32": weight_bytes(plain), "integers": weight_bytes(integer)}
    kept = {name: ways[name].cache.num_bytes for name in size}
    print(f"\n{arguments.scheme}, {arguments.threads} thread(s), engines {', '.join(engines)}")
    for name, found in speed.items():
        memory = (
            f"  weights {size[name] / 1e6:.1f} MB  cache {kept[name] / 1e6:.2f} MB"
            if name in size else ""
        )  # fmt: skip
        print(f"{name:>12} {found:8.1f} tokens/s  {found / speed['float32']:5.2f} x{memory}")
    figures = {
        "vs_fp32": {"value": round(speed["integers"] / speed["float32"], 3), "target": 2.5,
                    "better": "higher"},
        "weight_bytes": {"value": round(size["integers"] / size["float32"], 3), "better": "lower"},
        "cache_bytes": {"value": round(kept["integers"] / kept["float32"], 3), "better": "lower"},
        "tokens_per_second": {"value": round(speed["integers"], 1), "better": "higher"},
    }  # fmt: skip
    if "onnxruntime" in speed:
        ratio = speed["integers"] / speed["onnxruntime"]
        figures["vs_onnxruntime"] = {"value": round(ratio, 3), "target": 1.0, "better": "higher"}
    print(json.dumps({"benchmark": "decode", "threads": arguments.threads, "figures": figures}))


if __name__ == "__main__":
    main()
