"""Mixed precision: overrides by name reach weights and sites, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate import sensitivity, site_sqnr
from skipless.quant import Scheme, quantization, quantize, quantize_weight, quantized, restore
from skipless.scheme import matches

MIXED = "W4A8 blocks.0.mlp.*=W8A8 blocks.2=fp"


def test_text_and_json_round_trip():
    scheme = Scheme.parse(MIXED)
    assert str(scheme) == MIXED
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert scheme == Scheme.parse("W4A8").with_overrides(
        {"blocks.0.mlp.*": "W8A8", "blocks.2": None}
    )
    assert scheme == Scheme.parse("W4A8").with_overrides(["blocks.0.mlp.*=W8A8", "blocks.2=fp"])
    assert Scheme.parse("W4A8 a=W8A8-clip:absmax").overrides == (("a", "W8A8"),)  # canonical
    assert [str(part) for part in scheme.parts()] == ["W4A8", "W8A8"]
    assert str(scheme.base) == "W4A8"


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("blocks.1", "blocks.1.mlp.0", True), ("blocks.1", "blocks.10.mlp.0", False),
        ("blocks.1.*", "blocks.1", False), ("*.mlp.*", "blocks.1.mlp.0", True),
        ("blocks.1:output", "blocks.1:output", True), ("blocks.1:output", "blocks.1.mlp", False),
        ("blocks.1", "blocks.1:output", True), ("*", "a", True), ("mlp", "blocks.1.mlp", False),
    ],
)  # fmt: skip
def test_what_a_pattern_matches(pattern, name, wanted):
    assert matches(pattern, name) is wanted


def test_the_last_override_that_matches_counts():
    scheme = Scheme.parse("W4A4 *=fp blocks.1=W8A8")
    assert scheme.at("blocks.0.mlp.0") is None
    assert str(scheme.at("blocks.1.mlp.0")) == "W8A8"
    assert Scheme.parse("W4A4 blocks.1=W8A8 *=fp").at("blocks.1.mlp.0") is None


def test_weights_and_sites_get_their_own_format(plain, ids):
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    logits = plain(ids)
    quantize(plain, MIXED, scope="block")
    state = dict(plain.named_parameters())
    for name, text in {"blocks.0.mlp.0": "W8A8", "blocks.1.mlp.2": "W4A8"}.items():
        expected = quantize_weight(weights[f"{name}.weight"], Scheme.parse(text))
        assert torch.equal(state[f"{name}.weight"], expected)
    assert torch.equal(state["blocks.2.mlp.0.weight"], weights["blocks.2.mlp.0.weight"])
    record = quantization(plain)
    assert {site.site.module.split(".")[1] for site in record.activations} == {"0", "1"}
    assert "2 at W8A8, 2 at W4A8" in record.describe()
    assert "left out blocks.2.mlp.0, blocks.2.mlp.2" in record.describe()
    restore(plain)
    assert torch.equal(plain(ids), logits)


def test_overrides_equal_two_schemes_put_together(plain, ids):
    """Each block alone: an override of the others by fp is the option `layers`."""
    with quantized(plain, "W4A4", overrides={"blocks.0": "fp", "blocks.2": "fp"}):
        by_override = plain(ids)
    with quantized(plain, "W4A4", layers=[1]):
        by_layer = plain(ids)
    assert torch.equal(by_override, by_layer)


def test_a_site_can_be_set_apart_from_its_weight(plain):
    quantize(plain, "W4A4", overrides={"blocks.0.mlp.2:input": "W4A12"})
    bits = {q.site.name: q.bits for q in quantization(plain).activations}
    assert bits["blocks.0.mlp.2:input"] == 12 and bits["blocks.0.mlp.0:input"] == 4
    assert {str(weight.scheme) for weight in quantization(plain).weights} == {"W4A4"}


def test_static_beside_dynamic(plain, ids):
    scheme = "W8A8 blocks.1=W8A8-static"
    with pytest.raises(UserError, match="pass calibration"):
        quantize(plain, scheme)
    quantize(plain, scheme, calibration=[ids])
    static = [q.site.module for q in quantization(plain).activations if q.observer]
    assert static == ["blocks.1.mlp.0", "blocks.1.mlp.2"]
    assert bool(plain(ids).isfinite().all())


def test_measurements_take_a_mixed_scheme(plain, ids):
    rows = site_sqnr(plain, MIXED, [ids])
    bits = {row["site"]: row["bits"] for row in rows if row["kind"] == "weight"}
    assert bits == {"blocks.0.mlp.0": 8, "blocks.0.mlp.2": 8, "blocks.1.mlp.0": 4,
                    "blocks.1.mlp.2": 4}  # fmt: skip
    assert [row["layer"] for row in sensitivity(plain, MIXED, [ids])] == [0, 1]


def test_tied_weights_answer_to_both_names(plain):
    plain.blocks[1].mlp[0] = plain.blocks[0].mlp[0]
    quantize(plain, "W4A4", overrides={"blocks.1.mlp.0": "W8A8"})
    formats = {weight.name: str(weight.scheme) for weight in quantization(plain).weights}
    assert formats["blocks.0.mlp.0.weight"] == "W8A8"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"blcks.1": "W8A8"}, "'blcks.1' matches nothing.*did you mean.*'blocks.1'"),
        ({"mlp.0": "fp"}, r"write '\*\.mlp\.0'"),
        ({"out": "W8A8"}, "names the head out.*include_head=True"),
        ({"*": "fp"}, "leave every weight in full precision"),
        ({"blocks.0": "W8"}, "override blocks.0=W8: 'W8' does not say.*or fp"),
        ({"": "fp"}, "pattern of an override is ''"),
        ({"a b": "fp"}, "without spaces"),
        (["blocks.0"], "'blocks.0' is not an override; write PATTERN=SCHEME"),
        (["blocks.0=fp", "blocks.0=W8A8"], "'blocks.0' is given twice"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(plain, ids, overrides, says):
    logits = plain(ids)
    with pytest.raises(UserError, match=says):
        quantize(plain, "W4A4", overrides=overrides)
    assert quantization(plain) is None and torch.equal(plain(ids), logits)


def test_the_head_by_name_when_it_is_included(plain):
    quantize(plain, "W4A4", include_head=True, overrides={"out": "W8A8"})
    formats = {weight.name: str(weight.scheme) for weight in quantization(plain).weights}
    assert formats["embed.weight"] == "W8A8"  # tied


def test_lines_of_diagnose_can_be_pasted(plain, ids):
    import skipless

    found = skipless.diagnose(plain, [ids], "W3A3")
    assert any("in full precision" in row["what"] for row in found.alternatives)
    for row in found.alternatives:
        exec(row["code"], {"quantize": quantize, "model": plain})
        assert quantization(plain) is not None
        restore(plain)


def test_a_model_of_one_layer():
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match="leave every weight"):
        quantize(net, "W4A4", overrides={"0": None})
