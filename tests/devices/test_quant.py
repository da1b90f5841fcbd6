"""Quantisation on an accelerator that is not there: values of the CPU, codes where they belong."""

import copy
import inspect
from functools import partial

import pretend_device
import pytest
import torch
from device_models import transformer
from pretend_device import pretend

from skipless.config import InitConfig
from skipless.decoding import fuse
from skipless.errors import UserError
from skipless.quant import (
    fake_quantize,
    from_integer,
    integer_codes,
    paused,
    quantization,
    quantize,
    restore,
    to_integer,
    train_quantized,
)
from skipless.quant.integers.engines import Problem
from skipless.quant.integers.hardware import fastest_kernel
from skipless.quant.saved import resume, saved_form

IDS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))


model = partial(transformer, "residual", tie_word_embeddings=False, init=InitConfig(std=0.1))


def logits(net, ids=IDS):
    with torch.no_grad():
        return net(ids).logits


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("clip", ["absmax", "mse", "p99.5", "gauss"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token", "g8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_fake_quantize(kind, clip, granularity, symmetric):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    settings = {"granularity": granularity, "symmetric": symmetric, "clip": clip}
    try:
        expected = fake_quantize(x, 4, **settings)
    except UserError:
        pytest.skip("no such combination")
    with pretend(kind) as device:
        y = x.to(kind).requires_grad_()
        found = fake_quantize(y, 4, **settings)
        assert found.device == device.device
        found.sum().backward()
        torch.testing.assert_close(found.detach().cpu(), expected)
        codes = integer_codes(x.to(kind), 4, **settings)
        assert codes.codes.device == device.device
        torch.testing.assert_close(codes.dequantize().reshape(x.shape).cpu(), expected)


SCHEMES = [
    ("cuda", "W8A8-KV8-a:token", "linear"), ("cuda", "W4A4", "block"), ("mps", "W4A8-KV4", "all"),
    ("cuda", "W4A8-static", "block"), ("mps", "W4A8-static", "block"),
    ("cuda", "W4A8-w:g16-asym", "linear"), ("cuda", "W4A8-w:channel-clip:p99.5", "all"),
    ("mps", "W4Afp-clip:gauss", "linear"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "scheme", "scope"), SCHEMES)
def test_schemes_in_every_scope(kind, scheme, scope):
    own = model()
    before = logits(own)
    twin = copy.deepcopy(own)
    calibration = [IDS] if "static" in scheme else None
    quantize(own, scheme, scope, calibration=calibration, include_head=True)
    with pretend(kind) as device:
        twin.to(kind)
        quantize(twin, scheme, scope, calibration=calibration, include_head=True)
        found = logits(twin, IDS.to(kind))
        assert found.device == device.device
        # the last digit of a norm may be another one, and then a value its other neighbour
        apart = (found.cpu() - logits(own)).abs() > 1e-3
        assert apart.float().mean() < 0.1
        tensors, settings = saved_form(twin)
        assert all(t.device.type == "cpu" for t in tensors.values())
        again = model().to(kind)
        again.load_state_dict(twin.state_dict(), strict=False)
        resume(again, tensors, settings)
        torch.testing.assert_close(logits(again, IDS.to(kind)).cpu(), found.cpu())
        restore(twin)
        torch.testing.assert_close(logits(twin, IDS.to(kind)).cpu(), before, rtol=1e-4, atol=1e-4)


METHODS = [
    ("cuda", "awq"), ("mps", "awq"), ("cuda", "rotation:learned,steps=1"),
    ("mps", "rotation:learned,steps=1"), ("cuda", "codebook"), ("mps", "codebook"),
    ("cuda", "stream+smooth+hadamard+outliers:10%+gptq:order"), ("mps", "smooth+hadamard+gptq"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_methods(kind, method):
    own = model()
    with pretend(kind):
        own.to(kind)
        before = logits(own, IDS.to(kind))
        quantize(own, "W4A8", "block", method=method, calibration=[IDS])
        after = logits(own, IDS.to(kind))
        assert bool(after.isfinite().all())
        with paused(own):
            exact = logits(own, IDS.to(kind))
        torch.testing.assert_close(exact, before, rtol=1e-3, atol=1e-3)
        restore(own)
        assert torch.equal(logits(own, IDS.to(kind)), before)


@pytest.mark.parametrize(
    "method", ["smooth", "stream+hadamard", "rotation:learned,steps=1", "outliers:10%"]
)
def test_a_model_that_moved_takes_nothing_along_with_every_pass(method, monkeypatch):
    own, uploads = model(), []
    relabel = pretend_device._relabel

    def watched(x, label):
        caller = next(f for f in inspect.stack() if "/skipless/" in f.filename)
        if label is not None and "/quant/" in caller.filename:
            uploads.append(caller.filename)
        return relabel(x, label)

    quantize(own, "W4A8", "block", method=method, calibration=[IDS])
    with pretend("cuda"):
        own.to("cuda")
        ids = IDS.to("cuda")
        first = logits(own, ids)
        monkeypatch.setattr(pretend_device, "_relabel", watched)
        assert torch.equal(logits(own, ids), first)
    assert not uploads


def test_learned_clips_stay_the_optimiser_s_when_the_model_moves():
    own = model().train()
    training = train_quantized(own, "W4A4 from=0", learned_clips=True, calibration=[IDS])
    before = training.state_dict()
    optimizer = torch.optim.SGD(training.clips, lr=0.1)
    with pretend("cuda"):
        own.to("cuda")
        for _ in range(2):
            optimizer.zero_grad()
            own(IDS.to("cuda"), labels=IDS.to("cuda")).loss.backward()
            optimizer.step()
    after = training.state_dict()
    assert all(float((after[name] - clip).abs().max()) > 0 for name, clip in before.items())
    clips = {id(clip) for clip in training.clips}
    assert all(id(site.clip) in clips for site in training.sites)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("engine", ["float", "int_mm"])
@pytest.mark.parametrize("scheme", ["W8A8-KV4", "W8A12-KV12-a:token"])
def test_integers(kind, engine, scheme):
    twin = model()
    with pretend(kind) as device:
        quantize(twin.to(kind), scheme)
        expected = logits(twin, IDS.to(kind))
        if kind == "mps" and engine == "int_mm":
            with pytest.raises(UserError, match="does not run on mps"):
                to_integer(twin, engine=engine)
            return
        to_integer(twin, engine=engine)
        found = logits(twin, IDS.to(kind))
        assert ((found - expected).abs() > 1e-3).float().mean() < 0.1  # as above
        text = twin.generate(IDS.to(kind), 3)
        assert text.tolist() == twin.generate(IDS.to(kind), 3, use_cache=False).tolist()
        assert device.ops["_int_mm"] or engine != "int_mm"
        from_integer(twin)


@pytest.mark.parametrize(("kind", "clips"), [("cuda", False), ("mps", True)])
def test_training(kind, clips):
    own = model()
    with pretend(kind) as device:
        own.to(kind).train()
        training = train_quantized(
            own, "W4A4 scope=block from=0.1 over=0.3", learned_clips=clips, calibration=[IDS]
        )
        optimizer = torch.optim.SGD([*own.parameters(), *training.clips], lr=0.1)
        for progress in (0.0, 0.9):
            training.at(progress)
            own(IDS.to(kind), labels=IDS.to(kind)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.device == device.device for p in training.clips)
        training.finish()
        assert bool(logits(own.eval(), IDS.to(kind)).isfinite().all())
        assert quantization(own) is not None


def test_a_kernel_that_takes_addresses_refuses_rows_elsewhere():
    kernel = fastest_kernel()
    if kernel is None:
        pytest.skip("no C++ compiler")
    problem = Problem(weight_bits=8, activation_bits=8, in_features=16, out_features=16)
    prepared = kernel.prepare(torch.ones(16, 16, dtype=torch.int16), torch.ones(16), problem)
    with pretend("cuda"):
        rows = torch.ones(2, 16, device="cuda")
        for call in (
            lambda: kernel.from_floats(prepared, rows, False, -1.0, None),
            lambda: kernel.quantize(rows, 8, False, -1.0),
            lambda: kernel.sums(prepared, rows.to(torch.int16)),
        ):
            with pytest.raises(UserError, match="reads memory of the CPU"):
                call()


def test_a_model_moved_after_fuse_is_computed_by_torch():
    """The fused step reads addresses; nothing of a moved model, or of its cache, reaches it."""
    if fastest_kernel() is None:
        pytest.skip("no C++ compiler")
    own = model()
    quantize(own, "W8A8-KV8")
    fuse(to_integer(own))
    text = own.generate(IDS, 4)
    with pretend("cuda"):
        own.to("cuda")
        try:
            found = own.generate(IDS.to("cuda"), 4)
        except UserError as error:
            assert "cuda" in str(error)
        else:
            assert found.tolist() == text.tolist()


@pytest.mark.parametrize("part", ["norm", "cache"])
def test_a_part_moved_after_fuse_is_refused(part):
    if fastest_kernel() is None:
        pytest.skip("no C++ compiler")
    own = model()
    quantize(own, "W8A8-KV8")
    fuse(to_integer(own))
    cache = own.new_cache()
    logits(own)
    with torch.no_grad(), pretend("cuda"):
        own(IDS, cache=cache)
        if part == "norm":
            own.layers[0].input_layernorm.to("cuda")
        else:
            for store in cache.stores.values():
                store.packed.to("cuda")
        with pytest.raises(UserError, match="reads memory of the CPU"):
            own(IDS[:, :1], cache=cache)


def test_a_model_moved_after_it_was_quantised():
    own = model()
    before = logits(own)
    quantize(own, "W4A8-static", "block", calibration=[IDS])
    expected = logits(own)
    with pretend("cuda"):
        own.to("cuda")
        torch.testing.assert_close(
            logits(own, IDS.to("cuda")).cpu(), expected, rtol=1e-3, atol=1e-2
        )
        with paused(own):
            exact = logits(own, IDS.to("cuda"))
        torch.testing.assert_close(exact.cpu(), before, rtol=1e-3, atol=1e-3)
        to_integer(own)
        assert logits(own, IDS.to("cuda")).isfinite().all()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_convolutions(kind):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, bias=True), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, stride=2, groups=2), torch.nn.Flatten(), torch.nn.Linear(72, 5),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(net)
    quantize(net, "W8A8", include_convolutions=True)
    with torch.no_grad(), pretend(kind):
        quantize(twin.to(kind), "W8A8", include_convolutions=True)
        found = twin(x.to(kind))
        torch.testing.assert_close(found.cpu(), net(x), rtol=1e-3, atol=2e-2)
        to_integer(twin)
        torch.testing.assert_close(twin(x.to(kind)), found, rtol=1e-3, atol=2e-2)
