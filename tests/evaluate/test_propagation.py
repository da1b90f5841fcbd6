"""R_l (S9) and SQNR by site (S3, S11), against a float64 computation without the package's sums."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate import error_propagation, site_sqnr
from skipless.quant import fake_quantize, gaussian_sqnr, quantization, quantized
from skipless.sites import find_sites


def outputs(model, modules, batches) -> dict[str, np.ndarray]:
    """Output (or, for names ending in ":input", input) of modules over all batches, float64."""
    seen: dict[str, list] = {name: [] for name in modules}
    handles = []
    for name in modules:
        module = model.get_submodule(name.removesuffix(":input"))
        if name.endswith(":input"):
            hook = lambda m, a, n=name: seen[n].append(a[0].double().numpy().ravel())  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        else:
            hook = lambda m, a, o, n=name: seen[n].append(o.double().numpy().ravel())  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    model.eval()
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
    for handle in handles:
        handle.remove()
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize(("scheme", "scope"), [("W4A4", "block"), ("W4Afp", "linear"),
                                               ("W8A6", "all")])  # fmt: skip
def test_s9(model, batches, scheme, scope):
    sites = find_sites(model, "stream")
    names = [site.module for site in sites]
    reference = outputs(model, names, batches)
    with quantized(model, scheme, scope):
        approximate = outputs(model, names, batches)
    rows = error_propagation(model, scheme, batches, scope)
    assert [row["site"] for row in rows] == [site.name for site in sites]
    for row, site in zip(rows, sites, strict=True):
        x, q = reference[site.module], approximate[site.module]
        expected = np.linalg.norm(q - x) / np.linalg.norm(x)
        assert row["r"] == pytest.approx(expected, rel=1e-6)
        assert (row["layer"], row["sublayer"]) == (site.layer, site.sublayer)
    assert quantization(model) is None
    json.dumps(rows, allow_nan=False)


def test_more_bits_mean_less_error(model, batches):
    last = [error_propagation(model, f"W{b}A{b}", batches)[-1]["r"] for b in (4, 8, 12)]
    assert last[0] > 4 * last[1] > 16 * last[2] > 0


def test_padding_is_no_error(model):
    ids = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    batch, site = {"input_ids": ids, "attention_mask": mask}, find_sites(model, "stream")[-1]
    seen = []
    handle = model.get_submodule(site.module).register_forward_hook(
        lambda module, args, out: seen.append(out[mask.bool()].double())
    )
    model.eval()
    with torch.no_grad():
        model(**batch)
        with quantized(model, "W4A4", "block"):
            model(**batch)
    handle.remove()
    expected = float((seen[1] - seen[0]).norm() / seen[0].norm())
    assert error_propagation(model, "W4A4", [batch])[-1]["r"] == pytest.approx(expected, rel=1e-6)
    everywhere = error_propagation(model, "W4A4", [{**batch, "attention_mask": mask.fill_(1)}])
    assert everywhere[-1]["r"] != pytest.approx(expected, rel=1e-3)


def test_s3_and_the_gap(model, batches):
    rows = site_sqnr(model, "W4A5", batches, "block")
    with quantized(model, "W4A5", "block"):
        expected_sites = [q.site.name for q in quantization(model).activations]
        weights = [w.name.removesuffix(".weight") for w in quantization(model).weights]
    assert [row["site"] for row in rows] == expected_sites + weights
    by_site = {row["site"]: row for row in rows}
    for row in rows:
        assert row["gap"] == pytest.approx(row["ideal"] - row["sqnr"])
        assert row["ideal"] == gaussian_sqnr(4 if row["kind"] == "weight" else 5)
    # One batch by hand, per-tensor dynamic ranges.
    name = "layers.1.mlp.down_proj"
    x = outputs(model, [name + ":input"], batches[:1])[name + ":input"]
    s = np.abs(x).max() / 15
    noise = ((x - s * np.rint(x / s)) ** 2).sum()
    one = {row["site"]: row for row in site_sqnr(model, "W4A5", batches[:1])}[name + ":input"]
    assert one["sqnr"] == pytest.approx(10 * math.log10((x**2).sum() / noise), abs=1e-3)
    weight = model.layers[0].self_attn.q_proj.weight.detach()
    error = (weight - fake_quantize(weight, 4)).double().square().sum()
    expected = 10 * math.log10(float(weight.double().square().sum() / error))
    found = by_site["layers.0.self_attn.q_proj"]
    assert (found["layer"], found["sublayer"], found["bits"]) == (0, "attention", 4)
    assert found["sqnr"] == pytest.approx(expected, abs=1e-6)
    json.dumps(rows, allow_nan=False)


def test_gaussian_inputs_have_no_gap_under_the_gaussian_clip():
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    data = [torch.randn(2000, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    rows = site_sqnr(net, "W8A4-clip:gauss", data, "linear", include_weights=False)
    assert len(rows) == 1 and abs(rows[0]["gap"]) < 0.05


def test_all_zero_site_has_no_ratio():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    row = site_sqnr(net, "W8A4", [torch.zeros(3, 4)], "linear")[0]
    assert row["sqnr"] is None and row["gap"] is None


def test_every_site_is_judged_on_full_precision_values(model, batches):
    """The same site gives the same number however much else is quantised."""
    linear, block = (
        {r["site"]: r["sqnr"] for r in site_sqnr(model, s, batches, scope, include_weights=False)}
        for s, scope in (("W2A4", "linear"), ("W8A4", "block"))
    )
    assert all(block[site] == value for site, value in linear.items())


def test_hugging_face_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                 intermediate_size=48, vocab_size=61)
    )  # fmt: skip
    ids = torch.arange(24).view(2, 12)
    rows = error_propagation(llama, "W8A8", [ids])
    assert [row["layer"] for row in rows] == [0, 1] and all(0 < row["r"] < 0.2 for row in rows)
    assert {r["kind"] for r in site_sqnr(llama, "W8A8", [{"input_ids": ids}])} == {
        "linear_input", "sublayer_output", "stream", "weight",
    }  # fmt: skip


def test_bad_input(model, batches):
    with pytest.raises(UserError, match="no batch"):
        error_propagation(model, "W8A8", [])
    with pytest.raises(UserError, match="no batch"):
        site_sqnr(model, "W8A8", [])
    with pytest.raises(UserError, match="include_weights=True"):
        site_sqnr(model, "W8Afp", batches, include_weights=False)
    assert {row["kind"] for row in site_sqnr(model, "W8Afp", batches)} == {"weight"}
    with pytest.raises(UserError, match="no site of kind 'stream'"):
        error_propagation(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "W8A8", batches, "linear")
    assert quantization(model) is None
