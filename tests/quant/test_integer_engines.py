"""Every engine against an int64 oracle in numpy: sums and float32 results, bit for bit (Q4)."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipless.errors import UserError
from skipless.quant.integers import engines as module
from skipless.quant.integers.engines import (
    ENGINES,
    Problem,
    dequantize,
    is_float32_exact,
    split,
    split_shift,
    sums_by_digits,
)
from skipless.quant.integers.packing import (
    pack_panels,
    unpack_panels,
)

AVAILABLE = [name for name, engine in ENGINES.items() if not engine.unavailable("cpu")]


def oracle(x: np.ndarray, w: np.ndarray, row_scale, column_scale, bias) -> np.ndarray:
    """Q4 in numpy: int64 sums, then float32 with one rounding per operation."""
    sums = x.astype(np.int64) @ w.astype(np.int64).T
    scale = row_scale.astype(np.float32)[:, None] * column_scale.astype(np.float32)[None, :]
    out = sums.astype(np.float32) * scale
    return out if bias is None else out + bias.astype(np.float32)


def same_bits(a: Tensor, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.numpy().view(np.int32) == b.view(np.int32)).all())


def draw_codes(rng, shape, bits, kind) -> np.ndarray:
    limit = 2 ** (bits - 1) - 1
    if kind == "largest":
        return np.full(shape, limit, np.int16)
    if kind == "corners":
        return rng.choice(np.array([-limit, limit], np.int16), shape)
    if kind == "sparse":
        return (rng.integers(-limit, limit + 1, shape) * (rng.random(shape) < 0.2)).astype(np.int16)
    return rng.integers(-limit, limit + 1, shape).astype(np.int16)


def check(name: str, problem: Problem, x: np.ndarray, w: np.ndarray, rng, has_bias=True) -> None:
    engine = ENGINES[name]
    rows, out = len(x), len(w)
    column_scale = rng.random(out, np.float32) + np.float32(0.01)
    bias = rng.standard_normal(out).astype(np.float32) if has_bias else None
    prepared = engine.prepare(torch.from_numpy(w), torch.from_numpy(column_scale), problem)
    codes = torch.from_numpy(x)
    sums = engine.sums(prepared, codes)
    expected = x.astype(np.int64) @ w.astype(np.int64).T
    assert (sums.to(torch.int64).numpy() == expected).all(), name
    for count in {1, rows}:
        row_scale = rng.random(count, np.float32) + np.float32(0.01)
        got = engine.linear(
            prepared, codes, torch.from_numpy(row_scale), None if bias is None else
            torch.from_numpy(bias),
        )  # fmt: skip
        assert same_bits(got, oracle(x, w, row_scale, column_scale, bias)), (name, count)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 27),
    in_features=st.integers(1, 70),
    out_features=st.integers(1, 50),
    weight_bits=st.integers(2, 16),
    activation_bits=st.integers(2, 16),
    kinds=st.tuples(*[st.sampled_from(["random", "largest", "corners", "sparse"])] * 2),
    has_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shape_any_width(
    tokens, in_features, out_features, weight_bits, activation_bits, kinds, has_bias, seed
):
    rng = np.random.default_rng(seed)
    problem = Problem(
        weight_bits=weight_bits, activation_bits=activation_bits, in_features=in_features,
        out_features=out_features,
    )  # fmt: skip
    x = draw_codes(rng, (tokens, in_features), activation_bits, kinds[0])
    w = draw_codes(rng, (out_features, in_features), weight_bits, kinds[1])
    ran = [name for name in AVAILABLE if not ENGINES[name].refuses(problem)]
    assert "float" in ran and (weight_bits > 8 or "plain" in ran or "plain" not in AVAILABLE)
    for name in ran:
        check(name, problem, x, w, rng, has_bias)


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("in_features", [1, 2, 37, 768, 5000])
def test_worst_case_codes_at_every_width(name, in_features):
    """All +q against all +q and all -q: the sum is K qw qa, known without any computation."""
    for weight_bits in (2, 3, 4, 5, 6, 8, 9, 12, 16):
        for activation_bits in (2, 4, 6, 8, 10, 12, 15, 16):
            problem = Problem(
                weight_bits=weight_bits, activation_bits=activation_bits,
                in_features=in_features, out_features=17,
            )  # fmt: skip
            engine = ENGINES[name]
            if engine.refuses(problem):
                widest = {"int_mm": 15, "onnxruntime": 8}.get(name, 16)
                assert weight_bits > 8 or activation_bits > widest
                continue
            w = torch.full((17, in_features), problem.largest_weight, dtype=torch.int16)
            w[1::2] *= -1
            x = torch.full((2, in_features), problem.largest_activation, dtype=torch.int16)
            sums = engine.sums(engine.prepare(w, torch.ones(17), problem), x)
            signs = torch.tensor([1, -1]).repeat(9)[:17]
            assert torch.equal(sums.to(torch.int64), (problem.bound * signs).expand(2, 17)), (
                weight_bits, activation_bits,
            )  # fmt: skip


def test_sums_past_32_bits_spill(monkeypatch):
    """W8A16 passes 2^31 within 517 inputs, so that K = 5000 with mixed signs crosses it often."""
    rng = np.random.default_rng(0)
    problem = Problem(weight_bits=8, activation_bits=16, in_features=5000, out_features=33)
    assert problem.bound > 2**31
    for kinds in (("corners", "corners"), ("largest", "random")):
        x = draw_codes(rng, (13, 5000), 16, kinds[0])
        w = draw_codes(rng, (33, 5000), 8, kinds[1])
        for name in AVAILABLE:
            if not ENGINES[name].refuses(problem):
                check(name, problem, x, w, rng)


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_longest_sum_that_fits_in_32_bits(name):
    """Filled up to whole groups of inputs it would be too long; they are zeros."""
    width = (2**31 - 1) // (7 * 127)
    problem = Problem(weight_bits=4, activation_bits=8, in_features=width, out_features=1)
    engine = ENGINES[name]
    if engine.refuses(problem):
        pytest.skip(engine.refuses(problem))
    prepared = engine.prepare(torch.full((1, width), -7, dtype=torch.int16), torch.ones(1), problem)
    sums = engine.sums(prepared, torch.full((1, width), 127, dtype=torch.int16))
    assert sums.to(torch.int64).tolist() == [[-7 * 127 * width]]


@pytest.mark.parametrize("name", AVAILABLE)
def test_threads_and_callers_at_once_give_the_same(name):
    """Two torch threads, and two Python threads that call together."""
    rng = np.random.default_rng(1)
    engine, bits = ENGINES[name], 8 if name == "onnxruntime" else 12
    problem = Problem(weight_bits=4, activation_bits=bits, in_features=129, out_features=200)
    x, w = draw_codes(rng, (60, 129), bits, "random"), draw_codes(rng, (200, 129), 4, "random")
    prepared = engine.prepare(torch.from_numpy(w), torch.ones(200), problem)
    expected = torch.from_numpy(x.astype(np.int64) @ w.astype(np.int64).T)
    torch.set_num_threads(2)
    results: list[bool] = []

    def work() -> None:
        for _ in range(4):
            sums = engine.sums(prepared, torch.from_numpy(x)).to(torch.int64)
            results.append(torch.equal(sums, expected))

    callers = [threading.Thread(target=work) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert results == [True] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", [n for n in AVAILABLE if n in ("vnni", "avx2", "plain")][:1])
def test_a_forked_process_makes_its_own_threads(name):
    """The parent's waiting threads do not exist in the child, which must not wait for them."""
    problem = Problem(weight_bits=8, activation_bits=8, in_features=64, out_features=160)
    engine = ENGINES[name]
    codes = torch.full((30, 64), 3, dtype=torch.int16)
    prepared = engine.prepare(codes[:1].expand(160, 64), torch.ones(160), problem)
    torch.set_num_threads(2)
    expected = engine.sums(prepared, codes)
    assert bool((expected == 9 * 64).all())
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for ever is killed, and its status tells
        same = torch.equal(engine.sums(prepared, codes), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_float_engine_picks_the_cheapest_exact_product(monkeypatch):
    def shift(width: int, weight_bits: int, activation_bits: int) -> int:
        return split_shift(
            Problem(weight_bits=weight_bits, activation_bits=activation_bits, in_features=width,
                    out_features=1)
        )  # fmt: skip

    assert shift(768, 8, 12) and shift(768, 4, 12)
    assert not shift(5000, 16, 16)
    codes = torch.arange(-32767, 32768, dtype=torch.int16)
    for p in (1, 5, 8, 15):
        high, low = split(codes, p)
        assert torch.equal((high << p) + low, codes.to(torch.int32))
        assert int(low.min()) >= -(2 ** (p - 1)) and int(low.max()) < 2 ** (p - 1)


def test_float32_shortcuts_are_noticed(monkeypatch):
    """Reduced-precision float32 products (bfloat16, TF32) are not exact, so float64 steps in."""
    assert is_float32_exact(torch.device("cpu"))
    rng = np.random.default_rng(2)
    problem = Problem(weight_bits=8, activation_bits=8, in_features=500, out_features=64)
    x, w = draw_codes(rng, (64, 500), 8, "random"), draw_codes(rng, (64, 500), 8, "random")
    torch.set_float32_matmul_precision("medium")
    try:
        assert not is_float32_exact(torch.device("cpu"))
        check("float", problem, x, w, rng)
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check("float", problem, x, w, rng)


def test_devices_without_float64_sum_digits(monkeypatch):
    rng = np.random.default_rng(3)
    monkeypatch.setattr(module, "has_float64", lambda device: False)
    for weight_bits, activation_bits, kind in ((16, 16, "largest"), (8, 12, "corners")):
        problem = Problem(
            weight_bits=weight_bits, activation_bits=activation_bits, in_features=2100,
            out_features=5,
        )  # fmt: skip
        x = draw_codes(rng, (3, 2100), activation_bits, kind)
        w = draw_codes(rng, (5, 2100), weight_bits, kind)
        check("float", problem, x, w, rng)
        expected = torch.from_numpy(x.astype(np.int64) @ w.astype(np.int64).T)
        got = sums_by_digits(torch.from_numpy(x), torch.from_numpy(w))
        assert torch.equal(got, expected)


def test_dequantisation_rounds_each_step_by_itself():
    """A fused multiply-add would give another last bit for this value."""
    rng = np.random.default_rng(4)
    sums = rng.integers(-(2**40), 2**40, (50, 40))
    row, column = rng.random(50, np.float32), rng.random(40, np.float32)
    bias = rng.standard_normal(40).astype(np.float32) * np.float32(1e11)
    got = dequantize(*(torch.from_numpy(a) for a in (sums, row, column, bias)))
    product = sums.astype(np.float32) * (row[:, None] * column)
    assert same_bits(got, product + bias)
    fused = (product.astype(np.float64) * 0 + sums.astype(np.float32).astype(np.float64)
             * (row[:, None] * column).astype(np.float64) + bias).astype(np.float32)  # fmt: skip
    assert not same_bits(got, fused)


def test_an_engine_refuses_what_it_does_not_cover():
    problem = Problem(weight_bits=12, activation_bits=16, in_features=8, out_features=4)
    codes = torch.zeros(4, 8, dtype=torch.int16)
    for name in AVAILABLE:
        if name != "float":
            with pytest.raises(UserError, match=f"{name!r} cannot run this layer"):
                ENGINES[name].prepare(codes, torch.ones(4), problem)
    assert "CPU" in ENGINES["plain"].unavailable("cuda")
    assert "mps" in ENGINES["int_mm"].unavailable("mps")


@settings(max_examples=40, deadline=None)
@given(out=st.integers(1, 40), width=st.integers(1, 33), seed=st.integers(0, 99))
def test_packing_and_unpacking_return_the_codes(out, width, seed):
    rng = np.random.default_rng(seed)
    small = torch.from_numpy(rng.integers(-8, 8, (out, width)).astype(np.int8))
    whole = torch.from_numpy(rng.integers(-128, 128, (out, width)).astype(np.int8))
    for codes, nibbles in ((small, True), (small, False), (whole, False)):
        panels = pack_panels(codes.to(torch.int16), nibbles=nibbles)
        assert panels.shape == (-(-out // 16), -(-width // 2), 16 if nibbles else 32)
        assert torch.equal(unpack_panels(panels, out, width), codes)
        quads = pack_panels(codes.to(torch.int16), nibbles=nibbles, quads=True)
        assert quads.shape == (-(-out // 16), -(-width // (8 if nibbles else 4)), 64)
        assert torch.equal(unpack_panels(quads, out, width, quads=True, nibbles=nibbles), codes)


def test_packing_refuses_codes_that_do_not_fit():
    with pytest.raises(UserError, match="-8 to 7 fit"):
        pack_panels(torch.tensor([[8]]), nibbles=True)
    with pytest.raises(UserError, match="-128 to 127 fit"):
        pack_panels(torch.tensor([[200]], dtype=torch.int16), nibbles=False)


def test_four_bit_weights_take_half_the_bytes():
    problem = Problem(weight_bits=4, activation_bits=8, in_features=64, out_features=32)
    wider = Problem(weight_bits=8, activation_bits=8, in_features=64, out_features=32)
    codes = torch.ones(32, 64, dtype=torch.int16)
    for name in AVAILABLE:
        if name in ("vnni", "avx2", "plain"):
            sizes = [ENGINES[name].prepare(codes, torch.ones(32), p).num_bytes
                     for p in (problem, wider)]  # fmt: skip
            assert sizes == [32 * 64 // 2, 32 * 64]
