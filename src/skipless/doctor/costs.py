"""Rules about time and memory: what a change of structure was meant to save, and did not.

Evidence in, verdict out; None is healthy. Read by checkup.py.
"""

from __future__ import annotations

from skipless.doctor.evidence import Evidence
from skipless.doctor.finding import Finding, Unchecked, Verdict

CHANGE = 0.1
"""Less work or fewer weights, as a share, from which on a gain is to be expected at all: below it
hides in the scatter of timings."""
KEPT = 0.5
"""At least half of the expected gain has to come."""
SLACK = 0.1
"""Share of the weights' bytes that may be given back without anybody missing it."""
NUM_OPERATORS = 4
"""Operators that a finding names."""


def no_speed_up(e: Evidence) -> Verdict:
    """Less work and not less time."""
    if e.cost is None or e.against is None:
        return Unchecked(e.needs("against", "a model to compare with (--against)"))
    work, before = (c.flops * (1 - c.zeros) for c in (e.cost, e.against))
    if not before or not e.against.seconds:
        return Unchecked("matrix products to count in the model to compare with")
    expected, gained = 1 - work / before, 1 - e.cost.seconds / e.against.seconds
    if expected < CHANGE or gained >= KEPT * expected:
        return None
    shares = ", ".join(f"{name} {share:.0%}" for name, share in e.cost.operators[:NUM_OPERATORS])
    masked = e.cost.zeros - e.against.zeros > CHANGE
    return Finding(
        level="costly", excess=1 + (KEPT * expected - gained),
        symptom="less work, and not less time",
        evidence=(
            f"{expected:.0%} fewer multiplications and {gained:+.0%} of the time saved "
            f"({1e3 * e.against.seconds:.2f} -> {1e3 * e.cost.seconds:.2f} ms a pass; threshold: "
            f"half of what is expected). Time by operator: {shares}"
        ),
        cause="weights set to 0 are multiplied all the same" if masked else
        "the time is elsewhere than in the products that went away: see the operators",
        remedy="remove rows and layers instead of zeroing them (skipless.surgery.prune)"
        if masked else
        "measure at the batch and length of use, on one thread; fuse what leads the list "
        "(train.compile, scaled_dot_product_attention)",
        numbers={"expected": expected, "gained": gained, "operators": dict(e.cost.operators)},
    )  # fmt: skip


def memory_of_weights(e: Evidence) -> Verdict:
    """Weights that keep more bytes than their values need."""
    if e.weights is None:
        return Unchecked(e.needs("weights", "a model"))
    spare = sum(e.weights.reasons.values())
    share = spare / e.weights.stored if e.weights.stored else 0.0
    if share <= SLACK:
        return None
    reason, most = max(e.weights.reasons.items(), key=lambda item: item[1])
    return Finding(
        level="costly", excess=share / SLACK,
        symptom="weights take more memory than they hold",
        evidence=(
            f"{spare / 2**20:.1f} of {e.weights.stored / 2**20:.1f} MiB could be given back "
            f"({share:.0%}, threshold {SLACK:.0%}): "
            + "; ".join(f"{b / 2**20:.1f} MiB {why}" for why, b in e.weights.reasons.items())
        ),
        cause=reason,
        remedy=_REMEDIES.get(reason, "store the weights anew"),
        numbers={"stored": e.weights.stored, "spare": spare, "largest": most},
    )  # fmt: skip


CODES = "of simulated integers kept as floating point"
COPIES = "of equal tensors stored twice (a tie that came loose)"
VIEWS = "of storage behind slices, whose rest nobody reads"
ZEROS = "of whole rows of zeros"
_REMEDIES = {
    CODES: "skipless.quant.to_integer, which packs the codes; simulation saves nothing",
    COPIES: "tie again after loading (model.tie_weights()), or share the Parameter",
    VIEWS: "parameter.data.clone() after slicing, so that the former storage goes",
    ZEROS: "remove the rows (skipless.surgery.prune) instead of zeroing them",
}


def memory_of_training(e: Evidence) -> Verdict:
    """As many tensors kept for the backward pass as in the model to compare with."""
    if e.cost is None or e.against is None:
        return Unchecked(e.needs("against", "a model to compare with (--against)"))
    if not e.against.saved_bytes:
        return Unchecked("a model to compare with that keeps tensors for a backward pass")
    work, before = (c.flops * (1 - c.zeros) for c in (e.cost, e.against))
    expected = 1 - work / before if before else 0.0
    saved = 1 - e.cost.saved_bytes / e.against.saved_bytes
    if expected < CHANGE or saved >= KEPT * expected:
        return None
    return Finding(
        level="costly", excess=1 + (KEPT * expected - saved),
        symptom="training memory is not lower",
        evidence=(
            f"{expected:.0%} fewer multiplications, and {saved:+.0%} of the memory saved: "
            f"{e.against.saved_bytes / 2**20:.1f} -> {e.cost.saved_bytes / 2**20:.1f} MiB are "
            "kept for the backward pass (threshold: half of what is expected)"
        ),
        cause="a masked or split product, or an unfused step, keeps tensors of full size for "
        "its gradient",
        remedy="; ".join((
            *e.unset("train.activation_checkpointing=true"), "in-place or fused masks",
            "remove what is masked",
        )),
        numbers={"expected": expected, "saved": saved},
    )  # fmt: skip
