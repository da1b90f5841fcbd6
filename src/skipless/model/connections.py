"""How a sublayer joins the stream: y = a * x + b * f(norm(x)) + c * x0 (C0), as modules.

Kinds C1-C11 of docs/equations.md; one class each, found by name in `CONNECTIONS` (C8 and C10, whose
weights depend on the token, are in `interpolation.py`). In the
drawings x is the stream, f the sublayer's output (the branch), y the new stream. A connection is a
module of its own so that hooks see the stream: its output is the stream's probe site. Read by
`block.py`; what `gains` tells is folded into weights by `skipless.surgery.fold`.

Learned gains are 1-D, never 0-D: FSDP2 cannot shard a 0-D parameter.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.model.context import ForwardContext
from skipless.registry import Registry

CONNECTIONS: Registry = Registry("connection kind")


class Connection(nn.Module):
    """Base of all kinds.

    `forward(stream, branch, context)` takes and returns [B, T, D]; only C3 with c != 0 reads the
    context (its `embedding`).
    """

    def __init__(self, config: ConnectionConfig, hidden_size: int):
        super().__init__()
        self.config, self.hidden_size = config, hidden_size
        self.layer: int | None = None
        self.sublayer: str | None = None

    def place(self, layer: int, sublayer: str, causal: bool) -> None:
        """Tell where in a model this is; raises UserError where the kind cannot stand."""
        self.layer, self.sublayer = layer, sublayer

    @property
    def needs_entropy(self) -> bool:
        """Whether the attention in front is to put its entropy into the context."""
        return False

    def forward(self, stream: Tensor, branch: Tensor, context: ForwardContext) -> Tensor:
        """The new stream."""
        raise TypeError(f"{type(self).__name__} does not say how it joins; define forward")

    def gains(self) -> dict[str, Tensor]:
        """The current weights "a" of the stream and "b" of the branch, detached [1] or [D];
        only those that can change."""
        return {}

    def reset_parameters(self) -> None:
        """Set every gain to its start."""

    def set_training_progress(self, fraction: float) -> None:
        """Tell the share of training done, in [0, 1]; only C7 listens."""

    def extra_repr(self) -> str:
        return f"kind={self.config.kind}"

    def _gain(self, granularity: str) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.hidden_size if granularity == "channel" else 1))


@CONNECTIONS.register("residual")
class Residual(Connection):
    """C1: y = x + f.

    x ──┬───────────────(+)── y
        └─ norm ─ f ─────┘
    """

    def forward(self, stream, branch, context):
        return stream + branch


@CONNECTIONS.register("none")
class NoConnection(Connection):
    """C2: y = f. The stream itself ends here.

    x ──── norm ─ f ───────── y
    """

    def forward(self, stream, branch, context):
        return branch


@CONNECTIONS.register("fixed")
class Fixed(Connection):
    """C3: y = a x + b f + c x0, constants.

    x ──┬────── * a ────(+)── y
        └─ norm ─ f ─ * b┤
    x0 ──────── * c ─────┘
    """

    def forward(self, stream, branch, context):
        a, b, c = self.config.a, self.config.b, self.config.c
        joined = branch if b == 1 else branch * b
        if a != 0:  # 0 * x would cost a pass, and turn an infinite x into NaN
            joined = torch.add(joined, stream, alpha=a)
        if c != 0:
            assert context.embedding is not None, "it is set before the first block runs"
            joined = torch.add(joined, context.embedding, alpha=c)
        return joined


class _BranchGain(Connection):
    """y = x + b f with a learned b; C4 and C5 differ in shape and start."""

    gain_name: str
    start: float
    granularity: str

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        self.register_parameter(self.gain_name, self._gain(config.granularity or self.granularity))
        self.reset_parameters()

    @property
    def gain(self) -> Tensor:
        return getattr(self, self.gain_name)

    def reset_parameters(self):
        start = self.start if self.config.init is None else self.config.init
        nn.init.constant_(self.gain, start)

    def forward(self, stream, branch, context):
        return torch.addcmul(stream, branch, self.gain.to(branch.dtype))

    def gains(self):
        return {"b": self.gain.detach()}


@CONNECTIONS.register("rezero")
class ReZero(_BranchGain):
    """C4: y = x + alpha f, alpha one learned scalar that starts at 0 (arXiv 2003.04887).

    x ──┬───────────────────(+)── y
        └─ norm ─ f ─ * alpha┘

    With granularity "block" the two sublayers of a block share the parameter (`Block` ties it).
    """

    gain_name, start, granularity = "alpha", 0.0, "scalar"


@CONNECTIONS.register("layerscale")
class LayerScale(_BranchGain):
    """C5: y = x + gamma f, gamma learned per channel, starts at 1e-4 (arXiv 2103.17239).

    x ──┬───────────────────(+)── y
        └─ norm ─ f ─ * gamma┘
    """

    gain_name, start, granularity = "gamma", 1e-4, "channel"


@CONNECTIONS.register("interpolate")
class Interpolate(Connection):
    """C6: y = s (1 - lam) x + s lam f, lam = sigmoid(theta), theta starts at 0.

    x ──┬────── * s(1-lam) ──(+)── y
        └─ norm ─ f ─ * s lam ┘

    With s = 2 and theta = 0 both weights are exactly 1: the model is the residual one, bit for bit.
    """

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        self.theta = self._gain(config.granularity or "scalar")
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.theta, self.config.init or 0.0)

    def _weights(self) -> tuple[Tensor, Tensor]:
        lam = torch.sigmoid(self.theta)
        return self.config.scale * (1 - lam), self.config.scale * lam

    def forward(self, stream, branch, context):
        a, b = self._weights()
        return torch.addcmul(stream * a.to(stream.dtype), branch, b.to(branch.dtype))

    def gains(self):
        a, b = self._weights()
        return {"a": a.detach(), "b": b.detach()}


@CONNECTIONS.register("anneal")
class Anneal(Connection):
    """C7: y = a(p) x + f, a falls from 1 to 0 over the first `anneal_fraction` of training.

    x ──┬────── * a(p) ──(+)── y        p: share of training done
        └─ norm ─ f ──────┘             from a = 0 on this is C2

    The weight lives in a persistent buffer, so a checkpoint continues where it was and a finished
    model loads as C2.
    """

    stream_weight: Tensor

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        self.register_buffer("stream_weight", torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self):
        self.set_training_progress(0.0)

    def set_training_progress(self, fraction):
        if not 0 <= fraction <= 1:
            raise UserError(f"training progress is {fraction}; it is a share in [0, 1]")
        done = min(fraction / self.config.anneal_fraction, 1.0)
        weight = 1 - done
        if self.config.anneal_shape == "cosine":
            weight = (1 + math.cos(math.pi * done)) / 2 if done < 1 else 0.0
        self._set(weight)

    def _set(self, weight: float) -> None:
        # The float saves a device synchronisation at every step, and the phase is what a compiled
        # graph depends on: it changes twice in a training, the float at every step.
        self._weight = weight
        self._phase = {0.0: "none", 1.0: "residual"}.get(weight, "between")
        with torch.no_grad():
            self.stream_weight.fill_(weight)

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        if not self.stream_weight.is_meta:
            self._set(float(self.stream_weight))

    def forward(self, stream, branch, context):
        if self._phase == "none":
            return branch
        if self._phase == "residual":
            return stream + branch
        if torch.compiler.is_compiling():
            return branch + stream * self.stream_weight.to(stream.dtype)
        return torch.add(branch, stream, alpha=self._weight)

    def gains(self):
        return {"a": self.stream_weight.detach().reshape(1)}


@CONNECTIONS.register("learned")
class Learned(Connection):
    """C9: y = a x + b f, both learned, both start at 1.

    x ──┬────── * a ────(+)── y
        └─ norm ─ f ─ * b┘
    """

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        self.a = self._gain(config.granularity or "scalar")
        self.b = self._gain(config.granularity or "scalar")
        self.reset_parameters()

    def reset_parameters(self):
        start = 1.0 if self.config.init is None else self.config.init
        nn.init.constant_(self.a, start)
        nn.init.constant_(self.b, start)

    def forward(self, stream, branch, context):
        return torch.addcmul(stream * self.a.to(stream.dtype), branch, self.b.to(branch.dtype))

    def gains(self):
        return {"a": self.a.detach(), "b": self.b.detach()}


@CONNECTIONS.register("sphere")
class Sphere(Connection):
    """C11: y = n(n(x) + alpha (n(f) - n(x))), n(v) = v / rms(v); alpha a channel, from 0.05.

    x ──┬─ n ──────── * (1-alpha) ──(+)─ n ── y
        └─ norm ─ f ─ n ─ * alpha ───┘

    The join of nGPT (arXiv 2410.01131): stream and branch are directions, and the stream keeps the
    size of 1 a channel through all depth. Its normalised weights are another matter, and not here.
    """

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        self.alpha = self._gain(config.granularity or "channel")
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.alpha, 0.05 if self.config.init is None else self.config.init)

    def forward(self, stream, branch, context):
        dtype = torch.promote_types(stream.dtype, branch.dtype)  # autocast gives two
        x, f = _direction(stream.to(dtype)), _direction(branch.to(dtype))
        return _direction(torch.lerp(x, f, self.alpha.to(dtype)))

    def gains(self):
        return {"b": self.alpha.detach()}


def _direction(x: Tensor) -> Tensor:
    """v / rms(v) over the last dimension; a zero vector stays zero."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def build_connection(config: ConnectionConfig, hidden_size: int) -> Connection:
    """The connection that `config.kind` names."""
    return CONNECTIONS.get(config.kind)(config, hidden_size)
