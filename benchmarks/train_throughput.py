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
batches. Each contender is a process of its own, as a training script is (ours then tells malloc to
keep freed memory, see skipless/train/memory.py; the peers are left as they are). A round times
ours, peer, peer, ours, so that a drifting machine slows both alike; the figure is the median over
rounds of the ratio of CPU times, which a busy machine disturbs least.

The last comparison is residual-free as the demo trains it: identity-biased attention (I7) and a
skip annealed away (C7); it is shown and has no target.

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
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
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
    "rf_i7_vs_residual (no target)": ("ours, residual-free + I7", "ours, residual"),
}

TARGETS = {"vs_hf_llama": 1.0, "vs_nanogpt": 1.0, "rf_vs_residual": 1.0}


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


class Worker:
    """A contender in a process of its own, which makes a step when asked."""

    def __init__(self, name: str, num_layers: int) -> None:
        command = [sys.executable, __file__, "--worker", name, "--layers", str(num_layers)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []

    def ask(self, what: str) -> float:
        """Send one word, get one number."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def step(self) -> float:
        """CPU seconds of one training step."""
        self.seconds.append(self.ask("step"))
        return self.seconds[-1]

    def close(self) -> dict[str, float]:
        """What the table shows."""
        row = {
            "seconds": statistics.median(self.seconds), "memory": self.ask("memory"),
            "parameters": self.ask("parameters"),
        }  # fmt: skip
        self.process.communicate()
        return row


def work(name: str, num_layers: int) -> None:
    """What a Worker's process does: words on stdin, numbers on stdout."""
    with tempfile.TemporaryDirectory() as folder:
        data = random_data(Path(folder))
        bare = memory("VmRSS")
        model, step = contender(name, num_layers, data, Path(folder))
        for word in map(str.strip, sys.stdin):
            if word == "step":
                began = time.process_time()
                step()
                answer = time.process_time() - began
            elif word == "memory":
                answer = memory("VmHWM") - bare
            else:
                answer = sum(p.numel() for p in model.parameters())
            print(answer, flush=True)


def memory(which: str) -> float:
    """MiB this process holds now ("VmRSS") or held at most ("VmHWM", and always off Linux)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith(which))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def compare(ours: str, peer: str, num_layers: int, num_rounds: int):
    """Ratios of CPU time, peer over ours, by round; and the table's two rows."""
    workers = Worker(ours, num_layers), Worker(peer, num_layers)
    for worker in workers:
        worker.ask("step")
        worker.ask("step")
    ratios = []
    for _ in range(num_rounds):
        mine, theirs = workers[0].step(), workers[1].step()
        theirs, mine = theirs + workers[1].step(), mine + workers[0].step()
        ratios.append(theirs / mine)
    return sorted(ratios), [worker.close() for worker in workers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 layers, fewer rounds")
    parser.add_argument("--layers", type=int, help="number of layers (default 8, quick 4)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_layers = options.layers or (4 if options.quick else 8)
    if options.worker:
        work(options.worker, num_layers)
        return
    print(f"D = {WIDTH}, {num_layers} layers, {BATCH} x {LENGTH} tokens a step, fp32, 1 thread")
    figures = {}
    for figure, (ours, peer) in RATIOS.items():
        ratios, rows = compare(ours, peer, num_layers, 8 if options.quick else 20)
        middle = statistics.median(ratios)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{figure}: {middle:.3f} (middle half of rounds {low:.3f} to {high:.3f})")
        print(f"  {'':26s}  parameters  ms a step  tokens/s  peak MiB")
        for name, row in zip((ours, peer), rows, strict=True):
            speed = BATCH * LENGTH / row["seconds"]
            print(f"  {name:26s} {row['parameters']:11,.0f} {row['seconds'] * 1e3:10.1f} "
                  f"{speed:9.0f} {row['memory']:9.0f}")  # fmt: skip
        if figure in TARGETS:
            target = TARGETS[figure]
            figures[figure] = {"value": round(middle, 4), "target": target, "better": "higher"}
    print("times are medians of CPU time; peak memory counts from before the model is built")
    print(json.dumps({"benchmark": "train_throughput", "threads": 1, "figures": figures}))


if __name__ == "__main__":
    main()
