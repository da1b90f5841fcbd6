"""Models larger than memory: everything outside the blocks, and one block at a time, from disk.

The model is built without numbers (parameters on the meta device). What no list of blocks holds
(embedding, norms, head) is read from the folder's safetensors and stays. A block is read when it is
called, or when `ensure_loaded` asks for it, and takes the place of the one before. So a batch goes
through the model as it always does, with the activations of one batch and the weights of one block
in memory; every batch reads the file once more, which costs little beside computing with it.
Read by `skipless.diagnose.loading`, `site_rows`, `weights` and `parts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.sites import block_names

_ATTRIBUTE = "_skipless_stream"
_WHOLE = "leave out --layer-by-layer (layer_by_layer=False) to load it whole"


def is_streamed(model: nn.Module) -> bool:
    """Whether `open_streamed` made this model."""
    return getattr(model, _ATTRIBUTE, None) is not None


def ensure_loaded(model: nn.Module, module: str) -> None:
    """Have the weights of the module of this name in memory; nothing to do for other models."""
    stream = getattr(model, _ATTRIBUTE, None)
    if stream is not None:
        stream.hold_for(module)


def loaded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()`, each with its numbers at the time it is given."""
    for name, parameter in list(model.named_parameters()):
        if is_streamed(model):
            ensure_loaded(model, name)
            parameter = model.get_parameter(name)
        yield name, parameter


def open_streamed(folder: str | Path) -> nn.Module:
    """The Hugging Face model of `folder` in eval mode, its blocks read as they are needed.

    In the class and dtype that its config names. Raises UserError for a folder without safetensors,
    a model without a list of blocks, and weights that are missing, of another shape or stored under
    other names.
    """
    import transformers

    files = Weights(Path(folder))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} cannot be loaded: {' '.join(str(error).split())}") from None
    name = (config.architectures or ["AutoModel"])[0]
    cls: Any = getattr(transformers, name, None)
    if not hasattr(cls, "_from_config"):
        raise UserError(f"{folder} holds a {name}, which cannot be read layer by layer; {_WHOLE}")
    config.use_cache = False  # a cache of all layers is what does not fit
    with _without_numbers():
        model = cls._from_config(config, dtype=getattr(config, "dtype", None) or files.dtype())
    stream = Stream(model.eval(), files)
    setattr(model, _ATTRIBUTE, stream)
    return model


def file_bytes(folder: str | Path) -> int:
    """Size of the weights in a folder."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def free_bytes() -> int | None:
    """Memory that is free or can be freed without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


class Weights:
    """The tensors of a folder by name, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        self.files: dict[str, Path] = {}
        if index.exists():
            try:
                named = json.loads(index.read_text())["weight_map"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} cannot be read: {error}; fetch the model again") from None
            self.files = {name: folder / file for name, file in named.items()}
        elif (single := folder / "model.safetensors").exists():
            with _opened(single) as file:
                self.files = dict.fromkeys(file.keys(), single)
        if not self.files:
            raise UserError(
                f"{folder} has no model.safetensors, from which a model is read layer by layer; "
                "save it with save_pretrained, or " + _WHOLE
            )

    def dtype(self) -> torch.dtype:
        """That of the first floating tensor."""
        for name in self.files:
            tensor = self.read([name])[name]
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Copies of these tensors, so that no file stays mapped."""
        found = {}
        for path in dict.fromkeys(self.files[name] for name in names):
            with _opened(path) as file:
                for name in names:
                    if self.files[name] == path:
                        found[name] = file.get_tensor(name).clone()
        return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch the model again") from None


class Stream:
    """Which block of a model is in memory, and where its weights are on disk."""

    def __init__(self, model: nn.Module, files: Weights) -> None:
        self.files, self.held, self.num_reads = files, "", 0
        blocks = block_names(model)
        if not blocks:
            raise UserError(
                f"{type(model).__name__} has no list of blocks to read one by one; {_WHOLE}"
            )
        modules = dict(model.named_modules())
        self.blocks = set(blocks)
        self.places: dict[str, list[_Place]] = {"": [], **{block: [] for block in blocks}}
        owners: dict[int, _Place] = {}
        for name, module in modules.items():
            block = self.block_of(name) or ""
            for local, value in (*module._parameters.items(), *_persistent(module)):
                if value is None:
                    continue
                owner = (module, local)
                if id(value) in owners:  # tied
                    owners[id(value)].owners.append(owner)
                    owners[id(value)].names.append(f"{name}.{local}")
                    continue
                place = _Place(value, [owner], [f"{name}.{local}" if name else local])
                owners[id(value)] = place
                self.places[block].append(place)
        keys = _names_on_disk(model, files)
        for places in self.places.values():
            places[:] = [place for place in places if place.find(keys, files.folder)]
        self._load("")
        for block in blocks:
            modules[block].register_forward_pre_hook(self._hook(block), prepend=True)

    def block_of(self, name: str) -> str | None:
        """The block that a module or parameter lies in."""
        parts = name.split(".")
        heads = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return next((head for head in heads if head in self.blocks), None)

    def hold_for(self, name: str) -> None:
        """Have the block of this module or parameter in memory, and no other."""
        block = self.block_of(name)
        if block is None or block == self.held:
            return
        if self.held:
            for place in self.places[self.held]:
                place.put(place.empty)
        self.held = ""
        self._load(block)
        self.held = block

    def _load(self, block: str) -> None:
        self.num_reads += 1
        places = self.places[block]
        found = self.files.read([place.key for place in places])
        for place in places:
            place.put(place.filled(found.pop(place.key)))

    def _hook(self, block: str) -> Callable[..., None]:
        return lambda *_: self.hold_for(block)


class _Place:
    """A parameter or buffer: the modules that own it and its name in the files."""

    def __init__(
        self, empty: Tensor, owners: list[tuple[nn.Module, str]], names: list[str]
    ) -> None:
        self.empty, self.owners, self.names, self.key = empty, owners, names, ""

    def find(self, keys: dict[str, str], folder: Path) -> bool:
        """Set the name in the files; False for a buffer that is not there and so stays as built.

        Raises UserError for a parameter that is not there.
        """
        self.key = next((keys[name] for name in self.names if name in keys), "")
        if self.key or not isinstance(self.empty, nn.Parameter):
            return bool(self.key)
        raise UserError(
            f"{folder} has no weight named {self.names[0]}: it is incomplete, or stored in another "
            f"form than the model's; {_WHOLE}"
        )

    def filled(self, value: Tensor) -> Tensor:
        """The tensor from disk in the form of the empty one."""
        if value.shape != self.empty.shape:
            raise UserError(
                f"{self.names[0]} has the shape {tuple(value.shape)} on disk, and the config wants "
                f"{tuple(self.empty.shape)}; fetch the model again"
            )
        value = value.to(self.empty.dtype)
        return nn.Parameter(value, False) if isinstance(self.empty, nn.Parameter) else value

    def put(self, value: Tensor) -> None:
        for module, local in self.owners:
            kind = module._parameters if local in module._parameters else module._buffers
            kind[local] = value  # type: ignore[assignment]


def _names_on_disk(model: Any, files: Weights) -> dict[str, str]:
    """{name in the model: name in the files}, renamed as transformers does when it loads: names of
    old versions, a base model's file for a model with a head, and the other way round."""
    known: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    prefix = getattr(model, "base_model_prefix", "")
    rules: list[Any] = []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        rules = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    except ImportError:  # before transformers 5 files have the model's names
        pass
    found: dict[str, str] = {}
    for key in files.files:
        other = key
        for rule in rules:
            other, _ = rule.rename_source_key(other)
        for name in (key, other):
            for form in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if form in known:
                    found.setdefault(form, key)
    return found


def _persistent(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Buffers that a state dict holds; the others are computed when the model is built."""
    skipped = module._non_persistent_buffers_set
    return [(name, value) for name, value in module._buffers.items() if name not in skipped]


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Modules made inside get their parameters on the meta device; buffers stay real."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else tied: the same object stays
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
