"""The lines under Use: they run as they stand, for what lies where the card lies.

Read by sections.py.
"""

from __future__ import annotations

import shlex

from skipless.card.facts import Facts

_HERE = '"."'
"""The card's own folder; on a hub OWNER/NAME takes its place."""


def usage(facts: Facts) -> list[str]:
    """Python and, where the command line takes the folder, a line of it."""
    if facts.model_type is None:
        return _of_run(facts)
    if facts.is_packed and facts.model_type == "skipless" and not facts.has_code:
        return _of_packed()
    return _of_transformers(facts)


def _block(language: str, *lines: str) -> list[str]:
    return [f"```{language}", *lines, "```"]


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
    lines = _block("python", *python)
    if not facts.is_classifier:
        prompt = shlex.quote(facts.config.evaluate.prompt)
        lines += ["", *_block("bash", f"skipless generate {shlex.quote(run)} --prompt {prompt}")]
    return lines


def _of_packed() -> list[str]:
    return _block(
        "python",
        "from skipless.export import load_quantized",
        "",
        f"model = load_quantized({_HERE}, integer=True)",
    )


def _of_transformers(facts: Facts) -> list[str]:
    kind = "SequenceClassification" if facts.is_classifier else "CausalLM"
    # The tokenizer needs no code, but AutoTokenizer reads config.json, which names some, and asks.
    trust = ", trust_remote_code=True" if facts.has_code else ""
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
    if not facts.has_code:
        lines.insert(0, "import skipless.hf  # teaches transformers the model")
    return _block("python", *lines)
