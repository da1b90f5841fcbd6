"""The decoder on an accelerator that is not there: every part, against the same on the CPU."""

import copy
from functools import partial

import pytest
import torch
from device_models import transformer
from pretend_device import pretend

from skipless.config import (
    ConnectionConfig,
    InitConfig,
    TemperatureConfig,
    UniversalConfig,
)
from skipless.errors import UserError
from skipless.model import KeyValueCache, Transformer
from skipless.model.context import ForwardContext
from skipless.model.token_statistics import Tokens, prefix_moments

KINDS = ("residual", "none", "rezero", "layerscale", "interpolate", "anneal", "learned", "gated",
         "sphere", "universal")  # fmt: skip
JOINS = {kind: ConnectionConfig(kind=kind) for kind in KINDS}
JOINS["fixed"] = ConnectionConfig(kind="fixed", a=0.5, b=2.0, c=0.3)
CAUSAL = ("mean", "diagonal", "cholesky", "bures")
IDS = torch.randint(0, 40, (2, 22), generator=torch.Generator().manual_seed(0))


small = partial(
    transformer, "residual", hidden_size=16, num_attention_heads=2, vocab_size=40,
    max_position_embeddings=64, init=InitConfig(std=0.3),
)  # fmt: skip


def universal(aligner: str, rank=4, **settings) -> Transformer:
    """Chunks of 4, and a value for every zero start."""
    chosen = UniversalConfig(
        aligner=aligner,
        chunk_size=4,
        winsor_window=5,
        rank=rank,
        winsor=1.5,
        gate_feature="entropy",
    )
    model = small(connection=ConnectionConfig(kind="universal", universal=chosen), **settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("encoder.up", "gate_weight", "gate_bias", "rho")):
                p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return model.eval()


def same_on(kind: str, model: Transformer, tokens, **arguments):
    """Loss, logits and gradients on the device are the CPU's to rounding."""
    twin = copy.deepcopy(model)
    expected = model(tokens, **arguments)
    expected.loss.backward()
    with pretend(kind) as device:
        twin.to(kind)
        moved = {k: v.to(kind) for k, v in arguments.items()}
        found = twin(tokens.to(kind), **moved)
        found.loss.backward()
        assert found.logits.device == device.device
        torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=2e-4, atol=2e-4)
        for name, p in twin.named_parameters():
            own = model.get_parameter(name).grad
            assert (p.grad is None) == (own is None), name
            if own is not None:
                assert p.grad.device == device.device, name
                torch.testing.assert_close(p.grad.cpu(), own, rtol=5e-3, atol=5e-4)
    return device


@pytest.mark.parametrize(("kind", "join"), [("cuda", join) for join in JOINS] + [
    ("mps", "sphere"), ("mps", "gated"), ("mps", "universal"),
])  # fmt: skip
def test_connections(kind, join):
    tokens = IDS
    same_on(kind, small(connection=JOINS[join]), tokens, labels=tokens)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("aligner", [*CAUSAL, "none", "sinkhorn"])
def test_universal_interpolation(kind, aligner):
    tokens, mask = IDS, torch.ones(2, 22, dtype=torch.long)
    mask[0, :3] = 0
    model = universal(aligner, causal=aligner != "sinkhorn")
    same_on(kind, model, tokens, labels=tokens, attention_mask=mask)


OPTIONS = {
    "learned positions, LayerNorm, SwiGLU": dict(
        position="learned", norm="layernorm", hidden_act="swiglu", num_key_value_heads=1,
    ),
    "eager, no positions, post-norm": dict(
        position="none", norm_placement="post", attention_implementation="eager",
    ),
    "identity bias": dict(init=InitConfig(std=0.3, identity_bias=1.0)),
    "temperature": dict(
        temperature=TemperatureConfig(kind="learned_head", beta=1.1, length_scaled=True),
    ),
    "encoder": dict(causal=False),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "option"), [("cuda", option) for option in OPTIONS] + [
    ("mps", "identity bias"), ("mps", "temperature"),
])  # fmt: skip
def test_options(kind, option):
    tokens, mask = IDS, torch.ones(2, 22, dtype=torch.long)
    mask[1, :4] = 0
    same_on(kind, small(**OPTIONS[option]), tokens, labels=tokens, attention_mask=mask)


def test_classification_head():
    labels = torch.tensor([1, 2])
    same_on("cuda", small(num_labels=3, causal=False), IDS, labels=labels)


@pytest.mark.parametrize(("kind", "aligner"), [
    ("cuda", "mean"), ("cuda", "cholesky"), ("mps", "diagonal"), ("mps", "bures"),
])  # fmt: skip
def test_caches_and_generation(kind, aligner):
    model = universal(aligner)
    expected = model.generate(IDS, 6)
    drawn = model.generate(IDS, 6, temperature=1.0, top_k=5, seed=3)
    with torch.no_grad(), pretend(kind) as device:
        model.to(kind)
        found = model.generate(IDS.to(kind), 6)
        assert found.device == device.device and found.tolist() == expected.tolist()
        again = model.generate(IDS.to(kind), 6, temperature=1.0, top_k=5, seed=3)
        assert again.tolist() == drawn.tolist()  # drawn on the CPU, so the same everywhere
        cache = KeyValueCache()
        model(IDS.to(kind), cache=cache)
        cache.reorder(torch.tensor([1, 0], device=kind))
        model(IDS[:, :1].to(kind), cache=cache)


def test_greedy_generation_waits_for_the_device_at_its_ends():
    model = universal("diagonal")
    with torch.no_grad(), pretend("cuda") as device:
        model.to("cuda")
        found = set()
        for number in (2, 6):
            device.waits.clear()
            model.generate(IDS.to("cuda"), number)
            found.add(device.waits.total())
        assert found == {3}  # the least and largest id before, the logits after
        model.norm.weight.fill_(torch.nan)
        with pytest.raises(UserError, match="not finite"):
            model.generate(IDS.to("cuda"), 2)


def test_autocast():
    with pretend("cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
        for aligner in ("diagonal", "bures"):
            model = universal(aligner).train().to("cuda")
            loss = model(IDS.to("cuda"), labels=IDS.to("cuda")).loss
            loss.backward()
            assert loss.dtype == torch.float32


def test_initialisers_on_a_device_give_the_numbers_of_the_cpu():
    from skipless.model import initialize

    for init in (
        InitConfig(value_output="haar", query_key="haar", mlp="suo", identity_bias=1.0),
        InitConfig(value_output="cs", query_key="cs"), InitConfig(query_key="unit"),
    ):  # fmt: skip
        join = ConnectionConfig(kind="universal", universal=UniversalConfig())
        expected = small(init=init, connection=join)
        with pretend("cuda"):
            model = copy.deepcopy(expected).to_empty(device="cuda")
            initialize(model, 0)
            for name, p in model.named_parameters():
                assert torch.equal(p.cpu(), expected.get_parameter(name)), name


def test_gradients_of_prefix_moments_in_float32():
    """A device without float64: one token has no variance, and 1 / EPS asks for its derivative."""
    config, context = UniversalConfig(), ForwardContext(is_causal=True)
    generator = torch.Generator().manual_seed(1)
    x, r = torch.randn(2, 2, 12, 3, generator=generator)
    x[..., 0] += 30
    found = []
    for dtype, wide in ((torch.float64, torch.float64), (torch.float32, torch.float32)):
        z = x.to(dtype).requires_grad_()
        tokens = Tokens.of(config, context, 12, z.device, 0)
        _, variance = prefix_moments(tokens, z * tokens.new[..., None], "x", wide)
        (r.to(dtype) * (variance + 1e-8).sqrt()).sum().backward()
        found.append(z.grad.double())
    assert (found[1] - found[0]).norm() < 1e-3 * found[0].norm()


FUSED = "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("what", ["identity bias", "universal"])
def test_fused_kernels_of_half_precision(monkeypatch, what, has_kernel):
    """On cards that have them; others (before Ampere) compute the same by torch's own choice."""
    cuda = torch.backends.cuda
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: True)  # so it was built
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda params: has_kernel)
    model = (universal("mean", rank=8) if what == "universal"
             else small(init=InitConfig(std=0.3, identity_bias=1.0)))  # fmt: skip
    twin = copy.deepcopy(model)
    expected = model(IDS, labels=IDS)
    expected.loss.backward()
    with pretend("cuda") as device:
        twin.to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = twin(IDS.to("cuda"), labels=IDS.to("cuda"))
        found.loss.backward()
        assert bool(device.ops[FUSED]) == bool(device.ops[f"{FUSED}_backward"]) == has_kernel
        assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=0.1)
        for name, p in twin.named_parameters():
            own = model.get_parameter(name).grad
            if own is not None and own.ndim > 1:
                assert (p.grad.cpu() - own).norm() < 0.15 * own.norm() + 1e-3, name


def test_the_kernels_take_what_they_are_given():
    """Called by position: torch's order of arguments and results."""
    forward = getattr(torch.ops.aten, FUSED).default._schema
    backward = getattr(torch.ops.aten, f"{FUSED}_backward").default._schema
    given = [a.name for a in forward.arguments[:6]]
    assert given == ["query", "key", "value", "dropout_p", "is_causal", "return_debug_mask"]
    between = [a.name for a in forward.returns[:6]]
    assert between == ["output", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert [a.name for a in backward.arguments[1:10]] == given[:3] + ["out", *between[1:]]
    assert [a.name for a in backward.arguments[10:12]] == given[3:5]


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_warm_up_of_interpolators(kind):
    from skipless.model.warmup import record_pairs, warm_up

    with pretend(kind):
        model = universal("mean").to(kind)
        fits = warm_up(model, record_pairs(model, [IDS.to(kind)]), steps=2)
        assert len(fits) == 4 and all(fit.after >= 0 for fit in fits.values())
