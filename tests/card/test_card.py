"""A card tells what the run's files say and nothing else."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from skipless import recipes
from skipless.card import card_text, write_card
from skipless.card.equations import CONNECTIONS, OPTIMIZERS, STARTS, equations_of
from skipless.checks import CONNECTION_KINDS
from skipless.cli import main
from skipless.errors import UserError
from skipless.jsonable import override

EQUATIONS = Path(__file__).parents[2] / "docs" / "equations.md"
HEADINGS = ["Use", "Details", "Data and tokens", "Loss", "Inside", "Quantised", "Tasks", "Limits",
            "Attribution"]  # fmt: skip
TASKS = {
    "tasks": [{"name": "piqa", "chance": 0.5, "num_questions": 37}],
    "rows": [{"scheme": "full precision", "tasks": {"piqa": {"acc": 0.51351, "acc_stderr": 0.0821,
             "acc_norm": 0.54054, "acc_norm_stderr": 0.0819}}}],
}  # fmt: skip


def numbers(value) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return []
    if isinstance(value, (int, float)):
        return [float(value)]
    inside = value.values() if isinstance(value, dict) else value
    return [number for each in inside for number in numbers(each)]


def shown(text: str) -> list[str]:
    """Numbers of a card's body; not those inside names, code, links or versions."""
    text = text.partition("\n---\n")[2]
    text = re.sub(r"```.*?```|`[^`]*`|\[[^]]*\]\([^)]*\)", " ", text, flags=re.S)
    found = re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)", text)
    return [number.rstrip(",") for number in found]


@pytest.fixture
def run(copy_run, tmp_path):
    """A copy with task results."""
    path = copy_run(tmp_path / "runs" / "mine")
    (path / "tasks.json").write_text(json.dumps(TASKS))
    return path


def test_every_number_is_the_runs(run):
    known = [
        number for file in sorted(run.glob("*.json"))
        for number in numbers(json.loads(file.read_text()))
    ]  # fmt: skip
    text = card_text(run)
    assert "not measured" not in text.lower()
    found = shown(text)
    assert len(found) > 45, "the card has numbers"
    for number in found:
        digits = len(number.partition(".")[2].partition("e")[0])
        value = float(number.replace(",", ""))
        close = 0.5 * 10.0**-digits + 1e-9 if "e" not in number else 1e-6 * abs(value)
        assert any(abs(value - k) <= close for k in known if math.isfinite(k)), number


def test_the_check_of_numbers_finds_a_wrong_one(run):
    assert "4.1234" in shown("---\n---\n| loss | 4.1234 ± 0.1 |")
    assert shown("---\n---\nlayer 3, `W8A8` at 1,024 tokens, torch 2.13.0+cpu") == ["3", "1,024"]


def test_head_and_headings(run, tmp_path):
    yaml = pytest.importorskip("yaml")
    from huggingface_hub import ModelCard

    text = card_text(run)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["library_name"] == "skipless" and head["pipeline_tag"] == "text-generation"
    assert {"skipless", "connection-anneal", "residual-free", "kl-shampoo"} <= set(head["tags"])
    assert "license" not in head and "license" in text.partition("\n---")[0]
    assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
    (tmp_path / "folder").mkdir()
    path = write_card(run, tmp_path / "folder")
    card = ModelCard.load(path)
    assert {"library_name": "skipless", "tags": head["tags"]}.items() <= card.data.to_dict().items()
    assert card.text.strip() == text.split("\n---\n")[1].strip()


def test_what_was_not_measured_says_with_which_command(run):
    """Also what was measured on other weights than the last."""
    for name in ("eval.json", "tasks.json"):
        (run / name).unlink()
    for name in ("quant.json", "probe.json"):
        content = json.loads((run / name).read_text())
        content["measured"]["step"] -= 1
        (run / name).write_text(json.dumps(content))
    text = card_text(run)
    commands = re.findall(r"^Not measured: .*\. `skipless (.*)` measures it\.$", text, re.M)
    assert [command.split()[0] for command in commands] == [
        "probe", "quantize", "quantize", "eval",
    ]  # fmt: skip
    assert all(str(run) in command for command in commands)
    result = json.loads((run / "train.json").read_text())
    assert f"| loss, nats a token | {result['held_out_loss']:.4f} |" in text
    assert f"| held-out tokens | {result['held_out_tokens']} |" in text
    assert "From the end of training, without its error: `skipless eval" in text
    assert "dB" not in text and "perplexity" not in text


def test_an_unfinished_run_and_old_task_results(run):
    os.utime(run / "tasks.json", (1, 1))
    assert "zero-shot tasks" in card_text(run)
    (run / "train.json").unlink()
    text = card_text(run)
    assert "**The training has not finished**" in text and text.count("Not measured") >= 4


def test_the_lines_under_use_run(run, monkeypatch, capsys, cache):
    """The folder of the run itself; other folders are run where they are made."""
    (code,) = re.findall(r"```python\n(.*?)```", card_text(run), re.S)
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.startswith("The king said")
    (line,) = re.findall(r"```bash\nskipless (.*?)\n```", card_text(run), re.S)
    import shlex

    assert main([*shlex.split(line), "--max-new-tokens", "2"]) == 0


def test_a_card_of_somebody_else_is_kept(run, tmp_path, capsys):
    with pytest.raises(UserError, match="is no folder"):
        write_card(run, tmp_path / "missing")
    (tmp_path / "README.md").write_text("# mine\n")
    with pytest.raises(UserError, match="was not written by `skipless card`"):
        write_card(run, tmp_path)
    assert (tmp_path / "README.md").read_text() == "# mine\n"
    (tmp_path / "README.md").unlink()
    assert main(["card", str(run), "--out", str(tmp_path)]) == 0
    assert main(["card", str(run), "--out", str(tmp_path)]) == 0, "its own is written anew"
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "README.md")
    assert main(["card", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_use_lines_fit_the_folder(run, tmp_path):
    for config, words in [
        ({"model_type": "skipless", "quantization_config": {}, "model": {}}, "load_quantized"),
        ({"model_type": "skipless", "auto_map": {}}, "trust_remote_code=True"),
        ({"model_type": "llama"}, "AutoModelForCausalLM"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        text = write_card(run, tmp_path).read_text()
        assert words in text and "load_run" not in text
        assert "library_name: transformers" in text


def test_hub_data_sets_are_named_in_the_head(run):
    yaml = pytest.importorskip("yaml")
    config = json.loads((run / "config.json").read_text())
    config["data"]["sources"] = ["hf:roneneldan/TinyStories", "shakespeare"]
    (run / "config.json").write_text(json.dumps(config))
    text = card_text(run)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["datasets"] == ["roneneldan/TinyStories"]
    from skipless.data.catalog import SOURCES

    assert f"- `shakespeare`: {SOURCES.get('shakespeare').licence}" in text


def test_equations_are_those_of_the_docs():
    """Tags, names and formulas as docs/equations.md has them; links lead to its headings."""
    page = EQUATIONS.read_text()
    headings = dict(re.findall(r"^### (\w+) (.*)$", page, re.M))
    listed = [*CONNECTIONS.values(), *STARTS.values(), *OPTIMIZERS.values()]
    assert set(CONNECTIONS) == set(CONNECTION_KINDS)
    for equation in listed:
        assert headings[equation.tag] == equation.what
        formula = page.split(f"### {equation.tag} {equation.what}\n")[1].splitlines()[0]
        assert equation.formula in formula
        plain = re.sub(r"[^\w -]", "", f"{equation.tag} {equation.what}".lower())
        assert equation.anchor == plain.replace(" ", "-")
    assert all(e.formula for e in CONNECTIONS.values())


def test_every_recipe_has_equations():
    for name in recipes.names():
        found = equations_of(recipes.get(name))
        assert found and len(found) == len(set(found))
    changed = override(recipes.get("demo-rf-kl"), {"optim.name": "muon"})
    assert "O3" in [equation.tag for equation in equations_of(changed)]


def test_losses_say_what_computed_them(run):
    """Rows of before the key existed were simulated; refused ones were not computed."""
    quant = json.loads((run / "quant.json").read_text())
    row = quant["rows"][0]

    def sections(*computed: str | None) -> tuple[str, str]:
        rows = [{k: v for k, v in row.items() if k != "computed"} for _ in computed]
        for each, word in zip(rows, computed, strict=True):
            each |= {} if word == "older" else {"computed": word}
        (run / "quant.json").write_text(json.dumps(quant | {"rows": rows}))
        parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", card_text(run), re.M | re.S))
        return parts["Quantised"], parts["Limits"]

    table, limits = sections("integers", "older", None)
    cells = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| `")]
    assert cells == ["integers", "simulated", ""]
    assert "Losses computed with integers" in limits and "Simulated losses" in limits
    table, limits = sections("integers", "integers")
    assert "imulated" not in table + limits
    table, limits = sections("older", "simulated")
    assert "integers" not in table and "computed with integers" not in limits


def test_links_to_the_docs(run):
    text = card_text(run, docs="https://example.org/docs/")
    assert "[C7](https://example.org/docs/equations.md#c7-anneal) anneal" in text
    assert "](/equations" not in card_text(run)


def test_settings_that_are_lost_make_no_card(run):
    """Defaults would be the settings of another run."""
    (run / "config.json").write_text("{}")
    with pytest.raises(UserError, match="config.json holds no settings of a training"):
        card_text(run)
