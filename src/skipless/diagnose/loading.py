"""What `skipless diagnose` is given: a run directory, a folder, a name.

Read by the command line; in Python `diagnose(model, batches)` takes any module and any batches.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.diagnose.streaming import file_bytes, free_bytes, open_streamed
from skipless.errors import UserError
from skipless.packages import need, not_installed
from skipless.pretrained.beside import check_beside
from skipless.pretrained.naming import find_model
from skipless.pretrained.positions import num_positions
from skipless.pretrained.quantised import is_compressed, refuse_packed
from skipless.rundir import CHECKPOINTS, CONFIG


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
    source: str = ""
    """Folder or hub name, where a processor may lie beside the weights."""


def load_subject(name: str, *, layer_by_layer: bool = False) -> Subject:
    """The model that `name` names: a run directory, one of its checkpoints
    (RUN/checkpoint/step-N), a folder or hub name of Hugging Face's, a folder that `skipless patch`
    wrote, or a model of `skipless models list`. `layer_by_layer` reads blocks of a Hugging Face
    folder as they are needed (streaming.py), as is done anyway where the file is larger than the
    free memory.

    Raises UserError for anything else, and for what cannot be read layer by layer.
    """
    path = Path(name)
    step = _checkpoint_step(path)
    if step is not None or path.is_dir() and (path / CONFIG).exists() and _is_run(path):
        if layer_by_layer:
            raise UserError(f"{name} is a run directory, read whole; leave out --layer-by-layer")
        from skipless.train import load_run, load_step

        run = load_run(path) if step is None else load_step(path.parent.parent, step)
        return Subject(
            name=name, model=run.model, tokenizer=Decoder(run.tokenizer), run=run,
            limit=run.config.model.max_position_embeddings,
        )  # fmt: skip
    try:
        import transformers
    except ImportError:
        why = "and only run directories can be read without it"
        raise not_installed("transformers", why=why) from None
    transformers.utils.logging.disable_progress_bar()
    source = find_model(name)
    if Path(source).is_dir():
        refuse_packed(Path(source))
        check_beside(Path(source))
    if layer_by_layer or _is_too_large(source):
        model = _open_streamed(source)
    else:
        model = _load(source, transformers)
    return Subject(
        name=name, model=model.eval(), tokenizer=_tokenizer(source, model, transformers),
        limit=num_positions(model), source=source,
    )  # fmt: skip


def load_packed(name: str) -> Subject:
    """The quantised model of a folder that `skipless export` packed, simulated; one in the layout
    of compressed-tensors as transformers reads it with that package.

    Raises UserError for a damaged folder, and where the package is missing.
    """
    from skipless.export import load_quantized
    from skipless.model import Transformer

    check_beside(Path(name))
    read: Any = _load_compressed if is_compressed(Path(name)) else load_quantized
    model = read(Path(name))
    if isinstance(model, Transformer):
        from skipless.data import load_tokenizer

        tokenizer: Any = Decoder(load_tokenizer(name))
        limit = model.config.max_position_embeddings
    else:
        import transformers

        tokenizer, limit = _tokenizer(name, model, transformers), num_positions(model)
    return Subject(name=name, model=model, tokenizer=tokenizer, limit=limit, source=name)


def _load_compressed(folder: Path) -> Any:
    """A model in the layout of compressed-tensors, its weights unpacked."""
    need("transformers", "compressed_tensors", why=f"without which {folder} cannot be read")
    from skipless.surgery.reading import read_model

    with contextlib.redirect_stderr(io.StringIO()):  # the package draws progress bars
        model = read_model(folder, dtype=torch.float32)  # it cannot be cast after
        if model.main_input_name == "input_ids":
            with torch.no_grad():  # it unpacks in the first call
                model(input_ids=torch.zeros(1, 1, dtype=torch.long))
    return model


def _is_too_large(source: str) -> bool:
    """Whether the weights are larger than the free memory, and not of a patched folder."""
    folder, free = Path(source), free_bytes()
    if not folder.is_dir() or free is None or file_bytes(folder) <= free:
        return False
    return not _is_patched(folder)


def _open_streamed(source: str) -> nn.Module:
    if not Path(source).is_dir():
        raise UserError(
            f"{source} is no folder, and layer by layer only folders are read; download it first "
            f"(`hf download {source} --local-dir DIR`)"
        )
    if _is_patched(Path(source)):
        raise UserError(f"{source} was patched and is read whole; leave out --layer-by-layer")
    return open_streamed(source)


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


def _load(source: str, transformers: Any) -> Any:
    if Path(source).is_dir() and _is_patched(Path(source)):
        from skipless.surgery import load

        return load(source)
    from skipless.surgery.reading import check_whole, without_warnings

    classes: Any = transformers
    if _model_type(Path(source)) == "skipless":
        import skipless.hf

        classes = skipless.hf
    try:
        # A folder's own code is not run, and not asked about on the terminal either.
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        names = config.architectures or ["AutoModel"]
        cls = getattr(classes, names[0], None)
        if cls is None:
            raise UserError(
                f"{source} holds a {names[0]}, which this version of transformers does not have"
            )
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # told below
        with without_warnings():
            model, report = cls.from_pretrained(source, **options)
        check_whole(source, model, report)
        return model
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a family makes of settings that do not fit is its own affair
        reason = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise UserError(f"{source} cannot be loaded: {reason}") from None


def shortened(text: str, limit: int = 240) -> str:
    """The whole sentences of a long message that fit, else the words that do, with dots."""
    if len(text) <= limit:
        return text
    whole = text[:limit].rfind(". ")
    return text[:whole] if whole > 40 else text[:limit].rsplit(" ", 1)[0] + " ..."


def _is_patched(path: Path) -> bool:
    from skipless.surgery.saving import MODEL_TYPE

    return _model_type(path) == MODEL_TYPE


def _model_type(path: Path) -> str | None:
    """What config.json in the folder says; None where there is none."""
    try:
        return json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None


def _tokenizer(source: str, model: Any, transformers: Any) -> Any:
    folder = Path(source)
    names = ("tokenizer*", "vocab*", "merges*", "*.model")
    if folder.is_dir() and not any(file for name in names for file in folder.glob(name)):
        return None  # for some families transformers makes one without words
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        if getattr(getattr(model, "config", None), "model_type", None) == "skipless":
            tokenizer.split_special_tokens = True  # a text means what it means to the run
        tokenizer("a")  # settings that do not fit are noticed only here
        return tokenizer
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None  # said where text is to be read


class Decoder:
    """Our tokenizer, special tokens shown."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=False)
