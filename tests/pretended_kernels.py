"""What a device of `pretend_device` computes, and what it refuses as a real one does."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import torch

aten = torch.ops.aten
BETWEEN = {"copy_", "_to_copy", "lift_fresh", "set_", "alias", "detach", "detach_"}
"""Operations that take tensors of two devices, or one tensor of any."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations whose index tensors may lie on the CPU."""
SCALARS = {"where", "clamp", "masked_fill", "masked_fill_", "fill", "fill_", "lerp", "lerp_"}
"""Operations that are not tagged pointwise and take scalars (shape []) from the CPU."""
NO_INTEGERS = {"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "addbmm"}
"""Integer products that CUDA does not have."""


@functools.cache
def lacking(key: str) -> frozenset[str]:
    """Operations with a kernel for the CPU and none for `key` ("CUDA", "MPS").

    Read from the table that torch is generated from, which comes with torch.
    """
    import torchgen

    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    keys, delegates = {}, {}
    for entry in table.read_text().split("\n- func: ")[1:]:
        name = entry.partition("(")[0]
        _, _, dispatch = entry.partition("\n  dispatch:\n")
        lines = itertools.takewhile(lambda line: line.startswith("    "), dispatch.splitlines())
        keys[name] = {k.strip() for line in lines for k in line.partition(":")[0].split(",")}
        if found := re.search(r"\n  structured_delegate: (\S+)", entry):
            delegates[name] = found[1]
    general = {"CompositeExplicitAutograd", "CompositeImplicitAutograd",
               "CompositeExplicitAutogradNonFunctional"}  # fmt: skip
    own = {name: keys[delegates.get(name, name)] for name in keys}
    found = {n for n, k in own.items() if "CPU" in k and key not in k and not k & general}
    # torch takes these for its CPU tensors in place of what it takes on a device
    return frozenset(n for n in found if "for_cpu" not in n and "mkldnn" not in n)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """The kernel of CUDA by that of the CPU; what only its backward reads are place-holders."""
    out = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, scale=scale
    )
    rest = torch.empty(0)
    return *out, rest, rest, q.shape[2], k.shape[2], rest, rest, rest


def _flash_backward(
    grad_out, q, k, v, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and not dropout_p
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, dropout_p, is_causal, scale=scale
    )


FLASH = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
"""{an operation of CUDA's that the CPU has in another form: that form}"""


def refuse(func, args: tuple, flat: list, label: torch.device) -> None:
    """Raise what a device raises for tensors of two devices, and for kernels that it lacks.

    `flat` are the tensors among `args`; those on the device have a `label`.
    """
    name = func._schema.name.split("::")[-1]
    overload = func._schema.overload_name
    if f"{name}.{overload}".rstrip(".") in lacking(label.type.upper()):
        raise NotImplementedError(f"aten::{name} is not implemented for {label.type.upper()}")
    ints = [x for x in flat if not x.dtype.is_floating_point and not x.dtype.is_complex]
    if label.type == "cuda" and name in NO_INTEGERS and ints:
        raise RuntimeError(f"{name} not implemented for {ints[0].dtype} on CUDA")
    if label.type == "cuda" and name == "_int_mm":
        (rows, depth), columns = args[0].shape, args[1].shape[1]
        if rows <= 16 or depth % 8 or columns % 8:
            raise RuntimeError(f"_int_mm on CUDA takes no {rows} x {depth} x {columns}")
    if name in BETWEEN:
        return
    if name in INDEXED:
        if not hasattr(args[0], "label"):
            raise RuntimeError(f"{name}: indices on {label} for a tensor on {args[0].device}")
        flat = [x for x in (args[0], *args[2:3]) if isinstance(x, torch.Tensor)]
    takes_scalars = (
        torch.Tag.pointwise in func.tags or name in SCALARS | INDEXED or "foreach" in name
    )
    is_in_place = name.endswith("_") and not name.endswith("__")
    for place, x in enumerate(flat):
        is_free = x.dim() == 0 and takes_scalars and not (is_in_place and place == 0)
        if not hasattr(x, "label") and not is_free:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {label} and "
                f"{x.device} {list(x.shape)}"
            )
