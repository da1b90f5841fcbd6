"""Importing this lets transformers' Auto classes restore what `skipless.surgery` patched.

    import skipless.hf
    AutoModelForCausalLM.from_pretrained("patched")   # as skipless.surgery.load("patched")

`fetch_model` is that of `skipless.pretrained`.
"""

from skipless.hf.auto import PatchedConfig, register
from skipless.hf.cache import QuantizedCache
from skipless.hf.quantizer import register as register_quantizer
from skipless.pretrained import fetch_model

register()
register_quantizer()

__all__ = ["PatchedConfig", "QuantizedCache", "fetch_model", "register"]
