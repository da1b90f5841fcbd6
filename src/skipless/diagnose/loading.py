"""What `skipless diagnose` is given: a run directory, a folder, a name; and text as batches.

Read by the command line; in Python `diagnose(model, batches)` takes any module and any batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError, suggestion
from skipless.rundir import CHECKPOINTS, CONFIG

BATCH_SIZE = 4
LEAST_TOKENS = 16
_CHARACTERS = 12
"""Characters of text read for a token that is wanted; English has 4 to 5 a token."""


@dataclass(kw_only=True)
class Subject:
    """A model to diagnose, with what turns text into its inputs."""

    name: str
    model: nn.Module
    tokenizer: Any
    """None where there is none; else has `decode(list of ids)`."""
    limit: int | None
    """The longest sequence that the model takes."""
    run: Any = None
    """The `LoadedRun`, when it is one of ours."""


def load_subject(name: str) -> Subject:
    """The model that `name` names: a run directory, one of its checkpoints
    (RUN/checkpoint/step-N), a folder or hub name of Hugging Face's, a folder that `skipless patch`
    wrote, or a model of `skipless models list`.

    Raises UserError for anything else.
    """
    path = Path(name)
    step = _checkpoint_step(path)
    if step is not None or path.is_dir() and (path / CONFIG).exists() and _is_run(path):
        from skipless.train import load_run, load_step

        run = load_run(path) if step is None else load_step(path.parent.parent, step)
        return Subject(
            name=name, model=run.model, tokenizer=_Decoder(run.tokenizer), run=run,
            limit=run.config.model.max_position_embeddings,
        )  # fmt: skip
    try:
        import transformers
    except ImportError:
        raise UserError(
            "transformers is not installed, and only run directories can be read without it; "
            "install it with `pip install -e '.[hf]'`"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    source = _find(name)
    model = _load(source, transformers)
    return Subject(
        name=name, model=model.eval(), tokenizer=_tokenizer(source, transformers),
        limit=_limit(model),
    )  # fmt: skip


def _is_run(path: Path) -> bool:
    try:
        return "train" in json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def _checkpoint_step(path: Path) -> int | None:
    """The step of RUN/checkpoint/step-N, leading zeros or not; None for any other path."""
    digits = path.name.removeprefix("step-")
    inside = path.parent.name == CHECKPOINTS and path.name.startswith("step-")
    return int(digits) if inside and digits.isdigit() and _is_run(path.parent.parent) else None


def _find(name: str) -> str:
    """A folder, or a hub name as it is."""
    from skipless.pretrained import MODELS, fetch_model

    if Path(name).is_dir():
        return name
    if name in MODELS.names():
        return str(fetch_model(name))
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    raise UserError(
        f"{name} is neither a folder nor a named model; {suggestion(name, MODELS.names())} A model "
        "of a hub is named OWNER/NAME"
    )


def _load(source: str, transformers: Any) -> Any:
    if Path(source).is_dir() and _is_patched(Path(source)):
        from skipless.surgery import load

        return load(source)
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        names = config.architectures or ["AutoModel"]
        cls = getattr(transformers, names[0], None)
        if cls is None:
            raise UserError(
                f"{source} holds a {names[0]}, which this version of transformers does not have"
            )
        return cls.from_pretrained(source)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source} cannot be loaded: {reason}") from None


def _is_patched(path: Path) -> bool:
    from skipless.surgery.saving import MODEL_TYPE

    try:
        return json.loads((path / "config.json").read_text()).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError):
        return False


def _tokenizer(source: str, transformers: Any) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None  # said where text is to be read


def _limit(model: Any) -> int | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


class _Decoder:
    """Our tokenizer, special tokens shown."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Batches and what they are, in words."""

    batches: list[Any]
    about: str


def read_batches(
    subject: Subject, text: str | None, data: str | None, num_tokens: int, length: int | None
) -> Text:
    """`num_tokens` tokens of a file, a named source or, of a run, its held-out text.

    Sequences have `length` tokens (default 512, or what the model takes). Raises UserError for no
    text or two, a text shorter than one sequence of LEAST_TOKENS, a length beyond the model's,
    a model without tokenizer, and one that takes no text.
    """
    if text is not None and data is not None:
        raise UserError("--text and --data are both given; keep one of them")
    main = getattr(subject.model, "main_input_name", "input_ids")
    if main != "input_ids":
        raise UserError(
            f"{type(subject.model).__name__} takes {main} and no text; call "
            "skipless.diagnose.diagnose(model, batches) in Python with dicts of its inputs "
            "(docs/diagnose.md)"
        )
    if length is not None and subject.limit is not None and length > subject.limit:
        raise UserError(
            f"--sequence-length is {length} and {subject.name} takes {subject.limit} tokens at "
            "most; give at most that"
        )
    length = length or min(512, subject.limit or 512)
    if length < 2:
        raise UserError("--sequence-length is 1; give at least 2 tokens, so that one is predicted")
    if text is None and data is None:
        if subject.run is None:
            raise UserError(
                f"there is no text to run {subject.name} on; give --text FILE, or --data NAME "
                "(`skipless data list` shows names)"
            )
        from skipless.measure import held_out_batches

        batches = held_out_batches(subject.run, num_tokens)
        number = sum(ids.numel() for ids, _ in batches)
        return Text(batches=batches, about=f"{number:,} tokens of the run's held-out text")
    if subject.tokenizer is None:
        raise UserError(
            f"{subject.name} has no tokenizer beside its weights, so that text cannot be read; put "
            "tokenizer.json there, or call skipless.diagnose.diagnose(model, batches) with token "
            "ids in Python"
        )
    where = text or data or ""
    return _cut(subject, where, _characters(where, text is not None, num_tokens * _CHARACTERS),
                num_tokens, length)  # fmt: skip


def _characters(where: str, is_file: bool, limit: int) -> str:
    """The first `limit` characters of the documents."""
    from skipless.config import DataConfig
    from skipless.data import read_path
    from skipless.data.preparing import resolve

    documents = read_path(where) if is_file else resolve(where, DataConfig()).documents()
    found, size = [], 0
    for document in documents:
        found.append(document.text)
        size += len(document.text)
        if size >= limit:
            break
    return "\n\n".join(found)[:limit]


def _cut(subject: Subject, where: str, text: str, num_tokens: int, length: int) -> Text:
    """Whole sequences of `length` tokens in batches; one shorter sequence if there is no more."""
    sequences = list(islice(_sequences(subject, text, length), max(1, num_tokens // length)))
    total = sum(map(len, sequences))
    if total < LEAST_TOKENS:
        raise UserError(
            f"{where} has {total} tokens for {subject.name}; give a text of at least {LEAST_TOKENS}"
        )
    whole = [ids for ids in sequences if len(ids) == length] or sequences[:1]
    batches: list[Tensor] = [
        torch.tensor(whole[i : i + BATCH_SIZE]) for i in range(0, len(whole), BATCH_SIZE)
    ]
    about = f"{len(whole) * len(whole[0]):,} tokens of {where}"
    if total < num_tokens and len(whole) * length < num_tokens:
        about += f", all it has in sequences of {len(whole[0])}"
    return Text(batches=list(batches), about=about)


def _sequences(subject: Subject, text: str, length: int) -> Iterator[list[int]]:
    """Sequences of at most `length` token ids, special tokens included where a model has them."""
    if subject.run is not None:
        ids = subject.tokenizer.inner.encode(text)
        for start in range(0, len(ids), length):
            yield ids[start : start + length]
        return
    tokenizer = subject.tokenizer
    inside = length - tokenizer.num_special_tokens_to_add(pair=False)
    if inside < 1:
        raise UserError(f"--sequence-length is {length}; its special tokens alone need that much")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin, end = _around(tokenizer)
    for start in range(0, len(ids), inside):
        yield [*begin, *ids[start : start + inside], *end]


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that this tokenizer puts before and after a text, seen on a short one."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []
