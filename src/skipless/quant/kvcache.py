"""Keys and values of past tokens as packed integers with the scales that bring them back (Q1).

    bits 2-4   two codes in a byte, even channels in its low half
    bits 5-8   int8
    bits 9-16  int16

Asymmetric codes, whose zero point is taken off, need a bit more and are not packed in pairs.

A scale is stored for every token, and for every head of it with granularity "token". The values are
those of the simulation: the tokens of one forward pass are rounded together, once, when they come.

`pack_cache(model)` lets a model that was quantised with -KV (or in scope `all`) keep its cache in
this form: what the hooks on its keys and values round is handed on as codes. A model takes part by
asking `new_store(layer, "key" | "value")` for the place to keep them, as ours does. `PackedTensor`
serves other caches too (`skipless.hf.QuantizedCache`). Read by `quant.integers`.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.apply import Quantization, quantization
from skipless.quant.fake import quantizer

_STORES = "_skipless_stores"


class PackedTensor:
    """Codes [B, G, S, K] that grow along S, and their scales; B batch, G heads, K head size."""

    def __init__(self, bits: int, *, symmetric: bool = True) -> None:
        self.bits = bits
        self.nibbles = symmetric and bits <= 4
        magnitude = bits - 1 if symmetric else bits  # of the largest code, in bits
        self.dtype = next(
            dtype
            for dtype, room in ((torch.int8, 7), (torch.int16, 15), (torch.int32, 31))
            if magnitude <= room
        )
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None
        """float32 or float64 [capacity], or [B, G, capacity] with one for each head."""
        self.width = 0

    @property
    def stored_bits(self) -> int:
        """Bits that a code takes here: 4, 8, 16 or 32."""
        return 4 if self.nibbles else 8 * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """What the codes and scales take, room to grow included."""
        held = [t for t in (self.codes, self.scales) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    def append(self, codes: Tensor, scale: Tensor, start: int) -> None:
        """Put whole-number codes [B, G, T, K] and scale [] or [B, G, T, 1] at `start`."""
        batch, heads, length, self.width = codes.shape
        stop = start + length
        packed = _pack_pairs(codes) if self.nibbles else codes.to(self.dtype)
        per_head = scale.dim() > 0  # not by number: one token of one head has one scale, too
        kept = scale.reshape(batch, heads, length) if per_head else scale.reshape(1).expand(length)
        if self.codes is not None and len(self.codes) != batch:
            raise UserError(
                f"the cache holds a batch of {len(self.codes)} and the input has {batch}; start a "
                "new cache"
            )
        self.codes = _grown(self.codes, packed, 2, start, stop)
        self.scales = _grown(self.scales, kept, kept.dim() - 1, start, stop)
        self.codes[:, :, start:stop] = packed
        self.scales[..., start:stop] = kept

    def reserve(self, used: int, needed: int) -> tuple[Tensor, Tensor]:
        """Codes and scales with room for `needed` tokens; the first `used` are kept."""
        assert self.codes is not None and self.scales is not None, "nothing was appended yet"
        self.codes = _grown(self.codes, self.codes, 2, used, needed)
        self.scales = _grown(self.scales, self.scales, self.scales.dim() - 1, used, needed)
        return self.codes, self.scales

    def values(self, stop: int, dtype: torch.dtype) -> Tensor:
        """The first `stop` tokens [B, G, stop, K]: codes times scale."""
        assert self.codes is not None and self.scales is not None, "nothing was appended yet"
        codes = self.codes[:, :, :stop]
        codes = _unpack_pairs(codes, self.width) if self.nibbles else codes
        scales = self.scales[..., :stop]
        return (codes.to(scales.dtype) * scales[..., None]).to(dtype)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'], in that order."""
        if self.codes is None or self.scales is None:
            return
        rows = rows.to(self.codes.device)
        self.codes = self.codes.index_select(0, rows)
        if self.scales.dim() == 3:
            self.scales = self.scales.index_select(0, rows)

    def to(self, device: Any) -> None:
        """Move codes and scales."""
        if self.codes is not None and self.scales is not None:
            self.codes, self.scales = self.codes.to(device), self.scales.to(device)


def code_tensor(
    x: Tensor, bits: int, granularity: str, symmetric: bool, clip: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, values) of `x`: values as `fake.fake_quantize` gives, codes in floating point.

    The scale is NaN, and the codes 0, where a group holds a value that no integer represents.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    step, bounds, _ = quantizer(wide, bits, symmetric, clip, granularity == "tensor")
    codes = (wide / step).round_().clamp_(*bounds)
    values = (codes * step).to(x.dtype)
    scale = torch.where(torch.isfinite(step), step, torch.nan)
    return codes.nan_to_num_(0.0), scale, values


class _Packer:
    """In front of one site's quantiser: rounds the tensor itself, to have its codes."""

    def __init__(self, site: ActivationQuantizer) -> None:
        self.site = site
        self._own = threading.local()
        """`last`: a weak reference to the values this thread made last, their codes and scale."""

    @uncompiled
    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        site = self.site
        if site.state.mode != "quantize":
            return None
        codes, scale, values = code_tensor(
            output, site.bits, site.granularity, site.symmetric, site.clip
        )
        if isinstance(site.clip, str):
            site.state.note_scale(site.site.name, scale)
        self._own.last = (weakref.ref(values), codes, scale)
        return values

    def take(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Codes and scale of `values` if the hook made them last."""
        last, self._own.last = getattr(self._own, "last", None), None
        return last[1:] if last is not None and last[0]() is values else None

    def __getstate__(self) -> dict[str, Any]:
        return {"site": self.site}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Packer.__init__(self, state["site"])


class PackedStore:
    """One layer's keys or values in our model's cache (`model.cache.Store`)."""

    def __init__(self, packer: _Packer) -> None:
        self._packer = packer
        self.packed = PackedTensor(packer.site.bits, symmetric=packer.site.symmetric)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedStore:
        """In a copy of the cache, for the same model or the copy that was made before it."""
        twin = PackedStore(memo.get(id(self._packer), self._packer))
        memo[id(self)] = twin
        twin.packed = copy.deepcopy(self.packed, memo)
        return twin

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.packed.num_bytes

    def append(self, new: Tensor, start: int) -> Tensor:
        """Put new tokens [B, G, T, K] at `start`; return all [B, G, start + T, K]."""
        taken = self._packer.take(new)
        if taken is None:
            raise UserError(
                f"{self._packer.site.site.module} did not make the tensor that the cache is given; "
                "restore(model), or use a cache of floating-point values: KeyValueCache()"
            )
        self.packed.append(*taken, start)
        return self.packed.values(start + new.shape[2], new.dtype)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order."""
        self.packed.select(rows)


class _Stores:
    """Makes the stores of one model; undone with the other handles of `quantize`."""

    def __init__(self, model: nn.Module, packers: dict[tuple[int, str], _Packer]) -> None:
        self.packers, self.handles = packers, []
        self.model = model
        self._tell(self)
        for packer in packers.values():
            packer.site.is_integer = True
            module = model.get_submodule(packer.site.site.module)
            self.handles.append(module.register_forward_hook(packer.hook, prepend=True))

    def __call__(self, layer: int, kind: str) -> PackedStore:
        return PackedStore(self.packers[layer, kind])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stores:
        """Of the copied model; a cache that is copied by itself stays with its model."""
        if id(self.model) not in memo:
            return self
        memo[id(self)] = twin = object.__new__(_Stores)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for packer in self.packers.values():
            packer.site.is_integer = False
        self._tell(None)

    def _tell(self, new_store: _Stores | None) -> None:
        model: Any = self.model  # has the attribute, as `pack_cache` has seen
        model.new_store = new_store


def pack_cache(model: nn.Module) -> bool:
    """Let the caches that `model` makes from now on hold packed integers; whether it can.

    False when the model's keys and values are not quantised, or it does not ask for stores.
    Raises UserError when the model is not quantised. Undone by `unpack_cache` and `restore`.
    """
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    sites: dict[tuple[int, str], ActivationQuantizer] = {
        (site.site.layer, site.site.kind): site
        for site in record.activations
        if site.site.kind in ("key", "value") and site.site.layer is not None
    }
    layers = {layer for layer, _ in sites}
    whole = bool(sites) and all((n, kind) in sites for n in layers for kind in ("key", "value"))
    if not whole or not hasattr(model, "new_store") or _stores(record):
        return False
    record.handles.append(_Stores(model, {place: _Packer(site) for place, site in sites.items()}))
    return True


def unpack_cache(model: nn.Module) -> None:
    """Undo `pack_cache`; nothing happens if it did nothing."""
    record = quantization(model)
    for stores in _stores(record) if record is not None else []:
        stores.remove()
        record.handles.remove(stores)  # pyright: ignore[reportOptionalMemberAccess]


def _stores(record: Quantization) -> list[_Stores]:
    return [handle for handle in record.handles if isinstance(handle, _Stores)]


def _pack_pairs(codes: Tensor) -> Tensor:
    """Codes in -8..7 [..., K] -> uint8 [..., ceil(K / 2)]."""
    small = codes.to(torch.int16) & 15
    if small.shape[-1] % 2:
        small = nn.functional.pad(small, (0, 1))
    return (small[..., 0::2] | (small[..., 1::2] << 4)).to(torch.uint8)


def _unpack_pairs(packed: Tensor, width: int) -> Tensor:
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :width]
    return (both.to(torch.int8) ^ 8) - 8


def _grown(stored: Tensor | None, like: Tensor, dim: int, used: int, needed: int) -> Tensor:
    """`stored` with room for `needed` along `dim`, doubling; the first `used` are kept."""
    if stored is not None and stored.shape[dim] >= needed:
        return stored
    shape = list(like.shape)
    shape[dim] = max(needed, 2 * (0 if stored is None else stored.shape[dim]), 16)
    grown = like.new_zeros(shape)
    if stored is not None:
        grown.narrow(dim, 0, used).copy_(stored.narrow(dim, 0, used))
    return grown
