"""Rules about the inside of a model: tokens, attention, joins, causality, broken numbers.

Evidence in, verdict out; None is healthy. Read by checkup.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from skipless.doctor.evidence import OF_WEIGHTS, Evidence
from skipless.doctor.finding import Finding, Unchecked, Verdict

SIMILARITY, RANK_SHARE = 0.9, 0.25
"""Mean cosine between tokens, and effective rank as a share of the largest possible. Both: a common
mean direction alone makes tokens similar and leaves the rest of them apart (GPT-2 is such a
model)."""
SATURATED = 0.5
"""Share of a layer's rows, the first left out, whose largest probability is above .99."""
SINK = 0.4
"""Share of a layer's attention on the first token, beyond what an even look gives."""
BRANCH = 10.0
"""|F| / |x| at a join: from there on the stream in front is a tenth of what comes out, and the
skip carries next to nothing past the sublayer. The first layer is exempt: embeddings are small."""
GIANT_RANK = 0.1
"""Effective rank of a branch, as a share of the largest possible, below which single directions
hold it."""
LEAK_EPSILONS = 64.0
"""Roundings of the largest output: equal shapes give equal bits, and other sums of experts' tokens
give a few roundings."""


def nonfinite(e: Evidence) -> Verdict:
    """NaN or infinite values."""
    if e.nonfinite is None:
        return Unchecked(e.needs("nonfinite", "weights, or records of a probe"))
    if not e.nonfinite:
        return None
    if e.nonfinite.startswith(OF_WEIGHTS):
        return Finding(
            level="broken", excess=1.0,
            symptom="weights that are not finite",
            evidence=e.nonfinite,
            cause="a step of training that was not finite itself, or a file that was damaged or "
            "changed; every output that reads the weight is not finite then",
            remedy="load an earlier checkpoint, or the file again from where it came; if training "
            "did it, a lower optim.lr, longer train.warmup_steps, a smaller train.max_grad_norm; "
            "bf16 or fp32 instead of fp16",
        )  # fmt: skip
    return Finding(
        level="broken", excess=1.0,
        symptom="numbers that are not finite",
        evidence=e.nonfinite,
        cause="an overflow (fp16, a gain or a branch that grows) or a division by 0 before it",
        remedy="load an earlier checkpoint; lower optim.lr, longer train.warmup_steps, a smaller "
        "train.max_grad_norm; bf16 or fp32 instead of fp16",
    )  # fmt: skip


def leak(e: Evidence) -> Verdict:
    """Earlier outputs that change with later tokens."""
    if e.leak is None:
        return Unchecked(e.needs("leak", "a causal model that takes token ids"))
    tolerance = LEAK_EPSILONS * e.leak.epsilon * e.leak.largest
    if e.leak.difference <= tolerance:
        return None
    share = e.leak.difference / e.leak.largest if e.leak.largest else math.inf
    where = f", first at {e.leak.first}" if e.leak.first else ""
    return Finding(
        level="broken", excess=e.leak.difference / tolerance if tolerance else math.inf,
        symptom="earlier outputs see later tokens",
        evidence=(
            f"with other tokens from position {e.leak.cut} on, outputs before it moved by up to "
            f"{e.leak.difference:.3g}, {share:.2%} of the largest{where} (threshold "
            f"{tolerance:.1g})"
        ),
        cause="statistics, a gate or attention that pools over all positions, or a missing "
        "causal mask; the loss is then too good to be true",
        remedy="; ".join((
            "use prefix statistics (positions <= t)", *e.unset("model.causal=true"),
            "in the kind universal any aligner but sinkhorn",
        )),
        numbers={"difference": e.leak.difference, "largest": e.leak.largest, "cut": e.leak.cut,
                 "first": e.leak.first},
    )  # fmt: skip


def rank_collapse(e: Evidence) -> Verdict:
    """Tokens that have become alike."""
    rows = [r for r in e.joins if _is_number(r.get("token_similarity"))]
    if not rows or e.num_keys is None or e.num_keys < 2:
        return Unchecked(e.needs("joins", "joins measured on text (probe.stats with geometry)"))
    fallen = [
        (r, share) for r in rows
        if r["token_similarity"] > SIMILARITY and (share := _rank_share(r)) < RANK_SHARE
    ]  # fmt: skip
    if not fallen:
        return None
    first, (last, share) = fallen[0][0], fallen[-1]
    excess = last["token_similarity"] / SIMILARITY * RANK_SHARE / max(share, 1e-3)
    return Finding(
        level="harmful", excess=excess,
        symptom="the tokens have become alike",
        evidence=(
            f"mean cosine between tokens {rows[0]['token_similarity']:.2f} after {_place(rows[0])},"
            f" above {SIMILARITY:g} from {_place(first)} on, {last['token_similarity']:.3f} after "
            f"{_place(last)}; effective rank there {last['effective_rank']:.1f}, {share:.0%} of "
            f"what it could be (threshold {RANK_SHARE:.0%})"
        ),
        cause="attention averages over many tokens in every layer and nothing keeps a token "
        "apart from the average",
        remedy=_kept_apart(e),
        numbers={"similarity": last["token_similarity"], "rank_share": share,
                 "first": _place(first)},
    )  # fmt: skip


def _kept_apart(e: Evidence) -> str:
    """What keeps tokens apart, of what is not set yet."""
    found = e.unset("model.init.identity_bias=5 (I7)", "model.temperature.beta=1")
    kind = e.settings.get("model.connection.kind", "none")
    if kind == "none":
        found.append("a skip or an annealed one (model.connection.kind=anneal)")
    elif kind == "anneal":
        found.append("a skip that stays (model.connection.kind=rezero)")
    return "; ".join((*filter(None, [", ".join(found)]), "more steps", "fewer layers"))


def saturated_attention(e: Evidence) -> Verdict:
    """Softmax rows with all weight on one key."""
    rows = [r for r in e.attention if _is_number(r.get("saturated"))]
    if not rows or e.num_keys is None or e.num_keys < 2:
        return Unchecked(e.needs("attention", "attention probabilities on an eager path"))
    floor = 1 / e.num_keys if e.causal else 0.0  # the first row of a causal layer sees one key
    shares = [((r["saturated"] - floor) / (1 - floor), r) for r in rows]
    full = [(share, r) for share, r in shares if share > SATURATED]
    if not full:
        return None
    share, worst = max(full, key=lambda item: item[0])
    itself = worst.get("self_mass")
    own = f", {itself:.0%} of it on the token itself" if _is_number(itself) else ""
    return Finding(
        level="harmful", excess=share / SATURATED,
        symptom="attention is saturated",
        evidence=(
            f"in {_place(worst)} {share:.0%} of the rows put more than .99 on one key{own} "
            f"(threshold {SATURATED:.0%}; {len(full)} of {len(rows)} layers)"
        ),
        cause="logits far apart: large queries and keys, or a large bias, and a softmax that "
        "passes no gradient any more",
        remedy=", ".join((
            "a lower model.init.a_qk or identity_bias",
            *e.unset("model.temperature.kind=learned_head"),
            "a norm on queries and keys, a lower optim.lr",
        )),
        numbers={"share": share, "layer": worst.get("layer"), "layers": len(full)},
    )  # fmt: skip


def sinks(e: Evidence) -> Verdict:
    """Attention parked on the first token."""
    rows = [r for r in e.attention if _is_number(r.get("first_token_mass"))]
    if not rows or e.num_keys is None or e.num_keys < 2:
        return Unchecked(e.needs("attention", "attention probabilities on an eager path"))
    n = e.num_keys
    even = sum(1 / k for k in range(1, n + 1)) / n if e.causal else 1 / n
    found = [r for r in rows if r["first_token_mass"] - even > SINK]
    if not found:
        return None
    worst = max(found, key=lambda r: r["first_token_mass"])
    return Finding(
        level="note", excess=(worst["first_token_mass"] - even) / SINK,
        symptom="the first token is an attention sink",
        evidence=(
            f"in {_place(worst)} {worst['first_token_mass']:.0%} of the attention is on the first "
            f"token, an even look gives {even:.0%} (threshold {SINK:.0%} more; {len(found)} of "
            f"{len(rows)} layers)"
        ),
        cause="heads with nothing to say need somewhere to look; such a token often carries the "
        "giant activations that a per-tensor grid pays for",
        remedy="per-token activations when quantising (W8A8-a:token), keep the first token out of "
        "calibration and in the cache",
        numbers={"mass": worst["first_token_mass"], "even": even, "layers": len(found)},
    )  # fmt: skip


def exploding_branch(e: Evidence) -> Verdict:
    """A branch much larger than the stream that it joins."""
    rows = [r for r in e.joins if _is_number(r.get("branch_over_stream"))]
    if not rows:
        return Unchecked(e.needs("joins", "joins measured on text (probe.stats with geometry)"))
    first = rows[0].get("layer")
    kept = [(_growth(r), r) for r in rows if r.get("layer") != first and not _replaces(r)]
    large = [(ratio, r) for ratio, r in kept if ratio > BRANCH]
    if not large:
        return None
    ratio, worst = max(large, key=lambda item: item[0])
    rank, count = worst.get("branch_effective_rank"), worst.get("count") or 0
    giant = _is_number(rank) and rank < GIANT_RANK * min(count, worst.get("channels") or count)
    rank_text = f", effective rank {rank:.1f}" if _is_number(rank) else ""
    return Finding(
        level="costly" if giant else "harmful", excess=ratio / BRANCH,
        symptom="a branch outgrows the stream",
        evidence=(
            f"at {_place(worst)} |F| is {worst['branch_norm']:.3g}{rank_text}, and |x| "
            f"{worst['stream_norm']:.3g}: the stream grows {ratio:.3g} times (threshold "
            f"{BRANCH:g}; {len(large)} of {len(kept)} joins)"
        ),
        cause="giant activations: one direction, mostly of single tokens, holds the branch's energy"
        if giant else "an output matrix or a gain that grew",
        remedy="skipless diagnose names the channel and token; for quantising per-token "
        "activations (W8A8-a:token) or that layer in more bits"
        if giant else "layerscale or rezero there (model.connection_overrides), weight decay on "
        "output matrices, a lower optim.gain_lr",
        numbers={"ratio": ratio, "place": _place(worst), "giant": giant},
    )  # fmt: skip


def _growth(row: Mapping[str, Any]) -> float:
    """How many times larger the stream becomes, by the branch and not by its own weight: the less
    of |y| / |x| and |F| / |x|, so that a gain of 0 counts as no branch."""
    x, y = row.get("stream_norm"), row.get("output_norm")
    grown = y / x if _is_number(x) and _is_number(y) and x else math.inf
    return min(row["branch_over_stream"], grown)


def _replaces(row: Mapping[str, Any]) -> bool:
    """Whether the new stream is the branch itself, so that its size is no matter."""
    out, branch = row.get("output_norm"), row.get("branch_norm")
    total = row.get("sum_norm")
    return out == branch and out != total


def _rank_share(row: Mapping[str, Any]) -> float:
    """Effective rank over the number of tokens or channels, whichever is less."""
    rank, count = row.get("effective_rank"), row.get("count") or 0
    width = row.get("channels") or count
    return rank / min(count, width) if _is_number(rank) and count else 1.0


def _place(row: Mapping[str, Any]) -> str:
    layer, sublayer = row.get("layer"), row.get("sublayer")
    if layer is None:
        return str(row.get("module") or "a layer")
    return f"layer {layer}" + (f" {sublayer}" if sublayer else "")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
