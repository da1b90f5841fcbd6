"""`Diagnosis`: all numbers of a diagnosis, and the ten lines that say what matters, worst first.

Read by `writing.py`, the page and the command line. Numbers only, no torch.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipless.report.cells import show

ROUNDED = {
    "linear": ("linear_input",),
    "block": ("linear_input", "sublayer_output", "stream"),
    "all": ("linear_input", "sublayer_output", "stream"),
}
NUM_LINES = 10
NUM_TENSORS = 5
NO_ERROR = "one sequence gives no standard error"
REMEDIES = {
    "clip:gauss": "a clip for a Gaussian (-clip:gauss)",
    "clip:mse": "a clip at the least squared error (-clip:mse)",
    "token": "one scale a token (-a:token)",
    "columns": "1 % of the channels in full precision",
    "smoothing": "smoothing into the weights",
    "rotation": "a Hadamard rotation",
    "rotation, token": "a Hadamard rotation and one scale a token",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found; lists hold one dict a row, None where a number does not exist."""

    model: str
    about: str
    """What was read: text and number of tokens in words."""
    schemes: list[str]
    scope: str | None
    """Of layers, depth and alternatives; None where the model cannot be quantised."""
    num_tokens: int
    num_batches: int
    target_db: float
    sites: list[dict[str, Any]]
    """In order of computation. site, kind, layer, sublayer; tensor: the first site that saw the
    same one; `Moments.summary`; anatomy (anatomy.py); by scheme sqnr, token_sqnr, ideal, gap (of
    token_sqnr), remedies, remedy (remedies.py)."""
    weights: list[dict[str, Any]]
    attention: list[dict[str, Any]]
    joins: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    """scheme, layer, increase, standard_error, predicted; without `damage` predicted alone."""
    depth: list[dict[str, Any]]
    """R_l at the first scheme (S9): site, layer, sublayer, r."""
    alternatives: list[dict[str, Any]]
    damage: dict[str, Any] | None
    """kind, unit, baseline of the layers' increases; Spearman's correlation by scheme; predicted:
    what the layers' predictions are, "block" (block_noise.py) or "sites" (sensitivity.predict)."""
    missing: list[str]
    gradients: dict[str, Any] | None = None
    """On request (gradients.py): loss, of, sites, weights, depth, ratios."""
    command: str | None = None
    """The start of the shell line that quantises the same model on the same text, if any does."""

    def to_dict(self) -> dict[str, Any]:
        """The same as a plain dict."""
        return dataclasses.asdict(self)

    def worst_tensors(self, scheme: str | None = None) -> list[dict[str, Any]]:
        """Tensors that the scheme rounds, each once, the lowest token_sqnr first."""
        scheme = scheme or self.schemes[0]
        kinds = ROUNDED[self.scope or "linear"]
        rounded = [
            row for row in self.sites
            if row["token_sqnr"].get(scheme) is not None and row["kind"] in kinds
        ]  # fmt: skip
        rounded.sort(key=lambda row: row["token_sqnr"][scheme])
        first: dict[str, dict[str, Any]] = {}
        for row in rounded:  # a tensor that sites round differently counts at the worst of them
            first.setdefault(row["tensor"], row)
        return list(first.values())

    def recommended(self) -> dict[str, Any] | None:
        """The alternative to paste: the one with the smallest increase.

        The scheme as asked when its damage is within two standard errors of none, or `is_unsure`;
        None when nothing was measured.
        """
        if not self.alternatives:
            return None
        asked = self.alternatives[0]
        if _is_noise(asked) or self.is_unsure(asked):
            return asked
        return min(self.alternatives, key=lambda row: row["increase"])

    def is_unsure(self, row: dict[str, Any]) -> bool:
        """Whether a row of layers or alternatives is a loss on one sequence, without a standard
        error, that does not even double: what more than doubles is no accident of the text."""
        if not self.damage or self.damage["kind"] != "loss" or row["increase"] is None:
            return False
        full = self.damage["baseline"]
        return row["standard_error"] is None and (full is None or row["increase"] <= full)

    def paste(self, row: dict[str, Any]) -> str | None:
        """A row of `alternatives` as a line for the shell; None where no such line does it."""
        if self.command is None:
            return None
        return paste_line(self.command, row["scheme"], row["scope"])

    def lines(self) -> list[str]:
        """At most ten lines, worst first."""
        scheme = self.schemes[0]
        number = NUM_TENSORS - (self.gradients is not None)
        lines = [self._tensor_line(group, scheme) for group in self._groups(scheme)[:number]]
        lines += self._layer_lines(scheme) + self._depth_line() + self._weight_line(scheme)
        lines += self._attention_line() + self._gradient_line() + self._advice_line()
        return [line for line in lines if line][:NUM_LINES]

    def _groups(self, scheme: str) -> list[list[dict[str, Any]]]:
        """Tensors of the same place in different layers together, the worst group first."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.worst_tensors(scheme):
            groups.setdefault(re.sub(r"\d+", "*", row["site"]), []).append(row)
        return list(groups.values())

    def _tensor_line(self, group: list[dict[str, Any]], scheme: str) -> str:
        row = group[0]
        near = [r for r in group if r["token_sqnr"][scheme] <= row["token_sqnr"][scheme] + 6]
        layers = sorted({r["layer"] for r in near if r["layer"] is not None})
        others = [layer for layer in layers if layer != row["layer"]]
        where = f" (and layer{'s' * (len(others) > 1)} {_ranges(others)})" if others else ""
        text = (
            f"{row['site']}{where}: {row['token_sqnr'][scheme]:.1f} dB at {scheme}, a Gaussian "
            f"{row['ideal'][scheme]:.1f}; {describe_outliers(row)}"
        )
        remedy = row["remedy"].get(scheme)
        if remedy is None:
            return text + "; nothing tried gives 3 dB"
        value, gain = remedy[remedy["judged_by"]], remedy["gain"]
        given = f"{value:.1f} dB here, {gain:+.1f}"
        if remedy["judged_by"] == "output_sqnr":
            given = f"{value:.1f} dB instead of {value - gain:.1f} in the outputs of what reads it"
        return f"{text}; {REMEDIES[remedy['remedy']]} would give {given}"

    def _layer_lines(self, scheme: str) -> list[str]:
        rows = [row for row in self.layers if row["scheme"] == scheme]
        if not rows:
            return []
        if self.damage is None:
            known = [row for row in rows if row["predicted"] is not None]
            worst = sorted(known, key=lambda row: -row["predicted"])[:3]
            listed = ", ".join(f"{row['layer']} ({row['predicted']:.4f})" for row in worst)
            return [f"noise over energy that blocks alone add at {scheme}: most in {listed}"]
        worst = sorted(rows, key=lambda row: -row["increase"])[:3]
        listed = ", ".join(f"{row['layer']} ({show(row['increase'], '+.4f')})" for row in worst)
        correlation = self.damage["correlation"].get(scheme)
        if any(self.is_unsure(row) for row in worst):
            ranks = "" if correlation is None else (
                f" and the rank correlation with the prediction, {correlation:.2f},"
            )  # fmt: skip
            return [
                f"layers alone at {scheme}, in {self.damage['unit']}: most in {listed}; "
                f"{NO_ERROR}: these{ranks} may be noise"
            ]
        if all(_is_noise(row) for row in rows):
            return [
                f"layers alone at {scheme}: none costs more than two standard errors; most, in "
                f"{self.damage['unit']}: {listed}"
            ]
        agree = (
            "too few layers for a rank correlation with the prediction" if correlation is None
            else f"rank correlation with the prediction {correlation:.2f}"
        )  # fmt: skip
        unit = self.damage["unit"]
        if all(row["standard_error"] is None for row in rows):
            unit += " (no standard error)"
        return [f"layers alone at {scheme}: {listed} cost most, in {unit}; {agree}"]

    def _depth_line(self) -> list[str]:
        rows = [row for row in self.depth if row["r"] is not None]  # None: of a stream of zeros
        if not rows:
            return []
        r = [row["r"] for row in rows]
        steps = [b - a for a, b in zip([0.0, *r], r, strict=False)]
        at = rows[steps.index(max(steps))]
        return [
            f"error of the stream at {self.schemes[0]}: R = {r[-1]:.3f} after the last block; it "
            f"grows most at {at['site']} ({max(steps):+.3f})"
        ]

    def _weight_line(self, scheme: str) -> list[str]:
        rows = [row for row in self.weights if row["channel_sqnr"].get(scheme) is not None]
        if not rows:
            return []
        row = min(rows, key=lambda row: row["channel_sqnr"][scheme])
        finer = {k: v for k, v in row["remedies"][scheme].items() if v is not None}
        best = max(finer, key=finer.__getitem__) if finer else None
        more = "" if best is None else f"; {best} would give {finer[best]:.1f} dB"
        return [
            f"worst weight {row['site']}: {row['channel_sqnr'][scheme]:.1f} dB at {scheme}, "
            f"a Gaussian {row['ideal'][scheme]:.1f}{more}"
        ]

    def _attention_line(self) -> list[str]:
        rows = [r for r in self.attention if r.get("first_token_mass") is not None]
        if not rows:
            return []
        row = max(rows, key=lambda r: r["first_token_mass"])
        return [
            f"attention: {row['first_token_mass']:.0%} on the first token in {row['module']}, "
            f"{sum(r['first_token_mass'] for r in rows) / len(rows):.0%} on average; "
            f"{max(r['saturated'] for r in rows):.0%} of rows saturated at most"
        ]

    def _gradient_line(self) -> list[str]:
        if self.gradients is None:
            return []
        rows = [row for row in self.gradients["sites"] if row["kurtosis"] is not None]
        parts = [
            f"{row['ratio']:.3g} times as long at layer {row['first_layer']} as at layer "
            f"{row['last_layer']} ({'stream' if row['of'] == 'stream' else 'parameters'}"
            f"{' of ' + row['stack'] if row['stack'] else ''})"
            for row in self.gradients["ratios"][:2] if row["ratio"] is not None
        ]  # fmt: skip
        if rows:
            row = max(rows, key=lambda row: row["kurtosis"])
            parts.append(f"heaviest tails at {row['site']}, kurtosis {_short(row['kurtosis'])}")
        return [f"gradients of the {self.gradients['of']}: {'; '.join(parts)}"] if parts else []

    def _advice_line(self) -> list[str]:
        row = self.recommended()
        if row is None:
            return []
        asked = self.alternatives[0]
        start = (
            f"whole model at {asked['scheme']}, scope {asked['scope']}: "
            f"{show(asked['increase'], '+.4f')}"
        )
        if self.is_unsure(asked):
            least = min(self.alternatives, key=lambda r: r["increase"])
            other = "" if least is asked else (
                f" (least measured: {least['what']}, {show(least['increase'], '+.4f')})"
            )  # fmt: skip
            return [
                f"{start}; {NO_ERROR}, so that nothing else is advised{other}; measure layers on "
                f"two sequences or more: {asked['code']}"
            ]
        if row is asked:
            error = asked["standard_error"]
            if asked["increase"] <= 0:
                why = "no damage"
            elif error is None or asked["increase"] > 2 * error:
                why = "nothing tried is better"
            else:
                why = f"within two standard errors ({error:.4f} each) of no damage"
            return [f"{start}, {why}: {row['code']}"]
        unknown = f" ({NO_ERROR})" * (
            (self.damage or {}).get("kind") == "loss" and row["standard_error"] is None
        )
        return [f"{start}; {row['what']}: {show(row['increase'], '+.4f')}{unknown}: {row['code']}"]


def _is_noise(row: dict[str, Any]) -> bool:
    """Whether an increase is no more than two standard errors above none."""
    return row["increase"] <= 2 * (row["standard_error"] or 0.0)


def describe_outliers(row: dict[str, Any]) -> str:
    """Outlier tokens and channels of a site in words."""
    found = row["anatomy"]
    parts = []
    if found.get("num_tokens"):
        token = found["tokens"][0]
        text = "" if token["text"] is None else f" of {token['text']!r}"
        place = "" if token["position"] is None else f" at position {token['position']}"
        more = "at least " if found["all_extreme"] else ""
        number = found["num_tokens"]
        parts.append(
            f"{more}{number} outlier token{'s' * (number > 1)} ({found['energy_tokens']:.1%} of "
            f"the energy), {_short(token['value'])} in channel {token['channel']}{text}{place}"
        )
    if found.get("num_channels"):
        listed = ", ".join(str(c["channel"]) for c in found["channels"][:4])
        number = found["num_channels"]
        parts.append(
            f"{number} outlier channel{'s' * (number > 1)} ({found['energy_channels']:.1%} of the "
            f"other energy): {listed}{', ...' if number > 4 else ''}"
        )
    return "; ".join(parts) or f"no outliers, excess kurtosis {_short(row['kurtosis'])}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def paste_line(command: str, scheme: str, scope: str, method: str = "rtn") -> str:
    """`command`, the start of a `skipless quantize` line, with a scheme that may be a mixed one."""
    plain, *overrides = scheme.split()
    words = ["--schemes", plain, "--scopes", scope]
    words += ["--override", *overrides] if overrides else []
    words += [] if method == "rtn" else ["--methods", method]
    return f"{command} {shlex.join(words)}"
