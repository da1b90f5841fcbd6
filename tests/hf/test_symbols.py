"""Everything that src/skipless takes from transformers, by name; the oldest version has it all.

A symbol that transformers removes or moves fails here by its name; one that the code begins to use
is added to the list once it is known to exist in MINIMUM too. Run with another version installed to
learn what it lacks.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skipless"
MINIMUM = (5, 20)
SYMBOLS = [
    "AutoConfig.from_pretrained",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoTokenizer.from_pretrained",
    "DynamicCache",
    "GenerationMixin",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerFast",
    "TrainerCallback",
    "cache_utils.DynamicLayer",
    "conversion_mapping.get_model_conversion_mapping",
    "core_model_loading.WeightRenaming",
    "initialization",
    "masking_utils.ALL_MASK_ATTENTION_FUNCTIONS",
    "masking_utils.bidirectional_mask_function",
    "masking_utils.causal_mask_function",
    "modeling_outputs.BaseModelOutputWithPast",
    "modeling_outputs.CausalLMOutputWithPast",
    "modeling_outputs.SequenceClassifierOutputWithPast",
    "modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "quantizers.HfQuantizer",
    "quantizers.auto.AUTO_QUANTIZER_MAPPING",
    "quantizers.auto.register_quantization_config",
    "quantizers.auto.register_quantizer",
    "utils.logging.disable_progress_bar",
    "utils.logging.get_verbosity",
    "utils.logging.set_verbosity",
    "utils.logging.set_verbosity_error",
    "utils.quantization_config.QuantizationConfigMixin",
]
"""Written in the code as imports or attributes of `transformers`; of nested ones the longest."""

BY_NAME = [
    "ArceeConfig",
    "ArceeForCausalLM",
    "LlamaConfig",
    "LlamaForCausalLM",
    "GenerationMixin._prepare_attention_mask_for_generation",
    "GenerationMixin._prepare_generated_length",
    "GenerationMixin.generate",
    "GenerationMixin.prepare_inputs_for_generation",
    "PreTrainedModel._init_weights",
    "PreTrainedModel._set_gradient_checkpointing",
    "PreTrainedModel.get_expanded_tied_weights_keys",
    "PreTrainedModel.initialize_weights",
    "PreTrainedModel.loss_function",
    "PreTrainedModel.post_init",
    "PreTrainedModel.set_attn_implementation",
    "PreTrainedModel.tie_weights",
    "PreTrainedModel.warn_if_padding_and_no_attention_mask",
    "cache_utils.StaticLayer.update",
    "initialization.normal_",
    "utils.logging.enable_progress_bar",
    "utils.logging.is_progress_bar_enabled",
]
"""Overridden, called on our own classes, or looked up by a text."""


def used(tree: ast.AST) -> set[str]:
    """What a module takes from transformers: imported names and chains of attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            module = (node.module or "").partition(".")[2]
            found |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == "transformers":
            found.add(".".join(parts))
    return found


def test_the_list_is_what_the_code_uses():
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name in used(ast.parse(path.read_text())):
            found.setdefault(name, str(path.relative_to(SOURCE)))
    longest = {n: at for n, at in found.items() if not any(o.startswith(f"{n}.") for o in found)}
    new = {name: at for name, at in longest.items() if name not in SYMBOLS}
    assert not new, f"add these to SYMBOLS after a look at transformers {MINIMUM}: {new}"
    gone = set(SYMBOLS) - set(longest)
    assert not gone, f"nothing uses these any more; take them from SYMBOLS: {gone}"


@pytest.mark.parametrize("name", SYMBOLS + BY_NAME)
def test_this_transformers_has_it(name):
    import transformers

    parts, place = name.split("."), transformers
    for index, part in enumerate(parts):
        if hasattr(place, part):
            place = getattr(place, part)
            continue
        try:
            place = importlib.import_module(".".join(["transformers", *parts[: index + 1]]))
        except ImportError:
            pytest.fail(f"transformers {transformers.__version__} has no {name}")


def test_the_oldest_version_is_the_one_that_is_declared():
    import transformers

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]["hf"]
    found = next(m for item in extras if (m := re.match(r"transformers>=(\d+)\.(\d+)", item)))
    assert tuple(map(int, found.groups())) == MINIMUM
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert installed >= MINIMUM
