"""The small steps between the matrix products of a layer: norms, RoPE, rows into the window, the residual streams.

Arithmetic is fp32, rounded once. On a GPU each is one kernel; a CPU leaves the streams to the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.integrations import paging
from dsv4.v4_problem import Pool


def norm(x: Tensor, by: Any) -> Tensor:
    """RMSNorm of [N, D] with the weight of the module ``by``."""
    if x.is_cuda:
        return _kernel(x, eps=by.variance_epsilon, weight=by.weight)
    return _normed(x, by.variance_epsilon, by.weight).to(x.dtype)


def turned(x: Tensor, cos_sin: Tensor, positions: Tensor, eps: float | None = None) -> Tensor:
    """Heads [N, H, D], normed without a weight if eps is given, their last dims rotated at positions [N]."""
    if x.is_cuda:
        return _kernel(x, eps=eps, rope=(cos_sin, positions))
    return _rope(x.float() if eps is None else _normed(x, eps), cos_sin, positions).to(x.dtype)


def store(pool: Pool, slots: Tensor, x: Tensor, by: Any, cos_sin: Tensor, positions: Tensor) -> None:
    """Rows [N, D], normed by the module ``by`` and rotated at positions [N], to the row numbers slots [N]."""
    if x.is_cuda:
        _kernel(x, eps=by.variance_epsilon, weight=by.weight, rope=(cos_sin, positions), to=pool, slots=slots)
        return
    paging.write(pool, slots, _rope(_normed(x, by.variance_epsilon, by.weight), cos_sin, positions))


def compress(
    pool: Pool, states: tuple[Tensor, Tensor], kv: Tensor, gate: Tensor, by: Any, cos_sin: Tensor, rows: Any,
    positions: Tensor,
) -> None:  # fmt: skip
    """The rows (step.Rows) of the projections [N, width], by a compressor, into the pool; and the tokens into the
    states, if that is not for later. On a GPU."""
    from dsv4.kernels.shared.rings import compress_rings

    which = (rows.numbers, rows.lines, rows.begins, rows.starts, rows.targets)
    with torch.cuda.device(kv.device):
        compress_rings(
            kv, gate, by.position_bias, by.kv_norm.weight, by.kv_norm.variance_epsilon, cos_sin, states, which, pool,
            positions, rows.places if rows.kept is None else None,
        )  # fmt: skip


def streams_fit(model: Any) -> bool:
    """The kernels take a power of two of streams."""
    count = model.config.hc_mult
    return count & (count - 1) == 0


def collapse(streams: Tensor, by: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Streams [N, H, D] -> (weights for spread, [N, D]), by a DeepseekV4HyperConnection. On a GPU."""
    from dsv4.kernels.shared import streams as kernels

    mixed = torch.nn.functional.linear(streams.flatten(1).float(), by.fn.float())
    with torch.cuda.device(streams.device):
        post, comb, x = kernels.collapse(
            streams, mixed, by.base, by.scale, by.hc_sinkhorn_iters, by.input_norm.eps, by.hc_eps
        )
    return (post, comb), x


def spread(streams: Tensor, y: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """The output [N, D] of a block into the streams [N, H, D]. On a GPU."""
    from dsv4.kernels.shared import streams as kernels

    with torch.cuda.device(streams.device):
        return kernels.spread(streams, y.contiguous(), *weights)


def _kernel(x: Tensor, **options: Any) -> Any:
    from dsv4.kernels.shared.normed import normed  # needs Triton, which a CPU does not

    with torch.cuda.device(x.device):
        return normed(x.contiguous(), **options)


def _normed(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def _rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Turn the interleaved pairs of the last dims of x [N, ..., D]."""
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions].reshape(-1, *(1,) * (x.ndim - 2), r).chunk(2, -1)
    even, odd = x[..., -r:].unflatten(-1, (r // 2, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], pairs], -1)
