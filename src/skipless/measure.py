"""What is measured on a finished run: loss, precision, depth, samples. Run directory in, JSON out.

Each function loads nothing itself; it takes a `LoadedRun` (`skipless.train.load_run`) and writes
one file into the run directory, which the report then reads:

    evaluate_run  -> eval.json      held-out loss, perplexity, bits per byte; accuracy
    quantize_run  -> quant.json     loss at every scheme and scope; R_l by depth (S9); SQNR (S3)
    probe_run     -> probe.json     statistics of every site (S1-S3, S7, S8, S10)
    sample_run    -> samples.json   greedy and sampled text

Each file says in "measured" what it was made from (training step, held-out tokens, ...). With that
`measure_all` tells what is still good from what an earlier step or other settings left, and
`quantize_run` which rows may stand in one table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipless.errors import UserError, counted
from skipless.rundir import RunDir
from skipless.train import LoadedRun, measure_sites

Say = Callable[[str], None]
CALIBRATION_TOKENS = 8_192
"""Training tokens that fix the ranges of static schemes."""


def _quiet(_: str) -> None:
    return None


def _or(num_tokens: int | None, default: int) -> int:
    return default if num_tokens is None else num_tokens


def quantize_tokens(run: LoadedRun) -> int:
    """Tokens of the run's own table of schemes."""
    settings = run.config.evaluate
    return _or(settings.quantize_tokens, settings.num_tokens)


def held_out_batches(run: LoadedRun, num_tokens: int | None = None) -> list:
    """(input_ids, labels) pairs from the run's held-out documents, [batch, sequence_length]; labels
    [batch] if the model classifies.

    What `skipless.evaluate` measures on; None takes the run's evaluate.num_tokens.
    """
    from skipless.data import open_batches

    num_tokens = _or(num_tokens, run.config.evaluate.num_tokens)
    size = max(run.config.train.batch_size, 16)
    return open_batches(run.config, run.data, "held_out", size, num_tokens)


def measured_from(run: LoadedRun) -> dict[str, dict[str, Any]]:
    """By file: what a measurement with the run's own settings is made from."""
    settings, probe = run.config.evaluate, run.config.probe
    return {
        "eval.json": {"step": run.step, "num_tokens": settings.num_tokens},
        "samples.json": {
            "step": run.step, "prompt": settings.prompt, "sample_tokens": settings.sample_tokens
        },
        "quant.json": {"step": run.step, "num_tokens": quantize_tokens(run)},
        "probe.json": {
            "step": run.step, "num_tokens": probe.final_tokens, "stats": list(probe.stats)
        },
    }  # fmt: skip


def evaluate_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Held-out loss in nats with its standard error, perplexity, bits per byte -> eval.json.

    For a classifier accuracy with its standard error, loss a passage and recall by label.
    """
    from skipless.evaluate import accuracy, loss

    num_tokens = _or(num_tokens, run.config.evaluate.num_tokens)
    batches = held_out_batches(run, num_tokens)
    measured = measured_from(run)["eval.json"] | {"num_tokens": num_tokens}
    if run.config.model.num_labels is not None:
        found = accuracy(run.model, batches)
        result = {
            "accuracy": found.accuracy,
            "standard_error": found.standard_error,
            "held_out_loss": found.nats,
            "recall": dict(zip(run.data.sources, found.recall, strict=True)),
            "num_passages": found.num_passages,
            "measured": measured,
        }
        RunDir(run.path).write_json("eval.json", result)
        return result
    report = loss(run.model, batches, bytes_per_token=run.data.bytes_per_token)
    result = {
        "held_out_loss": report.nats,
        "perplexity": report.perplexity,
        "bits_per_byte": report.bits_per_byte,
        "num_tokens": report.num_tokens,
        "standard_error": report.standard_error,
        "measured": measured,
    }
    RunDir(run.path).write_json("eval.json", result)
    return result


def quantize_run(
    run: LoadedRun,
    *,
    schemes: tuple[str, ...] | None = None,
    scopes: tuple[str, ...] | None = None,
    methods: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
    num_tokens: int | None = None,
    by_layer: bool = False,
    all_but_one: bool = False,
    say: Say = _quiet,
) -> dict[str, Any]:
    """Loss under quantisation, error by depth and SQNR by tensor -> quant.json.

    Error by depth (S9), SQNR (S3) and, with `by_layer`, the loss with one layer quantised (with
    `all_but_one` also with one layer left out) are of the scheme with the fewest bits among
    `schemes`, of evaluate.error_scheme if none was named.
    `methods` (`skipless.quant.methods`) are measured beside rounding to the nearest, calibrated on
    training batches; their rows are kept apart, in "methods". `overrides`, PATTERN=SCHEME, sets
    modules apart in every scheme. Returns what was asked for. The
    file keeps the rows it has if they were measured on the same weights and as many tokens, and a
    table of the run's own settings is never replaced by one on other tokens. Static schemes are
    calibrated on training batches. Every scheme is checked before anything is measured.
    """
    from skipless.evaluate import error_propagation, precision_table, sensitivity, site_sqnr
    from skipless.quant import Scheme

    _need_language_model(run, "quantised loss")
    settings = run.config.evaluate
    parsed = list(dict.fromkeys(Scheme.parse(text) for text in schemes or settings.schemes))
    chosen_scopes = tuple(dict.fromkeys(scopes or settings.scopes))
    closer = _lowest(parsed) if schemes else Scheme.parse(settings.error_scheme)
    parsed = [scheme.with_overrides(overrides) for scheme in parsed]
    closer = closer.with_overrides(overrides)
    num_tokens = _or(num_tokens, quantize_tokens(run))
    batches = held_out_batches(run, num_tokens)
    is_static = any(scheme.needs_calibration for scheme in (*parsed, closer))
    calibration = calibration_batches(run) if is_static or methods else None
    say(f"{counted(len(parsed), 'scheme')} in scope {', '.join(chosen_scopes)}")
    table = precision_table(run.model, batches, parsed, chosen_scopes, calibration=calibration)
    few = batches[: max(1, len(batches) // 4)]
    scope = "block" if "block" in chosen_scopes else chosen_scopes[0]
    say(f"error of {closer} by depth")
    what: dict[str, Any] = {"scheme": str(closer), "scope": scope}
    depth = error_propagation(run.model, closer, few, scope, calibration=calibration)
    tensors = site_sqnr(run.model, closer, few, scope, calibration=calibration)
    result = {
        "full_precision": table[0]["loss"] - table[0]["increase"],
        "num_tokens": sum(labels.numel() for _, labels in batches),
        "rows": table,
        "error": what | {"rows": depth},
        "sqnr": what | {
            "rows": [row for row in tensors if row["kind"] != "weight"],
            "weights": [row for row in tensors if row["kind"] == "weight"],
        },
        "measured": measured_from(run)["quant.json"] | {"num_tokens": num_tokens},
    }  # fmt: skip
    if others := [method for method in methods if method != "rtn"]:
        say(f"methods {', '.join(others)}")
        result["methods"] = precision_table(
            run.model, batches, parsed, chosen_scopes, methods=others, calibration=calibration
        )
    if by_layer:
        say(f"loss with one layer at {closer}")
        rows = sensitivity(run.model, closer, few, scope, calibration=calibration)
        result["sensitivity"] = what | {"rows": rows}
        if all_but_one:
            say(f"loss with all layers but one at {closer}")
            result["sensitivity"]["all_but_one"] = sensitivity(
                run.model, closer, few, scope, keep="one", calibration=calibration
            )
    _keep_table(run, result, say)
    return result


def _lowest(schemes: list) -> Any:
    """The scheme with the fewest bits of weights and activations together, the last of equals."""
    from skipless.scheme import Scheme

    return min(reversed(schemes), key=Scheme.bits_together)


def calibration_batches(run: LoadedRun) -> list:
    """A few batches of the training text, for the fixed ranges of static schemes."""
    from skipless.data import open_batches

    size = max(run.config.train.batch_size, 16)
    return open_batches(run.config, run.data, "train", size, CALIBRATION_TOKENS)


def _need_language_model(run: LoadedRun, what: str) -> None:
    if run.config.model.num_labels is not None:
        raise UserError(
            f"{run.path} holds a classifier and {what} needs a language model; `skipless eval` and "
            "`skipless probe` work on both"
        )


def _keep_table(run: LoadedRun, result: dict[str, Any], say: Say) -> None:
    """Write `result` to quant.json, joined with the rows there that compare to it."""
    directory = RunDir(run.path)
    old = _read(directory, "quant.json")
    if old.get("measured") == result["measured"]:
        rows = {_cell(row): row for row in old["rows"]}
        rows |= {_cell(row): row for row in result["rows"]}
        parts = {}
        if _is_own(run, old) > _is_own(run, result):
            parts = {name: old[name] for name in ("error", "sqnr")}
            say(
                f"quant.json keeps error and SQNR of {_place(old)}, by which runs compare; those "
                f"of {_place(result)} are only shown"
            )
        kept = {"sensitivity": old["sensitivity"]} if "sensitivity" in old else {}
        directory.write_json("quant.json", {**kept, **result, **parts, "rows": list(rows.values())})
    elif old and old.get("measured") == measured_from(run)["quant.json"]:
        say(
            f"quant.json keeps its table on {old['measured']['num_tokens']} tokens; the one on "
            f"{result['measured']['num_tokens']} is only shown"
        )
    else:
        if old.get("rows"):
            say(
                f"quant.json is written anew: its {counted(len(old['rows']), 'row')} came of other "
                "weights or another number of tokens"
            )
        directory.write_json("quant.json", result)


def _is_own(run: LoadedRun, table: dict[str, Any]) -> tuple[bool, bool]:
    """Whether error by depth is of the run's own scheme, and of scope block: reports compare it."""
    from skipless.quant import Scheme

    own = str(Scheme.parse(run.config.evaluate.error_scheme))
    return table["error"]["scheme"] == own, table["error"]["scope"] == "block"


def _place(table: dict[str, Any]) -> str:
    return f"{table['error']['scheme']} in scope {table['error']['scope']}"


def _cell(row: dict[str, Any]) -> tuple[str, str]:
    return row["scheme"], row["scope"]


def _read(directory: RunDir, name: str) -> dict[str, Any]:
    """A measurement; empty when there is none that can be read."""
    try:
        found = directory.read_json(name, {})
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def probe_run(run: LoadedRun, *, num_tokens: int | None = None) -> dict[str, Any]:
    """Statistics of every site on held-out text -> probe.json."""
    config = run.config
    if num_tokens is not None:
        config = config.replace(probe={"final_tokens": num_tokens})
    result = measure_sites(run.model, config, run.data, final=True, step=run.step)
    RunDir(run.path).write_json("probe.json", result)
    return result


def sample_run(run: LoadedRun, *, prompt: str | None = None) -> dict[str, Any]:
    """Greedy and sampled (temperature 0.8, top 40, seed 0) continuations -> samples.json."""
    import torch

    _need_language_model(run, "a sample")
    settings = run.config.evaluate
    prompt = prompt if prompt is not None else settings.prompt
    ids = run.tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty; set evaluate.prompt to at least one character")
    room = run.config.model.max_position_embeddings - len(ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens and the model sees "
            f"{run.config.model.max_position_embeddings}; shorten it"
        )
    device = next(run.model.parameters()).device
    start = torch.tensor([ids], device=device)
    length = min(settings.sample_tokens, room)
    greedy = run.model.generate(start, length)
    sampled = run.model.generate(start, length, temperature=0.8, top_k=40, seed=0)
    result = {
        "prompt": prompt,
        "greedy": run.tokenizer.decode(greedy[0, len(ids) :].tolist()),
        "sampled": run.tokenizer.decode(sampled[0, len(ids) :].tolist()),
        "measured": measured_from(run)["samples.json"] | {"prompt": prompt},
    }
    RunDir(run.path).write_json("samples.json", result)
    return result


def measure_all(run: LoadedRun, *, say: Say = _quiet) -> None:
    """Everything a report shows, skipping what the run directory holds of these very weights.

    A classifier has no quantised loss and no samples.
    """
    directory = RunDir(run.path)
    steps: dict[str, Callable[[], Any]] = {
        "eval.json": lambda: evaluate_run(run),
        "samples.json": lambda: sample_run(run),
        "quant.json": lambda: quantize_run(run),
        "probe.json": lambda: probe_run(run),
    }
    wanted = measured_from(run)
    if run.config.model.num_labels is not None:
        del steps["samples.json"], steps["quant.json"]
    for name, step in steps.items():
        found = _read(directory, name)
        if found.get("measured") != wanted[name] or (
            name == "quant.json" and not _is_complete(run, found)
        ):
            say(f"writing {name}")
            step()


def _is_complete(run: LoadedRun, table: dict[str, Any]) -> bool:
    """Whether the table of quant.json has a row for every scheme and scope of the settings."""
    from skipless.quant import Scheme

    settings = run.config.evaluate
    there = {_cell(row) for row in table["rows"]}
    return _is_own(run, table)[0] and there >= {
        (str(Scheme.parse(scheme)), scope)
        for scheme in settings.schemes
        for scope in settings.scopes
    }
