"""An accelerator that is not there: tensors say "cuda:0" or "mps:0", their numbers lie on the CPU.

    with pretend("cuda") as device:      # torch.cuda.is_available() answers True inside
        model.to("cuda")(ids.to("cuda"))
        device.waits                     # where the host waited for a number, and how often

Unlike those of torch's FakeTensorMode, values are real: code that branches on numbers runs to its
end, results can be compared with the CPU's, and gradients flow without a CUDA build. Refused is
what a device refuses: operations on tensors of two devices (but for scalars and indices from the
CPU), a generator of another device, `.numpy()`, addresses handed to C++, products of integers on
CUDA, float64 and most eigensolvers on MPS. Kernels, speed, rounding and streams are not looked at.

How: `Labelled` wraps a CPU tensor. A function mode turns "device=cuda" into making one, `.to` into
wrapping and unwrapping; a dispatch mode computes on what is wrapped and wraps the results. To
torch's C++ part all of it lies on the CPU, which has autograd threads and a device guard.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from pretended_kernels import FLASH, refuse
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

RESHAPES = {"t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "swapdims_", "as_strided_"}
"""In-place changes of shape, which the outer tensor would not follow."""
WAITS = {"_local_scalar_dense", "equal", "nonzero", "unique_dim", "_unique2", "masked_select"}
"""Operations whose answer the host waits for."""
C_CALLERS = (
    "integers/native.py", "integers/fused.py", "integers/stacked.py", "diagnose/kernel.py",
)  # fmt: skip
"""Files of the package whose data_ptr() goes to C++."""


class Labelled(torch.Tensor):
    """A tensor that says it lies on `label`; `inner` (plain, same shape and strides) holds it."""

    inner: torch.Tensor
    label: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, label: torch.device):
        if label.type == "mps" and inner.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as MPS has none")
        outer = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device="cpu",
        )  # fmt: skip
        outer.inner, outer.label = inner, label
        return outer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {}, None)

    @property
    def device(self):  # pyright: ignore
        return self.label

    @property
    def is_cuda(self):  # pyright: ignore
        return self.label.type == "cuda"

    @property
    def is_mps(self):  # pyright: ignore
        return self.label.type == "mps"

    @property
    def is_cpu(self):  # pyright: ignore
        return False

    @property
    def data(self):  # pyright: ignore
        return Labelled(self.inner.detach(), self.label)

    @data.setter
    def data(self, value):
        assert isinstance(value, Labelled), f"a tensor of {value.device} put into one of {self}"
        assert value.shape == self.shape, "another shape is not pretended"
        self.inner, self.label = value.inner.detach(), value.label

    def __deepcopy__(self, memo):
        twin = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol):
        return Labelled, (self.inner, self.label)

    def __repr__(self, **kwargs):
        return f"<{self.label}> {self.inner!r}"

    def data_ptr(self) -> int:
        caller = sys._getframe(1).f_code.co_filename.replace("\\", "/")
        assert not any(name in caller for name in C_CALLERS), f"{caller} hands {self.label} to C++"
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(f"can't convert {self.label} device type tensor to numpy")
        return self.detach().cpu().numpy()

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def tolist(self):
        return self.detach().cpu().tolist()


class Device(TorchDispatchMode):
    """What happened on the pretended device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.device = torch.device(kind, 0)
        self.waits: Counter[str] = Counter()
        """{operation and the line of the package that asked: times}."""
        self.ops: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        """Functions of torch.cuda or torch.mps that were called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {}, self)

    def wait(self, what: str) -> None:
        """Count one wait under the line of the package that is running."""
        frame, place = sys._getframe(1), "?"
        while frame is not None:
            path = frame.f_code.co_filename.replace("\\", "/")
            if "/skipless/" in path:
                place = f"{path.rsplit('/skipless/', 1)[1]}:{frame.f_lineno}"
                break
            frame = frame.f_back
        self.waits[f"{what} {place}"] += 1


class _Placing(TorchFunctionMode):
    """Devices as Python code names them: "cuda" becomes a label, all else the CPU."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.owner, self.device = device, device.device

    def is_here(self, device) -> bool:
        device = torch.device(device)
        assert device.index in (None, 0) or device.type == "cpu", f"there is no {device}"
        return device.type == self.device.type

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cuda", "cpu", "mps") and args and isinstance(args[0], torch.Tensor):
            return self.move(name, *args, **kwargs)
        if kwargs.get("device") is None:
            if kwargs.get("generator") is not None and any(map(_is_labelled, tree_leaves(args))):
                raise RuntimeError(f"Expected a '{self.device}' generator but found one of the CPU")
            return func(*args, **kwargs)
        is_here = self.is_here(kwargs["device"])
        if not is_here and torch.device(kwargs["device"]).type != "cpu":
            return func(*args, **kwargs)  # the meta device
        if is_here and kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a '{self.device}' generator but found one of the CPU")
        kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        wants = kwargs.pop("requires_grad", False)
        out = func(*args, **kwargs)
        if name in ("tensor", "as_tensor") and is_here:
            self.owner.ops["from host"] += 1
        return self.place(out, is_here).requires_grad_(wants) if wants else self.place(out, is_here)

    def place(self, x: torch.Tensor, is_here: bool) -> torch.Tensor:
        return x if _is_labelled(x) == is_here else _Move.apply(x, self.device if is_here else None)

    def move(self, name: str, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if name == "to":
            other = args[0] if args else kwargs.pop("other", None)
            if isinstance(other, torch.Tensor):
                device, dtype, rest = other.device, other.dtype, {}
            else:
                device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
                rest = {} if layout is None else {"memory_format": layout}
        else:
            device, dtype, rest = torch.device(name), None, {}
        if device is not None and device.type == "meta":
            return x.to(device, dtype=dtype) if dtype else x.to(device)
        is_here = _is_labelled(x) if device is None else self.is_here(device)
        if not is_here and _is_labelled(x):
            self.owner.wait("to cpu")
        moved = x
        if dtype is not None and is_here:  # MPS never sees the wide type
            moved = moved.to(dtype=dtype, copy=copy, **rest)
        moved = self.place(moved, is_here)
        if dtype is not None and not is_here:
            moved = moved.to(dtype=dtype, copy=copy, **rest)
        return moved.clone() if copy and moved is x else moved


class _Move(torch.autograd.Function):
    """To the device and back: `label` None is the CPU."""

    @staticmethod
    def forward(ctx, x, label):
        if x.device.type == "meta":
            x = torch.empty_like(x, device="cpu")
        ctx.back = x.label if _is_labelled(x) else None
        return _relabel(x, label)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore
        return _relabel(gradient, ctx.back), None


def _relabel(x, label):
    plain = _inner(x).detach().clone()
    return plain if label is None else Labelled(plain, label)


def _is_labelled(x) -> bool:
    return isinstance(x, Labelled)


def _inner(x):
    return x.inner if isinstance(x, Labelled) else x


def _compute(func, args, kwargs, device):
    """`func` on what is wrapped; the results wrapped again."""
    flat = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    held = [x for x in flat if isinstance(x, Labelled)]
    if not held:
        return func(*args, **kwargs)
    name, label = func._schema.name.split("::")[-1], held[0].label
    assert name not in RESHAPES, f"{name} is not pretended"
    refuse(func, args, flat, label)
    if device is not None:
        device.ops[name] += 1
        to_host = name == "copy_" and not isinstance(args[0], Labelled)
        boolean = name.startswith("index") and any(
            x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, Labelled)
        )
        if name in WAITS or to_host or boolean:
            device.wait(name)
    own = {id(x.inner): x for x in held}
    args_, kwargs_ = tree_map(_inner, (args, kwargs))
    out = FLASH.get(name, func)(*args_, **kwargs_)
    written = name == "copy_" and not isinstance(args[0], Labelled)

    def wrap(x):
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or written:
            return x
        return own[id(x)] if id(x) in own else Labelled(x, label)

    out = tree_map(wrap, out)
    for x in held:
        assert x.shape == x.inner.shape, f"{name} changed a shape in place"
    return out if written else return_and_correct_aliasing(func, args, kwargs, out)


@contextlib.contextmanager
def pretend(kind: str = "cuda") -> Iterator[Device]:
    """Inside, the machine has one device of this kind ("cuda" or "mps")."""
    device = Device(kind)

    def note(name, result=None):
        def called(*args, **kwargs):
            device.calls[name] += 1
            return result

        return called

    def renamed(function):
        """The same for the CPU where `kind` is named."""

        def called(*args, **kwargs):
            args = tuple("cpu" if x == kind else x for x in args)
            kwargs = {k: "cpu" if v == kind else v for k, v in kwargs.items()}
            return function(*args, **kwargs)

        return called

    owner = torch.cuda if kind == "cuda" else torch.mps
    answers = {
        "is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
        "set_device": None, "synchronize": None, "max_memory_allocated": 1 << 20,
        "memory_allocated": 1 << 20, "reset_peak_memory_stats": None, "empty_cache": None,
        "is_initialized": True, "get_device_name": "Pretended", "get_device_capability": (9, 0),
        "current_stream": mock.MagicMock(), "stream": contextlib.nullcontext(),
        "get_rng_state": None, "set_rng_state": None, "device": contextlib.nullcontext(),
    }  # fmt: skip
    former = torch.__future__.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, result in answers.items():
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, note(name, result)))
        if kind == "mps":
            patch = mock.patch.object(torch.backends.mps, "is_available", note("mps", True))
            stack.enter_context(patch)
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, renamed(getattr(torch, name))))
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, former)
        stack.enter_context(device)
        placing = stack.enter_context(_Placing(device))
        run = torch.autograd._engine_run_backward

        def backward(*args, **kwargs):  # called inside a handler, where the mode is off
            with placing:
                return run(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        yield device
