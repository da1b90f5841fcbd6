"""Every remedy's dB against the same thing computed directly."""

import math

import pytest
import torch

from skipless.diagnose.remedies import choose_remedy, token_ratio, try_remedies
from skipless.quant import Scheme, fake_quantize
from skipless.quant.transforms.rotation import hadamard, rotation

WIDTHS = (1, 2, 7, 12, 20, 28, 36, 48, 64, 200, 320, 384, 576, 768, 1536)


@pytest.mark.parametrize("width", WIDTHS)
def test_rotations_are_orthogonal_and_flat(width):
    turn = rotation(width).double()
    assert torch.allclose(turn @ turn.T, torch.eye(width, dtype=torch.float64), atol=1e-5)
    if width not in (7, 200):
        core = hadamard(width)
        assert core is not None and bool((core.abs() == 1).all())
        assert float((turn.abs() * width**0.5 - 1).abs().max()) < 1e-5
    assert rotation(width) is rotation(width)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 48, generator=generator)
    x[:, 7] *= 40  # a heavy channel
    x[0, 20] = 900.0  # a giant token
    matrices = [torch.randn(n, 48, generator=generator) / 7 for n in (32, 16)]
    return x, torch.ones(80, dtype=torch.float64), matrices


def ratio(x, q):
    """Mean over tokens of noise over energy, in dB, in plain float64."""
    noise, energy = (q - x).double().square().sum(1), x.double().square().sum(1)
    return -10 * math.log10(float((noise / energy).mean()))


def absmax(x, bits, dim=None):
    """Symmetric rounding written out."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    step = largest / (2 ** (bits - 1) - 1)
    return torch.round(x / step) * step


def test_each_number_is_that_of_doing_it(case):
    x, weights, matrices = case
    rows = {r["remedy"]: r for r in try_remedies(x, weights, Scheme.parse("W8A6"), matrices)}
    w = torch.cat(matrices)
    rounded = torch.cat([absmax(m, 8) for m in matrices])
    exact = x @ w.T

    q = absmax(x, 6)
    assert rows["as is"]["token_sqnr"] == pytest.approx(ratio(x, q), abs=1e-3)
    assert rows["as is"]["output_sqnr"] == pytest.approx(ratio(exact, q @ rounded.T), abs=1e-2)

    q = absmax(x, 6, 1)
    assert rows["token"]["token_sqnr"] == pytest.approx(ratio(x, q), abs=1e-3)
    assert rows["token"]["output_sqnr"] == pytest.approx(ratio(exact, q @ rounded.T), abs=1e-2)

    turn = rotation(48)
    q = absmax(x @ turn, 6)
    turned = torch.cat([absmax(m @ turn, 8) for m in matrices])
    assert rows["rotation"]["token_sqnr"] == pytest.approx(ratio(x, q @ turn.T), abs=1e-2)
    assert rows["rotation"]["output_sqnr"] == pytest.approx(ratio(exact, q @ turned.T), abs=1e-2)

    s = (x.abs().amax(0) / w.abs().amax(0)).sqrt()
    q = absmax(x / s, 6)
    smooth = torch.cat([absmax(m * s, 8) for m in matrices])
    assert rows["smoothing"]["token_sqnr"] == pytest.approx(ratio(x, q * s), abs=1e-2)
    assert rows["smoothing"]["output_sqnr"] == pytest.approx(ratio(exact, q @ smooth.T), abs=1e-2)

    keep = x.abs().amax(0).topk(1).indices  # 1 % of 48
    rest = x.clone()
    rest[:, keep] = 0
    q = absmax(rest, 6)
    q[:, keep] = x[:, keep]
    assert rows["columns"]["token_sqnr"] == pytest.approx(ratio(x, q), abs=1e-3)

    pooled = rows["as is"]["sqnr"]
    assert pooled > rows["as is"]["token_sqnr"] + 10  # the giant decides it alone


def test_clips_do_not_lose_against_absmax_in_squared_error(case):
    x, weights, _ = case
    rows = {r["remedy"]: r for r in try_remedies(x, weights, Scheme.parse("W8A4"))}
    assert rows["clip:mse"]["sqnr"] >= rows["as is"]["sqnr"] - 1e-9
    assert "smoothing" not in rows and rows["token"]["output_sqnr"] is None
    clip = min(2.47 * float(x.double().square().mean().sqrt()), float(x.abs().max()))
    direct = ratio(x, fake_quantize(x, 4, clip=clip))
    assert rows["clip:gauss"]["token_sqnr"] == pytest.approx(direct, abs=0.05)


def test_weights_of_rows_count(case):
    x, weights, _ = case
    weights = weights.clone()
    weights[1:] = 3.0
    repeated = torch.cat([x[:1], x[1:].repeat(3, 1)])
    q = fake_quantize(x, 6)
    both = torch.cat([q[:1], q[1:].repeat(3, 1)])
    ones = torch.ones(len(both), dtype=torch.float64)
    assert token_ratio(x, q, weights) == pytest.approx(token_ratio(repeated, both, ones))


def test_a_scale_a_token_is_named_where_a_giant_is_the_trouble():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 48, generator=generator)
    x[0, 20] = 900.0
    weights = torch.ones(80, dtype=torch.float64)
    chosen = choose_remedy(try_remedies(x, weights, Scheme.parse("W8A8")), 40.5)
    assert chosen["remedy"] == "token" and chosen["gain"] > 20
    assert chosen["judged_by"] == "token_sqnr"


def test_a_scale_a_token_is_no_remedy_for_a_heavy_channel():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 48, generator=generator)
    x[:, 7] = 300.0
    weights = torch.ones(80, dtype=torch.float64)
    matrices = [torch.randn(16, 48, generator=generator) / 7]
    matrices[0][:, 7] /= 300
    chosen = choose_remedy(try_remedies(x, weights, Scheme.parse("W8A8"), matrices), 40.5)
    assert chosen["remedy"] in ("columns", "smoothing") and chosen["judged_by"] == "output_sqnr"


def test_nothing_to_fix_and_nothing_to_try():
    x = torch.rand(40, 16) * 2 - 1
    weights = torch.ones(40, dtype=torch.float64)
    assert choose_remedy(try_remedies(x, weights, Scheme.parse("W8A8")), 40.5) is None
    assert try_remedies(x, weights, Scheme.parse("W8Afp")) == [] and choose_remedy([], 40.0) is None
    assert try_remedies(torch.zeros(3, 4), weights[:3], Scheme.parse("W8A8")) == []


def row(name, value):
    return {"remedy": name, "sqnr": 0.0, "token_sqnr": value, "output_sqnr": None}


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ((10, 12, 30, 41), "b"),  # within a bit of 35: simple enough
        ((10, 12, 28, 41), "c"),
        ((10, 12, 20, 20.5), "b"),  # none is: the simplest near the best
        ((10, 12, 12, 12.9), None),  # nothing gives 3 dB
        ((30, 31, 32.9, 34), "c"),  # enough already, but the gain must be worth it
        ((10, math.nan, 9, 14), "c"),
        ((math.nan, 30, 30, 30), None),
    ],
)
def test_the_simplest_remedy_that_is_enough_is_chosen(values, chosen):
    rows = [row(name, value) for name, value in zip(("as is", "a", "b", "c"), values, strict=True)]
    found = choose_remedy(rows, 35.0)
    assert (found and found["remedy"]) == chosen
    if found:
        assert found["gain"] == found["token_sqnr"] - values[0] >= 3
