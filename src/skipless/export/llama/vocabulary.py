"""A byte-level BPE tokenizer.json as GGUF has it: tokens, their types, merges, and by which rule
text is cut before. Read by `writing.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.errors import UserError

NORMAL, CONTROL, ADDED, UNUSED = 1, 3, 4, 5
"""Types of a token."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What GGUF keeps of a tokenizer."""

    pre: str
    """llama.cpp's name of the rule that cuts text into words."""
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]
    """Of the tokens with a role: bos, eos, unk, pad, as far as there are."""
    adds: dict[str, bool]
    """Whether the tokenizer itself puts bos before and eos after a text."""


def read_vocabulary(tokenizer: Path, size: int) -> Vocabulary:
    """Read a tokenizer.json for a model of `size` tokens; ids without a token are filled up.

    Raises UserError for another kind of tokenizer than a byte-level BPE whose cutting rule has a
    name in llama.cpp, and for one that does not fit the model.
    """
    try:
        about = json.loads(tokenizer.read_text(encoding="utf-8"))
        model, added = about["model"], about.get("added_tokens") or []
        known = {**model["vocab"], **{entry["content"]: entry["id"] for entry in added}}
        kind, pre = model["type"], _rule(about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{tokenizer} is no tokenizer.json that can be read ({error})") from None
    if kind != "BPE" or not pre or about.get("normalizer") or model.get("ignore_merges"):
        raise UserError(
            f"{tokenizer} is not a byte-level BPE that cuts text as GPT-2 or SmolLM does, and no "
            "other rule is written here; use llama.cpp's convert_hf_to_gguf.py on --format llama"
        )
    if max(known.values()) >= size:
        raise UserError(
            f"{tokenizer} has the id {max(known.values())} and the model {size} tokens; they do "
            "not belong together"
        )
    by_id = {index: token for token, index in known.items()}
    tokens = [by_id.get(index, f"[UNUSED{index}]") for index in range(size)]
    types = [NORMAL if index in by_id else UNUSED for index in range(size)]
    for entry in added:
        types[entry["id"]] = CONTROL if entry.get("special") else ADDED
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    roles = _roles(tokenizer.with_name("tokenizer_config.json"), known)
    adds = _adds(about.get("post_processor"), roles, known)
    if adds is None:
        raise UserError(
            f"{tokenizer} puts other tokens around a text than bos and eos, which GGUF has no word "
            "for; use llama.cpp's convert_hf_to_gguf.py on --format llama"
        )
    return Vocabulary(pre=pre, tokens=tokens, types=types, merges=merges, ids=roles, adds=adds)


def _rule(about: dict[str, Any]) -> str:
    """llama.cpp's name of the rule; "" for one that is not known here."""
    steps = about.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return ""
    if not steps[-1].get("use_regex", True):
        return ""
    before = [step.get("type") for step in steps[:-1]]
    if before == ["Digits"] and steps[0].get("individual_digits"):
        return "smollm"
    return "gpt-2" if not before else ""


def _adds(
    after: dict[str, Any] | None, roles: dict[str, int], known: dict[str, int]
) -> dict[str, bool] | None:
    """What the tokenizer puts around a text; None for what is neither bos before nor eos after."""
    adds = {"bos": False, "eos": False}
    steps = [] if after is None else after.get("processors", [after])
    for step in steps:
        if step.get("type") == "ByteLevel":  # moves offsets, no tokens
            continue
        if step.get("type") != "TemplateProcessing":
            return None
        names = [part.get("SpecialToken", {}).get("id") for part in step["single"]]
        middle = names.index(None)  # the text itself
        around = {"bos": names[:middle], "eos": names[middle + 1 :]}
        for role, found in around.items():
            if found and [known.get(name) for name in found] != [roles.get(role)]:
                return None
            adds[role] |= bool(found)
    return adds


def _roles(config: Path, known: dict[str, int]) -> dict[str, int]:
    """Ids by role, from the file beside the tokenizer, or by the name of our own separator."""
    from skipless.data.tokenizer import EOS

    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = {"eos_token": EOS}
    found = {}
    for role in ("bos", "eos", "unk", "pad"):
        token = said.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in known:
            found[role] = known[token]
    return found
