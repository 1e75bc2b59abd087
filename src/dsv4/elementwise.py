"""The small steps between the matrix products of a layer: norms, RoPE, rows into the window, compressor, streams.

Arithmetic is fp32, rounded once. `Torch` is for the CPU, and leaves the residual streams to the model; `Kernels` is for
a GPU, or for softsm, and needs one launch for each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv
from dsv4.caches.kv import Pool
from dsv4.runtime import dispatch


def choose(backend: str, device: torch.device) -> Torch:
    found = dispatch.resolve(backend, device)
    return Torch() if found == "cpu" else Kernels(found, device)


class Torch:
    kernels = False

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which a step runs."""
        return nullcontext()

    def norm(self, x: Tensor, by: Any) -> Tensor:
        """Apply RMSNorm to [N, D] with the weight of the module ``by``."""
        return _normed(x, by.variance_epsilon, by.weight).to(x.dtype)

    def turned(self, x: Tensor, cos_sin: Tensor, positions: Tensor, eps: float | None = None) -> Tensor:
        """Norm heads [N, H, D] without a weight if eps is given, and rotate their last dims at positions [N]."""
        return _rope(x.float() if eps is None else _normed(x, eps), cos_sin, positions).to(x.dtype)

    def store(self, pool: Pool, slots: Tensor, x: Tensor, by: Any, cos_sin: Tensor, positions: Tensor) -> None:
        """Norm rows [N, D] by the module ``by``, rotate them at positions [N], store them at row numbers slots [N]."""
        kv.write_rows(pool, slots, _rope(_normed(x, by.variance_epsilon, by.weight), cos_sin, positions))


class Kernels(Torch):
    kernels = True

    def __init__(self, backend: str, device: torch.device):
        from dsv4.caches.kernels import normed_rows as normed  # imports Triton, which a CPU does not need
        from dsv4.compress.kernels import rings  # imports Triton, which a CPU does not need
        from dsv4.kernels import hyper_connections as streams

        self.backend, self.device = backend, device
        self.normed: Callable[..., Any] = normed.normed
        self.rings, self.streams = rings.compress_rings, streams

    def running(self) -> AbstractContextManager[Any]:
        if self.backend == "cuda":
            return torch.cuda.device(self.device)
        import softsm

        return softsm.use(dispatch.softsm_arch())

    def norm(self, x: Tensor, by: Any) -> Tensor:
        return self.normed(x, eps=by.variance_epsilon, weight=by.weight)

    def turned(self, x: Tensor, cos_sin: Tensor, positions: Tensor, eps: float | None = None) -> Tensor:
        return self.normed(x, eps=eps, rope=(cos_sin, positions))

    def store(self, pool: Pool, slots: Tensor, x: Tensor, by: Any, cos_sin: Tensor, positions: Tensor) -> None:
        options = dict(eps=by.variance_epsilon, weight=by.weight, rope=(cos_sin, positions))
        self.normed(x, **options, to=pool, slots=slots)

    def compress(
        self,
        pool: Pool,
        states: tuple[Tensor, Tensor],
        kv: Tensor,
        gate: Tensor,
        by: Any,
        cos_sin: Tensor,
        rows: Any,
        positions: Tensor,
    ) -> None:
        """Store the rows (step.Rows) that a compressor makes of projections [N, width] in the pool, and the tokens
        into the states, if that is not for later."""
        which = (rows.numbers, rows.lines, rows.begins, rows.starts, rows.targets)
        self.rings(
            kv,
            gate,
            by.position_bias,
            by.kv_norm.weight,
            by.kv_norm.variance_epsilon,
            cos_sin,
            states,
            which,
            pool,
            positions,
            rows.places if rows.kept is None else None,
        )

    def collapse(self, streams: Tensor, by: Any, norm: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Collapse streams [N, H, D] by a DeepseekV4HyperConnection and the norm after it -> (weights for spread, [N,
        D]).
        """
        post, comb, x = self.streams.collapse(
            streams.contiguous(), by.fn, by.base, by.scale, by.hc_sinkhorn_iters, by.input_norm.eps, by.hc_eps,
            norm.weight, norm.variance_epsilon,
        )  # fmt: skip
        return (post, comb), x

    def spread(self, streams: Tensor, y: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Add the output [N, D] of a block to the streams [N, H, D]."""
        return self.streams.spread(streams.contiguous(), y.contiguous(), *weights)


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
