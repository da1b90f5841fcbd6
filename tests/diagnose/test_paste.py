"""The lines to paste: what they leave in full precision, and that shell and Python take them."""

import json
import shlex

import pytest
import torch

from skipless import cli
from skipless.diagnose import diagnose
from skipless.diagnose.damage import Damage
from skipless.diagnose.sensitivity import without_layers
from skipless.diagnose.writing import write
from skipless.quant import Scheme, quantize, quantized, restore
from skipless.quant.targets import find_targets


def places(model, scheme, scope, **options):
    weights, activations = find_targets(model, scheme, scope, **options)
    return {w.name for w in weights}, {a.site.name for a in activations}


def llama(num_layers):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("scope", ["linear", "block"])
def test_overrides_leave_out_what_the_layers_hold(scope):
    """Layers 1 and 11 of 12, none of layer 10; as many as `layers=` of the rest leaves out."""
    model, scheme = llama(12), Scheme.parse("W8A8")
    mixed = without_layers(model, scheme, scope, [11, 1])
    assert str(mixed) == "W8A8 model.layers.1=fp model.layers.11=fp"
    rest = [n for n in range(12) if n not in (1, 11)]
    assert places(model, mixed, scope) == places(model, scheme, scope, layers=rest)


def test_names_with_other_numbers_before_the_layers():
    """A list of stacks: "1.blocks.1" is layer 1, and "1" would be a whole stack."""
    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())  # noqa: E731
    stack = lambda: torch.nn.ModuleDict(  # noqa: E731
        {"blocks": torch.nn.ModuleList(block() for _ in range(3))}
    )
    model = torch.nn.ModuleList(stack() for _ in range(2))
    scheme = Scheme.parse("W8A8")
    layers = {w.layer for w in find_targets(model, scheme, "linear")[0]}
    chosen = max(layers)
    rest = [layer for layer in layers if layer != chosen]
    mixed = without_layers(model, scheme, "linear", [chosen])
    assert places(model, mixed, "linear") == places(model, scheme, "linear", layers=rest)


def test_own_overrides_stay_and_are_replaced():
    model = llama(3)
    scheme = Scheme.parse("W4A4 model.layers.1=W8A8 model.layers.2=W8A8")
    mixed = without_layers(model, scheme, "block", [1])
    assert str(mixed) == "W4A4 model.layers.2=W8A8 model.layers.1=fp"


def test_every_line_gives_the_damage_that_stands_beside_it(tmp_path):
    """In Python as it stands; in the shell up to the text, which the command reads in halves."""
    model = llama(4)
    ids = torch.arange(64).view(2, 32) % 50
    start = "skipless quantize mine --data sotu"
    result = diagnose(model, [ids], "W4A4", measure="distance", command=start)
    assert any(row["exempt"] for row in result.alternatives)
    damage = Damage(model, [ids], "distance")
    for row in result.alternatives:
        exec(row["code"], {"quantize": quantize, "model": model})
        assert damage.increase()[0] == pytest.approx(row["increase"])
        restore(model)
        words = shlex.split(result.paste(row))
        assert words[:5] == ["skipless", "quantize", "mine", "--data", "sotu"]
        at = words.index("--override") if "--override" in words else len(words)
        scheme = Scheme.parse(words[6]).with_overrides(words[at + 1 :])
        with quantized(model, scheme, words[8]):
            assert damage.increase()[0] == pytest.approx(row["increase"])
    page = write(result, tmp_path / "page").read_text()
    for row in result.alternatives:
        assert row["code"].replace('"', "&quot;") in page
        assert result.paste(row).replace("'", "&#x27;") in page


def test_the_shell_line_of_a_run_runs(tiny_run, tmp_path, capsys):
    """Printed last, and taken by the command line as it stands."""
    run = str(tiny_run)
    assert cli.main(
        ["diagnose", run, "--num-tokens", "64", "--layer-tokens", "32", "--schemes", "W2A2",
         "--out", str(tmp_path / "out")]
    ) == 0  # fmt: skip
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("to try it: "))
    words = shlex.split(line.removeprefix("to try it: "))
    assert words[:3] == ["skipless", "quantize", run]
    table = json.loads((tmp_path / "out" / "diagnosis.json").read_text())["alternatives"]
    scheme = Scheme.parse(words[words.index("--schemes") + 1])
    asked = next(row for row in table if row["scheme"] == str(scheme))
    assert words[words.index("--num-tokens") + 1] == "32"
    assert cli.main([*words[1:], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = next(row for row in rows if row["scheme"] == str(scheme))
    assert found["increase"] == pytest.approx(asked["increase"], abs=1e-6)


def test_no_shell_line_without_a_command(planted, ids):
    result = diagnose(planted(), [ids])
    assert result.alternatives and result.paste(result.alternatives[0]) is None
