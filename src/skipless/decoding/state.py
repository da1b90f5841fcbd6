"""What a fused block carries: the structures of its two sublayers, and when they apply.

Read by `stack.py`, which joins those of all blocks, and `blocks.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model import Attention, Block
from skipless.model.cache import FloatStore, KeyValueCache, Store
from skipless.model.context import ForwardContext
from skipless.model.mlp import MLP
from skipless.model.norms import RMSNorm
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.apply import Quantization
from skipless.quant.integers.fused import Step, attention_step, mlp_step, store_of
from skipless.quant.kvcache import PackedStore, PackedTensor


def one_token(stream: Tensor, context: ForwardContext, record: Quantization) -> bool:
    """Whether this is one new token a sequence behind a cache, wanted for its value only."""
    cache, rotary = context.cache, context.rotary
    return (
        stream.shape[1] == 1
        and cache is not None
        and cache.length > 0
        and context.visible is None
        and not torch.is_grad_enabled()
        and record.state.mode == "quantize"
        and stream.dtype == torch.float32
        and stream.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and (rotary is None or rotary[0].dim() == 2 and rotary[0].dtype == torch.float32)
    )


def sum_of_hooks(hooks: list) -> int:
    """How many hooks are set in these dictionaries."""
    return sum(map(len, hooks))


def mark(tensor: Tensor | None) -> tuple[int, int] | None:
    """Changes when a tensor is written or moved."""
    return None if tensor is None else (tensor.data_ptr(), tensor._version)


class BlockState:
    """What a fused block carries; built again after a copy, since it holds addresses."""

    def __init__(self, block: Block, record: Quantization, engine: str) -> None:
        self.block, self.record, self.engine = block, record, engine
        self.stack: Any = None  # `stack.Stack`, if the model has one
        self.prepare()

    def prepare(self) -> None:
        """What depends on the block alone; not yet whole while it is being copied."""
        block = self.block
        self._steps: tuple[Step | None, Step | None] | None = None
        self._known: list[Any] = [None, None]
        self.layer = block.self_attn.layer if block.self_attn is not None else None
        self._kind: type = PackedStore if self._site("key") is not None else FloatStore
        inside: list[nn.Module] = []
        for part in (block.input_layernorm, block.self_attn, block.mlp):
            inside += [] if part is None else list(part.modules())
        if block.placement == "pre" and block.post_attention_layernorm is not None:
            inside.append(block.post_attention_layernorm)
        self.hooks = [h for m in inside for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._num_hooks = sum_of_hooks(self.hooks)
        self.is_ready = True

    def __deepcopy__(self, memo: dict) -> BlockState:
        import copy

        twin = BlockState.__new__(BlockState)
        memo[id(self)] = twin
        twin.is_ready, twin.engine = False, self.engine
        twin.block = copy.deepcopy(self.block, memo)
        twin.record = copy.deepcopy(self.record, memo)
        twin.stack = copy.deepcopy(self.stack, memo)
        return twin

    def fits(self, stream: Tensor, context: ForwardContext) -> bool:
        """Whether this forward pass is one new token that a fused step computes."""
        if not one_token(stream, context, self.record) or self.block.training:
            return False
        if self.layer is not None and not self.holds(cast(KeyValueCache, context.cache)):
            return False
        return sum_of_hooks(self.hooks) == self._num_hooks

    def holds(self, cache: KeyValueCache) -> bool:
        """Whether keys and values are kept as the step was told."""
        stores, layer, kind = cache.stores, self.layer, self._kind
        return (
            type(stores.get((layer, "key"))) is kind  # pyright: ignore[reportArgumentType]
            and type(stores.get((layer, "value"))) is kind  # pyright: ignore[reportArgumentType]
        )

    def steps(self) -> tuple[Step | None, Step | None]:
        """Of attention and MLP, None for one that the block does not have."""
        if self.record.state.unseen:  # what runs inside a step runs
            self.record.state.unseen -= self.names
        if self._steps is None or self.changed():
            self.build()
        assert self._steps is not None, "just built"
        return self._steps

    def stores(self, cache: KeyValueCache, rows: int) -> tuple[Any, Any]:
        """Addresses of keys and values, with room for one more token of `rows` sequences.

        Raises UserError when the cache holds another number of sequences.
        """
        keys, values = self._address(cache, "key", 0), self._address(cache, "value", 1)
        held = len(keys[3])
        if held != rows:
            raise UserError(
                f"the cache holds a batch of {held} and the input has {rows}; start a new cache"
            )
        return keys[2], values[2]

    def _address(self, cache: KeyValueCache, name: str, place: int) -> tuple:
        """(store, its capacity, the structure, codes, scales) with room for one more token."""
        store = cache.stores[self.layer, name]  # pyright: ignore[reportArgumentType]
        known = self._known[place]
        if known is None or known[0] is not store or known[1] <= cache.length:
            codes, scales = _room(store, cache.length)
            # The tensors are kept with their addresses; a store that moves them is looked up anew.
            known = store, codes.shape[2], store_of(codes, scales), codes, scales
            self._known[place] = known
        elif known[3] is not _held(store):
            self._known[place] = None
            return self._address(cache, name, place)
        return known

    def build(self) -> None:
        """Make the structures. Raises UserError for what no step covers."""
        block, attention, mlp = self.block, self.block.self_attn, self.block.mlp
        pre = block.placement == "pre"
        first = second = None
        self._inputs: list[tuple[dict[str, Any], str, Any]] = []
        if attention is not None:
            first = self._attention(attention, block.input_layernorm if pre else None)
        if mlp is not None:
            second = self._mlp(mlp, block.post_attention_layernorm if pre else None)
        self._steps = first, second
        kinds = ("linear_input", "key", "value")
        self.names = {
            s.site.name for s in self.record.activations
            if s.site.layer == self.layer and s.site.kind in kinds
        }  # fmt: skip

    def _attention(self, attention: Attention, norm: nn.Module | None) -> Step:
        if attention.measures_entropy:
            raise UserError("its connection reads the entropy of attention, which stays inside")
        temperature = attention.temperature
        if temperature.length_scaled:
            raise UserError("its temperature depends on the number of visible keys")
        scale = torch.full(
            (attention.num_heads,), temperature.scaling, dtype=torch.float32, device="cpu"
        )
        if temperature.tau is not None:
            self._watch(temperature, "tau")
            scale = scale * temperature.tau.detach().float()
        if attention.identity_bias is not None:
            self._watch(attention, "identity_bias")
        return attention_step(
            self.engine, self.norm_of(norm),
            (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            (attention.num_heads, attention.num_key_value_heads, attention.head_dim),
            scale, attention.identity_bias, self._site("key"), self._site("value"),
        )  # fmt: skip

    def _mlp(self, mlp: MLP, norm: nn.Module | None) -> Step:
        from skipless.model.mlp import ACTIVATIONS

        names = [name for name, kind in ACTIVATIONS.items() if type(mlp.act) is kind]
        if not names:
            raise UserError(f"its activation is {type(mlp.act).__name__}, which no step computes")
        return mlp_step(
            self.engine, self.norm_of(norm), mlp.gate_proj, mlp.up_proj, mlp.down_proj, names[0]
        )

    def norm_of(self, norm: nn.Module | None) -> tuple[str, Tensor | None, Tensor | None, float]:
        if norm is None:
            return "none", None, None, 0.0
        if type(norm) is RMSNorm:
            self._watch(norm, "weight")
            return "rmsnorm", norm.weight, None, norm.eps
        if type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1:
            self._watch(norm, "weight", "bias")
            gain = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight
            return "layernorm", gain, norm.bias, norm.eps
        raise UserError(f"its norm is {type(norm).__name__}, which no step computes")

    def _watch(self, module: nn.Module, *names: str) -> None:
        """Build again when one of these parameters was changed or replaced."""
        own = module._parameters
        self._inputs += [(own, name, mark(own[name])) for name in names]

    def changed(self) -> bool:
        return any(mark(own[name]) != known for own, name, known in self._inputs)

    def _site(self, kind: str) -> ActivationQuantizer | None:
        for site in self.record.activations:
            if site.site.kind == kind and site.site.layer == self.layer:
                return site
        return None


def _held(store: Store) -> Tensor | None:
    """The tensor that the store keeps codes or floats in at present."""
    return store.stored if isinstance(store, FloatStore) else cast(PackedStore, store).packed.codes


def _room(store: Store, used: int) -> tuple[Tensor, Tensor | None]:
    """Codes and scales, or floats and None, with room for one token after `used`."""
    if isinstance(store, FloatStore):
        return store.reserve(used, used + 1), None
    packed: PackedTensor = cast(PackedStore, store).packed
    return packed.reserve(used, used + 1)
