"""Looking inside on an accelerator that is not there: statistics, diagnosis, comparison, doctor."""

import math

import pytest
import torch
from device_models import transformer
from pretend_device import pretend
from torch import nn

from skipless import diagnose
from skipless.doctor import check_model, timing
from skipless.probes import Probe, gradient_norms, isometry_drift

IDS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))


def numbers(value):
    """Every number of nested tables, in order."""
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, (list, tuple)):
        return [n for item in value for n in numbers(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def same(found, expected):
    found, expected = numbers(found), numbers(expected)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-3) or (math.isnan(a) and math.isnan(b))


def looked(net, ids):
    with Probe(net) as probe, torch.no_grad():
        net(ids)
        net(ids.flip(0, 1))
    return probe.table(), probe.geometry(), probe.attention()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_statistics(kind):
    net = transformer()
    expected = looked(net, IDS)
    net(IDS, labels=IDS).loss.backward()
    drift, norms = isometry_drift(net), gradient_norms(net)
    with pretend(kind):
        net.to(kind)
        net.zero_grad()
        same(looked(net, IDS.to(kind)), expected)
        net(IDS.to(kind), labels=IDS.to(kind)).loss.backward()
        same(isometry_drift(net), drift)
        same(gradient_norms(net), norms)


def test_a_probe_of_a_foreign_model():
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with pretend("cuda"):
        net.to("cuda")
        with Probe(net) as probe:
            net(torch.randn(3, 5, 8, device="cuda"))
        assert probe.table()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_diagnosis(kind):
    options = {"gradients": True, "layers": kind == "cuda"}
    net = transformer(num_hidden_layers=1)
    expected = diagnose(net, [IDS], ["W4A4"], **options)
    with pretend(kind):
        net.to(kind)
        found = diagnose(net, [IDS.to(kind)], ["W4A4"], **options)
        assert [row["site"] for row in found.sites] == [row["site"] for row in expected.sites]
        for a, b in zip(found.sites, expected.sites, strict=True):
            same({k: v for k, v in a.items() if k in ("std", "kurtosis", "max_abs")}, {
                k: v for k, v in b.items() if k in ("std", "kurtosis", "max_abs")})  # fmt: skip
        assert len(found.layers) == len(expected.layers) and found.gradients
        assert found.missing == expected.missing


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_two_models_compared(kind):
    with pretend(kind):
        a, b = transformer().to(kind), transformer("residual").to(kind)
        assert diagnose.compare(a, b, [IDS.to(kind)]) is not None


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_doctor(kind, monkeypatch):
    monkeypatch.setattr(timing, "time_by_operator", lambda *_: ())  # the profiler looks for CUPTI
    batch = {"input_ids": IDS, "labels": IDS}
    net = transformer()
    expected = check_model(net, batch)
    with pretend(kind):
        net.to(kind)
        found = check_model(
            net, {k: v.to(kind) for k, v in batch.items()}, against=transformer().to(kind)
        )
        assert set(expected.findings) <= set(found.findings)


def test_a_log_of_a_training_loop_of_ones_own(tmp_path):
    from skipless.probes.callbacks import ProbeLog

    with pretend("cuda"):
        net = transformer().to("cuda").train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        log = ProbeLog(net, tmp_path / "log", every=1)
        for step in (1, 2):
            with log.step(step) as row:
                loss = net(IDS.to("cuda"), labels=IDS.to("cuda")).loss
                loss.backward()
                row["loss"] = loss
            optimizer.step()
            optimizer.zero_grad()
        log.close()
    assert (tmp_path / "log" / "probes.jsonl").read_text().count("\n") == 2
