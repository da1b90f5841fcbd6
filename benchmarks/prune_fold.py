"""What pruning and folding do to a trained ReZero model: size, speed, loss, exactness.

    python benchmarks/prune_fold.py [--quick] [--budget NATS] [--out runs/prune-fold]

Trains recipe `connections-8-rezero` with SwiGLU (8 layers, width 128, 307,200 tokens), prunes it
within a loss budget, single sublayers and whole layers, folds each into a LlamaForCausalLM, saves
that, loads it with stock transformers and measures everything side by side:

    forward, generate   tokens a second of CPU time, one thread, medians of interleaved rounds: a
                        batch of 8 x 128 tokens; 64 new tokens after 16, with cache
    loss                nats a token on held-out documents; what to drop is chosen on others
    W8A8, W4A4          increase of that loss under simulated integers, scope linear

The peers are the model before, and the unpruned model folded. Figures: `logit_difference`, largest
difference between a model and what stock transformers makes of its folder, as a share of the
largest logit; ratios of tokens a second and of parameters, pruned over trained; `loss_increase` of
pruning, held out; `w4a4_change_by_folding`, largest. A finished training is kept and not repeated.

--quick trains 4 layers on 40,960 tokens: its losses mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

ROUNDS, QUICK_ROUNDS = 7, 5


def trained(out: Path, quick: bool):
    """The finished run."""
    from skipless import recipes
    from skipless.jsonable import override
    from skipless.train import load_run, train

    settings = {"model.hidden_act": "swiglu", "train.num_threads": "1"}
    if quick:
        settings |= {"train.num_tokens": "40960", "train.eval_every": "0",
                     "train.warmup_steps": "8", "train.eval_tokens": "4096"}  # fmt: skip
    name = f"connections-{4 if quick else 8}-rezero"
    train(override(recipes.get(name), settings), out / "trained")
    return load_run(out / "trained")


def stock(model, folder: Path):
    """(what stock transformers makes of the folded model's folder, difference of logits)."""
    from transformers import AutoModelForCausalLM

    from skipless.surgery.slimming.folding import difference, sample_inputs
    from skipless.surgery.slimming.stock import fold_to_stock

    fold_to_stock(model).model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    return again, difference(model, again, sample_inputs(model, None))


def seconds(model, ids) -> float:
    """CPU time of one forward pass."""
    import torch

    began = time.process_time()
    with torch.no_grad():
        model(ids)
    return time.process_time() - began


def generating(model, ids, num_tokens: int) -> float:
    """CPU time of greedy generation with cache."""
    from skipless.model import Transformer

    began = time.process_time()
    if isinstance(model, Transformer):
        found = model.generate(ids, num_tokens)
    else:
        found = model.generate(
            ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    elapsed = time.process_time() - began
    assert found.shape[1] == ids.shape[1] + num_tokens, "it stopped early"
    return elapsed


def speeds(models: dict, ids, rounds: int) -> dict[str, tuple[float, float]]:
    """Tokens a second of every model, forward and generating; models take turns."""
    forward = {name: [] for name in models}
    generate = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            pair = seconds(model, ids), generating(model, ids[:1, :16], 64)
            if number:  # the first round warms up
                forward[name].append(pair[0])
                generate[name].append(pair[1])
    return {
        name: (ids.numel() / statistics.median(forward[name]),
               64 / statistics.median(generate[name]))
        for name in models
    }  # fmt: skip


def table(models: dict, differences: dict, rates: dict, held_out: list) -> dict[str, dict]:
    """Print the Markdown table; size, loss and W4A4 increase of every model."""
    from skipless.evaluate import precision_table
    from skipless.surgery.slimming.removal import size_of

    heads = ("model", "class", "parameters", "cache, bytes a token", "forward, tokens/s",
             "generate, tokens/s", "loss", "W8A8", "W4A4", "logits differ by")  # fmt: skip
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    rows = {}
    for name, model in models.items():
        found = precision_table(model, held_out, ("W8A8", "W4A4"), ("linear",))
        size, (forward, generate) = size_of(model, held_out[0][0]), rates[name]
        loss, (w8a8, w4a4) = found[0]["full_precision"], (row["increase"] for row in found)
        gap = differences.get(name.removesuffix(", folded")) if "folded" in name else None
        print(
            f"| {name} | {type(model).__name__} | {size.num_parameters:,} | {size.cache_bytes:,} | "
            f"{forward:,.0f} | {generate:,.1f} | {loss:.4f} | {w8a8:+.4f} | {w4a4:+.4f} | "
            f"{'' if gap is None else f'{gap:.1e}'} |",
            flush=True,
        )
        rows[name] = {"size": size, "loss": loss, "W4A4": w4a4}
    return rows


def compared(rows: dict, rates: dict, budget: float) -> dict[str, dict]:
    """Figures of pruned models beside the trained one, and of folded beside folded."""
    figures, base = {}, rows["trained"]
    for unit, tag in (("sublayer", ""), ("layer", "_layers")):
        name = f"pruned by {unit}"
        if name not in rows:
            continue
        ratios = {
            "tokens_per_s_ratio": rates[name][0] / rates["trained"][0],
            "generate_ratio": rates[name][1] / rates["trained"][1],
            "stock_generate_ratio": rates[f"{name}, folded"][1] / rates["trained, folded"][1],
        }
        figures |= {f"{key}{tag}": figure(ratio, 1.0, "higher") for key, ratio in ratios.items()}
        parameters = rows[name]["size"].num_parameters / base["size"].num_parameters
        figures[f"parameters_ratio{tag}"] = figure(parameters, None, "lower")
        increase = rows[name]["loss"] - base["loss"]
        figures[f"loss_increase{tag}"] = figure(increase, budget, "lower")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 layers, 40,960 tokens")
    parser.add_argument("--budget", type=float, default=0.02, help="nats that pruning may cost")
    parser.add_argument("--tokens", type=int, help="to choose on, and as many to measure on")
    parser.add_argument("--out", type=Path, default=None, help="where the models go")
    options = parser.parse_args()
    out = options.out or Path("runs/prune-fold-quick" if options.quick else "runs/prune-fold")

    import torch

    from skipless.data import open_batches
    from skipless.errors import UserError
    from skipless.surgery import prune

    torch.set_num_threads(1)
    run = trained(out, options.quick)
    tokens = options.tokens or (4096 if options.quick else 16_384)
    chosen_on, held_out = (
        open_batches(run.config, run.data, split, 8, tokens) for split in ("train", "held_out")
    )
    models, differences = {"trained": run.model}, {}
    for unit in ("sublayer", "layer"):
        model = copy.deepcopy(run.model)
        try:
            prune(model, chosen_on, loss_budget=options.budget, unit=unit)
        except UserError as error:
            print(f"pruned by {unit}: {error}")
            continue
        models[f"pruned by {unit}"] = model
    for name in list(models):
        models[f"{name}, folded"], differences[name] = stock(models[name], out / f"{name}-stock")

    rates = speeds(models, held_out[0][0], QUICK_ROUNDS if options.quick else ROUNDS)
    rows = table(models, differences, rates, held_out)
    changes = [abs(rows[f"{n}, folded"]["W4A4"] - rows[n]["W4A4"]) for n in differences]
    figures = {
        "logit_difference": figure(max(differences.values()), 1e-5, "lower"),
        **compared(rows, rates, options.budget),
        "w4a4_change_by_folding": figure(max(changes), None, "lower"),
    }
    print(json.dumps({"benchmark": "prune_fold", "threads": 1, "figures": figures}))


def figure(value: float, target: float | None, better: str) -> dict:
    """One entry of the JSON line."""
    return {"value": float(f"{value:.3g}"), "target": target, "better": better}


if __name__ == "__main__":
    main()
