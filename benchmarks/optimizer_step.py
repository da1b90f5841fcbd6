"""Cost of one optimiser step, against HeavyBall, pytorch-optimizer, torch and the bare products.

    python benchmarks/optimizer_step.py [--quick]

Figures (lower is better; ratios of wall times; the table has CPU times beside them):

    kl_vs_heavyball            our KL-Shampoo over HeavyBall's KLShampoo (eager: its compiled mode
                               does not finish on a CPU)
    kl_vs_reference            over our own reference=True, the published steps on whole matrices
    kl_vs_gemm_bound           over nothing but the five full products of cached inverse roots on
                               the same blocks, batched or block by block, whichever is faster
    soap_vs_pytorch_optimizer  our SOAP over pytorch-optimizer's
    muon_vs_peer               our Muon over the faster of pytorch-optimizer's and torch's with
                               their Newton-Schulz in fp32 (both force bf16 by themselves; the
                               table shows them so where the CPU has fast bf16 products)
    kl_worst_vs_median         our KL-Shampoo's dearest step over its median step, from the first
                               step on
    kl_state_bytes_ratio       its state over its parameters, bytes
    train_step_kl_vs_adamw     a whole training step (forward, backward, clipping, optimiser) with
                               KL-Shampoo over one with torch's fused AdamW, 4,096 tokens

12 layers of {3D x D, D x D, 4D x D, D x 4D} at D = 256, fp32, one thread; bases are refreshed every
10th step everywhere. The contenders take turns step by step, each round in another order, and each
ratio is one of medians over rounds after the first refresh cycle. Peers refresh all matrices in one
step of ten, which a median does not see: the column "cycle" (the mean over whole cycles) does.
Ours work in blocks of 256, the peers on whole matrices; "whole matrices" is ours without blocks.
For the dearest step, each step from the first on is repeated with fresh optimisers, and the least
of its times counts: what the step costs when nobody disturbs it.

--quick has 2 layers (3 in the training step, with a vocabulary as much smaller) and fewer rounds,
and stops adding rounds when its time is up: costs of layers add up, so ratios stay about the same.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.model import Transformer
from skipless.optim import SOAP, KLShampoo, Muon
from skipless.optim.blocks import make_layout

CYCLE = 10  # steps from refresh to refresh
TOKENS, LENGTH, VOCABULARY, LAYERS = 4096, 256, 4096, 12
TARGETS = {
    "kl_vs_heavyball": 0.3, "kl_vs_reference": 0.4, "kl_vs_gemm_bound": 1.3,
    "soap_vs_pytorch_optimizer": 0.5, "muon_vs_peer": 1.05, "kl_worst_vs_median": 1.5,
    "kl_state_bytes_ratio": 5.1, "train_step_kl_vs_adamw": 1.35,
}  # fmt: skip
KL, SOAP_, MUON = "KL-Shampoo", "SOAP", "Muon"
BOUNDS = ("bound: products, batched", "bound: products, block by block")
MUON_PEERS = ("pytorch-optimizer Muon, fp32", "torch.optim.Muon, fp32")


@dataclass
class Contender:
    """One row of the table: `step` is timed; `around` patches a peer while it steps."""

    name: str
    step: Callable[[], object]
    params: list[nn.Parameter] = field(default_factory=list)
    state: object = None
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, gradients: list[Tensor]) -> None:
        """One timed step with fresh copies of the gradients (some peers change or drop them)."""
        for p, g in zip(self.params, gradients, strict=bool(self.params)):
            p.grad = g.clone()
        with self.around():
            wall, cpu = time.perf_counter(), time.process_time()
            self.step()
            self.cpu.append(time.process_time() - cpu)
            self.wall.append(time.perf_counter() - wall)


def shapes(width: int, num_layers: int) -> list[tuple[int, int]]:
    d = width
    return [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * num_layers


def gradients(sizes: list[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [1e-2 * torch.randn(size, generator=generator) for size in sizes]


def made(name: str, build: Callable, sizes: list[tuple[int, int]], **more) -> Contender:
    """A contender around a torch optimiser; ours are told that all are hidden matrices."""
    params = [nn.Parameter(w) for w in gradients(sizes, seed=99)]
    optimizer = build(params)
    return Contender(name, optimizer.step, params, optimizer.state, **more)


def ours(cls: type, **options) -> Callable:
    """One of our optimisers over hidden matrices."""
    return lambda params: cls([{"params": params, "role": "matrix"}], lr=1e-4, **options)


def plain_newton_schulz(gradient: Tensor, coefficients, steps: int, eps: float) -> Tensor:
    """The published iteration on one matrix, in fp32, with torch.optim.Muon's arguments."""
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def fast_bf16() -> bool:
    """Whether a bf16 product here takes less than twice an fp32 one."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(256, 256).to(dtype)
        x @ x
        start = time.perf_counter()
        for _ in range(5):
            x @ x
        times[dtype] = time.perf_counter() - start
    return times[torch.bfloat16] < 2 * times[torch.float32]


def muon_peers(sizes: list[tuple[int, int]]) -> list[Contender]:
    """pytorch-optimizer's and torch's Muon with fp32 arithmetic, and in bf16 if that is fast."""
    from pytorch_optimizer.optimizer.muon import base as theirs
    from pytorch_optimizer.optimizer.muon.muon import Muon as PytorchOptimizerMuon

    def package(params):
        return PytorchOptimizerMuon([{"params": params, "use_muon": True}], lr=1e-4)

    wide = functools.partial(theirs.zero_power_via_newton_schulz_5, dtype=torch.float32)
    in_fp32 = functools.partial(mock.patch.object, theirs, "zero_power_via_newton_schulz_5", wide)
    contenders = [made(MUON_PEERS[0], package, sizes, around=in_fp32)]
    has_torch = hasattr(torch.optim, "Muon")
    if has_torch:
        from torch.optim import _muon

        plain = functools.partial(
            mock.patch.object, _muon, "_zeropower_via_newtonschulz", plain_newton_schulz
        )
        torchs = functools.partial(torch.optim.Muon, lr=1e-4)
        contenders.append(made(MUON_PEERS[1], torchs, sizes, around=plain))
    if fast_bf16():
        contenders.append(made("pytorch-optimizer Muon, bf16", package, sizes))
        if has_torch:
            contenders.append(made("torch.optim.Muon, bf16", torchs, sizes))
    else:
        print("bf16 products are slow on this CPU: the peers' bf16 forms are left out")
    return contenders


def bounds(sizes: list[tuple[int, int]]) -> list[Contender]:
    """The products alone, on the same blocks: A = G X_R, B = X_L G, X_L A, A A^T, B^T B."""
    layouts = [make_layout(size, block_size=256) for size in sizes]
    counts = Counter()
    for layout in layouts:
        counts[layout.block_shape] += layout.num_blocks
    stacks = []
    for (m, n), k in counts.items():
        shape = [(m, n), (m, m), (n, n), (m, n), (m, n), (m, n), (m, m), (n, n)]
        stacks.append([1e-2 * torch.randn(k, *s) for s in shape])

    def batched() -> None:
        for g, x_l, x_r, a, b, u, left, right in stacks:
            torch.bmm(g, x_r, out=a)
            torch.bmm(x_l, g, out=b)
            torch.bmm(x_l, a, out=u)
            left.baddbmm_(a, a.mT, beta=0.98, alpha=1e-3)
            right.baddbmm_(b.mT, b, beta=0.98, alpha=1e-3)

    def one_by_one() -> None:
        for stack in stacks:
            for g, x_l, x_r, a, b, u, left, right in zip(*stack, strict=True):
                torch.mm(g, x_r, out=a)
                torch.mm(x_l, g, out=b)
                torch.mm(x_l, a, out=u)
                left.addmm_(a, a.T, beta=0.98, alpha=1e-3)
                right.addmm_(b.T, b, beta=0.98, alpha=1e-3)

    return [Contender(BOUNDS[0], batched), Contender(BOUNDS[1], one_by_one)]


def contenders(sizes: list[tuple[int, int]]) -> list[Contender]:
    """Every row of the table."""
    import heavyball
    from pytorch_optimizer.optimizer.soap import SOAP as PytorchOptimizerSOAP

    heavyball.utils.compile_mode = None
    heavyball_kl = functools.partial(
        heavyball.KLShampoo, lr=1e-4, betas=(0.9, 0.98), shampoo_beta=0.98,
        precondition_frequency=CYCLE,
    )  # fmt: skip
    return [
        made(KL, ours(KLShampoo), sizes),
        made("  whole matrices", ours(KLShampoo, block_size=None), sizes),
        made("  packed triangles", ours(KLShampoo, packed=True), sizes),
        made("  reference=True", ours(KLShampoo, reference=True), sizes),
        made("HeavyBall KLShampoo, eager", heavyball_kl, sizes),
        *bounds(sizes),
        made(SOAP_, ours(SOAP), sizes),
        made(
            "pytorch-optimizer SOAP",
            functools.partial(PytorchOptimizerSOAP, lr=1e-4, precondition_frequency=CYCLE),
            sizes,
        ),
        made(MUON, ours(Muon), sizes),
        *muon_peers(sizes),
        made("torch.optim.AdamW, fused", functools.partial(torch.optim.AdamW, fused=True), sizes),
    ]


def rounds(number: int, least: int, seconds: float) -> Iterator[int]:
    """0 .. number - 1, ending early after `seconds` once `least` have been."""
    start = time.perf_counter()
    for i in range(number):
        if i >= least and time.perf_counter() - start > seconds:
            print(f"(time is up after {i} of {number} rounds)")
            return
        yield i


def take_turns(rows: list[Contender], sizes: list, turns: Iterator[int]) -> None:
    """Each contender once a round, the order turned by one each time."""
    pool = [gradients(sizes, seed) for seed in range(3)]
    for number in turns:
        shift = number % len(rows)
        for row in rows[shift:] + rows[:shift]:
            row.run(pool[number % len(pool)])


def dearest_over_median(sizes: list, num_steps: int, repeats: Iterator[int]) -> tuple[float, int]:
    """(largest over median of the undisturbed times of steps 1, 2, ..., that step)."""
    least = [math.inf] * num_steps
    pool = [gradients(sizes, seed) for seed in range(3)]
    for _ in repeats:
        row = made(KL, ours(KLShampoo), sizes)
        for step in range(num_steps):
            row.run(pool[step % len(pool)])
        least = [min(pair) for pair in zip(least, row.wall, strict=True)]
    return max(least) / statistics.median(least), 1 + least.index(max(least))


def tensor_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all tensors inside nested dicts, lists and tuples, each storage once."""
    if isinstance(value, Tensor):
        place = value.data_ptr()
        if place in seen:
            return 0
        seen.add(place)
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(v, seen) for v in value)
    return 0


def state_ratio(row: Contender) -> float:
    """State bytes over parameter bytes."""
    state = tensor_bytes(dict(row.state), set()) if row.state is not None else 0
    return state / max(sum(p.numel() * p.element_size() for p in row.params), 1)


def training_steps(width: int, num_layers: int, turns: Iterator[int]) -> list[Contender]:
    """Whole training steps with KL-Shampoo and with fused AdamW."""
    config = ModelConfig(
        hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=4,
        vocab_size=VOCABULARY * num_layers // LAYERS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    builds = {
        "training step, KL-Shampoo": KLShampoo,
        "training step, AdamW": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    }
    generator = torch.Generator().manual_seed(0)
    batch: list[Tensor] = []
    rows = []
    for name, build in builds.items():
        model = Transformer(config)
        optimizer = build(model)

        def step(model=model, optimizer=optimizer) -> None:
            model(batch[0], labels=batch[0].roll(-1, 1)).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        rows.append(Contender(name, step))
    for number in turns:
        ids = torch.randint(config.vocab_size, (TOKENS // LENGTH, LENGTH), generator=generator)
        batch[:] = [ids]
        for row in rows if number % 2 else rows[::-1]:
            row.run([])
    return rows


def middle(values: list[float], skip: int) -> float:
    """Median after the first `skip`."""
    return statistics.median(values[skip:])


def whole_cycles(values: list[float]) -> float:
    """Mean over whole refresh cycles after the first; nan if there is none."""
    later = values[CYCLE:]
    used = later[: len(later) // CYCLE * CYCLE]
    return statistics.fmean(used) if used else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 layers, fewer rounds, < 240 s")
    parser.add_argument("--layers", type=int, help="layers of matrices, and of the model")
    parser.add_argument("--rounds", type=int, help="rounds after the first refresh cycle")
    parser.add_argument("--width", type=int, default=256, help="D; 256 is what targets are for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick, width = options.quick, options.width
    num_layers = options.layers or (2 if quick else LAYERS)
    model_layers = options.layers or (3 if quick else LAYERS)
    num_rounds = CYCLE + (options.rounds or (2 * CYCLE if quick else 4 * CYCLE))
    budget = (lambda seconds: seconds) if quick else (lambda seconds: math.inf)
    sizes = shapes(width, num_layers)

    rows = contenders(sizes)
    take_turns(rows, sizes, rounds(num_rounds, CYCLE + 3, budget(110)))
    worst, at = dearest_over_median(sizes, 2 * CYCLE, rounds(5, 2, budget(25)))
    training = training_steps(width, model_layers, rounds(12 if quick else 20, 4, budget(60)))

    print(f"D = {width}, {num_layers} of {LAYERS} layers of matrices, fp32, 1 thread; a step, ms")
    print(f"{'':34s}{'wall':>9s}{'cycle':>9s}{'CPU':>9s}{'state/params':>14s}")
    wall, cpu = {}, {}
    for row in rows:
        wall[row.name], cpu[row.name] = middle(row.wall, CYCLE), middle(row.cpu, CYCLE)
        state = f"{state_ratio(row):14.2f}" if row.params else ""
        times = (wall[row.name], whole_cycles(row.wall), cpu[row.name])
        print(f"{row.name:34s}" + "".join(f"{x * 1e3:9.1f}" for x in times) + state)
    print(
        f"{model_layers} layers, {TOKENS} tokens, vocabulary {VOCABULARY * model_layers // LAYERS}"
    )
    for row in training:
        wall[row.name], cpu[row.name] = middle(row.wall, 2), middle(row.cpu, 2)
        print(f"{row.name:34s}{wall[row.name] * 1e3:9.1f}{'':9s}{cpu[row.name] * 1e3:9.1f}")
    print(f"dearest KL-Shampoo step: number {at}, {worst:.2f} times the median step")

    def ratio(ours: str, *peers: str) -> tuple[float, float]:
        present = [p for p in peers if p in wall]
        return tuple(t[ours] / min(t[p] for p in present) for t in (wall, cpu))

    ratios = {
        "kl_vs_heavyball": ratio(KL, "HeavyBall KLShampoo, eager"),
        "kl_vs_reference": ratio(KL, "  reference=True"),
        "kl_vs_gemm_bound": ratio(KL, *BOUNDS),
        "soap_vs_pytorch_optimizer": ratio(SOAP_, "pytorch-optimizer SOAP"),
        "muon_vs_peer": ratio(MUON, *MUON_PEERS),
        "train_step_kl_vs_adamw": ratio("training step, KL-Shampoo", "training step, AdamW"),
    }
    print(f"{'':28s}{'wall':>8s}{'CPU':>8s}   (the figures are those of wall time)")
    for name, (by_wall, by_cpu) in ratios.items():
        print(f"{name:28s}{by_wall:8.3f}{by_cpu:8.3f}")
    values = {name: by_wall for name, (by_wall, _) in ratios.items()}
    values["kl_worst_vs_median"] = worst
    values["kl_state_bytes_ratio"] = state_ratio(rows[0])
    figures = {
        name: {"value": round(values[name], 4), "target": target, "better": "lower"}
        for name, target in TARGETS.items()
    }
    print(json.dumps({"benchmark": "optimizer_step", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
