"""All rules over one record of evidence: what is found, what is healthy, what could not be checked.

    found = examine(evidence)
    for illness in found.findings: print(illness.symptom, illness.remedy)

Read by the CLI.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skipless.doctor import costs, inside, training
from skipless.doctor.evidence import Evidence
from skipless.doctor.finding import Finding, Unchecked, Verdict

WIDTH = 96
RULES: Mapping[str, Callable[[Evidence], Verdict]] = {
    "finite numbers": inside.nonfinite,
    "causality": inside.leak,
    "learning beyond token frequencies": training.flat_at_unigram,
    "gradients by depth": training.gradients_by_depth,
    "gains": training.gains,
    "gate gradients": training.gate_gradients,
    "start of training": training.slow_start,
    "distinct tokens": inside.rank_collapse,
    "soft attention": inside.saturated_attention,
    "attention sinks": inside.sinks,
    "branch sizes": inside.exploding_branch,
    "speed": costs.no_speed_up,
    "memory of weights": costs.memory_of_weights,
    "memory of training": costs.memory_of_training,
}
"""{what is healthy when the rule is silent: rule}."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The outcome of all rules; every rule is in exactly one of the three."""

    name: str
    findings: Mapping[str, Finding]
    """By rule, worst first."""
    healthy: tuple[str, ...]
    unchecked: Mapping[str, str]
    """{rule: what it needs}."""

    def as_json(self) -> dict[str, Any]:
        """Findings, healthy and unchecked as plain data."""
        found = [{"rule": n, **dataclasses.asdict(f)} for n, f in self.findings.items()]
        return {
            "name": self.name, "findings": found, "healthy": list(self.healthy),
            "unchecked": dict(self.unchecked),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For a terminal: findings in full, the rest in a line each."""
        text = [f"{self.name}: {_count(len(self.findings), 'finding')}"]
        for number, found in enumerate(self.findings.values(), start=1):
            text += ["", f"{number}. {found.symptom} ({found.level})"]
            for name in ("evidence", "cause", "remedy"):
                text += _wrapped(f"   {name:8}  ", getattr(found, name))
        if self.healthy:
            text += ["", *_wrapped("healthy: ", ", ".join(self.healthy), indent="")]
        if self.unchecked:
            by_need: dict[str, list[str]] = {}
            for name, needs in self.unchecked.items():
                by_need.setdefault(needs, []).append(name)
            parts = (f"{', '.join(names)} (needs {n})" for n, names in by_need.items())
            text += ["", *_wrapped("not checked: ", "; ".join(parts), indent="")]
        return text


def examine(evidence: Evidence) -> Checkup:
    """Apply every rule; findings come worst first, those of one level by how far they exceed."""
    verdicts = {name: rule(evidence) for name, rule in RULES.items()}
    found = {n: v for n, v in verdicts.items() if isinstance(v, Finding)}
    return Checkup(
        name=evidence.name,
        findings=dict(sorted(found.items(), key=lambda item: item[1].order)),
        healthy=tuple(n for n, v in verdicts.items() if v is None),
        unchecked={n: v.needs for n, v in verdicts.items() if isinstance(v, Unchecked)},
    )


def _wrapped(label: str, text: str, indent: str | None = None) -> list[str]:
    """Lines of at most WIDTH columns behind a label; words with hyphens stay whole, as commands
    and sites are."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=label,
        subsequent_indent=" " * len(label) if indent is None else indent,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
