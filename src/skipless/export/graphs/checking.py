"""ONNX Runtime against the model that a graph was made of.

    full precision   largest difference of a logit over the largest logit, at most 1e-4
    quantised        SQNR (S3) of the logits to those in full precision, of the file's and of our
                     simulation: they differ by at most 0.1 dB

The second is not a comparison of numbers: a sum in another order can tip a value over a rounding
border, which changes later ones by a step, in either program alike, until after some layers the two
are different samples of the same noise. Its size is compared on 1,024 tokens, and where these are
too few to agree, on up to 16 times as many. Three passes are compared: a batch, the same with
padding on the left, and, with a cache, a text in four pieces. Read by `writing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.export.graphs.files import open_session
from skipless.model import Transformer
from skipless.quant import paused, quantization

LIMIT, LIMIT_DB = 1e-4, 0.1
Pieces = list[tuple[Tensor, Tensor]]
"""(ids [B, T], mask [B, S]) of each pass behind the same cache."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a file's logits are from those of the model, over all passes."""

    difference: float
    """Largest |difference| / largest |logit|."""
    sqnr_file: float | None = None
    """dB to the logits in full precision; None where nothing is quantised."""
    sqnr_simulated: float | None = None
    agreement: float | None = None
    """dB of the file's logits to the simulated ones."""

    def describe(self) -> str:
        """One line."""
        if self.sqnr_file is None or self.sqnr_simulated is None:
            return (
                "run by ONNX Runtime and compared with our model: largest difference of a logit "
                f"{self.difference:.2g} of the largest one"
            )
        return (
            f"SQNR of the logits to those in full precision: {self.sqnr_file:.2f} dB run by ONNX "
            f"Runtime, {self.sqnr_simulated:.2f} dB in our simulation; of the one to the other "
            f"{self.agreement:.1f} dB"
        )


def sample_size(model: Transformer) -> tuple[int, int]:
    """(texts, tokens of each) to begin with: 1,024 tokens, fewer where a vocabulary is large."""
    length = min(model.config.max_position_embeddings, 64)
    return max(2, min(16, 2**24 // (model.config.vocab_size * length))), length


def sample_ids(model: Transformer) -> Tensor:
    """Random token ids [B, T], 16 times as many as to begin with."""
    generator = torch.Generator().manual_seed(0)
    rows, length = sample_size(model)
    return torch.randint(model.config.vocab_size, (16 * rows, length), generator=generator)


def compare(model: Transformer, path: Path, ids: Tensor, *, cached: bool) -> Comparison:
    """Run the file and the model on `ids` [B, T]. Raises UserError when the limits are not kept."""
    session = open_session(path, threads=torch.get_num_threads())
    rows, sums, done = sample_size(model)[0], _Sums(), None
    for number, part in enumerate(ids.split(rows)):
        sums.add(model, session, part, cached)
        if number + 1 not in (1, 4, 16) and (number + 1) * rows < len(ids):
            continue
        done = sums.comparison(quantization(model) is not None)
        if done.sqnr_file is None or done.sqnr_simulated is None:
            break  # full precision needs no more
        if _agree(done) or number + 1 >= 16:
            break
    assert done is not None, "ids hold at least one text"
    if done.sqnr_file is None or done.sqnr_simulated is None:
        if not done.difference <= LIMIT:
            raise _refused(path, f"by {done.difference:.2g} of the largest logit, over {LIMIT:g}")
    elif not _agree(done):
        raise _refused(
            path, f"{done.sqnr_file:.2f} dB where the simulation has {done.sqnr_simulated:.2f}"
        )
    return done


def _agree(found: Comparison) -> bool:
    file, simulated = found.sqnr_file, found.sqnr_simulated
    assert file is not None and simulated is not None, "asked of quantised models"
    return file == simulated or abs(file - simulated) <= LIMIT_DB  # both may be infinite


class _Sums:
    """What two sets of logits have in common, summed over parts."""

    def __init__(self) -> None:
        self.largest = self.worst = 0.0
        self.signal, self.of_file, self.simulated, self.between, self.mine = [0.0] * 5

    @torch.no_grad()
    def add(self, model: Transformer, session: Any, ids: Tensor, cached: bool) -> None:
        """Run all passes on `ids`."""
        for pieces in _passes(ids, cached):
            found, mine = _of_file(session, pieces, model, cached), _of_model(model, pieces)
            if not bool(torch.isfinite(mine).all()):
                raise UserError("the model's logits are not finite; check its weights")
            self.largest = max(self.largest, float(mine.abs().max()))
            # max() would pass over NaN
            gap = (found - mine).abs().nan_to_num(nan=math.inf)
            self.worst = max(self.worst, float(gap.max()))
            if quantization(model) is None:
                continue
            with paused(model):
                exact = _of_model(model, pieces)
            self.signal += _energy(exact)
            self.of_file += _energy(found - exact)
            self.simulated += _energy(mine - exact)
            self.mine += _energy(mine)
            self.between += _energy(found - mine)

    def comparison(self, is_quantized: bool) -> Comparison:
        """The result so far."""
        difference = self.worst / max(self.largest, 1e-30)  # every logit may be 0
        if not is_quantized:
            return Comparison(difference=difference)
        return Comparison(
            difference=difference, sqnr_file=_decibels(self.signal, self.of_file),
            sqnr_simulated=_decibels(self.signal, self.simulated),
            agreement=_decibels(self.mine, self.between),
        )  # fmt: skip


def _passes(ids: Tensor, cached: bool) -> list[Pieces]:
    ones = torch.ones_like(ids)
    padded = ones.clone()
    padded[::2, : ids.shape[1] // 3] = 0
    passes: list[Pieces] = [[(ids, ones)], [(ids, padded)]]
    if cached and ids.shape[1] > 3:
        middle = ids.shape[1] // 2
        cuts = sorted({0, middle, middle + 1, middle + 2, ids.shape[1]})
        passes.append([(ids[:, a:b], padded[:, :b]) for a, b in zip(cuts, cuts[1:], strict=False)])
    return passes


def _energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def _decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf


def _refused(path: Path, how: str) -> UserError:
    return UserError(
        f"ONNX Runtime reads other logits from {path}: {how}; nothing was written, so try another "
        "version of onnxruntime, or report the model's config.json"
    )


def _of_model(model: Transformer, pieces: Pieces) -> Tensor:
    """Logits of tokens that are no padding, [tokens, V], on the CPU."""
    cache = model.new_cache() if len(pieces) > 1 else None
    device = next(model.parameters()).device

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(device)
        return model(ids.to(device), attention_mask=mask, cache=cache).logits.cpu()

    return _gathered(pieces, run)


def _of_file(session: Any, pieces: Pieces, model: Transformer, cached: bool) -> Tensor:
    config = model.config
    past: dict[str, np.ndarray] = {}
    if cached:
        shape = (len(pieces[0][0]), config.key_value_heads, 0, config.head_dim)
        names = [i.name for i in session.get_inputs() if i.name.startswith("past_key_values.")]
        past = {name: np.zeros(shape, np.float32) for name in names}

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        nonlocal past
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **past}
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(names, feed), strict=True))
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
        return torch.from_numpy(results["logits"])

    return _gathered(pieces, run)


def _gathered(pieces: Pieces, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found = []
    for ids, mask in pieces:
        logits = run(ids.contiguous(), mask.contiguous()).float()
        seen = mask[:, -ids.shape[1] :].bool()
        found.append(logits[seen] if logits.dim() == 3 else logits)
    return torch.cat(found)
