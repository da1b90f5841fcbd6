"""How evenly attention spreads: the gate feature "entropy" of U3. Read by `attention.py`.

Fused kernels never show their weights, so the weights are computed again here, in blocks of
queries, without a graph: once more the cost of the logits of attention, and [B, H, 64, S] numbers
of memory at a time. Eager attention takes the same road, so that both give the same model.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


@torch.no_grad()
def attention_entropy(
    q: Tensor, k: Tensor, *, scale: float, visible: Tensor | None, causal: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Entropy of each query's weights over log(number of visible keys), mean over heads: [B, T].

    In [0, 1]; 0 where one key is visible. `q` [B, H, T, K], `k` [B, G, S, K] with G dividing H;
    `visible` bool [T, S] or [B, 1, T, S] as in `ForwardContext`; `causal` counts where it is None;
    `bias` [H] on the logit of a token with itself (I7). Float32 at least; no gradient.
    """
    batch, heads, num_new, _ = q.shape
    groups, total = k.shape[1], k.shape[2]
    past = total - num_new
    work = torch.promote_types(q.dtype, torch.float32)
    k = k.to(work).mT[:, :, None]
    columns = torch.arange(total, device=q.device)
    found = []
    for start in range(0, num_new, BLOCK):
        stop = min(start + BLOCK, num_new)
        own = torch.arange(start + past, stop + past, device=q.device)[:, None]
        if visible is not None:
            seen = visible[..., start:stop, :]
        elif causal:
            seen = columns <= own
        else:
            seen = torch.ones(stop - start, total, dtype=torch.bool, device=q.device)
        block = q[:, :, start:stop].to(work).unflatten(1, (groups, heads // groups))
        scores = (block @ k).flatten(1, 2) * scale
        if bias is not None:
            scores = scores + (columns == own) * bias.to(work)[None, :, None, None]
        logs = torch.log_softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        # 0 log 0 = 0: hidden keys have -inf and would give NaN
        entropy = -(logs.exp() * logs.masked_fill(~seen, 0.0)).sum(-1).mean(1)
        num = seen.sum(-1).expand(batch, 1, -1)[:, 0] if seen.ndim == 4 else seen.sum(-1)
        found.append(torch.where(num > 1, entropy / num.clamp(min=2).to(work).log(), 0.0))
    return torch.cat(found, dim=-1)
