"""One pass over the data: S1 to S3 of every linear and norm input and output, sublayer and stream.

Hooks feed one `TensorRecord` a tensor: sites that see the same tensor (a norm's output is the input
of three projections) share it. Memory does not depend on the amount of data, but for the token ids,
which are kept to name outlier tokens. Outputs of heads (logits) are left out: they are as wide as
the vocabulary and are not quantised. Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipless.diagnose.kernel import fused_sums
from skipless.errors import UserError
from skipless.heads import find_heads
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.outliers import NUM_EXTREME, NUM_SAMPLED, Outliers
from skipless.probes.passes import ForwardPass
from skipless.quant import run_batch
from skipless.sites import Site, find_sites, first_tensor

KINDS = (
    "embedding", "stream", "sublayer_output", "norm_input", "norm_output", "linear_input",
    "linear_output",
)  # fmt: skip
"""What is measured; norm_input is only found here."""
SAMPLE_BYTES = 128 << 20
"""Kept rows of all tensors together stay below this; it sets how many tokens are sampled."""


@dataclass(frozen=True)
class Place:
    """A site and what kind it is."""

    site: Site
    kind: str


@dataclass(kw_only=True)
class TensorRecord:
    """Statistics of one tensor and the sites that see it."""

    places: list[Place] = field(default_factory=list)
    moments: Moments = field(default_factory=Moments)
    outliers: Outliers = field(default_factory=Outliers)
    num_seen: int = 0
    """Tokens so far, padding included: the number of the next one."""
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, sequences, length) of every batch."""

    @property
    def name(self) -> str:
        """The first site that saw it."""
        return self.places[0].site.name


def find_places(model: nn.Module) -> list[Place]:
    """Every place to measure, in the order of the model."""
    heads = find_heads(model)
    places = []
    for site in find_sites(model):
        if site.kind == "norm_output" and site.direction == "output":
            before = Site(
                name=f"{site.module}:input", module=site.module, direction="input",
                layer=site.layer, sublayer=site.sublayer,
            )  # fmt: skip
            places.append(Place(before, "norm_input"))
        if site.kind in KINDS and not (site.kind == "linear_output" and site.module in heads):
            places.append(Place(site, site.kind))
    return places


class Collector:
    """Measures `model` inside a `with collector.active():` block, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        widths: Iterable[int] = (),
        *,
        num_extreme: int = NUM_EXTREME,
        sample_bytes: int = SAMPLE_BYTES,
        outliers: bool = True,
    ) -> None:
        self.model, self.widths = model, tuple(widths)
        self.places = find_places(model)
        self.num_extreme, self.sample_bytes = num_extreme, sample_bytes
        self.records: dict[str, TensorRecord] = {}
        """By the name of the first site that saw the tensor, in order of computation."""
        self.ids: list[tuple[int, Tensor]] = []
        """(batch number, token ids [B, T] on the CPU)."""
        self.num_batches = 0
        self._of: dict[str, str] = {}
        self._pass = ForwardPass()
        self._num_sampled = NUM_SAMPLED
        self._keeps = outliers

    @contextmanager
    def active(self) -> Iterator[Collector]:
        """Hooks on the model for the length of a with statement; gone afterwards, come what may."""
        modules = dict(self.model.named_modules())
        handles: list[Any] = []
        try:
            handles.append(
                self.model.register_forward_pre_hook(self._start, with_kwargs=True)
            )  # fmt: skip
            for place in self.places:
                module = modules[place.site.module]
                if place.site.direction == "input":
                    hook = self._input_hook(place)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(self._output_hook(place)))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self._pass = ForwardPass()

    def run(self, batch: Any) -> None:
        """One batch through the model; a no-grad context is the caller's."""
        if not self.num_batches and self._keeps:
            self._size_sample()
        self.ids += [(self.num_batches, ids) for ids in _token_ids(batch)]
        run_batch(self.model, batch)
        self.num_batches += 1

    def _size_sample(self) -> None:
        """How many tokens of each tensor fit into the bytes for samples, from the modules' widths.

        Norms and linears that see one tensor are counted once each, so that it is an upper bound.
        """
        modules = dict(self.model.named_modules())
        total = 0
        for place in self.places:
            if place.site.direction == "output":
                weight = getattr(modules[place.site.module], "weight", None)
                total += weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0
        room = self.sample_bytes // (4 * max(1, total)) - self.num_extreme
        self._num_sampled = max(NUM_SAMPLED // 3, min(4 * NUM_SAMPLED, room))

    def _start(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self._pass = ForwardPass.start(self.model, args, kwargs)

    def _input_hook(self, place: Place) -> Callable[..., None]:
        return lambda _, args, kwargs: self._measure(place, first_tensor([args, kwargs]))

    def _output_hook(self, place: Place) -> Callable[..., None]:
        return lambda _, __, result: self._measure(place, first_tensor(result))

    @torch.no_grad()
    def _measure(self, place: Place, x: Tensor | None) -> None:
        if x is None or not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0:
            return
        name = place.site.name
        leader = self._pass.remember(x, "record", lambda: self._add(name, x))
        if self._of.setdefault(name, leader) == leader:
            record = self.records[leader]
            if not any(p.site.name == name for p in record.places):
                record.places.append(place)

    def _add(self, name: str, x: Tensor) -> str:
        """Take in `x` under the record of `name`; returns the record's name."""
        record = self.records.get(name)
        if record is None:
            outliers = Outliers(
                self.widths,
                num_extreme=self.num_extreme,
                num_sampled=self._num_sampled,
                fused=fused_sums,
            )
            record = self.records[name] = TensorRecord(outliers=outliers)
        mask = self._pass.mask_for(x)
        try:
            if self._keeps:
                moments = record.outliers.update(x, mask, first=record.num_seen)
            else:
                moments = batch_moments(x, mask)
            record.moments.merge(moments)
        except UserError as error:
            raise UserError(f"site {name}: {error}") from None
        total = x.numel() // x.shape[-1]
        length = x.shape[1] if x.dim() > 2 else 1
        record.shapes.append((record.num_seen, total // max(1, length), length))
        record.num_seen += total
        return name

    def finished(self) -> list[TensorRecord]:
        """The records in order. Raises UserError when nothing was seen."""
        found = [r for r in self.records.values() if r.places]
        if not found:
            raise UserError(
                f"nothing of {type(self.model).__name__} that could be measured ran; linear "
                "layers, norms, embeddings and blocks are measured, and of a convolution nothing is"
            )
        if not any(record.moments.count or record.moments.nonfinite for record in found):
            raise UserError(
                f"no site of {type(self.model).__name__} saw a token in {self.num_batches} "
                "batches; give at least one batch with a token that is not padding"
            )
        return found

    def unseen(self) -> list[str]:
        """Sites whose modules never ran."""
        seen = {place.site.name for record in self.records.values() for place in record.places}
        return [p.site.name for p in self.places if p.site.name not in seen]

    def locate(self, record: TensorRecord, number: int) -> dict[str, int | None]:
        """{"sequence", "position", "id"} of a token of the record; id None where it has none."""
        sequence = 0
        for batch, (first, rows, length) in enumerate(record.shapes):
            if number < first + rows * length:
                row, position = divmod(number - first, length)
                for at, ids in self.ids:
                    if at != batch:
                        continue
                    if ids.shape == (rows, length):
                        token = int(ids[row, position])
                        return {"sequence": sequence + row, "position": position, "id": token}
                    if length == 1 and ids.numel() == rows:  # tokens without a batch dimension
                        row, position = divmod(row, ids.shape[1])
                        token = int(ids[row, position])
                        return {"sequence": sequence + row, "position": position, "id": token}
                return {"sequence": sequence + row, "position": position, "id": None}
            sequence += rows
        return {"sequence": None, "position": None, "id": None}


def _token_ids(batch: Any) -> list[Tensor]:
    """Integer tensors [B, T] among the inputs that are token ids."""
    if isinstance(batch, Mapping):
        found = [v for k, v in batch.items() if str(k).endswith("input_ids")]
    else:
        found = [batch[0] if isinstance(batch, (tuple, list)) and batch else batch]
    return [
        ids.detach().to("cpu", torch.int32) for ids in found
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point()
    ]  # fmt: skip
