"""Which engine is right on this machine, and which is fast: measured, not assumed.

Integer products that are right on random data can be wrong on large codes: 8-bit multiply-add
instructions without VNNI sum pairs in 16 bits and saturate. So every engine is run on worst-case
codes first (all +q, opposite signs, alternating signs that add up, K = 768 and an odd K) and
compared with int64 sums:

    exact        right everywhere
    slow         exact, but slower than a float32 product at 1 token and at 16
    saturating   right on small codes, too small in absolute value on the largest
    wrong        wrong on small codes as well
    unavailable  cannot run here; the reason is told

`probe()` gives a table, once per process and device; `pick` chooses among the exact ones by
measured time. Never a saturating or wrong one. Equation Q4. Read by `quant.integers`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.errors import UserError, check_choice
from skipless.quant.integers.building import find_compiler, tell_once
from skipless.quant.integers.engines import ENGINES, Engine, KernelEngine, Problem

WIDTHS = ((8, 8), (8, 12), (4, 8), (8, 16), (16, 16))
"""Weight and activation bits that are tried; an engine sits out what it refuses."""
TOKENS = (1, 16)
ACTIVATION_WIDTHS = (8, 12)
"""Widths that are timed, since some engines need two products above 8 bits."""
_TIMED, _COPIES = (768, 768), 6
_probed: dict[str, list[EngineReport]] = {}


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What the probe found for one engine on one device."""

    engine: str
    state: str
    detail: str = ""
    speed: tuple[float, ...] = ()
    """Time of float32 over the engine's, at `TOKENS` tokens: 2.0 is twice as fast (W8A8)."""
    wide_speed: tuple[float, ...] = ()
    """The same at W8A12; empty where that is refused."""

    @property
    def usable(self) -> bool:
        """Gives the right integers."""
        return self.state in ("exact", "slow")


def probe(device: str = "cpu", *, fresh: bool = False) -> list[EngineReport]:
    """Reports for every engine on `device` ("cpu", "cuda", "mps"); measured once a process."""
    kind = torch.device(device).type
    if fresh or kind not in _probed:
        _probed[kind] = [examine(engine, kind) for engine in ENGINES.values()]
        kernels = [r for r in _probed[kind] if isinstance(ENGINES[r.engine], KernelEngine)]
        if kind == "cpu" and find_compiler() is None:
            tell_once(
                "no C++ compiler found, so integer layers run without the fast kernel; install "
                "one, or set CXX"
            )
        elif kind == "cpu" and kernels and not any(report.usable for report in kernels):
            # The last is `plain`, which lacks nothing but what keeps all of them from running.
            tell_once(f"integer layers run without the fast kernel: {kernels[-1].detail}")
    return list(_probed[kind])


def table(reports: list[EngineReport]) -> list[dict]:
    """Rows with engine, state, speed_<tokens> (times float32) and detail, for printing."""
    return [
        {"engine": r.engine, "state": r.state}
        | {f"speed_{n}": round(s, 2) for n, s in zip(TOKENS, r.speed, strict=False)}
        | {"detail": r.detail}
        for r in reports
    ]


def examine(engine: Engine, device: str = "cpu") -> EngineReport:
    """Run one engine on worst-case codes, then time it."""
    if reason := engine.unavailable(device):
        return EngineReport(engine=engine.name, state="unavailable", detail=reason)
    tried = []
    for weight_bits, activation_bits in WIDTHS:
        for width in (768, 37):
            problem = Problem(
                weight_bits=weight_bits, activation_bits=activation_bits, in_features=width,
                out_features=24, device=device,
            )  # fmt: skip
            if engine.refuses(problem):
                continue
            try:
                verdict = _compare(engine, problem)
            except RuntimeError as error:
                line = str(error).splitlines()[0]
                return EngineReport(engine=engine.name, state="unavailable", detail=line)
            if verdict:
                state, detail = verdict
                return EngineReport(engine=engine.name, state=state, detail=detail)
        if not engine.refuses(problem):
            tried.append(f"W{weight_bits}A{activation_bits}")
    if not tried:
        return EngineReport(engine=engine.name, state="unavailable", detail="refuses every width")
    speed, wide = (_speed(engine, device, bits) for bits in ACTIVATION_WIDTHS)
    state = "slow" if speed and max(speed) < 1 else "exact"
    return EngineReport(
        engine=engine.name, state=state, speed=speed, wide_speed=wide,
        detail="exact for " + ", ".join(tried),
    )  # fmt: skip


def worst_case(problem: Problem) -> list[tuple[str, Tensor, Tensor]]:
    """(name, activation codes [3, in] int16, weight codes [24, in] int16); small codes first."""
    qa, qw, width = problem.largest_activation, problem.largest_weight, problem.in_features
    generator = torch.Generator().manual_seed(0)

    def codes(rows: int, limit: int) -> Tensor:
        shape = (rows, width)
        return torch.randint(
            -limit, limit + 1, shape, generator=generator, dtype=torch.int16, device="cpu"
        )

    sign = torch.ones(width, dtype=torch.int16, device="cpu")
    sign[1::2] = -1
    x, w = sign.new_full((3, width), qa), sign.new_full((problem.out_features, width), qw)
    return [
        ("small codes", codes(3, min(qa, 3)), codes(problem.out_features, min(qw, 3))),
        ("all largest", x, w),
        ("opposite signs", x, -w),
        ("alternating signs", x * sign, w * sign),
        ("cancelling signs", x, w * sign),
        ("random codes", codes(3, qa), codes(problem.out_features, qw)),
    ]


def _compare(engine: Engine, problem: Problem) -> tuple[str, str] | None:
    """None if right, else (state, what came out)."""
    ones = torch.ones(problem.out_features, dtype=torch.float32, device=problem.device)
    for name, x, w in worst_case(problem):
        expected = x.to(torch.int64) @ w.to(torch.int64).t()
        prepared = engine.prepare(w.to(problem.device), ones, problem)
        got = engine.sums(prepared, x.to(problem.device)).cpu().to(torch.int64)
        if torch.equal(got, expected):
            continue
        place = int((got != expected).flatten().nonzero()[0])
        mine, right = int(got.flatten()[place]), int(expected.flatten()[place])
        detail = (
            f"{mine} instead of {right} at W{problem.weight_bits}A{problem.activation_bits}, "
            f"K = {problem.in_features}, {name}"
        )
        is_small = bool((got.abs() <= expected.abs()).all())
        return ("saturating" if is_small and name != "small codes" else "wrong"), detail
    return None


def _speed(engine: Engine, device: str, activation_bits: int) -> tuple[float, ...]:
    width, out = _TIMED
    problem = Problem(
        weight_bits=8, activation_bits=activation_bits, in_features=width, out_features=out,
        device=device,
    )  # fmt: skip
    if engine.refuses(problem):
        return ()
    scale = torch.ones(out, dtype=torch.float32, device=device)
    weight = torch.randint(-127, 128, (out, width), dtype=torch.int16, device=device)
    # Visited in turn, as in a network: a single one would stay in a cache that no model fits in.
    prepared = [engine.prepare(weight, scale, problem) for _ in range(_COPIES)]
    full = [weight.float().t() for _ in range(_COPIES)]
    # One thread's own time does not count what a busy machine takes away.
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    speeds = []
    for tokens in TOKENS:
        codes = torch.randint(-127, 128, (tokens, width), dtype=torch.int16, device=device)
        x, best = codes.float(), [float("inf"), float("inf")]
        calls = (
            lambda i, x=x: x @ full[i],
            lambda i, codes=codes: engine.linear(prepared[i], codes, scale[:1], None),
        )
        for round_ in range(2 * _COPIES):  # in turn, so that a busy machine slows both
            for i, call in enumerate(calls):
                start = clock()
                call(round_ % _COPIES)
                if device == "cuda":
                    torch.cuda.synchronize()
                elif device == "mps":
                    torch.mps.synchronize()
                if round_ >= _COPIES:
                    best[i] = min(best[i], clock() - start)
        speeds.append(best[0] / best[1])
    return tuple(speeds)


def pick(problem: Problem, engine: str | None = None) -> Engine:
    """The engine called `engine`, or the fastest exact one, for this product.

    Raises UserError when the one asked for refuses the product or the probe found it inexact.
    """
    reports: Mapping[str, EngineReport] = {r.engine: r for r in probe(problem.device)}
    if engine is not None:
        chosen = ENGINES[check_choice("engine", engine, ENGINES)]
        report = reports[engine]
        reason = chosen.refuses(problem) or ("" if report.usable else report.detail)
        if reason:
            raise UserError(
                f"engine {engine!r} cannot run W{problem.weight_bits}A{problem.activation_bits} "
                f"on this {problem.device}: {reason}; leave the engine out to have one chosen"
            )
        return chosen
    able = [r for r in reports.values() if r.usable and not ENGINES[r.engine].refuses(problem)]
    if not able:
        raise UserError(
            f"no engine computes W{problem.weight_bits}A{problem.activation_bits} with "
            f"{problem.in_features} inputs exactly on {problem.device}; use fewer bits"
        )
    wide = problem.activation_bits > 8
    return ENGINES[max(able, key=lambda report: _merit(report, wide)).engine]


def _merit(report: EngineReport, wide: bool) -> tuple[bool, float]:
    speeds = report.wide_speed if wide else report.speed
    # Only the C++ engines make codes and product in one call, pack 4 bits and can be fused, so that
    # another has to be half again as fast in the product alone.
    worth = 1.5 if isinstance(ENGINES[report.engine], KernelEngine) else 1.0
    return report.state == "exact", math.prod(worth * speed for speed in speeds)


def fastest_kernel() -> KernelEngine | None:
    """The best C++ engine of this CPU, without probing; None if none can be built."""
    kernels = (e for e in ENGINES.values() if isinstance(e, KernelEngine))
    return next((kernel for kernel in kernels if not kernel.unavailable("cpu")), None)
