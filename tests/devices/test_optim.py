"""Every optimiser's steps on an accelerator that is not there: its weights are the CPU's."""

import copy
import math

import pytest
import torch
from pretend_device import pretend
from torch import nn

from skipless.optim import KLSOAP, SOAP, AdamW, KLShampoo, Muon, Shampoo
from skipless.optim.roots import full_precision

SETTINGS = {
    "AdamW": (AdamW, {}),
    "Muon": (Muon, {"dtype": torch.float32}),
    "KL-Shampoo": (KLShampoo, {"root": "qr"}),
    "KL-Shampoo eigh": (KLShampoo, {"root": "eigh"}),
    "KL-Shampoo newton": (KLShampoo, {"root": "newton"}),
    "KL-Shampoo qr": (KLShampoo, {"root": "qr", "packed": True, "update_rms": 0.2}),
    "KL-Shampoo jacobi": (KLShampoo, {"root": "jacobi", "momentum_dtype": torch.bfloat16}),
    "KL-Shampoo one side": (KLShampoo, {"root": "qr", "one_sided": True}),
    "KL-Shampoo low rank": (
        KLShampoo,
        {"root": "qr", "max_side": 4, "wide": "low_rank", "rank": 2},
    ),
    "KL-Shampoo diagonal": (KLShampoo, {"root": "qr", "max_side": 4}),
    "KL-Shampoo reference": (KLShampoo, {"reference": True}),
    "KL-SOAP": (KLSOAP, {"root": "qr"}),
    "SOAP": (SOAP, {"root": "eigh"}),
    "SOAP jacobi": (SOAP, {"root": "jacobi"}),
    "Shampoo": (Shampoo, {"root": "qr"}),
}
"""Roots are named where "auto" would take another one on CUDA."""


def build(name, net):
    cls, settings = SETTINGS[name]
    if issubclass(cls, (KLShampoo, KLSOAP, SOAP, Shampoo)):
        settings = {"refresh_every": 2, **settings}
        if "reference" not in settings:
            settings["block_size"] = 8
    return cls(net, lr=1e-2, **settings)


class Net(nn.Module):
    """Two hidden matrices, a kernel, gains and an embedding: every role."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 16)])
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 12)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.layers[1](self.layers[0](x).relu())
        x = x + self.conv(x.mT).mT
        return self.head(self.norm(x))


def step(net, optimizer, ids):
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def ids():
    return torch.randint(0, 12, (4, 9), generator=torch.Generator().manual_seed(0))


FACTORS = ("AdamW", "Muon", "KL-Shampoo", "KL-Shampoo eigh", "KL-Shampoo low rank",
           "KL-Shampoo reference", "SOAP")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [("cuda", name) for name in SETTINGS] + [("mps", name) for name in FACTORS]
)
def test_steps(kind, name):
    torch.manual_seed(0)
    net = Net()
    twin, optimizer = copy.deepcopy(net), build(name, net)
    for _ in range(4):
        step(net, optimizer, ids())
    with pretend(kind) as device:
        found = build(name, twin.to(kind))
        for _ in range(4):
            step(twin, found, ids().to(kind))
        for key, p in twin.named_parameters():
            assert p.device == device.device
            torch.testing.assert_close(p.cpu(), net.get_parameter(key), rtol=1e-3, atol=1e-4)
        assert found.describe()
        found.collect_metrics = True
        step(twin, found, ids().to(kind))
        assert all(math.isfinite(v) for v in found.metrics().values() if isinstance(v, float))
        # what a file gives back lies on the CPU
        kept = found.state_dict()
        kept["state"] = {
            k: {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in row.items()}
            for k, row in kept["state"].items()
        }
        again = build(name, twin)
        again.load_state_dict(kept)
        step(twin, again, ids().to(kind))


@pytest.mark.parametrize("cls", [KLShampoo, SOAP])
def test_what_auto_takes(cls):
    with pretend("cuda") as device:
        net = Net().to("cuda")
        optimizer = cls(net, lr=1e-2, block_size=8, refresh_every=2)
        for _ in range(3):
            step(net, optimizer, ids().to("cuda"))
        assert not {"_linalg_eigh", "linalg_qr", "geqrf"} & device.ops.keys()


@pytest.mark.parametrize("way", ["fp32_precision", "allow_tf32", "set"])
def test_products_of_factors_are_no_tf32(way):
    matmul = torch.backends.cuda.matmul
    with pretend("cuda"):
        net = Net().to("cuda")
        optimizer = build("KL-Shampoo jacobi", net)
        try:
            if way == "set":
                torch.set_float32_matmul_precision("high")
            else:
                setattr(matmul, way, "tf32" if way == "fp32_precision" else True)
            with full_precision():
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "tf32"
            step(net, optimizer, ids().to("cuda"))
        finally:
            matmul.fp32_precision = "none"
            torch.set_float32_matmul_precision("highest")
            matmul.fp32_precision = "none"


@pytest.mark.parametrize("name", ["AdamW", "Muon", "KL-Shampoo jacobi", "SOAP jacobi"])
def test_a_step_waits_for_the_device_once(name):
    with pretend("cuda") as device:
        net = Net().to("cuda")
        optimizer = build(name, net)
        step(net, optimizer, ids().to("cuda"))
        device.waits.clear()
        for _ in range(4):
            step(net, optimizer, ids().to("cuda"))
        assert device.waits.total() == 4, device.waits
