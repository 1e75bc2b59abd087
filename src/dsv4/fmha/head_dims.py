"""Head dims that no kernel has, and values narrower or wider than keys: columns of zeros up to the next head dim.

A zero column adds nothing to a score, and gives a column of out that is cut off. Padding copies q, k and v once, which
is acceptable for dense and varlen calls; a paged cache would be copied whole, so its head dim must be one of the
kernels'. Calls without gradients reach the kernels unpadded: those of sm_90a read them directly if there are many rows
(sm90/columns.py); otherwise the program pads (kernels/prepare.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.fmha.options import FmhaOptions
from dsv4.fmha.problem import is_between
from dsv4.runtime import checks


def needs_padding(q: Any, v: Any, rank: int) -> bool:
    """Return whether the shapes need padding; wrong arguments are rejected later, by name."""
    if not (checks.is_tensor(q) and checks.is_tensor(v) and q.ndim == v.ndim == rank):
        return False
    return q.shape[-1] != v.shape[-1] or q.shape[-1] not in checks.HEAD_DIMS


def kernels_take(tensors: Sequence[Any], backend: str) -> bool:
    """Return whether there are kernels for q, k and v as they are. `padded` reports what is wrong with them."""
    q, k, v = tensors[:3]
    if not all(checks.is_tensor(x) and x.ndim == q.ndim and x.dtype in checks.LOW_PRECISION for x in (q, k, v)):
        return False
    fits = all(is_between(x.shape[-1]) for x in (q, k, v))
    if not fits or torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return False
    return not q.is_meta and (backend == "softsm" or backend != "cpu" and q.device.type == "cuda")


def padded(tensors: Sequence[Any], options: FmhaOptions) -> tuple[tuple[Any, ...], FmhaOptions]:
    """Pad q, k and v of (q, k, v, ...) to one head dim that the kernels have; the options keep the scale of the true
    one.
    """
    q, k, v = tensors[:3]
    d, width = q.shape[-1], v.shape[-1]
    checks.tensor("q", q, ("...",) * q.ndim, checks.FLOATS, unit_last=False)
    checks.tensor("k", k, ("...",) * q.ndim, checks.CACHED)
    checks.tensor("v", v, ("...",) * q.ndim, checks.CACHED, unit_last=False)
    if k.shape[-1] != d:
        if k.shape[-1] == width:
            checks.fail("q", f"head dim {d}", f"head dim {width}, as k and v")
        checks.fail("k", f"head dim {k.shape[-1]}", f"head dim {d}, as q")
    largest = checks.HEAD_DIMS[-1]
    for name, n in (("q", d), ("v", width)):
        if not 0 < n <= largest:
            checks.fail(name, f"head dim {n}", f"a head dim from 1 to {largest}")
    if v.shape[:-1] != k.shape[:-1]:
        checks.fail("v", f"shape {list(v.shape)}", f"shape {[*k.shape[:-1], width]}, as k but for the head dim")
    wide = next(n for n in checks.HEAD_DIMS if n >= max(d, width))
    wide_k = _widened(k, wide)
    wide_v = wide_k if v is k else _widened(v, wide)  # K = V has kernels of its own
    if options.softmax_scale is None:
        options = options._replace(softmax_scale=d**-0.5)
    return (_widened(q, wide), wide_k, wide_v, *tensors[3:]), options


def _widened(x: Tensor, wide: int) -> Tensor:
    if x.shape[-1] == wide:
        return x
    by = (0, wide - x.shape[-1])
    if x.dtype == checks.E4M3:  # torch does not pad this dtype; a byte of 0 is 0
        return torch.nn.functional.pad(x.view(torch.uint8), by).view(x.dtype)
    return torch.nn.functional.pad(x, by)
