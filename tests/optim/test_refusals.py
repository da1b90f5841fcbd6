"""What an optimiser refuses, in one sentence that names it, and edge shapes that it accepts."""

import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.optim import KLSOAP, SOAP, AdamW, KLShampoo, Muon, Shampoo
from skipless.optim.describe import isometry_drift

METHODS = (AdamW, Muon, KLShampoo, KLSOAP, SOAP, Shampoo)


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -1), ("lr", math.nan), ("lr", "fast"), ("weight_decay", -1), ("adamw_lr", -1),
        ("adamw_lr", math.nan), ("gain_lr", -1), ("gain_weight_decay", -3), ("adamw_eps", -1),
        ("adamw_betas", (0.9, 2)), ("adamw_betas", 0.9), ("block_size", 0), ("block_size", 2.5),
        ("split", {"weight": 0}), ("spectral_roles", ("matrices",)),
    ],
)  # fmt: skip
def test_settings_out_of_range(method, setting, value):
    refused(lambda: method(nn.Linear(4, 4), **{setting: value}), setting)


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        (AdamW, "betas", (0.9, math.nan)), (AdamW, "eps", -1), (AdamW, "lr", None),
        (Muon, "lr", None), (Muon, "momentum", 2), (Muon, "momentum", math.nan),
        (Muon, "steps", 0), (Muon, "steps", 2.5), (KLShampoo, "refresh_every", 0),
        (KLShampoo, "update_rms", 0), (KLShampoo, "update_rms", math.nan), (SOAP, "rank", 0),
        (SOAP, "max_side", 0), (SOAP, "momentum_dtype", torch.int8),
    ],
)  # fmt: skip
def test_a_methods_own_settings_out_of_range(method, setting, value):
    refused(lambda: method(nn.Linear(4, 4), **{setting: value}), setting)


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_setting_names_the_method_and_near_names(method):
    refused(lambda: method(nn.Linear(4, 4), weigth_decay=0.1), method.__name__, "'weight_decay'")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_train_is_an_error(method):
    refused(lambda: method(nn.ReLU()), method.__name__, "no parameter")
    refused(lambda: method([{"params": []}]), "no parameter")


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_cannot_be_trained(method):
    w = nn.Parameter(torch.ones(4, 4))
    refused(lambda: method([w, w]), "given twice")
    refused(lambda: method([{"params": [w]}, {"params": [("again", w)]}]), "given twice")
    refused(lambda: method([w, 3]), "int, not a tensor")
    refused(lambda: method([torch.ones(4, 4, dtype=torch.int64)]), "torch.int64")
    complex_ = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    refused(lambda: method([complex_]), "complex64", "view_as_real")
    module = nn.Module()
    module.w = complex_
    refused(lambda: method(module), "parameter w is torch.complex64")
    refused(lambda: method([w * 2]), "computed from others")
    optimizer = method([("w", w)])
    refused(lambda: optimizer.add_param_group({"params": [w]}), "given twice (also as w)")


def test_frozen_integers_of_a_quantised_model_are_left_alone():
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    model(torch.ones(1, 4)).sum().backward()
    KLShampoo(model).step()
    assert (model.codes == 1).all()


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"betas": (0.9, 2.0)}, {"role": "matrices"}])
def test_groups_are_checked_like_settings(option):
    w = nn.Parameter(torch.ones(4, 4))
    refused(lambda: Muon([{"params": [w], **option}]), "of a parameter group")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 0), (0, 8)])
def test_layers_without_entries_are_passed_over(method, shape):
    model = nn.Sequential(nn.Linear(4, 4))
    model.empty = nn.Parameter(torch.zeros(shape))
    optimizer = method(model)
    optimizer.collect_metrics = True
    (model(torch.ones(1, 4)).sum() + model.empty.sum()).backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    assert "empty" in optimizer.describe()


def test_the_drift_of_a_matrix_that_left_the_numbers_is_nan():
    w = torch.eye(3)
    assert math.isnan(isometry_drift(w, torch.full((3, 3), torch.inf)))
    assert math.isnan(isometry_drift(torch.zeros(0, 3), torch.zeros(0, 3)))
    assert isometry_drift(w, w) == 0
