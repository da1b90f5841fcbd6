"""The packed folder of a run, written for the package alone, as a model of transformers.

    skipless export runs/mine --scheme W8A8 --out packed
    AutoModelForCausalLM.from_pretrained("packed")     # after `import skipless.hf`

Names in such a folder are those of our decoder; here they get the body's in front. Importing this
makes `from_pretrained` of our classes know such folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skipless.data import load_tokenizer
from skipless.errors import UserError
from skipless.hf.body import SkiplessPreTrainedModel
from skipless.hf.converting import from_transformer, inner_name
from skipless.hf.quantizer import SkiplessQuantizationConfig, SkiplessQuantizer
from skipless.packed import load_packed, read_packed_config
from skipless.quant import restore
from skipless.quant.saved import resume, saved_form
from skipless.scheme import Scheme

__all__ = ["open_packed_run"]

_KNOWN = {
    "dtype", "device_map", "output_loading_info",
    # without effect on a folder of the disk, or passed on by the Auto class
    "adapter_kwargs", "cache_dir", "code_revision", "commit_hash", "config", "force_download",
    "ignore_mismatched_sizes", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code", "use_safetensors", "weights_only", "_commit_hash", "_from_auto",
}  # fmt: skip


def open_packed_run(cls: Any, path: Path, **options: Any) -> Any:
    """The model of the folder as `cls`, quantised, bit for bit as saved; `dtype`, `device_map` of
    one device and `output_loading_info` as in transformers.

    Raises UserError for a folder of another class, a damaged one, and other options.
    """
    if unknown := sorted(set(options) - _KNOWN):
        raise UserError(
            f"{path} is the packed folder of a run, which is read without {unknown[0]}; leave it "
            "out, or export the run with --format hf"
        )
    own = load_packed(path, read_packed_config(path)).eval()
    tensors, settings = saved_form(own)
    restore(own)
    there = (path / "tokenizer.json").is_file()  # not where Python saved a model of its own
    found = from_transformer(own, tokenizer=load_tokenizer(path) if there else None)
    if not isinstance(found, cls):
        raise UserError(f"{path} holds a {type(found).__name__}, not a {cls.__name__}; load that")
    settings = _inner(settings)
    # so that `save_pretrained` writes packed integers again, now under transformers' names
    found.hf_quantizer = SkiplessQuantizer(SkiplessQuantizationConfig(**settings))
    found.config.quantization_config = found.hf_quantizer.quantization_config
    resume(found, {inner_name(n): t for n, t in tensors.items()}, settings)
    if isinstance(dtype := options.get("dtype"), torch.dtype):
        found.to(dtype)
    if (place := options.get("device_map")) not in (None, "auto"):
        found.to(place.get("", "cpu") if isinstance(place, dict) else place)
    if options.get("output_loading_info"):
        names = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        return found, {name: [] for name in names}
    return found


def _inner(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a saved quantisation with the names that transformers gives modules."""
    scheme = Scheme.parse(settings["scheme"])
    overrides = [f"{inner_name(pattern)}={text}" for pattern, text in scheme.overrides]
    return {
        **settings, "scheme": str(scheme.base.with_overrides(overrides)),
        "weights": {inner_name(n): about for n, about in settings["weights"].items()},
        "ranges": {inner_name(n): ends for n, ends in settings["ranges"].items()},
    }  # fmt: skip


SkiplessPreTrainedModel.open_packed = staticmethod(open_packed_run)
