"""Which treatment each parameter gets: its role (roles.py), then method, rates and decay by role.

Groups come out with keys role, algorithm ("adamw" or the method), and (name, parameter) pairs under
params. Read by base.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from skipless.errors import UserError, check_choice
from skipless.optim import checking
from skipless.optim.entries import Named, as_groups, named_entries, warn_of_unnamed
from skipless.optim.roles import GAIN_DECAY_ROLES, ROLES, parameter_roles, roles_from_tensors

Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The rules of one optimiser."""

    algorithm: str
    """The method of hidden matrices."""
    spectral_roles: tuple[str, ...]
    """What counts as one."""
    tail: dict[str, Any]
    """lr, betas and eps of all other roles."""
    gain_lr: float
    gain_weight_decay: float

    def __post_init__(self) -> None:
        for role in self.spectral_roles:
            check_choice("spectral_roles", role, ROLES)

    def groups(self, params: nn.Module | Iterable) -> list[Group]:
        """Groups of one treatment each, of a model, (named) parameters, or a user's groups.

        Raises UserError for anything else, and for what cannot be trained.
        """
        if isinstance(params, nn.Module):
            named = list(params.named_parameters())
            checking.parameters((n, p) for n, p in named if p.requires_grad)
            found = self._by_role(named, parameter_roles(params), {})
            covered = [n for group in found for n, _ in group["params"]]
            assert sorted(covered) == sorted(n for n, _ in named), "a parameter has no group"
            return found
        found = []
        for group in as_groups(params):
            found += self.split(group, first=sum(len(g["params"]) for g in found))
        checking.parameters(pair for group in found for pair in group["params"])
        return found

    def split(self, group: Any, *, first: int) -> list[Group]:
        """One user's group to groups of one treatment each; nameless parameters are numbered from
        `first` on."""
        named, unnamed = named_entries(group, first=first)
        checking.parameters(named)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        role = options.get("role")
        if role is not None:
            check_choice("role of a parameter group", role, ROLES)
        elif self.algorithm != "adamw":
            warn_of_unnamed(unnamed)
        roles = {n: role for n, _ in named} if role else roles_from_tensors(named)
        return self._by_role(named, roles, options)

    def _by_role(
        self, named: Sequence[Named], roles: dict[str, str], options: Group
    ) -> list[Group]:
        groups: dict[str, Group] = {}
        for name, p in named:
            group = groups.setdefault(roles[name], {"params": [], "role": roles[name]})
            group["params"].append((name, p))
        for role, group in groups.items():
            spectral = role in self.spectral_roles and self.algorithm != "adamw"
            group["algorithm"] = self.algorithm if spectral else "adamw"
            if role not in self.spectral_roles:  # AdamW's hidden matrices keep lr and betas
                group.update(self.tail)
            if not spectral:
                if role == "gain":
                    group["lr"] = self.gain_lr
                if role in GAIN_DECAY_ROLES:
                    group["weight_decay"] = self.gain_weight_decay
            group.update({k: v for k, v in options.items() if k != "role"})
        return list(groups.values())


def check_roles(roles: Any) -> tuple[str, ...]:
    """Names of roles as a tuple. Raises UserError for a lone text or what is no list."""
    if isinstance(roles, str) or not isinstance(roles, Iterable):
        raise UserError(f"spectral_roles is {roles!r}; a tuple was expected, such as ('matrix',)")
    return tuple(roles)
