"""One torch optimiser for a whole model: a spectral method for matrices, AdamW for the rest.

`RoleOptimizer` owns what every method shares: groups by role (routing.py), the AdamW tail,
non-finite gradients (skipped and counted), float32 state that survives `load_state_dict`, sharded
(DTensor) parameters, metrics and `describe()`. A method subclasses it and writes
`_update_matrices`. Read by whitening.py, muon.py, build.py.

Group keys: role, algorithm ("adamw" or the method), lr, base_lr (what a schedule multiplies),
betas, eps, weight_decay, param_names.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.optim import checking
from skipless.optim.blocks import Layout, make_layout
from skipless.optim.describe import copies, describe, measure, step_device, tensor_bytes
from skipless.optim.entries import is_settled
from skipless.optim.finite import finite
from skipless.optim.roles import SPECTRAL_ROLES
from skipless.optim.routing import Routing, check_roles
from skipless.optim.saved import check_shapes, match_by_name
from skipless.optim.sharding import Exchange, Sink, add_over_ranks, exchanges
from skipless.optim.tail import update_adamw
from skipless.sharded import is_sharded, local


class RoleOptimizer(torch.optim.Optimizer):
    """Base of every optimiser here. `params` may be a model, named parameters, parameters or
    groups; a group may fix its own "role" and any default."""

    algorithm = "adamw"
    without: tuple[str, ...] = ()
    """Settings of the routing that mean nothing to this method."""

    def __init__(
        self,
        params: nn.Module | Iterable,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.98),
        adamw_eps: float = 1e-8,
        gain_lr: float | None = None,
        gain_weight_decay: float = 0.0,
        block_size: int | None = None,
        split: dict[str, int] | None = None,
        spectral_roles: tuple[str, ...] = SPECTRAL_ROLES,
        extra: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        checking.no_unknown(self, unknown)
        for what, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay),
                            ("adamw_eps", adamw_eps), ("gain_weight_decay", gain_weight_decay),
                            ("adamw_lr", adamw_lr), ("gain_lr", gain_lr)):  # fmt: skip
            if value is not None or what not in ("adamw_lr", "gain_lr"):
                checking.from_zero(what, value)
        checking.decays("betas", betas)
        checking.decays("adamw_betas", adamw_betas)
        checking.at_least_one("block_size", block_size, or_none=True)
        checking.splits(split)
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "role": None, "algorithm": None, "base_lr": None, **(extra or {}),
        }  # fmt: skip
        tail_lr = lr if adamw_lr is None else adamw_lr
        self._routing = Routing(
            algorithm=self.algorithm, spectral_roles=check_roles(spectral_roles),
            tail={"lr": tail_lr, "betas": tuple(adamw_betas), "eps": adamw_eps},
            gain_lr=tail_lr if gain_lr is None else gain_lr, gain_weight_decay=gain_weight_decay,
        )  # fmt: skip
        self._block_size = block_size
        self._split = dict(split or {})
        self._layouts: dict[Tensor, Layout] = {}
        self._names: dict[Tensor, str] = {}
        self._exchanges: dict[tuple, Exchange] = {}
        self.collect_metrics = False
        self.skipped: dict[str, int] = {}
        """Non-finite gradients left out so far, by parameter name."""
        self._metrics: dict[str, float] = {}
        self._has_had_gradients = False
        self._own = (*vars(self), "_own")
        """Attributes of this package, which copies keep."""
        groups = self._routing.groups(params)
        if not any(group["params"] for group in groups):
            raise UserError(
                f"{type(self).__name__} got no parameter to train; pass a model that has some"
            )
        super().__init__(groups, defaults)
        unused = [k for k in self._split if not any(k in n for n in self._names.values())]
        if unused:
            raise UserError(f"split names {unused}, which is part of no parameter's name")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later; a group that mixes roles becomes several."""
        known = {p: self._names[p] for group in self.param_groups for p in group["params"]}
        if is_settled(param_group):
            groups = [param_group]
        else:
            groups = self._routing.split(param_group, first=len(self._names))
        for group in groups:
            group.setdefault("lr", self.defaults["lr"])
            check_choice("algorithm of a parameter group", group["algorithm"],
                         {"adamw", self.algorithm})  # fmt: skip
            self._check_group(group)
            if group["algorithm"] != "adamw":
                for name, p in group["params"]:
                    self._layout(p, group, name)
        trained = [
            (name, p) for group in groups for name, p in group["params"]
            if p.requires_grad or p in known
        ]  # fmt: skip
        checking.parameters(trained, known)
        for group in groups:  # nothing was kept of a group that was refused
            self._names |= {p: name for name, p in group["params"]}
            if group.get("base_lr") is None:
                group["base_lr"] = float(group["lr"])
            super().add_param_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Settings of a parameter group, which may come from the user."""
        checking.group_keys(self, group)
        checking.group_options(group)

    def _layout(self, p: Tensor, group: dict[str, Any], name: str | None = None) -> Layout:
        if p not in self._layouts or self._layouts[p].shape != tuple(p.shape):
            name = self._names.get(p, "") if name is None else name
            split = next((s for key, s in self._split.items() if key in name), 1)
            self._layouts[p] = make_layout(
                tuple(p.shape),
                block_size=self._block_size,
                convolution=group["role"] == "convolution",
                split=split,
            )
        return self._layouts[p]

    # ---- one step ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns the closure's loss.

        Raises UserError before anything moves if a gradient is sparse or a group's lr is none.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise UserError(
                    f"step was given {type(closure).__name__}; call loss.backward() and then "
                    "step(), or pass a function that computes the loss and its gradients"
                )
            with torch.enable_grad():
                loss = closure()
        self._metrics = {}
        ready_of = [
            [p for p in group["params"] if p.grad is not None and p.numel()]
            for group in self.param_groups
        ]
        self._check_step(ready_of)
        before = copies(self) if self.collect_metrics else {}
        # of all groups at once: an accelerator is waited for once a step
        usable = dict(finite(list(itertools.chain(*ready_of)), self._names, self.skipped))
        for group, ready in zip(self.param_groups, ready_of, strict=True):
            pairs = [(p, usable[p]) for p in ready if p in usable]
            if group["algorithm"] == "adamw":
                update_adamw(self.state, group, pairs)
            else:
                self._update_spectral(group, pairs)
        self._metrics = measure(self, before)
        return loss

    def _check_step(self, ready_of: list[list[Tensor]]) -> None:
        """What would end in a wrong step, before any; `ready_of` as `param_groups`."""
        for group, ready in zip(self.param_groups, ready_of, strict=True):
            checking.from_zero("lr of a parameter group", group["lr"])
            for p in ready:
                if cast("Tensor", p.grad).layout != torch.strided:
                    raise UserError(
                        f"the gradient of {self._names.get(p, '?')} is sparse; build the "
                        "embedding with sparse=False"
                    )
                if self.state.get(p):  # fused kernels do not look at shapes
                    shapes = self._state_shapes(p, group)
                    check_shapes(self._names.get(p, "?"), self.state[p], shapes)
        if not self._has_had_gradients and not any(
            p.grad is not None for group in self.param_groups for p in group["params"]
        ):
            warnings.warn(
                "step() found no gradient in any parameter, so nothing moved; call backward() "
                "first, and build the optimiser from the model that is trained",
                stacklevel=4,
            )
        self._has_had_gradients = True

    def _state_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of the state of p apart from its step count."""
        if group["algorithm"] == "adamw":
            return dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(p.shape))
        return self._matrix_shapes(p, group)

    def _matrix_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of the method's state of a matrix."""
        raise AssertionError(f"{type(self).__name__} has no matrix method")

    def _update_spectral(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Whole matrices in place; sharded ones on their owner ranks."""
        sent = [(p, self._prepare(group, p, g)) for p, g in pairs]
        plain = [(p, u) for p, u in sent if not is_sharded(p)]
        if plain:
            self._update_matrices(group, plain, Sink(group))
        sharded = {p: u for p, u in sent if is_sharded(p)}
        if not sharded:
            return
        everyone = [p for p in group["params"] if is_sharded(p)]
        fresh = [p for p in sharded if not self.state[p].get("step", 0)]
        size = torch.stack([local(sharded[p]).abs().sum().float() for p in fresh] or
                           [torch.zeros(())])  # fmt: skip
        add_over_ranks(size, fresh)
        silent = {p for p, x in zip(fresh, size.tolist(), strict=False) if x == 0}
        for exchange in exchanges(everyone, self._cost, self._exchanges):
            owned = exchange.gather(sharded)
            for p in exchange.params:
                if not exchange.is_mine(p):
                    self._disown(p, counts=p in sharded and p not in silent)
            sink = Sink(group, collect=True)
            self._update_matrices(group, owned, sink)
            exchange.scatter(sharded, sink)

    def _prepare(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        """What a matrix method works on: the gradient, or something elementwise made from it."""
        return g

    def _update_matrices(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], sink: Sink
    ) -> None:
        """Hand the update of each whole matrix to `sink`."""
        raise AssertionError(f"{type(self).__name__} has no matrix method")

    def _cost(self, p: Tensor) -> float:
        """Work of one update, for balancing owner ranks."""
        m, n = p.shape[0], p.numel() // max(p.shape[0], 1)
        return float(m) ** 3 + float(n) ** 3

    def _disown(self, p: Tensor, counts: bool) -> None:
        """Another rank keeps this matrix's state; only the step count stays, equal to the owner's,
        so that any rank's copy may be saved and no rank looks as if it had never stepped."""
        step = self.state[p].get("step", torch.zeros(()))
        self.state[p].clear()
        self.state[p]["step"] = step + float(counts)

    # ---- state ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore, matched by parameter name where the file has names, in the saved dtypes.

        torch casts state to the parameter's dtype, which ruins float32 factors of a bf16 model;
        here tensors keep theirs and move to the parameter's device. Raises UserError, with
        nothing replaced, when a parameter is missing on either side, or was saved by another
        method or with settings that shape the state otherwise.
        """
        state_dict = match_by_name(state_dict, self.param_groups)
        for group, source in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], source["params"], strict=True):
                values = state_dict["state"].get(key, {})
                check_shapes(self._names.get(p, "?"), values, self._state_shapes(p, group))
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        own = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        for key, p in zip(saved, own, strict=True):
            values = state_dict["state"].get(key)
            if values is None:
                continue
            for what, value in values.items():
                if isinstance(value, Tensor):
                    device = self._state_device(what, p)
                    self.state[p][what] = value.detach().to(device).clone()
        self._state_replaced()

    def _state_device(self, what: str, p: Tensor) -> torch.device:
        if what != "step":
            return local(p).device
        return step_device(p) if "exp_avg" in self.state[p] else torch.device("cpu")

    def _state_replaced(self) -> None:
        """Hook: state tensors are new objects now."""

    def __getstate__(self) -> dict[str, Any]:
        """What copy, deepcopy and pickle keep: torch's part, and this package's without caches."""
        mine = {what: getattr(self, what) for what in self._own}
        return {**super().__getstate__(), **mine, "_exchanges": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layouts" in self.__dict__:
            self._state_replaced()

    # ---- reports ----------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step: skipped gradients always, the rest if `collect_metrics` was
        set before it."""
        return {"skipped_gradients": float(sum(self.skipped.values())), **self._metrics}

    def _note_preconditioner(self, p: Tensor, group: dict[str, Any]) -> dict[str, float]:
        """A method's own numbers about one matrix, for `metrics`."""
        return {}

    def state_bytes(self) -> int:
        """Bytes of all state tensors on this process."""
        return sum(map(tensor_bytes, self.state.values()))

    def _describe_one(self, p: Tensor, group: dict[str, Any]) -> str:
        return "elementwise"

    def describe(self) -> str:
        """A table: every parameter with role, shape, treatment and state bytes."""
        return describe(self)
