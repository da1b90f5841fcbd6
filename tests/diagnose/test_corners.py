"""Where numbers do not exist: zeros, constants, half precision; and what is said then."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from skipless.diagnose import by_layer, compare, diagnose
from skipless.diagnose.comparison.outputs import Outputs
from skipless.diagnose.damage import Damage
from skipless.diagnose.page import page
from skipless.diagnose.plots import draw
from skipless.errors import UserError
from skipless.quant import evaluation_mode, placed, run_batch


def page_of(found):
    """The page, which has to be drawn without an exception."""
    text = page(found, *draw(found))
    assert not {"nan", "None"} & set(text.replace("<", " ").replace(">", " ").split())
    return text


class Silent(nn.Module):
    """Its output is exactly 0."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("written", [False, True])
def test_outputs_of_zero_have_no_relative_distance(written, tmp_path):
    out = tmp_path / "out" if written else None
    found = diagnose(Silent(), [torch.randn(6, 8)], out=out)
    assert found.sites and not found.layers and not found.alternatives
    assert sum("are all 0" in line for line in found.missing) == 2
    assert found.recommended() is None and "are all 0" in page_of(found)


def test_a_stream_of_zeros_has_no_error_by_depth(planted, ids):
    model = planted()
    with torch.no_grad():
        model.embedding.weight.zero_()
        for block in model.blocks:
            block.down.weight.zero_()
            block.down.bias.zero_()
    found = diagnose(model, [ids], measure="distance")
    assert found.lines() and page_of(found)
    rows = [{**row, "r": None} for row in found.depth]
    unknown = replace(found, depth=rows)
    assert not any("error of the stream" in line for line in unknown.lines())
    assert page_of(unknown)
    some = replace(found, depth=[rows[0], {**rows[1], "r": 0.5}])
    assert any(f"grows most at {rows[1]['site']} (+0.500)" in line for line in some.lines())


def test_a_constant_matrix_has_no_tails():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    nn.init.constant_(model[0].weight, 0.1)
    found = diagnose(model, [torch.randn(6, 8)])
    row = next(row for row in found.weights if row["site"] == "0")
    assert row["kurtosis"] is None and row["max_over_std"] is None
    page_of(found)


def test_a_milder_scheme_does_not_stand_in_for_the_one_asked(monkeypatch, ids, planted):
    """The first row is what was asked for; what else fails is left out."""
    measured = Damage.increase
    failing = {"W8A8"}

    def increase(self):
        from skipless.quant import quantization

        if str(quantization(self.model).scheme) in failing:
            raise UserError("the outputs are not finite once quantised")
        return measured(self)

    monkeypatch.setattr(Damage, "increase", increase)
    found = diagnose(planted(), [ids], "W8A8", measure="distance")
    assert found.alternatives == [] and found.recommended() is None
    assert any(line.startswith("the whole model quantised: ") for line in found.missing)
    failing = {"W8A8-a:token"}
    found = diagnose(planted(), [ids], "W8A8", measure="distance")
    assert found.alternatives[0]["what"] == "as asked"
    assert "activations by token" not in [row["what"] for row in found.alternatives]


def test_noise_that_is_not_finite_is_no_prediction(monkeypatch, planted, ids):
    monkeypatch.setattr(by_layer, "block_noise", lambda *_: {0: math.nan, 1: 0.5, 2: 0.1})
    found = diagnose(planted(), [ids], measure="distance")
    assert [row["predicted"] for row in found.layers] == [None, 0.5, 0.1]
    assert found.damage["correlation"] == {"W8A8": None}, "two layers have no rank correlation"
    page_of(found)


def test_damage_within_its_error_is_said_to_be_none(planted, ids):
    found = diagnose(planted(), [ids], measure="distance")
    rows = [{**row, "increase": 1e-5 * row["layer"] - 1e-5, "standard_error": 1e-4}
            for row in found.layers]  # fmt: skip
    line = next(line for line in replace(found, layers=rows).lines() if "layers alone" in line)
    assert "none costs more than two standard errors" in line and "-0.0000" not in line
    clear = [{**row, "increase": 1.0} for row in rows]
    assert any("cost most" in line for line in replace(found, layers=clear).lines())
    loss = replace(found, damage={**found.damage, "kind": "loss", "unit": "nats a token"})
    for layers, said in ((rows, "bars are two standard errors"), (found.layers, "one sequence")):
        figures, _ = draw(replace(loss, layers=layers))
        assert said in next(figure.caption for figure in figures if figure.name == "layers")


def test_the_best_measured_way_is_the_one_advised(planted, ids):
    """Not the first that leaves a tenth of the damage."""
    found = diagnose(planted(), [ids], measure="distance")
    first, *others = found.alternatives
    rows = [{**first, "increase": 10.0}, *({**row, "increase": 1.0} for row in others)]
    rows[2]["increase"] = 0.1
    told = replace(found, alternatives=rows)
    assert told.recommended() is rows[2]
    assert any("distance of the outputs (no standard error)" in line for line in told.lines())
    assert told.lines()[-1].endswith(f"{rows[2]['what']}: +0.1000: {rows[2]['code']}")


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_loss_on_one_sequence_advises_nothing(sequences):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    found = diagnose(model, [torch.randint(50, (sequences, 24))], "W2A2")
    assert found.damage["kind"] == "loss"
    found = replace(found, alternatives=[
        {**row, "increase": 1.0 - 0.1 * number}
        for number, row in enumerate(found.alternatives)
    ])  # fmt: skip
    least = found.alternatives[-1]
    layers = next(line for line in found.lines() if line.startswith("layers alone"))
    if sequences == 1:
        assert found.recommended() is found.alternatives[0]
        assert "one sequence gives no standard error: these" in layers and "cost most" not in layers
        assert "nothing else is advised (least measured: " in found.lines()[-1]
        assert least["code"] not in found.lines()[-1]
        assert "what does not double the loss may be noise" in page_of(found)
        far = [{**found.alternatives[0], "increase": 9.0}, *found.alternatives[1:]]
        clear = replace(found, alternatives=far)
        assert clear.recommended() is least and least["code"] in clear.lines()[-1]
        assert "(one sequence gives no standard error)" in clear.lines()[-1]
    else:
        assert "no standard error" not in " ".join(found.lines()) + page_of(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_come_in_the_models_dtype(dtype):
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)).to(dtype)
    x = torch.randn(3, 8)
    with evaluation_mode(model):
        assert torch.equal(run_batch(model, x), model(x.to(dtype)))
    assert placed(torch.ones(2, dtype=torch.long), model).dtype == torch.long
    mixed = nn.Sequential(model, nn.Linear(4, 4))  # float32 beside it, on purpose
    assert placed(x, mixed) is x and placed("text", model) == "text"


def test_similarities_are_no_tokens():
    """Four images and four captions of four tokens: the mask of tokens does not fit by chance."""

    class Pairs(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.mix, self.scale = nn.Linear(4, 4, bias=False), scale
            nn.init.eye_(self.mix.weight)

        def forward(self, x, attention_mask):
            return self.mix(x) * self.scale

    x, mask = torch.rand(4, 4), torch.ones(4, 4, dtype=torch.long).tril()
    batch = {"x": x, "attention_mask": mask}
    scale = torch.ones(4, 4) + torch.ones(4, 4).triu(1)  # they differ where the mask is 0 alone
    outputs = Outputs(Pairs(1.0), Pairs(scale), batch)
    with torch.no_grad():
        outputs.run(batch)
    assert outputs.found()["distance"] == pytest.approx(float(x.triu(1).norm() / x.norm()))


def test_what_is_no_module_is_told():
    with pytest.raises(UserError, match="the model is int; an nn.Module was expected"):
        compare(3, nn.Linear(4, 4), [torch.randn(2, 4)])  # pyright: ignore[reportArgumentType]
