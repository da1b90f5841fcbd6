"""The lines under Use: they run as they stand, in the folder where the card lies, with what lies
there.

Read by sections.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from skipless.card.facts import Facts
from skipless.packages import install_line

_HERE = '"."'
"""The card's own folder; on a hub OWNER/NAME takes its place."""


def usage(facts: Facts) -> list[str]:
    """Python and, where the command line takes the folder, a line of it."""
    kind = facts.holds.kind
    if kind == "run":
        return _of_run(facts)
    if kind == "packed" and not facts.holds.is_foreign:
        return _of_packed_run(facts)
    if kind == "onnx":
        return _of_onnx(facts)
    if kind == "gguf":
        return _of_gguf(facts)
    return _of_transformers(facts)


def _block(language: str, *lines: str) -> list[str]:
    return [f"```{language}", *lines, "```"]


def _generate(facts: Facts, what: str) -> list[str]:
    """A line of the command line, of a model that writes."""
    if facts.is_classifier:
        return []
    prompt = shlex.quote(facts.config.evaluate.prompt)
    return ["", *_block("bash", f"skipless generate {shlex.quote(what)} --prompt {prompt}")]


def _of_run(facts: Facts) -> list[str]:
    """The run directory itself."""
    run = facts.run
    python = ["from skipless.train import load_run", "", f"run = load_run({run!r})"]
    if facts.is_classifier:
        python.append("print(run.model.config.num_labels)")
    else:
        python = ["import torch", *python]
        python += [
            f"ids = torch.tensor([run.tokenizer.encode({facts.config.evaluate.prompt!r})])",
            "print(run.tokenizer.decode(run.model.generate(ids, 20)[0].tolist()))",
        ]
    return [*_block("python", *python), *_generate(facts, run)]


def _of_packed_run(facts: Facts) -> list[str]:
    """Codes of our own decoder; AutoModelForCausalLM reads them too, after `import skipless.hf`."""
    lines = ["import torch", "", "from skipless.data import load_tokenizer",
             "from skipless.export import load_quantized", "",
             f"model = load_quantized({_HERE}, integer=True)"]  # fmt: skip
    lines.append(f"ids = torch.tensor([load_tokenizer({_HERE}).encode("
                 f"{facts.config.evaluate.prompt!r})])")  # fmt: skip
    if facts.is_classifier:
        lines.append("print(model(ids).logits)")
    else:
        ids = "model.generate(ids, 20)[0].tolist()"
        lines.append(f"print(load_tokenizer({_HERE}).decode({ids}))")
    return [*_block("python", *lines), *_generate(facts, ".")]


def _of_transformers(facts: Facts) -> list[str]:
    holds = facts.holds
    kind = "SequenceClassification" if facts.is_classifier else "CausalLM"
    trust = ", trust_remote_code=True" if holds.has_code else ""
    lines = [
        f"from transformers import AutoModelFor{kind}, AutoTokenizer",
        "",
        f"model = AutoModelFor{kind}.from_pretrained({_HERE}{trust})",
        f"tokenizer = AutoTokenizer.from_pretrained({_HERE}{trust})",
        f'inputs = tokenizer({facts.config.evaluate.prompt!r}, return_tensors="pt")',
    ]
    if facts.is_classifier:
        lines.append("print(model(**inputs).logits)")
    else:
        lines.append("print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))")
    if holds.kind == "packed":
        lines.insert(0, "import skipless.hf  # teaches transformers to read packed integers")
    elif holds.is_own and not holds.has_code:
        lines.insert(0, "import skipless.hf  # teaches transformers the model")
    if holds.kind == "compressed":
        lines.insert(0, f"# {install_line('compressed_tensors')}")
    return [*_block("python", *lines), *([] if holds.has_code else _generate(facts, "."))]


def _of_onnx(facts: Facts) -> list[str]:
    """ONNX Runtime alone, without the package. What the options are for: docs/export.md."""
    tokenizer = "tokenizer.json"
    if not facts.holds.has_tokenizer:
        tokenizer = str(Path(facts.run) / tokenizer)
    lines = [
        "import numpy as np",
        "import onnxruntime",
        "from tokenizers import Tokenizer",
        "",
        "options = onnxruntime.SessionOptions()  # exact products of bytes on every processor",
        'options.add_session_config_entry("session.x64quantprecision", "1")',
        'options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")',
        f"session = onnxruntime.InferenceSession({facts.holds.file!r}, options)",
        f"tokenizer = Tokenizer.from_file({tokenizer!r})",
        f"ids = np.array([tokenizer.encode({facts.config.evaluate.prompt!r}).ids], np.int64)",
        'feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}',
    ]
    if facts.holds.file != "model.onnx":
        lines += [
            "for past in session.get_inputs()[2:]:  # keys and values, where there is a cache",
            "    feed[past.name] = np.zeros((1, past.shape[1], 0, past.shape[3]), np.float32)",
        ]
    lines.append('logits = session.run(["logits"], feed)[0]')
    last = "logits" if facts.is_classifier else "tokenizer.decode([int(logits[0, -1].argmax())])"
    lines.append(f"print({last})")
    return [
        *_block("python", *lines), "",
        f"It takes up to {facts.config.model.max_position_embeddings} tokens.",
    ]  # fmt: skip


def _of_gguf(facts: Facts) -> list[str]:
    name, prompt = facts.holds.file, facts.config.evaluate.prompt
    lines = _block("bash", f"llama-cli -m {shlex.quote(name)} -n 20 -p {shlex.quote(prompt)}")
    if facts.config.model.hidden_act != "swiglu":  # arcee, which transformers does not read
        return lines
    return [
        *lines, "",
        *_block(
            "python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({_HERE}, gguf_file={name!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({_HERE}, gguf_file={name!r})",
            f'inputs = tokenizer({prompt!r}, return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        ),
    ]  # fmt: skip
