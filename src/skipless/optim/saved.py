"""Saved optimiser state, matched by parameter name whatever the order. Read by base.py."""

from __future__ import annotations

from typing import Any

from skipless.errors import UserError


def match_by_name(state_dict: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """`state_dict` with its groups in the order and composition of `own` (param_groups).

    Matched by parameter name; unchanged if either has no names. Raises UserError when the saved
    state lacks a parameter.
    """
    groups = state_dict["param_groups"]
    if not all(g.get("param_names") for g in [*groups, *own]):
        return state_dict
    place = {
        name: (i, key)
        for i, g in enumerate(groups)
        for name, key in zip(g["param_names"], g["params"], strict=True)
    }
    rebuilt = []
    for group in own:
        missing = [n for n in group["param_names"] if n not in place]
        if missing:
            raise UserError(
                f"the saved optimiser state has no parameter {missing[0]!r} "
                f"({len(missing)} missing); build the optimiser for the model it was saved with"
            )
        source = groups[place[group["param_names"][0]][0]]
        rebuilt.append(
            {**source, "params": [place[n][1] for n in group["param_names"]],
             "param_names": list(group["param_names"])}
        )  # fmt: skip
    return {**state_dict, "param_groups": rebuilt}
