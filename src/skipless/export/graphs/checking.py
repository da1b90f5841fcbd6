"""ONNX Runtime against the model that a graph was made of.

    full precision   largest difference of a logit over the largest logit, at most 1e-4
    quantised        SQNR (S3) of the logits to those in full precision, of the file's and of our
                     simulation: they differ by at most 0.1 dB

The second is not a comparison of numbers: a sum in another order can tip a value over a rounding
border, which changes later ones by a step, in either program alike. Three passes are compared: a
batch, the same with padding on the left, and, with a cache, a text in four pieces. Read by
`writing.py`.
"""

from __future__ import annotations

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
from skipless.probes import sqnr
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
            return f"ONNX Runtime: largest relative logit difference {self.difference:.2g}"
        return (
            f"ONNX Runtime: logits at {self.sqnr_file:.2f} dB, simulated "
            f"{self.sqnr_simulated:.2f} dB, to one another {self.agreement:.1f} dB"
        )


def sample_size(model: Transformer) -> tuple[int, int]:
    """(texts, tokens of each) to compare on: 1,024 tokens, fewer where a vocabulary is large."""
    length = min(model.config.max_position_embeddings, 64)
    return max(2, min(16, 2**24 // (model.config.vocab_size * length))), length


def sample_ids(model: Transformer) -> Tensor:
    """Random token ids [B, T]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, sample_size(model), generator=generator)


@torch.no_grad()
def compare(model: Transformer, path: Path, ids: Tensor, *, cached: bool) -> Comparison:
    """Run the file and the model on `ids` [B, T]. Raises UserError when the limits are not kept."""
    session = open_session(path, threads=torch.get_num_threads())
    ones = torch.ones_like(ids)
    padded = ones.clone()
    padded[::2, : ids.shape[1] // 3] = 0
    passes: list[Pieces] = [[(ids, ones)], [(ids, padded)]]
    if cached and ids.shape[1] > 3:
        cuts = [0, ids.shape[1] // 2, ids.shape[1] // 2 + 1, ids.shape[1] // 2 + 2, ids.shape[1]]
        cuts = sorted(set(cuts))
        passes.append([(ids[:, a:b], padded[:, :b]) for a, b in zip(cuts, cuts[1:], strict=False)])
    found, mine, exact = [], [], []
    for pieces in passes:
        found.append(_of_file(session, pieces, model, cached))
        mine.append(_of_model(model, pieces))
        if quantization(model) is not None:
            with paused(model):
                exact.append(_of_model(model, pieces))
    if not exact:
        top = max(float(m.abs().max()) for m in mine)
        worst = max(float((f - m).abs().max()) for f, m in zip(found, mine, strict=True))
        done = Comparison(difference=worst / top)
        if not done.difference <= LIMIT:
            raise _refused(path, f"by {done.difference:.2g} of the largest logit, over {LIMIT:g}")
        return done
    file, simulated, whole = (torch.cat([x.flatten() for x in p]) for p in (found, mine, exact))
    done = Comparison(
        difference=float((file - simulated).abs().max() / simulated.abs().max()),
        sqnr_file=float(sqnr(whole, file)), sqnr_simulated=float(sqnr(whole, simulated)),
        agreement=float(sqnr(simulated, file)),
    )  # fmt: skip
    assert done.sqnr_file is not None and done.sqnr_simulated is not None
    if not abs(done.sqnr_file - done.sqnr_simulated) <= LIMIT_DB:
        raise _refused(
            path, f"{done.sqnr_file:.2f} dB where the simulation has {done.sqnr_simulated:.2f}"
        )
    return done


def _refused(path: Path, how: str) -> UserError:
    return UserError(
        f"ONNX Runtime reads other logits from {path}: {how}; nothing was written, so try another "
        "version of onnxruntime, or report the model's config.json"
    )


def _of_model(model: Transformer, pieces: Pieces) -> Tensor:
    """Logits of tokens that are no padding, [tokens, V]."""
    cache = model.new_cache() if len(pieces) > 1 else None
    return _gathered(pieces, lambda ids, mask: model(ids, attention_mask=mask, cache=cache).logits)


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
