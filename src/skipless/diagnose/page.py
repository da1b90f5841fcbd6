"""The page of a diagnosis: one HTML file with everything inline, that loads nothing.

Same stylesheet, figures and cells as the report of runs, tables that sort (`report.frame`).
Everything from the model, tokens above all, is escaped. Read by writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from skipless.diagnose.plots import series
from skipless.diagnose.result import NO_ERROR, REMEDIES, Diagnosis, describe_outliers
from skipless.report.cells import show
from skipless.report.frame import document, glossary, listed, number, sortable, word
from skipless.report.html import figure_html, section
from skipless.report.plots import Figure

RATIOS = ("token_sqnr", "ideal", "gap", "sqnr")
WITHOUT = ("tokens", "channels", "both")
GLOSSARY = {
    "Site": "An input or output of one module; sites that see the same tensor share their numbers.",
    "Signal to rounding noise (SQNR)": "How much larger the values are than what rounding adds to "
    "them, in decibels: 6 dB is about one bit, 20 dB a tenth in size.",
    "Every token alike": "The same ratio taken for each token by itself and then averaged: it "
    "shows what happens to ordinary tokens when a few huge ones set the scale.",
    "Ideal, gap": "What a tensor of Gaussian values with its best clip reaches at this width, and "
    "how far this one, every token alike, stays below.",
    "Excess kurtosis": "How heavy the tails are over all tokens and channels: 0 for a Gaussian, "
    "thousands when single values are huge.",
    "max / sd": "The largest value over the standard deviation; a Gaussian tensor of a million "
    "values has about 5.",
    "S2": "Channel energy: 1 when all channels have the same energy, the number of channels when "
    "one has it all.",
    "Outlier token": "A token with a value more than six times what a token's largest usually is, "
    "outlier channels left aside.",
    "Outlier channel": "A channel that on most tokens is more than six times what channels usually "
    "are; a channel huge on one token only is none.",
    "Energy": "Share of the sum of squares that outlier tokens hold, and of the rest that "
    "outlier channels hold.",
    "Without": "Excess kurtosis of what is left when outlier tokens, channels or both are taken "
    "out.",
    "KL": "Divergence in nats from the Gaussian of the same mean and standard deviation, over 64 "
    "bins: 0 is equal, 4.16 the most.",
    "Bits": "The width at which every token alike reaches the target with one scale a tensor, and "
    "the width a Gaussian needs.",
    "Remedy": "What was tried on the site's own values and would help most simply; the number is "
    "what it gives, at the outputs of the linear layers that read the tensor where there are any.",
    "Loss by layer": "The increase of the loss, or the relative distance of the outputs where a "
    "model has no loss without labels, when one layer alone is quantised.",
    "Standard error": "Of an increase of the loss, over sequences, each against itself in full "
    "precision: what is within two of them may be chance. One sequence and distances have none.",
    "R": "Distance of the quantised stream from the exact one over the exact one's length.",
    "Rank correlation": "Spearman's: 1 when the prediction orders the layers as the measured "
    "damage does, 0 when it says nothing.",
    "Predicted": "Noise over energy of the output of the layer's block, every token alike, the "
    "block alone quantised and given its exact inputs; of a model without blocks the sum of noise "
    "over energy of what is rounded.",
    "Gradient first / last": "Norm at the first layer over that at the last: 1 is even, far above "
    "or below 1 says that layers learn at very different speeds.",
    "First token, saturated": "Share of attention on the first token, a parking place called a "
    "sink; share of queries that give one token more than 99 %.",
}


def page(result: Diagnosis, figures: Sequence[Figure], without: Sequence[str]) -> str:
    """The whole HTML text; `without` names figures that had no numbers."""
    title = f"Diagnosis of {result.model}"
    missing = [*result.missing, *(f"figure “{title}”: no numbers" for title in without)]
    scope = "" if result.scope is None else f", scope {result.scope}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(result.about or f'{result.num_batches} batches')}; schemes "
        f"{escape(', '.join(result.schemes) + scope)}. Simulated integers; embedding and head stay "
        "in full precision.</p>",
        section("Worst first", listed(result.lines(), ordered=True)),
        section("To paste", _paste(result)),
        section("Figures", "".join(map(figure_html, figures))),
        section("Sites", _sites(result)),
        section("Outliers by name", _outliers(result)),
        section("Remedies", _remedies(result)),
        section("Layers", _layers(result)),
        section("Weights", _weights(result)),
        section("Attention", _attention(result)),
        section("Gradients", _gradients(result)),
        section("What could not be measured", listed(missing)),
        section("What the numbers mean", glossary(GLOSSARY)),
    ]
    return document(title, parts, series().rows)


def _sites(result: Diagnosis) -> str:
    scheme = result.schemes[0]
    head = ["site", "kind", "layer", f"every token alike, {scheme} (dB)", "ideal (dB)", "gap (dB)",
            "SQNR pooled (dB)", "excess kurtosis", "per token", "max / sd", "largest |x|", "S2",
            "KL (nats)", f"bits for {result.target_db:g} dB", "Gaussian's"]  # fmt: skip
    body = []
    for row in result.sites:
        found = row["anatomy"]
        body.append([
            word(row["site"]), word(row["kind"].replace("_", " ")), number(row["layer"], ".0f"),
            *(number(row[key].get(scheme), ".1f") for key in RATIOS),
            number(row["kurtosis"]), number(row["kurtosis_per_token"]),
            number(row["max_over_std"], ".1f"), number(row["max_abs"], ".4g"),
            number(row["channel_energy"], ".1f"), number(found.get("kl_gaussian"), ".3f"),
            *(number(found.get(key), ".0f") for key in ("bits_for_target", "gaussian_bits")),
        ])  # fmt: skip
    note = "<p class=quiet>A click on a heading sorts. A dash: not defined.</p>"
    return note + sortable(head, body)


def _outliers(result: Diagnosis) -> str:
    body, seen = [], set()
    for row in result.sites:
        found = row["anatomy"]
        if row["tensor"] in seen or not (found.get("num_tokens") or found.get("num_channels")):
            continue
        seen.add(row["tensor"])
        body.append([
            word(row["site"]), word(describe_outliers(row)),
            number(found["energy_tokens"], ".1%"), number(found["energy_channels"], ".1%"),
            number(row["kurtosis"]),
            *(number(found[f"kurtosis_without_{what}"]) for what in WITHOUT),
        ])  # fmt: skip
    if not body:
        return "<p>No tensor has an outlier token or an outlier channel.</p>"
    head = ["tensor", "what", "energy of tokens", "energy of channels", "excess kurtosis",
            "without tokens", "without channels", "without both"]  # fmt: skip
    return sortable(head, body)


def _remedies(result: Diagnosis) -> str:
    parts = []
    for scheme in result.schemes:
        body = []
        for row in result.worst_tensors(scheme):
            tried = {r["remedy"]: r for r in row["remedies"].get(scheme, [])}
            chosen = row["remedy"].get(scheme)
            cells = []
            for name in ("as is", *REMEDIES):
                found = tried.get(name)
                key = "token_sqnr"
                if found is not None and found["output_sqnr"] is not None:
                    key = "output_sqnr"
                cells.append(number(None if found is None else found[key], ".1f"))
            body.append([
                word(row["site"]), word("–" if chosen is None else chosen["remedy"]),
                number(None if chosen is None else chosen["gain"], "+.1f"), *cells,
            ])  # fmt: skip
        if body:
            head = ["tensor", "would fix it", "gain (dB)", *(f"{n} (dB)" for n in
                    ("as is", *REMEDIES))]  # fmt: skip
            parts.append(f"<h3>{escape(scheme)}</h3>" + sortable(head, body))
    if not parts:
        return ""
    note = (
        "<p class=quiet>Computed on the kept tokens, every token alike: at the outputs of the "
        "linear layers that read the tensor, weights rounded too, or of the tensor itself where "
        "none does. Columns: 1 % of the channels in full precision.</p>"
    )
    return note + "".join(parts)


def _layers(result: Diagnosis) -> str:
    if not result.layers:
        return ""
    body = [
        [number(row["layer"], ".0f"), word(row["scheme"]), number(row["increase"], "+.5f"),
         number(row["standard_error"], ".5f"), number(row["predicted"], ".4g")]
        for row in result.layers
    ]  # fmt: skip
    unit = f" ({result.damage['unit']})" if result.damage else ""
    head = ["layer", "scheme", f"increase{unit}", "standard error", "predicted (noise / energy)"]
    if result.damage is None:
        note = "<p>Predicted and not measured: the model was read layer by layer.</p>"
        return note + sortable(head, body)
    said = ", ".join(
        f"{scheme}: {show(value, '.2f')}" for scheme, value in result.damage["correlation"].items()
    )
    alone = any(result.is_unsure(row) for row in result.layers)
    unsure = (
        f" {NO_ERROR.capitalize()}: what does not double the loss may be noise." if alone else ""
    )
    note = (
        f"<p>One layer quantised alone; the measure is {escape(result.damage['unit'])}. Spearman's "
        f"rank correlation of prediction and measurement: {escape(said)}.{unsure}</p>"
    )
    return note + sortable(head, body)


def _weights(result: Diagnosis) -> str:
    scheme = result.schemes[0]
    body = []
    for row in result.weights:
        finer = row["remedies"].get(scheme, {})
        body.append([
            word(row["site"]), word(" × ".join(map(str, row["shape"]))),
            number(row["channel_sqnr"].get(scheme), ".1f"),
            number(row["sqnr"].get(scheme), ".1f"), number(row["gap"].get(scheme), ".1f"),
            number(finer.get("channel"), ".1f"), number(finer.get("g32"), ".1f"),
            number(finer.get("clip:mse"), ".1f"), number(row["kurtosis"]),
            number(row["max_over_std"], ".1f"),
        ])  # fmt: skip
    head = ["matrix", "out × in", f"every channel alike, {scheme} (dB)",
            "SQNR pooled (dB)", "gap (dB)", "a scale a channel (dB)",
            "a scale a 32 (dB)", "MSE clip (dB)", "excess kurtosis", "max / sd"]  # fmt: skip
    return sortable(head, body) if body else ""


def _attention(result: Diagnosis) -> str:
    body = [
        [word(row["module"]), number(row["entropy"], ".2f"),
         number(row["max_probability"], ".1%"), number(row["first_token_mass"], ".1%"),
         number(row["saturated"], ".1%")]
        for row in result.attention if row.get("count")
    ]  # fmt: skip
    head = ["layer", "entropy (nats)", "largest probability", "first token", "saturated"]
    return sortable(head, body) if body else ""


def _gradients(result: Diagnosis) -> str:
    found = result.gradients
    if found is None:
        return ""
    ratios = [
        [word(row["of"]), word(row["stack"] or "–"), number(row["first_layer"], ".0f"),
         number(row["first"], ".4g"), number(row["last_layer"], ".0f"),
         number(row["last"], ".4g"), number(row["ratio"], ".3g")]
        for row in found["ratios"]
    ]  # fmt: skip
    parts = [
        f"<p>One backward pass of the {escape(found['of'])}, {found['loss']:.4f}, on the first "
        "sequences. The gradient at a site is the one with respect to the values there.</p>"
    ]
    if ratios:
        head = ["of", "stack", "first layer", "norm", "last layer", "norm there", "first / last"]
        parts.append(sortable(head, ratios))
    for what in ("sites", "weights"):
        body = []
        for row in found[what]:
            about = [word(row.get("kind", "").replace("_", " "))]
            if what == "weights":
                about = [number(row["relative"], ".3g")]
            body.append([
                word(row["site"]), *about, number(row["layer"], ".0f"), number(row["norm"], ".4g"),
                number(row["rms"], ".3g"), number(row["kurtosis"]),
                number(row["max_over_std"], ".1f"),
            ])  # fmt: skip
        name, second = ("site", "kind") if what == "sites" else ("parameter", "norm / |weight|")
        head = [name, second, "layer", "norm", "rms", "excess kurtosis", "max / sd"]
        parts.append(sortable(head, body) if body else "")
    return "".join(parts)


def _paste(result: Diagnosis) -> str:
    if not result.alternatives:
        return ""
    body = [
        [word(row["what"]), number(row["increase"], "+.4f"),
         number(row["standard_error"], ".4f"), word(row["scope"])]
        for row in result.alternatives
    ]  # fmt: skip
    chosen = result.recommended()
    rows = [row for row in result.alternatives if row is not chosen]
    rows = rows if chosen is None else [chosen, *rows]
    note = (
        "<p class=quiet>The whole model quantised in several ways, on the tokens of the layers. "
        "The line to try first stands first.</p>"
    )
    unit = f" ({result.damage['unit']})" if result.damage else ""
    head = ["whole model", f"increase{unit}", "standard error", "scope"]
    parts = [note, sortable(head, body)]
    python = [f"{row['code']}  # {_said(row)}" for row in rows]
    parts.append(_code(["from skipless.quant import quantize", "", *python]))
    if result.command is not None:
        parts.append(_code([f"{result.paste(row)}  # {_said(row)}" for row in rows]))
    return "".join(parts)


def _said(row: dict[str, Any]) -> str:
    return f"{row['what']}: {show(row['increase'], '+.4f')}"


def _code(lines: Sequence[str]) -> str:
    return "<pre>" + escape("\n".join(lines)) + "</pre>"
