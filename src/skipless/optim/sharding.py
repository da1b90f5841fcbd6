"""Sharded parameters (DTensor, FSDP2): whole matrix in, own shard out.

A whitened or orthogonalised update needs the whole matrix. Each matrix has an owner rank, chosen so
that the work m^3 + n^3 is balanced. One all-to-all brings every rank's pieces of the gradients to
the owners, each owner computes its updates as if nothing were sharded, and a second all-to-all
brings every rank its own piece back. State lives on the owner. Parameters sharded in another way
than by rows over a one-dimensional mesh are gathered and computed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skipless.optim.blocks import Layout
from skipless.sharded import full, is_sharded, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def add_over_ranks(values: Tensor, params: Sequence[Tensor]) -> None:
    """Sum values[i] over the ranks that share params[i], in place; plain ones stay."""
    meshes: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        if is_sharded(p):
            meshes.setdefault(p.device_mesh, []).append(i)
    for mesh, indices in meshes.items():
        index = torch.tensor(indices, device=values.device)
        part = values[index]
        for dim in range(mesh.ndim):
            dist.all_reduce(part, group=mesh.get_group(dim))
        values[index] = part


class Sink:
    """Takes updates of whole matrices: applies them to plain parameters, or keeps them for the
    owner to hand out. Legend: W <- (W - lr U)(1 - lr decay) in float32 at least (O1 step 4)."""

    def __init__(self, group: dict[str, Any], *, collect: bool = False) -> None:
        self.lr, self.decay = float(group["lr"]), float(group["weight_decay"])
        self.collected: dict[Tensor, Tensor] | None = {} if collect else None

    def take(self, p: Tensor, update: Tensor) -> None:
        """The update of a whole parameter."""
        if self.collected is not None:
            self.collected[p] = update
        else:
            self.apply(p, update)

    def apply(self, target: Tensor, update: Tensor) -> None:
        """Subtract `update` from `target`, a plain tensor, in place."""
        if target.numel() == 0:
            return
        if target.dtype in (torch.float32, torch.float64):
            target.sub_(update, alpha=self.lr)
            if self.decay:
                target.mul_(1 - self.lr * self.decay)
            return
        wide = target.float().sub_(update, alpha=self.lr)
        target.copy_(wide.mul_(1 - self.lr * self.decay))

    def blocks(self, p: Tensor, layout: Layout, blocks: Tensor, scale: Any) -> None:
        """The update as blocks [K, bm, bn] times a number, applied without gathering it."""
        if not self.fuses(p) or layout.padded:
            self.take(p, layout.from_blocks(blocks) * scale)
            return
        w = p.view(layout.stack * layout.kr, layout.bm, layout.kc, layout.bn).transpose(1, 2)
        u = blocks.view(w.shape)
        if isinstance(scale, Tensor):
            u, scale = u * scale, 1.0
        keep = 1 - self.lr * self.decay
        if keep != 1:
            w.mul_(keep)
        w.sub_(u, alpha=self.lr * keep * scale)

    def fuses(self, p: Tensor) -> bool:
        """Whether `product` may be used for p. Decided by what p is, never by what is measured,
        so that looking does not change the run."""
        return (
            self.collected is None
            and p.dtype == torch.float32
            and p.device.type == "cpu"
            and p.is_contiguous()
        )

    def product(self, p: Tensor, layout: Layout, a: Tensor, b: Tensor) -> None:
        """Apply the update a @ b, blocks [K, bm, bn], inside the product that makes it."""
        keep = 1 - self.lr * self.decay
        w = p.view(layout.stack * layout.kr, layout.bm, layout.kc, layout.bn).transpose(1, 2)
        w = w.flatten(0, 1) if layout.kc == 1 else [blk for row in w for blk in row]
        for piece, x, y in zip(w, a, b, strict=True):
            piece.addmm_(x, y, beta=keep, alpha=-self.lr * keep)


class Exchange:
    """Owner ranks of some DTensor parameters on one mesh, and the traffic between them."""

    def __init__(self, params: list[DTensor], cost: Callable[[Tensor], float]) -> None:
        self.params, self.mesh = params, params[0].device_mesh
        self.by_rows = self.mesh.ndim == 1 and all(
            type(p.placements[0]).__name__ == "Shard" and getattr(p.placements[0], "dim", None) == 0
            for p in params
        )
        self.group = self.mesh.get_group(0)
        self.rank, self.world = self.mesh.get_local_rank(0), self.mesh.size(0)
        load = [0.0] * self.world
        self.owner: dict[Tensor, int] = {}
        for p in sorted(params, key=cost, reverse=True):
            target = load.index(min(load))
            self.owner[p] = target
            load[target] += cost(p)

    def is_mine(self, p: Tensor) -> bool:
        """Whether this rank computes p's update."""
        return not self.by_rows or self.owner.get(p) == self.rank

    def _rows(self, p: Tensor) -> list[int]:
        """Rows of each rank's piece, as DTensor cuts them."""
        m = p.shape[0]
        each = -(-m // self.world)
        return [max(0, min(each, m - r * each)) for r in range(self.world)]

    def gather(self, tensors: dict[DTensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(p, whole tensor) of the parameters this rank owns, from every rank's pieces."""
        mine = [p for p in self.params if p in tensors]
        if not self.by_rows:
            return [(p, full(tensors[p]).float()) for p in mine]
        send = [[local(tensors[p]) for p in mine if self.owner[p] == r] for r in range(self.world)]
        owned = [p for p in mine if self.owner[p] == self.rank]
        width = {p: p.numel() // p.shape[0] for p in owned}
        sizes = [[self._rows(p)[r] * width[p] for p in owned] for r in range(self.world)]
        pieces = self._swap(send, sizes, mine)
        whole = []
        for k, p in enumerate(owned):
            parts = [pieces[r][k] for r in range(self.world)]
            whole.append((p, torch.cat(parts).view(p.shape)))
        return whole

    def scatter(self, tensors: dict[DTensor, Tensor], sink: Sink) -> None:
        """Send each rank its rows of the updates in `sink` and apply them."""
        updates = sink.collected or {}
        mine = [p for p in self.params if p in tensors]
        if not self.by_rows:
            from torch.distributed.tensor import DTensor, Replicate

            for p in [p for p in mine if p in updates]:
                same = [Replicate()] * self.mesh.ndim
                whole = DTensor.from_local(updates[p], self.mesh, same, run_check=False)
                sink.apply(local(p), whole.redistribute(placements=p.placements).to_local())
            return
        owned = [p for p in mine if self.owner[p] == self.rank]
        zero = {p: torch.zeros(p.shape, device=local(p).device) for p in owned if p not in updates}
        cut = {p: (updates if p in updates else zero)[p].split(self._rows(p)) for p in owned}
        send = [[cut[p][r] for p in owned] for r in range(self.world)]
        theirs = [[p for p in mine if self.owner[p] == r] for r in range(self.world)]
        sizes = [[local(p).numel() for p in theirs[r]] for r in range(self.world)]
        pieces = self._swap(send, sizes, mine)
        for r in range(self.world):
            for p, piece in zip(theirs[r], pieces[r], strict=True):
                sink.apply(local(p), piece.view(local(p).shape))

    def _swap(self, send: list[list[Tensor]], sizes: list[list[int]], like: list[DTensor]):
        """One all-to-all of float32 pieces; returns pieces by sending rank."""
        device = local(like[0]).device
        flat = [x.reshape(-1).float() for row in send for x in row]
        out = torch.cat(flat) if flat else torch.empty(0, device=device)
        incoming = torch.empty(sum(map(sum, sizes)), device=device)
        dist.all_to_all_single(
            incoming, out, [sum(s) for s in sizes],
            [sum(x.numel() for x in row) for row in send], group=self.group,
        )  # fmt: skip
        by_rank = incoming.split([sum(s) for s in sizes])
        return [list(part.split(s)) for part, s in zip(by_rank, sizes, strict=True)]


def exchanges(
    params: list[DTensor], cost: Callable[[Tensor], float], cache: dict[tuple, Exchange]
) -> list[Exchange]:
    """One exchange for each mesh and way of sharding among `params`, kept in `cache`."""
    kinds: dict[tuple, list[DTensor]] = {}
    for p in params:
        kinds.setdefault((p.device_mesh, p.placements, local(p).device), []).append(p)
    made = []
    for members in kinds.values():
        key = tuple(map(id, members))
        if key not in cache:
            cache[key] = Exchange(members, cost)
        made.append(cache[key])
    return made
