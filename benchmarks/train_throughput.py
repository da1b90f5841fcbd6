"""Tokens per second of whole training steps, against two plain training scripts.

    python benchmarks/train_throughput.py [--quick]

Figures (ratio of tokens/s, higher is better, target 1.0):

    vs_hf_llama      ours with SwiGLU, RMSNorm and RoPE over transformers' LlamaForCausalLM (SDPA)
                     of the same shape and the same number of parameters
    vs_nanogpt       ours with GELU, LayerNorm and learned positions over a plain nanoGPT-style
                     model and loop, written in this file, of the same shape
    rf_vs_residual   ours residual-free (C2) over ours residual (C1)

Ours runs `skipless.train.Loop.advance`: batch, schedule, forward, backward, check that all is
finite, clipping, fused AdamW and a row of metrics.jsonl. The two peers run batch, forward,
backward, `clip_grad_norm_` and `torch.optim.AdamW(fused=True)`. fp32, one thread, the same token
batches. For each figure a round times ours, peer, peer, ours, so that a drifting machine slows both
alike; the figure is the median over rounds of the ratio of CPU times, which a busy machine disturbs
least. Peak memory is each contender's own process after three steps, beside the bare imports.

D = 256, 8 layers, 4 heads, context 256, vocabulary 4,096, 4 sequences a step; --quick has 4 layers
and fewer rounds (the head's share is then larger). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import (
    ConnectionConfig,
    InitConfig,
    ModelConfig,
    OptimizerRecipe,
    ProbeConfig,
    RunConfig,
    TrainConfig,
)
from skipless.data import Loader, PreparedData, Shard, write_shard
from skipless.rundir import RunDir
from skipless.train import Loop
from skipless.train.distributed import World

WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 256, 4, 256, 4096, 4
GATED_WIDTH = 688  # 8/3 of the width, rounded up to a multiple of 16, as Llama does
Step = Callable[[], object]


class PlainBlock(nn.Module):
    """A GPT block the way small training scripts write it: joint q/k/v, LayerNorm, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm_1(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """Embedding, learned positions, blocks, final norm, tied head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def plain_loop(model: nn.Module, loss: Callable, loader: Loader) -> Step:
    """The training step of a plain script around `loss(ids, labels)`."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    number = 0

    def step() -> None:
        nonlocal number
        value = loss(*loader.batch(number))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value.item()  # what a script logs
        number += 1

    return step


def hf_llama(num_layers: int, loader: Loader) -> tuple[nn.Module, Step]:
    """transformers' Llama with SDPA attention in the same plain loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=num_layers, num_attention_heads=HEADS,
        intermediate_size=GATED_WIDTH, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        tie_word_embeddings=True, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        # shift_labels are next tokens already, as ours are, so both learn from every position.
        return model(input_ids=ids, labels=labels, shift_labels=labels).loss

    return model, plain_loop(model, loss, loader)


def nanogpt(num_layers: int, loader: Loader) -> tuple[nn.Module, Step]:
    """The plain model in the plain loop."""
    model = PlainGPT(num_layers)
    return model, plain_loop(model, model, loader)


OURS: dict[str, dict] = {
    "ours, swiglu": {"hidden_act": "swiglu", "intermediate_size": GATED_WIDTH},
    "ours, gelu + layernorm": {"norm": "layernorm", "position": "learned"},
    "ours, residual": {},
    "ours, residual-free": {"connection": ConnectionConfig(kind="none")},
    "ours, residual-free + I7": {
        "connection": ConnectionConfig(kind="anneal"), "init": InitConfig(identity_bias=5.0),
    },
}  # fmt: skip
PEERS = {"HF LlamaForCausalLM": hf_llama, "nanoGPT-style": nanogpt}
RATIOS = {
    "vs_hf_llama": ("ours, swiglu", "HF LlamaForCausalLM"),
    "vs_nanogpt": ("ours, gelu + layernorm", "nanoGPT-style"),
    "rf_vs_residual": ("ours, residual-free", "ours, residual"),
    "rf_i7_vs_residual": ("ours, residual-free + I7", "ours, residual"),
}


def contender(name: str, num_layers: int, data: PreparedData, folder: Path):
    """(model, step) of one row of the table."""
    loader = Loader(data.train, LENGTH, BATCH)
    if name in PEERS:
        return PEERS[name](num_layers, loader)
    config = RunConfig(
        name=name,
        model=ModelConfig(
            hidden_size=WIDTH, num_hidden_layers=num_layers, num_attention_heads=HEADS,
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **OURS[name],
        ),
        optim=OptimizerRecipe(name="adamw"),
        train=TrainConfig(
            num_tokens=1000 * BATCH * LENGTH, batch_size=BATCH, sequence_length=LENGTH,
            device="cpu",
        ),
        probe=ProbeConfig(every=0),
    )  # fmt: skip
    run = RunDir.create(folder / name.replace(" ", "_"), config)
    loop = Loop(config, run, data, World())
    loop.resume()
    return loop.model, loop.advance


def random_data(folder: Path) -> PreparedData:
    """Shards of random tokens: speed does not depend on what is learned."""
    tokens = torch.randint(VOCABULARY, (400_000,), generator=torch.Generator().manual_seed(0))
    for split in ("train", "held_out"):
        write_shard(
            folder / split, [tokens.tolist()], vocab_size=VOCABULARY, eos_id=None,
            tokenizer_sha256="", counts={"num_bytes": 4 * len(tokens), "num_documents": 1},
        )  # fmt: skip
    return PreparedData(
        directory=folder, train=Shard.open(folder / "train"),
        held_out=Shard.open(folder / "held_out"), tokenizer_path=folder / "tokenizer.json",
        sources=("random",), notes=(), fallback_reason=None,
        num_documents={"train": 1, "held_out": 1},
    )  # fmt: skip


def measure(num_layers: int, num_rounds: int):
    """CPU seconds of every step by contender, ratios by figure and round, parameter counts."""
    names = [*OURS, *PEERS]
    with tempfile.TemporaryDirectory() as folder:
        data = random_data(Path(folder))
        made = {name: contender(name, num_layers, data, Path(folder)) for name in names}
        sizes = {n: sum(p.numel() for p in model.parameters()) for n, (model, _) in made.items()}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        ratios: dict[str, list[float]] = {figure: [] for figure in RATIOS}

        def timed(name: str) -> float:
            began = time.process_time()
            made[name][1]()
            seconds[name].append(time.process_time() - began)
            return seconds[name][-1]

        for _, step in made.values():
            step()
        for _ in range(num_rounds):
            for figure, (ours, peer) in RATIOS.items():
                mine, theirs = timed(ours), timed(peer)
                theirs, mine = theirs + timed(peer), mine + timed(ours)
                ratios[figure].append(theirs / mine)
    return seconds, ratios, sizes


def peak_memory(name: str, num_layers: int) -> float:
    """MiB at the peak of a process of its own that makes three steps; "" only imports."""
    command = [sys.executable, __file__, "--memory", name, "--layers", str(num_layers)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report_memory(name: str, num_layers: int) -> None:
    """What the process of `peak_memory` does."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (the same imports for all)

    with tempfile.TemporaryDirectory() as folder:
        if name:
            step = contender(name, num_layers, random_data(Path(folder)), Path(folder))[1]
            for _ in range(3):
                step()
    print(peak_mebibytes())


def peak_mebibytes() -> float:
    """The most memory this process has held, MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss is at least the parent's there, so it cannot be used
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 layers, fewer rounds")
    parser.add_argument("--layers", type=int, help="number of layers (default 8, quick 4)")
    parser.add_argument("--no-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_layers = options.layers or (4 if options.quick else 8)
    if options.memory is not None:
        report_memory(options.memory, num_layers)
        return
    seconds, ratios, sizes = measure(num_layers, 7 if options.quick else 20)
    print(f"D = {WIDTH}, {num_layers} layers, {BATCH} x {LENGTH} tokens a step, fp32, 1 thread")
    figures = {}
    for figure, values in ratios.items():
        values.sort()
        middle = statistics.median(values)
        low, high = values[len(values) // 4], values[-1 - len(values) // 4]
        print(f"{figure:18s} {middle:.3f}  (middle half of rounds {low:.3f} to {high:.3f})")
        figures[figure] = {"value": round(middle, 4), "target": 1.0, "better": "higher"}
    if options.no_memory:
        return
    bare = peak_memory("", num_layers)
    print(f"{'':26s} {'parameters':>11s} {'ms a step':>10s} {'tokens/s':>9s} {'peak MiB':>9s}")
    for name, values in seconds.items():
        middle = statistics.median(values)
        memory = peak_memory(name, num_layers) - bare
        speed = BATCH * LENGTH / middle
        print(f"{name:26s} {sizes[name]:11,d} {middle * 1e3:10.1f} {speed:9.0f} {memory:9.0f}")
    print(f"(peak memory is above the {bare:.0f} MiB of bare imports; times are CPU medians)")
    print(json.dumps({"benchmark": "train_throughput", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
