"""What lies in the folder that a card is for. Without reading weights; read by facts.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skipless.jsonable import parse_json, read_text
from skipless.rundir import CONFIG

Kind = Literal["run", "packed", "compressed", "ours", "stock", "onnx", "gguf"]
OWN_TYPES = ("skipless", "skipless-patched")
"""Model types that transformers knows after `import skipless.hf`."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A folder as a reader of the card finds it."""

    kind: Kind = "run"
    """run: the run itself, or nothing that is known here. packed: our packed integers. compressed:
    the layout of compressed-tensors. ours, stock: weights for transformers, with and without
    `skipless.hf`. onnx, gguf: such a file."""
    file: str = ""
    """Of onnx and gguf, its name."""
    is_own: bool = False
    """Whether transformers needs `import skipless.hf` for it."""
    is_foreign: bool = True
    """Of packed integers: whether they are of a class of transformers."""
    has_code: bool = False
    """Whether it brings its own code (trust_remote_code)."""
    has_tokenizer: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether it holds packed integers."""
        return self.kind in ("packed", "compressed")

    @property
    def hub_name(self) -> str:
        """What the hub calls the program that reads it."""
        other = {"run": "skipless", "onnx": "onnx", "gguf": "gguf"}
        return other.get(self.kind, "transformers")


def what_holds(folder: Path | None) -> Held:
    """What `folder` holds; None stands for the run itself."""
    if folder is None:
        return Held()
    config = _config(folder)
    if kind := config.get("model_type"):
        method = (config.get("quantization_config") or {}).get("quant_method", "skipless")
        own = kind in OWN_TYPES
        more: dict[str, Any] = {
            "is_own": own, "has_code": "auto_map" in config, "is_foreign": "model" not in config,
        }  # fmt: skip
        if "quantization_config" in config:
            return Held(kind="packed" if method == "skipless" else "compressed", **more)
        return Held(kind="ours" if own else "stock", **more)
    tokenizer = (folder / "tokenizer.json").exists()
    graphs = sorted(file.name for file in folder.glob("*.onnx"))
    if graphs:
        file = "model.onnx" if "model.onnx" in graphs else graphs[0]
        return Held(kind="onnx", file=file, has_tokenizer=tokenizer)
    if files := sorted(file.name for file in folder.glob("*.gguf")):
        return Held(kind="gguf", file=files[0])
    return Held()


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).exists():
        return {}
    config = parse_json(read_text(folder / CONFIG), where=str(folder / CONFIG))
    return config if isinstance(config, dict) else {}
