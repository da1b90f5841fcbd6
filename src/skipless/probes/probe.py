"""`Probe`: statistics of every site of any nn.Module while it runs, in one pass.

    with Probe(model) as probe:
        for batch in batches:
            model(batch)
    probe.table(); probe.geometry(); probe.attention()

Hooks feed accumulators of constant size: moments (S1, S2) at the sites, geometry of the joins (S7,
S8), attention (S10), optionally gradients. Each tensor is measured once, though several sites may
see it (a norm's output is the input of three projections). Batches, probes and processes merge.
Read by `skipless.train`, the CLI and `skipless.diagnose`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import run_eagerly, unwrapped
from skipless.errors import UserError, check_choice
from skipless.probes.attention import AttentionStatistics, eager_attention, find_probabilities
from skipless.probes.geometry import JoinGeometry
from skipless.probes.joins import watch_joins
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.passes import ForwardPass, in_backward
from skipless.probes.spectrum import Sketch
from skipless.sites import Site, find_sites, first_tensor, select_sites

STATS = ("moments", "geometry", "attention", "gradients")
DEFAULT_STATS = ("moments", "geometry", "attention")
DEFAULT_KINDS = (
    "embedding", "norm_output", "sublayer_input", "sublayer_output", "activation_output", "stream",
)  # fmt: skip

Key = tuple[str, int | None, str | None]


class Probe:
    """Measure `model` inside a `with` block.

    `sites`: None (sublayer inputs and outputs, norm and activation outputs, embedding, stream; all
    sites of a model without blocks), or kinds, names, patterns or Site objects as in
    `select_sites`. `stats`: some of "moments", "geometry", "attention", "gradients" (norm of the
    loss's gradient at each site, when a backward pass runs inside the block); None takes the first
    three as far as the model has them, while naming one that it lacks is an error. `mask` [B, T],
    True at real tokens, is read from the model's `attention_mask` argument unless set here or
    later as an attribute. Attention is sampled on the first `attention_batches` forward passes,
    which then run on the eager path: the same model within rounding.

    What was compiled (`torch.compile`) runs uncompiled inside the block, where hooks are called.

    Statistics are float64 and survive the block. Values that are NaN or infinite are counted
    (`nonfinite` in the table, and `probe.nonfinite()`), never averaged in. Raises UserError if
    nothing was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Site | Sequence[str | Site] | None = None,
        stats: Sequence[str] | None = None,
        *,
        mask: Tensor | None = None,
        attention_batches: int = 1,
    ):
        wanted = DEFAULT_STATS if stats is None else stats
        self.stats = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for stat in self.stats:
            check_choice("probe statistic", stat, STATS)
        if not self.stats:
            raise UserError(f"stats is empty; choose from {', '.join(STATS)}")
        self.model = model = unwrapped(model)
        self.all_sites = find_sites(model) if sites is None or len(self.stats) > 1 else []
        self.sites = self._default_sites() if sites is None else select_sites(model, sites)
        self.explicit = stats is not None
        if self.explicit and "geometry" in self.stats:
            find_sites(model, "stream")  # an error names what is missing
        self.mask, self.attention_batches = mask, attention_batches
        self.num_passes = 0
        self.moments = {site.name: Moments() for site in self.sites}
        self.gradients = {site.name: [0.0, 0] for site in self.sites}
        self.joins: dict[Key, JoinGeometry] = {}
        self.heads: dict[Key, AttentionStatistics] = {}
        self._pass = ForwardPass()
        self._mask_used = False
        self._saw_empty = False
        self._handles: list[Any] = []
        self._eager: contextlib.ExitStack | None = None
        self._uncompiled = contextlib.ExitStack()

    def _default_sites(self) -> list[Site]:
        if any(site.kind == "stream" for site in self.all_sites):
            return [site for site in self.all_sites if site.kind in DEFAULT_KINDS]
        return self.all_sites

    # --- collecting -----------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._handles:
            raise UserError("this probe is already active; leave its `with` block first")
        add = self._handles.append
        add(self.model.register_forward_pre_hook(self._start, with_kwargs=True))
        modules = dict(self.model.named_modules())
        if {"moments", "gradients"} & set(self.stats):
            for site in self.sites:
                module = modules[site.module]
                if site.direction == "input":
                    hook = self._input_hook(site)
                    add(module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    add(module.register_forward_hook(self._output_hook(site)))
        if "geometry" in self.stats:
            self._handles += watch_joins(self.model, self.all_sites, self._join)
        if "attention" in self.stats:
            self._watch_attention(modules)
        add(self.model.register_forward_hook(self._finish, always_call=True))
        self._uncompiled.enter_context(run_eagerly())
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._uncompiled.close()
        self._finish()

    def _start(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self._finish()
        self._pass = ForwardPass.start(self.model, args, kwargs, self.mask)
        if "attention" in self.stats and self.num_passes < self.attention_batches:
            self._eager = contextlib.ExitStack()
            self._eager.enter_context(eager_attention(self.model))
        self.num_passes += 1

    def _finish(self, *_: Any) -> None:
        self._leave_eager()
        self._mask_used |= self._pass.mask_used
        self._pass = ForwardPass()

    def _leave_eager(self) -> None:
        if self._eager is not None:
            stack, self._eager = self._eager, None
            stack.close()

    def _measure(self, site: Site, x: Tensor | None) -> None:
        if x is None or not x.is_floating_point() or in_backward():
            return
        if "moments" in self.stats:
            mask = self._pass.mask_for(x)
            batch = self._pass.remember(x, "moments", lambda: batch_moments(x, mask))
            self._saw_empty |= not (batch.count or batch.nonfinite)
            try:
                self.moments[site.name].merge(batch)
            except UserError as error:
                raise UserError(f"site {site.name}: {error}") from None
        if "gradients" in self.stats and x.requires_grad:
            total = self.gradients[site.name]

            def keep(gradient: Tensor) -> None:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                total[0] += float(torch.linalg.vector_norm(gradient, dtype=dtype)) ** 2
                total[1] += 1

            x.register_hook(keep)

    def _input_hook(self, site: Site) -> Callable[..., None]:
        return lambda _, args, kwargs: self._measure(site, first_tensor([args, kwargs]))

    def _output_hook(self, site: Site) -> Callable[..., None]:
        return lambda _, __, result: self._measure(site, first_tensor(result))

    def _join(self, key: Key, x: Tensor, f: Tensor, y: Tensor) -> None:
        if in_backward():
            return
        join = self.joins.setdefault(key, JoinGeometry())
        with torch.no_grad():
            join.update(x, f, y, mask=self._pass.mask_for(x), remember=self._pass.remember)

    def _watch_attention(self, modules: dict[str, nn.Module]) -> None:
        layers = {site.module: site for site in self.all_sites}
        own = [site for site in self.all_sites if site.kind == "probabilities"]
        if own:
            watched = [site.module for site in own]
        else:
            watched = [n for n, m in modules.items() if "attention" in type(m).__name__.lower()]
        for name in watched:
            site = layers.get(name)
            number = next((int(p) for p in name.split(".") if p.isdigit()), None)
            key = (name, site.layer if site else number, "attention")
            find = first_tensor if own else find_probabilities
            hook = self._attention_hook(key, find)
            self._handles.append(modules[name].register_forward_hook(hook))

    def _attention_hook(self, key: Key, find: Callable[..., Any]) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple, result: Any) -> None:
            if self._eager is None or in_backward():
                return
            p = find(result)
            # A wrapper hands on what its inner module returned: the inner one is counted.
            if p is not None and self._pass.first_time(p):
                with torch.no_grad():
                    self.heads.setdefault(key, AttentionStatistics()).update(p, self._pass.mask)

        return hook

    # --- merging --------------------------------------------------------------------------------

    def merge(self, other: Probe | dict[str, Any]) -> Probe:
        """Add what another probe of the same sites (or its `state_dict`) has seen. Returns self."""
        state = other.state_dict() if isinstance(other, Probe) else other
        if list(state["moments"]) != list(self.moments):
            raise UserError(
                f"probes of {len(state['moments'])} and {len(self.moments)} different sites "
                "cannot be merged; give both the same `sites`"
            )
        for name, part in state["moments"].items():
            self.moments[name].merge(Moments.from_state_dict(part))
        for name, (square, number) in state["gradients"].items():
            self.gradients[name][0] += square
            self.gradients[name][1] += number
        for key, part in state["joins"]:
            join = JoinGeometry.from_state_dict(part)
            self.joins.setdefault(tuple(key), JoinGeometry()).merge(join)
        for key, part in state["heads"]:
            heads = AttentionStatistics.from_state_dict(part)
            self.heads.setdefault(tuple(key), AttentionStatistics()).merge(heads)
        self.num_passes += state["num_passes"]
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything measured, as CPU tensors and numbers; `torch.save` it or send it."""
        return {
            "moments": {name: m.state_dict() for name, m in self.moments.items()},
            "gradients": {name: list(total) for name, total in self.gradients.items()},
            "joins": [(key, join.state_dict()) for key, join in self.joins.items()],
            "heads": [(key, heads.state_dict()) for key, heads in self.heads.items()],
            "num_passes": self.num_passes,
        }

    def all_reduce(self, group: Any = None) -> Probe:
        """Merge over the processes of torch.distributed, in rank order; no-op on a single one."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return self
        states: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, self.state_dict(), group=group)
        self.moments = {name: Moments() for name in self.moments}
        self.gradients = {name: [0.0, 0] for name in self.gradients}
        self.joins, self.heads, self.num_passes = {}, {}, 0
        for state in states:
            self.merge(state)
        return self

    # --- reading --------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """One row a site: site, kind, layer, sublayer, then `Moments.summary`.

        A site whose module was never called has count 0 and None for every number. With
        "gradients", `gradient_norm` is the root mean square over batches of the gradient's norm.
        """
        self._check_measured()
        rows = []
        for site in self.sites:
            row: dict[str, Any] = {"site": site.name, "kind": site.kind, "layer": site.layer}
            row["sublayer"] = site.sublayer
            if "moments" in self.stats:
                row |= self.moments[site.name].summary()
            if "gradients" in self.stats:
                square, number = self.gradients[site.name]
                row["gradient_norm"] = (square / number) ** 0.5 if number else None
            rows.append(row)
        return rows

    def geometry(self) -> list[dict[str, Any]]:
        """One row a join, in order of depth: module, layer, sublayer, `JoinGeometry.summary`."""
        self._check("geometry", self.joins, "joins: its stream sites saw no (stream, branch) pair")
        known: list[tuple[Sketch, tuple]] = []

        def decompose(sketch: Sketch) -> tuple:
            # Without skips F, y and the next x are one tensor: one decomposition serves three.
            for other, result in known[-4:]:
                same = sketch.count == other.count and sketch.energy == other.energy
                a, b = sketch.total, other.total
                if same and a is not None and b is not None and torch.equal(a, b):
                    return result
            known.append((sketch, sketch.decompose()))
            return known[-1][1]

        return [_labelled(key) | join.summary(decompose) for key, join in self.joins.items()]

    def attention(self) -> list[dict[str, Any]]:
        """One row an attention layer: module, layer, sublayer, `AttentionStatistics.summary`."""
        self._check("attention", self.heads, "attention probabilities on an eager path")
        return [_labelled(key) | heads.summary() for key, heads in self.heads.items()]

    def nonfinite(self) -> dict[str, int]:
        """{site: number of NaN or infinite values}, only sites that had some, in model order."""
        return {name: m.nonfinite for name, m in self.moments.items() if m.nonfinite}

    def _check_measured(self) -> None:
        measured = any(m.count or m.nonfinite for m in self.moments.values())
        graded = any(number for _, number in self.gradients.values())
        needs = {"moments": measured, "gradients": graded}
        missing = [stat for stat in self.stats if stat in needs and not needs[stat]]
        if "moments" in missing and self._saw_empty:
            raise UserError(
                f"every tensor that the probe saw in {type(self.model).__name__} was empty (a "
                "batch of no tokens, or a mask that hides all of them); give at least one token"
            )
        name = type(self.model).__name__
        if missing and not self.num_passes:
            raise UserError(
                f"the probe has seen nothing of {name} yet; run the model inside `with "
                "Probe(model) as probe:` and read the tables afterwards"
            )
        if missing:
            what = "backward()" if missing[0] == "gradients" else "the modules of its sites"
            raise UserError(
                f"the probe saw no {missing[0]} of {name} in {self.num_passes} forward passes; run "
                f"{what} inside `with Probe(...)`, or leave {missing[0]!r} out of the stats"
            )
        if not set(self.stats) & set(needs):
            raise UserError("the table is of moments, which were not asked for; add it to stats")
        if self.mask is not None and not self._mask_used:
            raise UserError(
                f"the probe's mask of shape {tuple(self.mask.shape)} fitted no tensor of "
                f"{type(self.model).__name__}; expected [batch, tokens]"
            )

    def _check(self, stat: str, found: dict, what: str) -> None:
        if stat not in self.stats:
            raise UserError(f"{stat} was not asked for; add it to the probe's stats")
        if not found and (self.explicit or not self.num_passes):
            raise UserError(
                f"{type(self.model).__name__} showed no {what} in {self.num_passes} forward "
                f"passes; run it inside `with Probe(...)`, or leave {stat!r} out of the stats"
            )


def _labelled(key: Key) -> dict[str, Any]:
    return {"module": key[0], "layer": key[1], "sublayer": key[2]}
