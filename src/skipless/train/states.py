"""The states of a model and its optimiser by parameter name, as tensors and JSON.

    "model.<name>"                        a parameter or buffer
    "optimizer.<parameter name>.<key>"    a tensor of the optimiser's state

What is no tensor goes into JSON with holes (tree.py). Names, and not places, so that a checkpoint
of two processes is read by one and the other way round. Read by checkpoint.py and load.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skipless.sharded import is_sharded
from skipless.train.tree import pack, tensor_paths, unpack

ELEMENTWISE = ("adamw", "muon")
"""Update rules whose state has one number an entry of the parameter, on the rank of that entry."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one once) and persistent buffers by name, as the live tensors."""
    own = {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    return {k: v for k, v in model.state_dict().items() if k in own}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model_state` by checkpoint key."""
    return {f"model.{name}": tensor for name, tensor in model_state(model).items()}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the order of the optimiser's state_dict indices."""
    by_id = {id(p): n for n, p in model.named_parameters()}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by checkpoint key, and by parameter name the rest with holes where tensors go."""
    names = _names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    skeletons: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        name = names[index] if isinstance(index, int) else index
        skeletons[name] = pack(state, f"optimizer.{name}", tensors)
    return tensors, skeletons


def group_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, with names in place of parameters."""
    names = iter(_names(model, optimizer))
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        settings = pack({k: v for k, v in group.items() if k != "params"}, "group", {})
        groups.append({"parameters": [next(names) for _ in group["params"]], "settings": settings})
    return groups


def empty_slots(
    stored: dict[str, Any], skeletons: dict[str, Any], model: nn.Module, optimizer: Any
) -> dict[str, Tensor]:
    """Empty tensors to load the optimiser's state into, by checkpoint key.

    Elementwise state (AdamW's moments, Muon's momentum) is sharded like its parameter. That of a
    whitening method is whole, because its update needs the whole matrix; every rank reads it and
    those that do not own the matrix drop it at their next step.
    """
    parameters = dict(model.named_parameters())
    names = iter(_names(model, optimizer))
    elementwise = {
        next(names): group.get("algorithm", "adamw") in ELEMENTWISE
        for group in optimizer.param_groups
        for _ in group["params"]
    }
    slots = {}
    for name, skeleton in skeletons.items():
        parameter = parameters[name]
        for key in tensor_paths(skeleton):
            dtype, shape = stored[key].properties.dtype, stored[key].size
            alike = elementwise[name] and shape == parameter.shape
            if alike and is_sharded(parameter):
                slots[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                device = torch.device("cpu") if len(shape) == 0 else parameter.device
                slots[key] = torch.empty(shape, dtype=dtype, device=device)
    return slots


def load_optimizer(
    stored: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Put what was `stored`, its tensors in slots, into `optimizer`.

    Raises RuntimeError if its parameters are grouped in another way.
    """
    names = _names(model, optimizer)
    groups = []
    live = optimizer.state_dict()["param_groups"]
    here = group_settings(model, optimizer)
    if [g["parameters"] for g in here] != [g["parameters"] for g in stored["groups"]]:
        raise RuntimeError("its parameter groups are not those of this optimiser")
    for group, saved in zip(live, stored["groups"], strict=True):
        groups.append({**group, **unpack(saved["settings"], {})})
    state = {
        names.index(name): unpack(skeleton, tensors)
        for name, skeleton in stored["parameters"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
