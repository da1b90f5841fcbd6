"""Learning-rate multipliers by step: warm-up, then cosine, linear, WSD or constant.

The training loop reads this: `group["lr"] = group["base_lr"] * schedule(...)`.
"""

from __future__ import annotations

import math

from skipless.errors import UserError, check_choice

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def schedule(
    kind: str,
    step: int,
    num_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """Multiplier of the base learning rate at `step` (0-based), in (0, 1].

    The first `warmup_steps` steps rise linearly to 1, the first of them already above 0. After
    them `cosine` and `linear` fall to `min_lr_ratio` at the last step, `wsd` stays at 1 and falls
    linearly over the last `decay_fraction` of all steps, `constant` stays at 1. Raises UserError
    for an unknown kind, a negative step or warm-up, a ratio or fraction outside [0, 1].
    """
    check_choice("schedule", kind, SCHEDULES)
    if step < 0 or num_steps < 1:
        raise UserError(f"step {step} of {num_steps} steps; a step from 0 on was expected")
    if not 0 <= min_lr_ratio <= 1:
        raise UserError(f"min_lr_ratio is {min_lr_ratio}; it must lie in [0, 1]")
    if warmup_steps < 0:
        raise UserError(f"warmup_steps is {warmup_steps}; it must be at least 0")
    if not 0 <= decay_fraction <= 1:
        raise UserError(f"decay_fraction is {decay_fraction}; it must lie in [0, 1]")
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    start = warmup_steps
    if kind == "wsd":
        start = max(warmup_steps, num_steps - 1 - round(decay_fraction * num_steps))
    share = min(max((step - start) / max(num_steps - 1 - start, 1), 0.0), 1.0)
    fall = 0.5 * (1 + math.cos(math.pi * share)) if kind == "cosine" else 1 - share
    return min_lr_ratio + (1 - min_lr_ratio) * fall
