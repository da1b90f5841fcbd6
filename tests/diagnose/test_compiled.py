"""Models that were compiled before are looked at like others: compiled code looks for no hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from skipless.diagnose import compare, diagnose
from skipless.doctor import check_model

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def compiled(how: str) -> nn.Module:
    model = make()
    if how == "whole":
        model = torch.compile(model, backend="eager")
    else:
        for layer in model:
            layer.compile(backend="eager")
    with torch.no_grad():
        model(BATCH)
    return model


@pytest.mark.parametrize("how", ["whole", "parts"])
def test_the_numbers_are_those_of_the_model(how):
    def sites(model):
        return {row["site"]: row["kurtosis"] for row in diagnose(model, [BATCH]).sites}

    model = compiled(how)
    assert sites(model) == sites(make())
    difference = compare(model, make(), [BATCH])
    assert difference.sites and difference.outputs["distance"] == 0
    found = check_model(model, BATCH, loss=lambda y: y.square().mean())
    assert found.healthy == check_model(make(), BATCH, loss=lambda y: y.square().mean()).healthy
