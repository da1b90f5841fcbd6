"""precision_table and sensitivity: the numbers are those of quantize by hand."""

from __future__ import annotations

import json

import pytest
import torch

from skipless.errors import UserError
from skipless.evaluate import loss, precision_table, sensitivity
from skipless.quant import Scheme, quantization, quantize, restore, to_integer


def test_rows_are_what_quantising_by_hand_gives(model, batches):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    rows = precision_table(
        model, iter(batches), ["W8A8", Scheme.parse("W2A3"), "W4A8-asym"],
        ["linear", "block", "all"], on_row=seen.append,
    )  # fmt: skip
    assert seen == rows
    assert [(r["scheme"], r["scope"]) for r in rows] == [
        (scheme, scope)
        for scheme in ("W8A8", "W2A3", "W4A8-asym")
        for scope in ("linear", "block", "all")
    ]
    full = loss(model, batches).nats
    for row in rows:
        quantize(model, row["scheme"], row["scope"])
        if row["scheme"].endswith("asym"):
            assert row["computed"] == "simulated"
        else:
            to_integer(model, "float")
            assert row["computed"] == "integers"
        assert loss(model, batches).nats == row["loss"], "to the bit, whatever engine was picked"
        restore(model)
        assert row["full_precision"] == full
        assert row["increase"] == row["loss"] - full
        assert row["num_tokens"] == 84 and row["standard_error"] >= 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    json.dumps(rows, allow_nan=False)


def test_static_schemes_use_the_calibration(model, batches):
    with pytest.raises(UserError, match="calibration"):
        precision_table(model, batches, ["W8A8-static"], ["block"])
    rows = precision_table(
        model, batches, ["W8A8-static", "W8A8"], ["block"], calibration=iter(batches)
    )
    assert abs(rows[0]["loss"] - rows[1]["loss"]) < 0.05
    assert quantization(model) is None


@pytest.mark.parametrize(
    ("schemes", "scopes", "says"),
    [([], ["block"], "at least one scheme"), (["W8A8"], [], "one scope"),
     (["W8"], ["block"], "W8Afp"), (["W8A8"], ["rows"], "'rows'")],
)  # fmt: skip
def test_bad_lists(model, batches, schemes, scopes, says):
    with pytest.raises(UserError, match=says):
        precision_table(model, batches, schemes, scopes)
    assert quantization(model) is None


def test_sensitivity_is_one_layer_at_a_time(model, batches):
    rows = sensitivity(model, "W2A3", batches)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    quantize(model, "W2A3", "block", layers=[1])
    to_integer(model, "float")
    assert loss(model, batches).nats == rows[1]["loss"]
    restore(model)
    assert all(row["num_weights"] == 6 and row["num_sites"] == 6 + 4 for row in rows)
    assert len({row["loss"] for row in rows}) == 3
    assert quantization(model) is None


def test_sensitivity_needs_layers(batches):
    flat = torch.nn.Sequential(
        torch.nn.Embedding(61, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 61)
    )
    flat[0].weight.requires_grad_(False)

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner, self.out = flat

        def forward(self, ids):
            return self.out(self.inner(self.embed(ids)))

    with pytest.raises(UserError, match="precision_table"):
        sensitivity(Flat(), "W4A4", batches, "linear")
