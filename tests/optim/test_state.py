"""State: bit-exact resume, names, dtypes, odd gradients, late parameters, the torch protocol."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipless.errors import UserError
from skipless.optim import KLSOAP, SOAP, AdamW, KLShampoo, Muon, Shampoo

ALL = {
    "adamw": AdamW, "muon": Muon, "soap": SOAP, "kl_soap": KLSOAP, "shampoo": Shampoo,
    "kl_shampoo": KLShampoo,
    "kl_reference": lambda p, **k: KLShampoo(p, reference=True, **k),
    "kl_newton": lambda p, **k: KLShampoo(p, root="newton", **k),
    "kl_jacobi": lambda p, **k: KLShampoo(p, root="jacobi", **k),
    "soap_jacobi_packed": lambda p, **k: SOAP(p, root="jacobi", packed=True, **k),
    "kl_packed": lambda p, **k: KLShampoo(p, packed=True, **k),
    "soap_packed": lambda p, **k: SOAP(p, packed=True, **k),
    "kl_bf16_momentum": lambda p, **k: KLShampoo(p, momentum_dtype=torch.bfloat16, **k),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 7)

    def forward(self, x):
        h = self.embed(x)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def loss_of(model, step):
    g = torch.Generator().manual_seed(step)
    x = torch.randint(0, 7, (16,), generator=g)
    return F.cross_entropy(model(x).float(), (x * 3 + 1) % 7)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("root", ["qr", "jacobi"])
@pytest.mark.parametrize("cls", [KLShampoo, KLSOAP, SOAP, Shampoo])
def test_packed_triangles_change_the_state_and_nothing_else(cls, root):
    whole, packed = net(), net()
    one = cls(whole, lr=1e-2, root=root)
    other = cls(packed, lr=1e-2, packed=True, root=root)
    train(whole, one, range(23))
    train(packed, other, range(23))
    assert same(whole, packed)
    left = other.state[packed.up.weight]["left"]
    assert left.shape == (1, 55) and "packed eigenbasis" in other.describe()
    saved = 4 * 2 * (45 + 15)  # of each of two matrices, the upper triangles of 10 x 10 and 6 x 6
    assert one.state_bytes() - other.state_bytes() == saved
    assert one.metrics() == other.metrics()


def test_packed_triangles_are_of_eigenbases():
    for options, said in (
        ({"root": "eigh"}, "packed=True needs eigenbases"),
        ({"root": "newton"}, "packed=True needs eigenbases"),
        ({"reference": True}, "where packed has no effect"),
    ):
        with pytest.raises(UserError, match=said):
            KLShampoo(net(), packed=True, **options)
    model = net()
    loss_of(model, 0).backward()
    first = KLShampoo(model, lr=1e-2)
    first.step()
    other = KLShampoo(model, lr=1e-2, packed=True)
    with pytest.raises(UserError, match="packed"):
        other.load_state_dict(first.state_dict())
    assert not other.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(ALL))
def test_resume_is_bit_exact(name, dtype):
    """Saved in the middle of the refresh cycle, loaded with weights_only, continued."""
    straight = net(dtype)
    optimizer = ALL[name](straight, lr=1e-2)
    train(straight, optimizer, range(13))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    resumed = copy.deepcopy(straight)
    train(straight, optimizer, range(13, 27))
    buffer.seek(0)
    again = ALL[name](resumed, lr=1e-2)
    again.load_state_dict(torch.load(buffer, weights_only=True, map_location="cpu"))
    for p in resumed.parameters():
        for what, value in again.state[p].items():
            narrow = name == "kl_bf16_momentum" and what == "momentum" and value.ndim == 3
            assert value.dtype == (torch.bfloat16 if narrow else torch.float32), what
    train(resumed, again, range(13, 27))
    assert same(straight, resumed)


def test_measuring_does_not_change_the_run():
    plain, measured = net(), net()
    for model, collect in ((plain, False), (measured, True)):
        optimizer = KLShampoo(model, lr=1e-2)
        optimizer.collect_metrics = collect
        train(model, optimizer, range(12))
    assert same(plain, measured)
    numbers = optimizer.metrics()
    for what in ("update_rms", "isometry_drift", "left_condition", "preconditioner_age"):
        assert numbers[f"{what}/up.weight"] > 0
    assert numbers["skipped_gradients"] == 0


def test_state_is_found_by_name_whatever_the_order():
    model = net()
    named = list(model.named_parameters())
    optimizer = KLShampoo(named, lr=1e-2)
    train(model, optimizer, range(5))
    other = KLShampoo(named[::-1], lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    for _, p in named:
        assert set(other.state[p]) == set(optimizer.state[p])
        for what, value in optimizer.state[p].items():
            assert torch.equal(other.state[p][what], value)


def test_foreign_state_is_refused():
    model = net()
    optimizer = KLShampoo(model, lr=1e-2)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    with pytest.raises(UserError, match="no parameter 'weight'"):
        KLShampoo(nn.Linear(6, 6, bias=False), lr=1e-2).load_state_dict(saved)
    for options, word in (({"root": "newton"}, "root"), ({"block_size": 3}, "block_size")):
        other = KLShampoo(model, lr=1e-2, **options)
        with pytest.raises(UserError, match=word):
            other.load_state_dict(saved)
        assert not other.state


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", list(ALL))
def test_non_finite_gradient_is_left_out_and_counted(name, bad):
    model = net()
    optimizer = ALL[name](model, lr=1e-2)
    train(model, optimizer, range(3))
    before = model.up.weight.detach().clone()
    saved = {k: v.clone() for k, v in optimizer.state[model.up.weight].items()}
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    model.up.weight.grad[0, 0] = bad
    down = model.down.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.up.weight)
    assert all(torch.equal(v, optimizer.state[model.up.weight][k]) for k, v in saved.items())
    assert not torch.equal(down, model.down.weight)
    assert optimizer.skipped == {"up.weight": 1}
    assert optimizer.metrics()["skipped_gradients"] == 1.0


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("kind", ["zero", "zero_first", "rank_one", "row", "column", "one"])
def test_odd_gradients_stay_finite(name, kind):
    shape = {"row": (1, 9), "column": (9, 1), "one": (1, 1)}.get(kind, (6, 9))
    p = nn.Parameter(torch.ones(shape))
    optimizer = ALL[name]([("w", p)], lr=1e-2)
    g = torch.Generator().manual_seed(0)
    for t in range(25):
        if kind == "zero" or (kind == "zero_first" and t < 3):
            p.grad = torch.zeros(shape)
        elif kind == "rank_one":
            p.grad = torch.outer(torch.arange(1.0, 7), torch.ones(9))
        else:
            p.grad = torch.randn(shape, generator=g)
        optimizer.step()
    assert p.isfinite().all()
    moved = (p - 1).abs().max()
    assert moved < 2.0
    assert moved > 5e-4


def test_late_groups_frozen_and_unfrozen_parameters():
    model = net()
    model.down.weight.requires_grad_(False)
    optimizer = KLShampoo(model, lr=1e-2)
    frozen = model.down.weight.detach().clone()
    train(model, optimizer, range(4))
    assert torch.equal(frozen, model.down.weight)
    model.down.weight.requires_grad_(True)
    late = nn.Linear(6, 6)
    optimizer.add_param_group({"params": list(late.named_parameters()), "lr": 5e-3})
    assert {g["role"] for g in optimizer.param_groups[-2:]} == {"matrix", "vector"}
    assert all(g["base_lr"] == 5e-3 for g in optimizer.param_groups[-2:])
    start = late.weight.detach().clone()
    late(torch.ones(2, 6)).sum().backward()
    train(model, optimizer, range(4, 8))
    late.weight.grad = torch.randn(6, 6)
    optimizer.step()
    assert not torch.equal(frozen, model.down.weight) and not torch.equal(start, late.weight)


def test_groups_closures_schedulers_and_grad_scaler():
    model = net()
    optimizer = KLShampoo(
        [
            {"params": [model.up.weight, model.down.weight], "lr": 2e-2, "weight_decay": 0.0},
            {"params": [model.embed.weight], "role": "embedding"},
            {"params": [*model.norm.parameters(), *model.head.parameters(), model.up.bias]},
        ],
        lr=1e-2,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=10)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(30):
        last = optimizer.step(closure)
        scheduler.step()
    assert last < first and optimizer.param_groups[0]["lr"] == pytest.approx(2e-2)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = model.up.weight.detach().clone()
    for poison in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        if poison:
            model.up.weight.grad[0, 0] = float("inf")
            before = model.up.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.up.weight) == poison
    assert scaler.get_scale() == 2.0**9 and optimizer.skipped == {}


def test_wrong_input_is_one_sentence():
    with pytest.raises(UserError, match="empty"):
        KLShampoo([])
    with pytest.raises(UserError, match="one tensor"):
        KLShampoo(torch.zeros(2, 2))
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Muon(embedding)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="sparse=False"):
        optimizer.step()


def test_a_group_that_says_everything_is_known_by_its_names():
    optimizer, names = Muon(net(), lr=1e-2), ("late.one", "late.two")
    for name in names:
        p = nn.Parameter(torch.zeros(3, 4))
        optimizer.add_param_group({"params": [(name, p)], "role": "matrix", "algorithm": "muon"})
    assert all(name in optimizer.describe() for name in names)


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("reference", [False, True])
def test_convolution_is_out_by_the_rest(conv, reference):
    kernel = conv(2, 4, 3, bias=False)
    flat = nn.Parameter(kernel.weight.detach().flatten(1).clone())
    one, two = (KLShampoo(p, lr=1e-2, reference=reference) for p in (kernel, [flat]))
    one.collect_metrics = two.collect_metrics = True
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        kernel.weight.grad = torch.randn(kernel.weight.shape, generator=g)
        flat.grad = kernel.weight.grad.flatten(1)
        one.step()
        two.step()
    assert torch.allclose(kernel.weight.flatten(1), flat, atol=1e-6)
    drifts = [next(v for k, v in o.metrics().items() if "drift" in k) for o in (one, two)]
    assert drifts[0] == pytest.approx(drifts[1], rel=1e-3) and drifts[0] > 0
    assert one.state_bytes() == two.state_bytes()
    size = f"4 x {flat.shape[1]}"
    assert all(size in optimizer.describe() for optimizer in (one, two))


def test_the_published_steps_take_a_stack_as_one_tall_matrix():
    stack, tall = nn.Parameter(torch.zeros(3, 4, 5)), nn.Parameter(torch.zeros(12, 5))
    named = {"experts": stack, "tall": tall}
    optimizer = KLShampoo(named.items(), lr=1e-2, reference=True)
    for seed in range(12):
        tall.grad = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))
        stack.grad = tall.grad.view(3, 4, 5)
        optimizer.step()
    assert torch.equal(stack.view(12, 5), tall) and tall.abs().max() > 0
    assert optimizer.describe().count("whole, 12 x 5") == 2
    with pytest.raises(UserError, match="leave one of them out"):
        KLShampoo(named.items(), reference=True, split={"tall": 3})


@pytest.mark.parametrize("name", ALL)
def test_a_model_in_float64_keeps_its_digits(name):
    model = net(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-10)  # digits that float32 has not
    before = copy.deepcopy(model)
    train(model, ALL[name](model, lr=1e-25, weight_decay=0.0), range(3))
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-20)


def test_state_is_five_matrices_at_the_benchmark_shapes():
    shapes = [(768, 256), (256, 256), (1024, 256), (256, 1024)]
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    optimizer = KLShampoo(params, lr=0.0)
    for p in params:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert optimizer.state_bytes() <= 5.1 * sum(p.numel() * 4 for p in params)


def test_torch_distributed_checkpoint_state_dicts():
    """get/set_optimizer_state_dict key by parameter name and fill a fresh optimiser."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    straight = net()
    optimizer = KLShampoo(straight, lr=1e-2)
    train(straight, optimizer, range(7))
    saved = copy.deepcopy(get_optimizer_state_dict(straight, optimizer))
    assert saved["state"]["up.weight"]["left"].dtype == torch.float32
    resumed = copy.deepcopy(straight)
    again = KLShampoo(resumed, lr=1e-2)
    set_optimizer_state_dict(resumed, again, saved)
    train(straight, optimizer, range(7, 15))
    train(resumed, again, range(7, 15))
    assert same(straight, resumed)
