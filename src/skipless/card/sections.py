"""The body of a card, heading by heading. Numbers are the run's own, rounded; what was not measured
says so, with the command that measures it. Read by `skipless.card`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from skipless.card.equations import Equation, equations_of
from skipless.card.facts import Facts
from skipless.card.usage import usage
from skipless.data.catalog import SOURCES

MARK = "<!-- written by skipless card -->"
PAPER = "2605.25880"


def body(facts: Facts) -> str:
    """Everything below the head."""
    parts: list[tuple[str, Callable[[Facts], list[str]]]] = [
        ("Use", usage), ("Details", _details), ("Data and tokens", _data), ("Loss", _loss),
        ("Inside", _inside), ("Quantised", _quantised), ("Tasks", _tasks), ("Limits", _limits),
        ("Attribution", _attribution),
    ]  # fmt: skip
    lines = [MARK, "", f"# {facts.name}", "", *_opening(facts)]
    for title, part in parts:
        lines += ["", f"## {title}", "", *part(facts)]
    return "\n".join(lines) + "\n"


def _opening(facts: Facts) -> list[str]:
    what = "A text classifier" if facts.is_classifier else "A causal language model"
    lines = [
        f"{what}, trained and measured with `skipless`: transformers without, or with learned,",
        "skip connections, quantised with plain uniform integers.",
    ]
    if facts.result is None:
        lines += ["", f"**The training has not finished**: `skipless train {_run(facts)}` goes on."]
    return lines


def _run(facts: Facts) -> str:
    return shlex.quote(facts.run)


def _details(facts: Facts) -> list[str]:
    config, model = facts.config, facts.config.model
    optim, train = config.optim, config.train
    rows = [
        ("recipe", f"`{config.name}`"),
        ("layers, width, heads", f"{model.num_hidden_layers}, {model.hidden_size}, "
                                 f"{model.num_attention_heads}"),
        ("vocabulary, context", f"{model.vocab_size}, {model.max_position_embeddings}"),
        ("connection", _connections(facts)),
        ("norm", f"{model.norm}, {model.norm_placement}"),
        ("activation", model.hidden_act),
        ("positions", model.position),
        ("start", f"values and outputs {model.init.value_output}, queries and keys "
                  f"{model.init.query_key}, MLP {model.init.mlp}"),
        ("optimiser", f"{optim.name}, learning rate {optim.lr:g}, weight decay "
                      f"{optim.weight_decay:g}"),
        ("schedule", f"{train.schedule}, {train.warmup_steps} warm-up steps"),
        ("batch", f"{train.batch_size} sequences of {train.sequence_length} tokens"),
        ("precision", train.precision),
    ]  # fmt: skip
    if train.quantize is not None:
        rows.append(("trained with", f"`{train.quantize}`"))
    if facts.result is not None:
        rows.append(("steps", str(facts.result["step"])))
        processor = facts.environment.get("processor", "unknown")
        rows.append(("training time", f"{facts.result['seconds']:.0f} s on {processor}"))
    lines = _table(("what", "value"), rows)
    lines += ["", "Equations, by the tags of docs/equations.md:", ""]
    lines += [f"- {_equation(equation, facts.docs)}" for equation in equations_of(config)]
    return lines


def _connections(facts: Facts) -> str:
    model = facts.config.model
    seen: dict[str, None] = {}
    for layer in range(model.num_hidden_layers):
        for sublayer in ("attention", "mlp"):
            one = model.connection_at(layer, sublayer)
            text = one.kind
            if one.kind == "anneal":
                text += f" over a share of {one.anneal_fraction:g} of training"
            elif one.kind == "fixed":
                text += f" a={one.a:g} b={one.b:g} c={one.c:g}"
            seen[text] = None
    return "; ".join(seen)


def _equation(equation: Equation, docs: str) -> str:
    tag = f"[{equation.tag}]({docs}/equations.md#{equation.anchor})" if docs else equation.tag
    formula = f": `{equation.formula}`" if equation.formula else ""
    paper = equation.paper
    source = f" ([arXiv {paper}](https://arxiv.org/abs/{paper}))" if paper else ""
    return f"{tag} {equation.what}{formula}{source}"


def _data(facts: Facts) -> list[str]:
    config, rows = facts.config, []
    for name in config.data.sources:
        source = SOURCES.get(name) if name in SOURCES.names() else None
        if source is not None:
            rows.append((f"`{name}`", source.about, f"{source.package} {source.version}"))
        else:
            kind = "data set of the hub" if name.startswith("hf:") else "a file or folder"
            rows.append((f"`{_shown(name)}`", kind, ""))
    lines = _table(("text", "what", "package"), rows)
    tokens = facts.result["tokens"] if facts.result is not None else config.train.num_tokens
    seen = "Seen in training" if facts.result is not None else "To be seen in training"
    lines += [
        "",
        f"{seen}: {tokens:,} tokens. Held out: a share of {config.data.held_out_fraction:g} of the "
        f"documents. Tokeniser: {'byte-level BPE' if config.data.tokenizer == 'bpe' else 'given'}.",
    ]
    hashes = facts.text.get("sha256")
    if isinstance(hashes, dict):
        lines += ["", "SHA-256 of the prepared tokens:", ""]
        lines += [f"- {split}: `{value}`" for split, value in hashes.items()]
    return lines


def _loss(facts: Facts) -> list[str]:
    found = facts.evaluation
    if found is None:
        return _loss_of_training(facts)
    error = found.get("standard_error")
    if facts.is_classifier:
        rows = [
            ("accuracy", _number(found["accuracy"], ".4f") + _plus(error, ".4f")),
            ("loss, nats a passage", _number(found["held_out_loss"], ".4f")),
            ("held-out passages", f"{found['num_passages']:,}"),
        ]
        return _table(("held out", "value"), rows)
    rows = [
        ("loss, nats a token", _number(found["held_out_loss"], ".4f") + _plus(error, ".4f")),
        ("perplexity", _number(found["perplexity"], ".2f")),
        ("bits a byte", _number(found["bits_per_byte"], ".4f")),
        ("held-out tokens", f"{found['num_tokens']:,}"),
    ]
    lines = _table(("held out", "value"), rows)
    lines += ["", "± is the standard error over the held-out text; other seeds of training are not "
              "in it."]  # fmt: skip
    unigram = facts.text.get("unigram_loss")
    if isinstance(unigram, (int, float)):
        lines.append(f"Token frequencies alone reach {unigram:.4f} nats.")
    return lines


def _loss_of_training(facts: Facts) -> list[str]:
    """What the last step of training measured, where nothing was measured since."""
    command = f"skipless eval {_run(facts)}"
    result = facts.result or {}
    found = result.get("held_out_loss")
    if not isinstance(found, (int, float)):
        return _not_measured("held-out loss", command)
    unit = "passage" if facts.is_classifier else "token"
    rows = [(f"loss, nats a {unit}", _number(found, ".4f"))]
    counted = result.get("held_out_tokens")
    if isinstance(counted, int):
        rows.append((f"held-out {unit}s", f"{counted:,}"))
    lines = _table(("held out", "value"), rows)
    return [*lines, "", f"From the end of training, without its error: `{command}` measures it."]


def _inside(facts: Facts) -> list[str]:
    """Kurtosis, and SQNR at the scheme that the run is compared at, by layer."""
    lines: list[str] = []
    if facts.probe is None:
        lines += _not_measured("kurtosis", f"skipless probe {_run(facts)}")
    sqnr = None if facts.quant is None else facts.quant.get("sqnr")
    if sqnr is None and not facts.is_classifier:
        lines += _not_measured("SQNR", f"skipless quantize {_run(facts)}")
    heads, columns = ["layer"], []
    if facts.probe is not None:
        worst = _by_layer(facts.probe["sites"], "kurtosis", max)
        stream = {
            row["layer"]: row["kurtosis"]
            for row in facts.probe["sites"] if row["kind"] == "stream" and row["sublayer"] == "mlp"
        }  # fmt: skip
        heads += ["kurtosis of the stream", "largest kurtosis", "at"]
        columns.append((stream, ".2f"))
        columns.append(({n: row["kurtosis"] for n, row in worst.items()}, ".2f"))
        columns.append(({n: _short(row["site"]) for n, row in worst.items()}, ""))
    if sqnr is not None:
        lowest = _by_layer(sqnr["rows"], "sqnr", min)
        heads += ["lowest SQNR, dB", "of a Gaussian", "at"]
        columns.append(({n: row["sqnr"] for n, row in lowest.items()}, ".1f"))
        columns.append(({n: row["ideal"] for n, row in lowest.items()}, ".1f"))
        columns.append(({n: _short(row["site"]) for n, row in lowest.items()}, ""))
        depth = {
            row["layer"]: row["r"] for row in facts.quant["error"]["rows"]  # type: ignore[index]
            if row["sublayer"] == "mlp"
        }  # fmt: skip
        heads.append("R")
        columns.append((depth, ".3f"))
    if not columns:
        return lines
    layers = sorted({n for cells, _ in columns for n in cells if n is not None})
    rows = [
        (f"layer {n}", *(_number(cells.get(n), form) if form else cells.get(n, "")
                         for cells, form in columns))
        for n in layers
    ]  # fmt: skip
    lines = [*lines, ""] if lines else lines
    lines += _table(heads, rows)
    lines += ["", "Kurtosis (S1) is excess kurtosis, pooled over tokens and channels: zero for a "
              "bell curve."]  # fmt: skip
    if sqnr is not None:
        lines.append(
            f"SQNR (S3) and R, the relative error of the stream after the layer (S9), are of "
            f"`{sqnr['scheme']}` in scope {sqnr['scope']}, simulated."
        )
    return lines


def _by_layer(rows: Sequence[dict[str, Any]], key: str, of: Any) -> dict[int, dict[str, Any]]:
    """The row of each layer with the largest or smallest `key`."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        layer, value = row["layer"], row.get(key)
        if layer is None or value is None or not math.isfinite(value):
            continue
        if layer not in found or of(value, found[layer][key]) == value != found[layer][key]:
            found[layer] = row
    return found


def _short(site: str) -> str:
    """A site without its layer."""
    return "`" + ".".join(site.split(".")[2:]) + "`"


def _quantised(facts: Facts) -> list[str]:
    if facts.is_classifier:
        return ["Not measured: quantised loss needs a language model."]
    if facts.quant is None:
        return _not_measured("quantised loss", f"skipless quantize {_run(facts)}")
    rows = [
        (f"`{row['scheme']}`", row["scope"], _number(row["loss"], ".4f"),
         _number(row["increase"], "+.4f") + _plus(row.get("standard_error"), ".4f"),
         _computed(row))
        for row in facts.quant["rows"]
    ]  # fmt: skip
    lines = _table(("scheme", "scope", "loss, nats", "increase", "computed"), rows)
    lines += [
        "",
        f"On {facts.quant['num_tokens']:,} held-out tokens, against "
        f"{facts.quant['full_precision']:.4f} nats in full precision; embedding and head stay in "
        "full precision. W is the width of weights in bits, A of activations.",
    ]
    return lines


def _computed(row: dict[str, Any]) -> str:
    """By what a row of losses was measured; files of before say nothing, and were simulated."""
    return row.get("computed", "simulated") or ""


def _tasks(facts: Facts) -> list[str]:
    if facts.is_classifier:
        return ["Not measured: tasks ask a language model."]
    if facts.tasks is None:
        return _not_measured("zero-shot tasks", f"skipless eval {_run(facts)} --tasks core8")
    from skipless.evaluate.tasks.tables import comparison_lines, lead_metric

    sizes = {about["name"]: about for about in facts.tasks.get("tasks", ())}
    rows = []
    for row in facts.tasks["rows"]:
        for name, entry in row["tasks"].items():
            metric = lead_metric(entry)
            if metric is None:
                continue
            about = sizes.get(name, {})
            rows.append((
                row["scheme"], name, metric,
                _number(entry[metric], ".3f") + _plus(entry.get(f"{metric}_stderr"), ".3f"),
                _number(about.get("chance"), ".3f"), _number(about.get("num_questions"), "d"),
            ))  # fmt: skip
    lines = _table(("scheme", "task", "metric", "value", "chance", "questions"), rows)
    if compared := comparison_lines(facts.tasks):
        said = "Against full precision, question by question: an interval that holds zero shows no"
        lines += ["", f"{said} effect; KL in nats.", "", *_table(compared[0], compared[1:])]
    return lines


def _limits(facts: Facts) -> list[str]:
    lines = [
        "- The loss is of held-out text of the same sources; of other text nothing is known.",
        "- A single training with a single seed; other seeds are not in the errors.",
        "- Nothing was done about the content of the texts: the model repeats what they hold.",
    ]
    if not facts.is_classifier:
        lines.append("- It continues text; it was not trained to follow instructions.")
    computed = {_computed(row) for row in (facts.quant or {"rows": ()})["rows"]}
    if "integers" in computed:
        lines.append("- Losses computed with integers are those of execution, to the bit.")
    if "simulated" in computed:
        lines.append(
            "- Simulated losses are of rounding in floating point; integer execution, where it "
            "covers the scheme, has sums that differ in the last digits of float32."
        )
    if facts.result is None:
        lines.append("- The training is not finished.")
    return lines


def _attribution(facts: Facts) -> list[str]:
    lines = [
        f"The experiment follows [arXiv {PAPER}](https://arxiv.org/abs/{PAPER}). Made with "
        f"`skipless` {facts.environment.get('skipless', '')}, torch "
        f"{facts.environment.get('torch', '')}.",
        "",
        "Training texts and their licences:",
        "",
    ]
    for name in facts.config.data.sources:
        known = name in SOURCES.names()
        licence = SOURCES.get(name).licence if known else "not known here; look at the source"
        lines.append(f"- `{_shown(name)}`: {licence}")
    return lines


def _shown(source: str) -> str:
    """A text's name; of a file the last part, since the card is read elsewhere."""
    is_name = source in SOURCES.names() or source.startswith("hf:")
    return source if is_name else PurePath(source).name


def _not_measured(what: str, command: str) -> list[str]:
    return [f"Not measured: {what}. `{command}` measures it."]


def _number(value: Any, form: str) -> str:
    if value is None:
        return "not measured"
    return format(value, form) if math.isfinite(value) else "not finite"


def _plus(error: Any, form: str) -> str:
    return "" if error is None else f" ± {error:{form}}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; pipes in cells are escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(str(c).replace('|', chr(92) + '|') for c in row)} |"
                    for row in rows]  # fmt: skip
