"""What `skipless doctor WHAT` names, as evidence: a run, a log of another training, a model.

    evidence = collect("runs/mine")            # files, and the model where weights are there
    evidence = collect("smollm2-135m", text="book.txt", against="runs/pruned")

    check_model(model, batch)                       # any nn.Module, in Python

Read by the CLI and users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.data import read_path
from skipless.data.catalog import SOURCES
from skipless.doctor.checkup import Checkup, examine
from skipless.doctor.evidence import Evidence
from skipless.doctor.measuring import Batch, evaluating, measure
from skipless.doctor.records import from_log, from_run, has_records
from skipless.doctor.timing import cost
from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text
from skipless.rundir import CONFIG, RunDir

NUM_TOKENS = 1024
DEFAULT_TEXT = "the documentation of CPython"
LENGTH = 256
"""Tokens a sequence at most: attention statistics and sinks show at that length."""


def collect(
    what: str | Path,
    *,
    text: str | Path | None = None,
    against: str | Path | None = None,
    num_tokens: int = NUM_TOKENS,
    device: str | torch.device = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Evidence:
    """Everything that the files of `what` and one batch through its model tell.

    `what` and `against` are run directories, Hugging Face folders or names of `skipless models
    list`; `against` may be of another width, but reads the same batch. A folder with a log alone
    is judged by its files. `text` is a file to measure on: else a run's own held-out text, and for
    language models the English documentation of CPython. Raises UserError for what is none of
    these, or cannot be read.
    """
    kind = kind_of(what)
    if kind == "log":
        if against or text:
            option = "--against" if against else "--text"
            raise UserError(
                f"{what} holds a log and no model, so {option} has nothing to run; name a run or a "
                "model"
            )
        return from_log(what)
    files = from_run(what) if kind == "run" else None
    try:
        model, batch, source = _open(what, kind, text, num_tokens)
    except UserError as error:
        if files is None or text or against:
            raise
        say(f"judged by its files alone: {error}")
        return dataclasses.replace(
            files, missing={**files.missing, **dict.fromkeys(_OF_MODELS, "weights to load")}
        )
    say(f"measured on {source}")
    batch = {k: v.to(device) for k, v in batch.items()}
    found = measure(model.to(device), batch, name=str(what))
    if against is not None:
        other = _open(against, kind_of(against), text, num_tokens)[0]
        found = compared(found, model, other.to(device), batch)
    return files.joined(found) if files else found


def check_model(
    model: nn.Module,
    batch: Batch,
    *,
    against: nn.Module | None = None,
    causal: bool | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    log: str | Path | None = None,
) -> Checkup:
    """All rules for any nn.Module and one batch of it; `batch`, `causal`, `loss` as in `measure`.

    `against` is a model that reads the same batch, to judge time and memory by. `log` is a folder
    that `ProbeLog` wrote while this model was trained. Raises UserError for a batch that does not
    fit and a folder without a log.
    """
    found = measure(model, batch, causal=causal, loss=loss)
    if against is not None:
        found = compared(found, model, against, batch)
    return examine(from_log(log).joined(found) if log else found)


def compared(e: Evidence, model: nn.Module, other: nn.Module, batch: Any) -> Evidence:
    """The evidence with time, work and memory of `model` and of the `other` on one batch.

    Raises UserError if the other cannot run on that batch.
    """
    with evaluating(model), evaluating(other):
        return dataclasses.replace(e, against=cost(other, batch), cost=cost(model, batch))


def kind_of(what: str | Path) -> str:
    """ "run" (settings of ours), "log" (metrics.jsonl or probes.jsonl alone) or "model".

    Raises UserError for a folder that is nothing of these.
    """
    path = Path(what)
    if (path / CONFIG).is_file():
        settings = parse_json(read_text(path / CONFIG), where=str(path / CONFIG))
        return "run" if isinstance(settings, dict) and "train" in settings else "model"
    if path.is_dir() and has_records(path):
        return "log"
    if path.is_dir():
        raise UserError(
            f"{path} holds neither {CONFIG} nor metrics.jsonl or probes.jsonl; name a run, a log "
            "of ProbeLog or the folder of a Hugging Face model"
        )
    return "model"


_OF_MODELS = ("leak", "gate_norm", "weights", "against")


def _open(
    what: str | Path, kind: str, text: str | Path | None, num_tokens: int
) -> tuple[Any, dict[str, Tensor], str]:
    """(model, batch, what the batch is of)."""
    if kind == "run":
        return _open_run(what, text, num_tokens)
    if kind == "log":
        raise UserError(f"{what} holds a log and no model to run; name a run or a model")
    from skipless.diagnose.loading import load_subject
    from skipless.surgery.folders import sample_batch

    subject = load_subject(str(what))
    model: Any = subject.model
    if getattr(model, "main_input_name", "input_ids") != "input_ids" or _has_images(model):
        if text:
            raise UserError(f"{what} reads other things than text alone; leave --text out")
        return model, sample_batch(model), "random input (this model does not read text alone)"
    if subject.tokenizer is None:
        if text:
            raise UserError(f"{what} has no tokenizer to read {text} with; leave --text out")
        return model, sample_batch(model), "random tokens (there is no tokenizer)"
    encoded = subject.tokenizer(_read(text, 8 * num_tokens), verbose=False)["input_ids"]
    where = text or DEFAULT_TEXT
    ids = _cut(torch.tensor(encoded), num_tokens, min(LENGTH, subject.limit or LENGTH), where)
    size = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= size:
        raise UserError(
            f"the tokenizer of {what} gives token {int(ids.max())} and the model knows {size}; the "
            "two are not of one model"
        )
    return model, {"input_ids": ids}, f"{ids.numel():,} tokens of {where}"


def _open_run(
    path: str | Path, text: str | Path | None, num_tokens: int
) -> tuple[Any, dict[str, Tensor], str]:
    from skipless.data import load_tokenizer, open_batches
    from skipless.train import load_run

    run = load_run(path)
    length = run.config.train.sequence_length
    noted = RunDir(path).read_json("data.json", {})
    directory = Path(noted.get("directory", "")) if isinstance(noted, dict) else Path()
    if text is None and (directory / "prepared.json").is_file():
        batches = open_batches(run.config, run.data, "held_out", max(1, num_tokens // length),
                               num_tokens)  # fmt: skip
        ids, labels = batches[0]
        batch = {"input_ids": ids, "labels": labels}
        return run.model, batch, f"{ids.numel():,} held-out tokens of the run"
    if text is None:
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, num_tokens // length), length)
        ids = torch.randint(run.config.model.vocab_size, shape, generator=generator)
        return run.model, {"input_ids": ids}, "random tokens (the run's text is not here)"
    if not (directory / "tokenizer.json").is_file():
        raise UserError(f"the tokenizer of {path} is not here any more; leave --text out")
    encoded = load_tokenizer(directory / "tokenizer.json").encode(_read(text, 8 * num_tokens))
    ids = _cut(torch.tensor(encoded), num_tokens, length, text)
    return run.model, {"input_ids": ids}, f"{ids.numel():,} tokens of {text}"


def _cut(ids: Tensor, num_tokens: int, length: int, text: str | Path) -> Tensor:
    """The first tokens as rows of `length`, or as one shorter row."""
    if len(ids) < 2:
        raise UserError(f"{text} holds {len(ids)} tokens; give a text of at least 2")
    length = min(length, len(ids))
    rows = max(1, min(num_tokens, len(ids)) // length)
    return ids[: rows * length].view(rows, length)


def _read(text: str | Path | None, num_characters: int) -> str:
    """The start of a text, documents joined by blank lines."""
    documents: Iterable[Any] = (
        SOURCES.get("cpython").read(Path()) if text is None else read_path(Path(text))
    )
    found = ""
    for document in documents:
        found += document.text + "\n\n"
        if len(found) >= num_characters:
            break
    return found[:num_characters]


def _has_images(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "vision_config")
