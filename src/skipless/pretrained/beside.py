"""What lies beside the weights of a Hugging Face folder, looked at before transformers reads it.

It takes a file of settings that is cut short, or holds a list or a number, for none at all, or ends
in a traceback of its own; and leaves out adapters without a word. Without torch. Read by
`skipless.surgery` and `skipless.diagnose`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text

ADAPTER = "adapter_config.json"
SETTINGS = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json", "processor_config.json", ADAPTER,
)  # fmt: skip
"""Each is one JSON object."""


def check_beside(folder: Path) -> None:
    """Raise UserError for a file of settings that is damaged, and as `refuse_adapter` does."""
    for name in SETTINGS:
        file = folder / name
        if file.is_file():
            found = parse_json(read_text(file), where=str(file))
            if not isinstance(found, dict):
                raise UserError(
                    f"{file} holds {_kind(found)} and no JSON object {{...}}; get the file anew, "
                    "or save the model again"
                )
    refuse_adapter(folder)


def refuse_adapter(folder: Path) -> None:
    """Raise UserError for a folder whose model is what an adapter makes of another one."""
    if not (folder / ADAPTER).is_file():
        return
    if not (folder / "config.json").is_file() or find_spec("peft") is None:
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER}), which is not read here; merge it into its "
            "model with peft (merge_and_unload), save that with its tokenizer, and name that folder"
        )


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")
