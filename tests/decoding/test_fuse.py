"""Fused decoding gives what the modules give, steps aside where it must, and is undone."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import replace

import pytest
import torch

from skipless.config import (
    ConnectionConfig,
    InitConfig,
    ModelConfig,
    TemperatureConfig,
)
from skipless.decoding import fuse, unfuse
from skipless.decoding.blocks import FusedBlock
from skipless.errors import UserError
from skipless.model import Block, KeyValueCache, Transformer
from skipless.quant import from_integer, quantize, restore, to_integer
from skipless.quant.integers import fused, layers
from skipless.quant.integers.engines import ENGINES, KernelEngine
from skipless.quant.integers.fused import engine_of_steps
from skipless.quant.integers.hardware import fastest_kernel, probe

pytestmark = pytest.mark.skipif(fastest_kernel() is None, reason="needs a C++ compiler")
IDS = torch.randint(61, (3, 5), generator=torch.Generator().manual_seed(0))


def make(connection: str | ConnectionConfig = "residual", **changes) -> Transformer:
    if isinstance(connection, str):
        connection = ConnectionConfig(kind=connection)
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=40, connection=connection, **changes,
    )  # fmt: skip
    model = Transformer(config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # gains and norms at their start would hide what is left out
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.rand(parameter.shape, generator=generator))
    return model


def decode(model: Transformer, rows: int = 1, steps: int = 4) -> torch.Tensor:
    cache, found = model.new_cache(), []
    with torch.no_grad():
        model(IDS[:rows], cache=cache)
        for step in range(steps):
            ids = torch.arange(rows)[:, None] + step
            found.append(model(ids, cache=cache).logits)
    return torch.cat(found, 1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


VARIANTS = {
    "residual": {},
    "none": {"connection": "none"},
    "fixed": {"connection": ConnectionConfig(kind="fixed", a=0.7, b=0.5, c=0.3)},
    "rezero": {"connection": "rezero"},
    "layerscale": {"connection": "layerscale"},
    "interpolate": {"connection": "interpolate"},
    "learned": {"connection": "learned"},
    "sphere": {"connection": "sphere"},  # no sum: a call a sublayer
    "post": {"norm_placement": "post"},
    "post-sphere": {"norm_placement": "post", "connection": "sphere"},
    "no norm": {"norm_placement": "none"},
    "layernorm": {"norm": "layernorm"},
    "groups": {"num_key_value_heads": 2},
    "one group": {"num_key_value_heads": 1, "position": "learned"},
    "relu": {"hidden_act": "relu"},
    "relu2": {"hidden_act": "relu2"},
    "swiglu": {"hidden_act": "swiglu", "intermediate_size": 100},
    "bias": {"init": InitConfig(identity_bias=2.0)},
    "temperature": {"temperature": TemperatureConfig(kind="learned_head")},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_fused_equals_unfused(name, rows):
    """16-bit activations: a code that rounding tips is worth a 32,767th."""
    model = make(**VARIANTS[name])
    quantize(model, "W8A16")
    to_integer(model)
    expected = decode(model, rows)
    assert fuse(model) is model and isinstance(model.layers[0], FusedBlock)
    assert distance(decode(model, rows), expected) < 2e-4
    assert ("sphere" in name) == (model.layers[0]._skipless_fused.stack is None)


@pytest.mark.parametrize(
    "scheme",
    ["W8A8-KV8", "W8A8-KV8-a:token", "W4A8-KV4", "W3A12-KV3-w:channel-a:token", "W8A12-static-KV8",
     "W8A8", "W4A8-KV8 layers.1.self_attn.q_proj=W8A12"],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_schemes_and_packed_caches(scheme, rows):
    model = make()
    quantize(model, scheme, calibration=[IDS])
    to_integer(model)
    expected = decode(model, rows, 12)
    cache = model.new_cache()
    fuse(model)
    found = decode(model, rows, 12)
    # A value near a border of the grid may fall on its other side.
    assert distance(found, expected) < 0.05
    close = (found - expected).abs().amax(-1) < 1e-3 * expected.abs().amax()
    assert close.float().mean() > 0.3, "most steps agree to rounding"
    assert isinstance(cache, KeyValueCache)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_it_follows_from_every_engine(engine):
    """Which engine `to_integer` picks depends on the processor: another than ours computes whole
    texts where it is faster, and single tokens are fused all the same."""
    model = make()
    quantize(model, "W4A8-KV8-a:token")
    try:
        to_integer(model, engine)
    except UserError as error:
        pytest.skip(str(error))
    expected = decode(model)
    fuse(model)
    fused = decode(model)
    states = [model.layers[n]._skipless_fused for n in range(len(model.layers))]
    assert all(state.steps()[1] is not None for state in states)
    assert distance(fused, expected) < 0.05
    assert torch.equal(decode(copy.deepcopy(model)), fused)
    restore(model)
    quantize(model, "W4A8-KV8-a:token")
    fuse(to_integer(model, fastest_kernel().name))
    assert distance(decode(model), fused) < 1e-5, "steps are those of the C++ engine"


def test_steps_are_never_those_of_an_engine_that_is_inexact_here(monkeypatch):
    """Where the layers name no single C++ engine: the best, as long as it gives the right sums."""
    model = to_integer(quantize(make(), "W4A8"), "float")
    kernels = [report for report in probe() if isinstance(ENGINES[report.engine], KernelEngine)]
    exact = [report.engine for report in kernels if report.usable]
    assert engine_of_steps(model) == exact[0]
    wrong = [replace(r, state="wrong") if r.engine == exact[0] else r for r in kernels]
    monkeypatch.setattr(fused, "probe", lambda: wrong)
    if len(exact) > 1:
        assert engine_of_steps(model) == exact[1]
    monkeypatch.setattr(fused, "probe", lambda: [replace(r, state="wrong") for r in kernels])
    with pytest.raises(UserError, match="needs a C"):
        engine_of_steps(model)


def test_layers_of_different_engines_are_fused_by_one(monkeypatch):
    """Each layer gets what was fastest when it was looked for, which on a busy machine varies."""
    kernels = [report.engine for report in probe() if report.engine in ("vnni", "avx2", "plain")
               and report.usable]  # fmt: skip
    names = itertools.cycle(kernels)
    model = make()
    quantize(model, "W8A8-KV8")
    expected = decode(fuse(to_integer(model, kernels[0])))
    from_integer(model)
    monkeypatch.setattr(layers, "pick", lambda problem, engine: ENGINES[next(names)])
    to_integer(model)
    assert len(set(layers.integer_layers(model).values())) == len(kernels)
    assert distance(decode(fuse(model)), expected) < 1e-5
    assert torch.equal(decode(copy.deepcopy(model)), decode(model))


def test_two_threads_give_the_same():
    model = make()
    quantize(model, "W8A8-KV8")
    fuse(to_integer(model))
    expected = decode(model, 3)
    torch.set_num_threads(2)
    try:
        assert torch.equal(decode(model, 3), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("connection", ["residual", "sphere"])
def test_threads_with_caches_of_their_own_do_not_mix(connection):
    """The addresses of one thread's cache were the next one's: another text, or a crash."""
    model = make(connection)
    quantize(model, "W8A8-KV8")
    fuse(to_integer(model))

    @torch.no_grad()
    def write(start: int) -> torch.Tensor:
        cache, found = model.new_cache(), []
        model((IDS[:1] + start) % 61, cache=cache)
        for step in range(20):
            found.append(model(torch.tensor([[(start + step) % 61]]), cache=cache).logits)
        return torch.cat(found, 1)

    expected, wrong = [write(start) for start in range(3)], []

    def work(start: int) -> None:
        for _ in range(8):
            if not torch.equal(write(start), expected[start]):
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_crop_reorder_and_long_texts():
    model = make()
    quantize(model, "W8A8-KV8-a:token")
    fuse(to_integer(model))
    with torch.no_grad():
        cache = model.new_cache()
        model(IDS[:2], cache=cache)
        after = model(IDS[:2, :1], cache=cache).logits
        cache.crop(5)
        assert torch.equal(model(IDS[:2, :1], cache=cache).logits, after)
        cache.crop(5)
        cache.reorder(torch.tensor([1, 0, 1]))
        turned = model(IDS[[1, 0, 1], :1], cache=cache).logits
        with pytest.raises(UserError, match="holds a batch of 3 and the input has 2"):
            model(IDS[:2, :1], cache=cache)
        torch.testing.assert_close(turned, after[[1, 0, 1]], rtol=1e-4, atol=1e-4)
    text = model.generate(IDS[:1], 50)  # the window slides, and so the cache starts anew
    unfuse(model)
    again = model.generate(IDS[:1], 50)
    assert text.shape == again.shape and (text == again).float().mean() > 0.2


def test_hooks_padding_gradients_and_training_go_the_usual_way():
    model = make()
    quantize(model, "W8A12-KV8")
    to_integer(model)
    expected = decode(model)
    fuse(model)
    fused = decode(model)
    seen = []
    handle = model.layers[1].mlp.act.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    assert torch.equal(decode(model), expected) or len(seen) == 5
    assert len(seen) == 5 and seen[-1] == (1, 1, 256)
    handle.remove()
    streams = []
    handle = model.layers[2].register_forward_hook(lambda m, a, out: streams.append(out))
    assert torch.equal(decode(model), fused) is False or len(streams) == 5
    handle.remove()
    assert torch.equal(decode(model), fused)
    with torch.no_grad():
        cache = model.new_cache()
        mask = torch.ones(2, 5)
        mask[0, :2] = 0
        model(IDS[:2], attention_mask=mask, cache=cache)
        mask = torch.cat((mask, torch.ones(2, 1)), 1)
        padded = model(IDS[:2, :1], attention_mask=mask, cache=cache).logits
    assert bool(torch.isfinite(padded).all())


def test_changed_norms_and_gains_are_noticed():
    model = make("learned")
    quantize(model, "W8A16")
    fuse(to_integer(model))
    decode(model)
    with torch.no_grad():
        model.layers[1].input_layernorm.weight.mul_(1.5)
        model.layers[2].mlp_connection.a.mul_(0.5)
    model.layers[0].post_attention_layernorm.weight = torch.nn.Parameter(torch.full((64,), 0.3))
    fused = decode(model)
    unfuse(model)
    assert distance(fused, decode(model)) < 2e-4


def test_norms_of_other_kinds():
    model = make(norm="layernorm")
    for block in model.blocks:  # C++ read the gain that is not there
        block.input_layernorm = torch.nn.LayerNorm(64, elementwise_affine=False)
    quantize(model, "W8A16")
    expected = decode(to_integer(model))
    assert distance(decode(fuse(model)), expected) < 2e-4
    restore(model)

    class Shifted(type(make().blocks[0].input_layernorm)):
        def forward(self, x):
            return super().forward(x) + 1

    model = make()
    model.blocks[1].input_layernorm.__class__ = Shifted
    quantize(model, "W8A16")
    with pytest.raises(UserError, match="layer 1: its norm is Shifted, which no step computes"):
        fuse(to_integer(model))


def test_it_is_undone_and_copied():
    model = make()
    reference = decode(model)
    quantize(model, "W8A8-KV8")
    to_integer(model)
    executed = decode(model)
    fuse(model)
    fused = decode(model)
    with pytest.raises(UserError, match="fused already"):
        fuse(model)
    twin = copy.deepcopy(model)
    assert torch.equal(decode(twin), fused)
    assert twin.layers[0]._skipless_fused.block is twin.layers[0]
    unfuse(model)
    assert type(model.layers[0]) is Block and type(model.lm_head) is torch.nn.Linear
    assert torch.equal(decode(model), executed)
    fuse(model)
    from_integer(model)
    assert type(model.layers[0]) is Block
    fuse(to_integer(model))
    restore(model)
    assert torch.equal(decode(model), reference) and type(model.lm_head) is torch.nn.Linear
    restore(twin)
    assert torch.equal(decode(twin), reference)


def test_nan_is_named():
    model = make()
    quantize(model, "W8A8-KV8")
    fuse(to_integer(model))
    decode(model)
    with torch.no_grad():
        cache = model.new_cache()
        model(IDS[:1], cache=cache)
        model.layers[1].post_attention_layernorm.weight[3] = torch.nan
        with pytest.raises(UserError, match=r"reached layers\.1\.mlp\.up_proj:input"):
            model(IDS[:1, :1], cache=cache)


def test_refusals(make_plain=torch.nn.Linear):
    model = make()
    with pytest.raises(UserError, match="quantize it"):
        fuse(model)
    plain = torch.nn.Sequential(make_plain(32, 32)).eval()
    with pytest.raises(UserError, match=r"Sequential is not skipless\.model\.Transformer"):
        fuse(to_integer(quantize(plain, "W8A8", include_head=True)))
    quantize(model, "W8A8")
    with pytest.raises(UserError, match="layer 0: a fused step needs"):
        fuse(model)
    restore(model)
    quantize(model, "W8A8", scope="block")
    to_integer(model)
    with pytest.raises(UserError, match="also rounds stream, sublayer_output"):
        fuse(model)
    restore(model)
    quantize(model, "W8A8-clip:gauss")
    to_integer(model)
    with pytest.raises(UserError, match="takes its range by gauss"):
        fuse(model)
    assert type(model.layers[0]) is Block
    scaled = make(temperature=TemperatureConfig(length_scaled=True))
    quantize(scaled, "W8A8")
    with pytest.raises(UserError, match="number of visible keys"):
        fuse(to_integer(scaled))


@torch.no_grad()
def test_the_head_refuses_another_width():
    """Its C++ call is told addresses, which do not know where memory ends."""
    model = fuse(to_integer(quantize(make(), "W8A8")))
    for width in (32, 128):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.lm_head(torch.zeros(1, 1, width))
