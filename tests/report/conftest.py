"""Run directories made by hand: the files of training and measuring, with plausible numbers.

`fabricate(path, ...)` writes one; what a test is about is an argument, the rest is a smooth curve.
"""

import json
import math
import random
from pathlib import Path

import pytest

from skipless.config import ConnectionConfig, ModelConfig, OptimizerRecipe, RunConfig, TrainConfig
from skipless.files import to_strict_json

SCHEMES = ("W8A12", "W8A8", "W8A6", "W8A5", "W8A4", "W4A4")
RISE = {"W8A12": 0.0, "W8A8": 0.002, "W8A6": 0.05, "W8A5": 0.25, "W8A4": 0.9, "W4A4": 1.0}
RESIDUAL = ConnectionConfig(kind="residual")
ANNEALED = ConnectionConfig(kind="anneal", anneal_fraction=0.5)
GREEDY = " said the king, and the people answered him with one voice."


def fabricate(
    path: Path,
    *,
    label: str = "",
    connection: ConnectionConfig = RESIDUAL,
    optimizer: str = "muon",
    loss: float = 4.5,
    kurtosis: float = 5.0,
    damage: float = 1.0,
    error: float = 1.0,
    layers: int = 8,
    steps: int = 200,
    seed: int = 0,
    note: str = "",
    without: tuple[str, ...] = (),
    samples: dict | None = None,
    standard_error: float = 0.012,
) -> Path:
    """Write a run directory; `damage` scales the loss increases, `without` names missing files."""
    rng = random.Random(f"{path.name}{seed}")
    config = RunConfig(
        name=path.name,
        label=label,
        note=note,
        model=ModelConfig(
            hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=2048,
            max_position_embeddings=128, connection=connection,
        ),
        optim=OptimizerRecipe(name=optimizer, lr=5e-3),
        train=TrainConfig(num_tokens=steps * 1024, seed=seed),
    )  # fmt: skip
    free = connection.kind != "residual"
    path.mkdir(parents=True)
    files = {
        "config.json": config.to_dict(),
        "environment.json": {
            "skipless": "0.1.0", "python": "3.12.4", "torch": "2.13.0+cpu", "threads": 1,
            "processor": "Some CPU @ 2.1 GHz", "cores": 2, "cuda": None,
            "started": "2026-01-02T03:04:05Z", "command": f"skipless train {path.name} --measure",
        },
        "train.json": {"seconds": 123.4, "tokens": steps * 1024},
        "metrics.jsonl": _metrics(loss, steps, rng),
        "probes.jsonl": [_probe(s, kurtosis * s / steps, layers, free, s / steps, rng)
                         for s in range(steps // 4, steps + 1, steps // 4)],
        "probe.json": _probe(steps, kurtosis, layers, free, 1.0, rng),
        "quant.json": _quant(loss, damage, error, layers, free, rng),
        "eval.json": {
            "held_out_loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2.4,
            "num_tokens": 32768, "standard_error": standard_error,
        },
        "samples.json": samples or {"prompt": "The king", "greedy": GREEDY, "sampled": " went out"},
    }  # fmt: skip
    for name, value in files.items():
        if name in without:
            continue
        lines = value if isinstance(value, list) else [value]
        text = "\n".join(to_strict_json(line) for line in lines)
        (path / name).write_text(text + "\n")
    return path


def _metrics(loss: float, steps: int, rng: random.Random) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        value = loss + 3.1 * math.exp(-6 * step / steps) + rng.gauss(0, 0.05)
        rows.append({"step": step, "tokens": step * 1024, "loss": value, "lr": 5e-3,
                     "grad_norm": 1.0, "seconds": step * 0.6})  # fmt: skip
        if step % max(1, steps // 8) == 0:
            held_out = loss + 3.1 * math.exp(-6 * step / steps) * (step < steps)
            rows.append({"step": step, "held_out_loss": held_out,
                         "held_out_bits_per_byte": held_out / 2.4})  # fmt: skip
    return rows


def _probe(step: int, kurtosis: float, layers: int, free: bool, done: float, rng) -> dict:
    sites, attention = [], []
    for layer in range(layers):
        bump = math.sin(math.pi * (layer + 1) / (layers + 1))
        for sublayer in ("attention", "mlp"):
            sites.append({
                "site": f"layers.{layer}.{sublayer}_connection:output", "kind": "stream",
                "layer": layer, "sublayer": sublayer, "count": 16384 * 128, "mean": 0.01,
                "std": 1.0 if free else 1.0 + 0.6 * layer, "kurtosis": kurtosis * bump,
            })  # fmt: skip
        sites.append({"site": f"layers.{layer}.mlp.act:output", "kind": "activation_output",
                      "layer": layer, "sublayer": "mlp", "kurtosis": 1e6})  # fmt: skip
        attention.append({"layer": layer, "entropy": 1.6 + 0.2 * layer,
                          "first_token_mass": (0.02 if free else 0.1) * (1 + layer)})  # fmt: skip
    gains = {f"layers.{i}.mlp_connection.a": [max(0.0, 1 - 2 * done)] for i in range(layers)}
    return {
        "step": step, "sites": sites, "geometry": [], "attention": attention,
        "gradient_norms": {**{str(i): 0.1 * (1 + rng.random()) * (i + 1) for i in range(layers)},
                           "embed_tokens": 0.3},
        "isometry_drift": {"update_rms": 0.01}, "gains": gains if free else {},
    }  # fmt: skip


def _quant(loss: float, damage: float, error: float, layers: int, free: bool, rng) -> dict:
    rows = [
        {"scheme": s, "scope": scope, "loss": loss + RISE[s] * damage * share,
         "increase": RISE[s] * damage * share, "perplexity": math.exp(loss)}
        for scope, share in (("linear", 0.7), ("block", 1.0)) for s in SCHEMES
    ]  # fmt: skip
    return {
        "full_precision": loss,
        "rows": rows,
        "error": {"scheme": "W4A4", "scope": "block", "rows": [
            {"layer": i, "sublayer": s, "r": error * (i + 0.5 * (s == "mlp") + 0.5) / layers}
            for i in range(layers) for s in ("attention", "mlp")]},
        "sqnr": {"scheme": "W4A4", "rows": [
            {"site": f"layers.{i}.{k}", "kind": "linear_input", "layer": i, "ideal": 18.9,
             "sqnr": (17.5 if free else 14.5) - rng.random() * (3 if free else 8), "gap": 99.0}
            for i in range(layers) for k in ("self_attn.o_proj:input", "mlp.down_proj:input")]},
    }  # fmt: skip


@pytest.fixture(scope="session")
def make():
    """The function `fabricate`."""
    return fabricate


@pytest.fixture
def edit():
    """`edit(run, name, change)`: pass a run's JSON file through `change(value)` in place."""

    def apply(run: Path, name: str, change) -> None:
        file = run / name
        value = json.loads(file.read_text())
        result = change(value)
        file.write_text(json.dumps(value if result is None else result))

    return apply


@pytest.fixture
def four(tmp_path):
    """Two optimisers with and without skips; without, the loss is higher."""
    free = {"connection": ANNEALED, "kurtosis": 0.3}
    return [
        fabricate(tmp_path / "res-kl", label="residual + KL-Shampoo", optimizer="kl_shampoo",
                  loss=4.55, damage=0.54, error=0.74, kurtosis=6.0),
        fabricate(tmp_path / "rf-kl", label="residual-free + KL-Shampoo", optimizer="kl_shampoo",
                  loss=4.64, damage=1.21, error=1.02, **free),
        fabricate(tmp_path / "res-muon", label="residual + Muon", loss=4.49, damage=1.01,
                  error=1.04, kurtosis=40.0),
        fabricate(tmp_path / "rf-muon", label="residual-free + Muon", loss=4.63, damage=0.45,
                  error=0.66, **free),
    ]  # fmt: skip
