"""Rules about training: is it learning, do all layers, and do the learned gains behave?

Evidence in, verdict out; None is healthy. Read by checkup.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from skipless.doctor.evidence import Curve, Evidence
from skipless.doctor.finding import Finding, Unchecked, Verdict

MARGIN = 0.15
"""Nats around the unigram loss that count as its level: twice the scatter of held-out losses among
the measurements of one run at the demo's size."""
FLAT = 0.05
"""Nats between the middle and the last third of the curve that count as no progress."""
NUM_STEPS = 20
"""Steps below which a curve says nothing."""
HALF_SHARE, HALF_STEPS = 0.2, 500
"""Half of the way to the unigram level within a fifth of the steps, 20 to 500: a residual-free row
of the demo was there at step 24 of 147 under a warm-up of 50 steps."""
DEPTH_RATIO = 100.0
"""Largest over smallest gradient norm among layers. With skips and an ordinary start the ratio
stays below 10; at 100 one global clip leaves the weakest layers a hundredth of a step."""
NUM_GAINS = 8
"""Traced values below which neither standstill nor oscillation can be told."""
STUCK_SHARE, STUCK = 0.02, 1e-3
"""A learned gain that stays within 2 % of itself or 0.001 was not learned."""
TURNS, SWING = 0.6, 0.05
"""Share of steps that reverse the one before (one half for a random walk, so more is a swing back
and forth), and their mean size relative to the gain."""
GATE_RATIO = 3.0
"""Gates' over trunk's gradient norm: at 3 the gates are 90 % of the squared norm by which the clip
divides everything."""


def flat_at_unigram(e: Evidence) -> Verdict:
    """Loss at the level of token frequencies, and no longer falling."""
    if e.unigram is None:
        return Unchecked(e.needs("unigram", "the loss of token frequencies (data.json of a run)"))
    if len(e.losses) < NUM_STEPS:
        return Unchecked(e.needs("losses", f"a loss curve of at least {NUM_STEPS} steps"))
    values = [value for _, value in e.losses]
    third = len(values) // 3
    before, last = _mean(values[third : 2 * third]), _mean(values[-third:])
    level = e.held_out[-1][1] if e.held_out else last
    progress = before - last
    if level > e.unigram + MARGIN:
        return Unchecked("a loss that has come down to the level of token frequencies")
    if level < e.unigram - MARGIN or progress > FLAT:
        return None
    return Finding(
        level="harmful", excess=1 + MARGIN - abs(level - e.unigram),
        symptom="the loss stands still at the level of token frequencies",
        evidence=(
            f"loss {level:.3f}, token frequencies alone give {e.unigram:.3f} nats; "
            f"{progress:+.3f} nats gained from the middle to the last third of the steps "
            f"(thresholds {MARGIN:g} and {FLAT:g})"
        ),
        cause="no context reaches the head: deep attention averages all tokens, or the "
        "branches are cut off by gains near 0",
        remedy=_context_back(e),
        numbers={"loss": level, "unigram": e.unigram, "progress": progress},
    )  # fmt: skip


def _context_back(e: Evidence) -> str:
    """What lets context reach the head, of what is not set yet."""
    kind = e.settings.get("model.connection.kind", "none")
    gains = "with gains raise optim.gain_lr"
    if kind not in ("none", "anneal"):
        return f"a higher optim.lr, more steps; {gains}"
    start = e.unset("model.init.identity_bias=5", "model.temperature.beta=1",
                    "model.connection.kind=anneal")  # fmt: skip
    if start:
        return f"without skips start with {', '.join(start)}; {gains}"
    return f"a skip that stays (model.connection.kind=rezero), more steps; {gains}"


def slow_start(e: Evidence) -> Verdict:
    """Long before half of the way to the unigram level."""
    if e.unigram is None:
        return Unchecked(e.needs("unigram", "the loss of token frequencies (data.json of a run)"))
    if len(e.losses) < NUM_STEPS or not e.num_steps:
        return Unchecked(e.needs("losses", f"a loss curve of at least {NUM_STEPS} steps"))
    start = e.losses[0][1]
    if start - e.unigram < 2 * MARGIN:
        return None  # it began with more than frequencies, as a continued model does
    limit = max(NUM_STEPS, min(HALF_SHARE * e.num_steps, HALF_STEPS))
    target = (start + e.unigram) / 2
    smooth = [(s, _mean([v for _, v in e.losses[max(0, i - 2) : i + 3]]))
              for i, (s, _) in enumerate(e.losses)]  # fmt: skip
    reached = next((step for step, value in smooth if value <= target), None)
    if reached is None and e.losses[-1][0] < limit:
        return Unchecked(f"a loss curve of {limit:.0f} steps")
    if reached is not None and reached <= limit:
        return None
    at = reached if reached is not None else e.losses[-1][0]
    warmup = e.warmup_steps or 0
    long_warmup = warmup > limit / 2
    rate = "" if e.lr is None else f", optim.lr {e.lr:g}"
    return Finding(
        level="harmful", excess=at / limit,
        symptom="training starts slowly",
        evidence=(
            f"from {start:.2f} half of the way to the {e.unigram:.2f} nats of token frequencies "
            + ("was reached at" if reached is not None else "was not reached by")
            + f" step {at:.0f}, expected by step {limit:.0f} (warm-up {warmup} steps{rate})"
        ),
        cause="a warm-up as long as the start itself" if long_warmup else
        "steps too small: a low learning rate, an optimiser state that starts far off, or "
        "branches that begin at 0",
        remedy=f"train.warmup_steps={max(1, round(limit / 4))}" if long_warmup else
        "sweep optim.lr upwards (skipless sweep ... --values); with KL-Shampoo keep "
        "optim.start=gradient; with gains from 0 raise optim.gain_lr",
        numbers={"start": start, "unigram": e.unigram, "step": at, "expected": limit},
    )  # fmt: skip


def gradients_by_depth(e: Evidence) -> Verdict:
    """Gradient norms that differ by orders of magnitude between the layers."""
    tables = [(step, norms) for step, norms in e.gradients if _is_usable(norms)]
    if not tables:
        return Unchecked(
            e.needs("gradients", "gradient norms of at least 3 layers (probe.trace_every, a text)")
        )
    norms = _typical([norms for _, norms in tables])
    if not _is_usable(norms):
        return Unchecked("gradient norms of the same 3 layers at every step")
    ratio, weak, strong = _depth_ratio(norms)
    if ratio < DEPTH_RATIO:
        return None
    vanishing = weak < strong
    middle = "vanish" if vanishing else "explode"
    where = "" if len(tables) == 1 else f", median of {len(tables)} steps"
    return Finding(
        level="harmful", excess=ratio / DEPTH_RATIO,
        symptom=f"gradients {middle} towards the first layers",
        evidence=(
            f"gradient norm {norms[weak]:.2e} in layer {weak} and {norms[strong]:.2e} in layer "
            f"{strong}{where}: a ratio of {ratio:.3g} (threshold {DEPTH_RATIO:g})"
        ),
        cause="each layer multiplies the gradient by a factor "
        + ("below" if vanishing else "above")
        + " 1: a start of the wrong scale, no norm, or no skip without an orthogonal start",
        remedy=_passing_back(e),
        numbers={"ratio": ratio, "weakest": weak, "strongest": strong},
    )  # fmt: skip


def _passing_back(e: Evidence) -> str:
    """What lets gradients pass, of what is not set yet."""
    starts = e.unset("model.init.value_output=haar (I2)", "model.init.mlp=suo (I4)")
    kinds = e.unset("model.connection.kind=anneal", "model.connection.kind=rezero")
    skip = f"a skip again ({' or '.join(kinds)})"
    keep = e.unset("model.norm_placement=pre") if e.settings else ["keep model.norm_placement=pre"]
    return "; ".join((", or ".join((*filter(None, [" and ".join(starts)]), skip)), *keep))


def gains(e: Evidence) -> Verdict:
    """Learned gains that do not move, or swing back and forth."""
    curves = {name: curve for name, curve in e.gains.items() if len(curve) >= NUM_GAINS}
    if not curves:
        return Unchecked(
            e.needs("gains", f"at least {NUM_GAINS} traced values of a learned gain "
                             "(probe.trace_every, and a connection that has gains)")
        )  # fmt: skip
    swinging = {name: swing for name, curve in curves.items() if (swing := _swing(curve)) > SWING}
    if swinging:
        name = max(swinging, key=lambda key: swinging[key])
        return Finding(
            level="harmful", excess=swinging[name] / SWING,
            symptom="a learned gain swings back and forth",
            evidence=(
                f"{name} changes by {swinging[name]:.1%} of itself between traced steps and turns "
                f"round at most of them ({len(swinging)} of {len(curves)} gains; thresholds "
                f"{SWING:.0%} and {TURNS:.0%} of the steps)"
            ),
            cause="its learning rate is too high for a single number that every token pushes",
            remedy="optim.gain_lr at a tenth; or probe.trace_every smaller, to see the swing",
            numbers={"gain": name, "swing": swinging[name], "num": len(swinging)},
        )  # fmt: skip
    moved = {name: _moved(curve) for name, curve in curves.items()}
    stuck = [name for name, share in moved.items() if share < 1]
    if len(stuck) <= len(curves) / 2:  # single gains may well be right where they started
        return None
    name = min(stuck, key=lambda key: moved[key])
    first, last = curves[name][0][1], curves[name][-1][1]
    return Finding(
        level="harmful", excess=1 / max(moved[name], 1e-3),
        symptom="learned gains do not move",
        evidence=(
            f"{name} went from {first:.4g} to {last:.4g} in {len(curves[name])} traced values; "
            f"{len(stuck)} of {len(curves)} gains stayed within {STUCK_SHARE:.0%} of themselves "
            f"or {STUCK:g}"
        ),
        cause="a learning rate too low for gains, weight decay on them, or an optimiser that "
        "was not given them",
        remedy="optim.gain_lr ten times higher; in a loop of your own see optimizer.describe()",
        numbers={"gain": name, "first": first, "last": last, "num": len(stuck)},
    )  # fmt: skip


def gate_gradients(e: Evidence) -> Verdict:
    """Gradients of gates that drown those of the trunk in the common clip."""
    if e.gate_norm is None or e.trunk_norm is None:
        return Unchecked(
            e.needs("gate_norm", "a model with learned connections, and a text to take a gradient")
        )
    ratio = e.gate_norm / e.trunk_norm if e.trunk_norm else math.inf
    if ratio < GATE_RATIO:
        return None
    share = ratio**2 / (1 + ratio**2) if math.isfinite(ratio) else 1.0
    return Finding(
        level="harmful", excess=ratio / GATE_RATIO,
        symptom="the gates' gradients are much larger than the trunk's",
        evidence=(
            f"gradient norm {e.gate_norm:.3g} of the gates and {e.trunk_norm:.3g} of all other "
            f"weights: {share:.0%} of the squared norm by which clipping divides (threshold "
            f"{GATE_RATIO:g} times)"
        ),
        cause="a gate sums over all tokens and channels of a branch that is large or aligned "
        "with the loss, so the global clip shrinks everybody else's step",
        remedy="clip gates apart or set train.max_grad_norm=none with a lower optim.gain_lr; "
        "bring the branch to unit scale (model.norm_placement=pre, model.init.std)",
        numbers={"gates": e.gate_norm, "trunk": e.trunk_norm, "ratio": ratio},
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _is_usable(norms: Mapping[int, float]) -> bool:
    finite = all(math.isfinite(norm) for norm in norms.values())
    return len(norms) >= 3 and finite and max(norms.values()) > 0


def _typical(tables: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The median of each layer's norms: one step's accident, such as gains that start at 0, is no
    illness."""
    layers = sorted(set.intersection(*(set(norms) for norms in tables)))
    return {layer: statistics.median(norms[layer] for norms in tables) for layer in layers}


def _depth_ratio(norms: Mapping[int, float]) -> tuple[float, int, int]:
    """Largest over smallest norm, the layer of the smallest, the layer of the largest."""
    weak = min(norms, key=lambda layer: norms[layer])
    strong = max(norms, key=lambda layer: norms[layer])
    return norms[strong] / norms[weak] if norms[weak] else math.inf, weak, strong


def _swing(curve: Curve) -> float:
    """Mean size of a step relative to the gain's own, 0 unless most steps turn round."""
    values = [value for _, value in curve]
    steps = [b - a for a, b in zip(values, values[1:], strict=False)]
    turns = sum(a * b < 0 for a, b in zip(steps, steps[1:], strict=False))
    if turns < TURNS * (len(steps) - 1):
        return 0.0
    scale = _mean([abs(value) for value in values])
    return _mean([abs(step) for step in steps]) / scale if scale else 0.0


def _moved(curve: Curve) -> float:
    """The widest a gain was from its start, in units of what still counts as standing still."""
    start = curve[0][1]
    return max(abs(v - start) for _, v in curve) / max(STUCK_SHARE * abs(start), STUCK)
