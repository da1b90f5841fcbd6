"""What `skipless doctor WHAT` names, as evidence: a run, a log of another training, a model.

    evidence = collect("runs/mine")            # files, and the model where weights are there
    evidence = collect("smollm2-135m", text="book.txt", against="runs/pruned")

    check_model(model, batch)                       # any nn.Module, in Python

Read by the CLI and users.
"""

from __future__ import annotations

import dataclasses
import json
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
from skipless.rundir import CONFIG, RunDir

NUM_TOKENS = 1024
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
    """ "run", "log" or "model". Raises UserError for a path that is nothing of these."""
    path = Path(what)
    if (path / CONFIG).is_file():
        return "model" if "model_type" in _settings(path / CONFIG) else "run"
    if path.is_dir() and has_records(path):
        return "log"
    from skipless.surgery.folders import find_folder

    folder = find_folder(str(what))
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} holds neither {CONFIG} nor metrics.jsonl or probes.jsonl; name a run, a log "
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
    from skipless.surgery.folders import find_folder, sample_batch

    folder = find_folder(str(what))
    model = _load(folder)
    if not hasattr(model, "get_input_embeddings") or getattr(
        model, "main_input_name", "input_ids"
    ) != "input_ids":  # fmt: skip
        if text:
            raise UserError(f"{what} does not read text; leave --text out")
        return model, sample_batch(model), "random input (this model reads no text)"
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", LENGTH)
    ids = _tokens(folder, text, num_tokens, min(LENGTH, longest))
    if ids is None:
        if text:
            raise UserError(
                f"{folder} holds no tokenizer.json to read {text} with; leave --text out"
            )
        return model, sample_batch(model), "random tokens (no tokenizer.json)"
    size = model.config.get_text_config().vocab_size
    if int(ids.max()) >= size:
        raise UserError(
            f"the tokenizer of {folder} gives token {int(ids.max())} and the model knows {size}; "
            "the two are not of one model"
        )
    extra = {} if type(model).__name__ != "CLIPModel" else sample_batch(model)
    where = text or "the documentation of CPython"
    return model, {**extra, "input_ids": ids}, f"{ids.numel():,} tokens of {where}"


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


def _load(folder: Path) -> Any:
    """A Hugging Face folder in the class that its config names, patched ones too, in eval mode."""
    settings = _settings(folder / CONFIG)
    try:
        import transformers
    except ImportError:
        raise UserError(
            "transformers is not installed; install it with `pip install -e '.[hf]'`"
        ) from None
    from skipless.surgery import load
    from skipless.surgery.saving import MODEL_TYPE as PATCHED

    transformers.utils.logging.disable_progress_bar()
    if settings.get("model_type") == PATCHED:
        return load(folder)
    name = (settings.get("architectures") or ["AutoModel"])[0]
    cls: Any = getattr(transformers, name, None)
    if cls is None:
        raise UserError(
            f"{folder} holds a {name}, which this version of transformers does not have; load it "
            "in Python and give it to skipless.doctor.check_model"
        )
    try:
        return cls.from_pretrained(folder).eval()
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} cannot be loaded as {name}: {reason}") from None


def _tokens(
    folder: Path, text: str | Path | None, num_tokens: int, length: int
) -> Tensor | None:  # fmt: skip
    """Token ids [B, T] of a text in the folder's own tokens; None without a tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(file)).encode(_read(text, 8 * num_tokens)).ids
    return _cut(torch.tensor(encoded), num_tokens, length, text or "the documentation of CPython")


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


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no settings but a {type(found).__name__}")
    return found
