"""torch's scaled_dot_product_attention on dsv4: the same arguments, layout and result, head dims up to 512.

    from dsv4.integrations.sdpa import scaled_dot_product_attention

    with dsv4.integrations.sdpa.replaced():  # what any library computes with torch's function in this block
        image = pipeline(prompt)

Masks other than ``is_causal``, and dropout, are rejected by name; within :func:`replaced` such calls run in torch, and
a warning gives the reason, once for each. ``calls`` counts both.

Gradients, torch.compile, DDP and FSDP work as with :func:`dsv4.fmha`. Under torch.autocast, inputs are cast. Head dims
other than 64, 128, 256 and 512 are padded with columns of zeros, which is exact and costs a copy, or read as they are
(:func:`dsv4.fmha` on Hopper).
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.fmha.api import fmha
from dsv4.integrations.naming import named
from dsv4.runtime import checks, dispatch
from dsv4.runtime.checks import Backend

calls: Counter[str] = Counter()  # "dsv4", "torch", of this process, within replaced()
_told: set[tuple[str, str]] = set()  # argument and what is accepted of the calls that a warning was about
TORCH = torch.nn.functional.scaled_dot_product_attention


class Rejected(NamedTuple):
    """Why a call cannot run here: the parts of an error."""

    argument: str
    got: str
    accepted: str


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute attention: query [..., Hq, T, D], key [..., Hkv, S, D], value [..., Hkv, S, Dv] -> [..., Hq, T, Dv].

    is_causal counts from the top left corner, as in torch: query i sees the keys 0 .. i, whatever S is.
    sink, backend: as in dsv4.fmha.

    Example:
        >>> q = torch.randn(2, 8, 100, 64)  # [batch, heads, tokens, head dim]
        >>> out = scaled_dot_product_attention(q, q, q, is_causal=True)
    """
    checks.flag("is_causal", is_causal)
    checks.flag("enable_gqa", enable_gqa)
    query, key, value = _autocast(query, key, value)
    if rejected := reason(query, key, value, attn_mask, dropout_p, enable_gqa):
        checks.fail(*rejected)
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_tokens_first(x, lead) for x in (query, key, value))
    tokens, keys = q.shape[1], k.shape[1]
    if is_causal and keys > tokens:
        k, v = k[:, :tokens], v[:, :tokens]
    if scale is not None:
        scale = checks.real("scale", scale, checks.SCALE)
    window = (-1, max(tokens - keys, 0)) if is_causal else (-1, -1)
    with named(q="query", k="key", v="value", softmax_scale="scale"):
        out = fmha(q, k, v, window=window, sink=sink, softmax_scale=scale, backend=backend)
    return out.transpose(1, 2).reshape(*lead, *out.shape[2:0:-1], out.shape[-1])


def reason(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, enable_gqa: bool = False
) -> Rejected | None:
    """Return why dsv4 cannot compute this, by types, shapes and devices alone; None if it can."""
    given = [("query", query), ("key", key), ("value", value)]
    for n, (name, x) in enumerate(given):
        if not checks.is_tensor(x) or x.ndim < 3:
            return Rejected(name, checks.describe(x), "a tensor [..., heads, tokens, head dim]")
        if x.layout != torch.strided:
            return Rejected(name, f"layout {x.layout}", "a dense strided tensor")
        if not 0 < x.shape[-1] <= checks.HEAD_DIMS[-1]:
            return Rejected(name, f"head dim {x.shape[-1]}", f"a head dim from 1 to {checks.HEAD_DIMS[-1]}")
        for other, y in given[:n]:
            pairs = zip(reversed(x.shape[:-3]), reversed(y.shape[:-3]))
            if any(a != b and a != 1 and b != 1 for a, b in pairs):
                accepted = f"one that broadcasts with {list(y.shape[:-3])}, as {other}"
                return Rejected(name, f"batch {list(x.shape[:-3])}", accepted)
    if attn_mask is not None:
        instead = "None: is_causal=True, or window and fmha_varlen of dsv4 for windows and padding"
        return Rejected("attn_mask", checks.describe(attn_mask), instead)
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        return Rejected("dropout_p", checks.describe(dropout_p), "0.0")
    heads = query.shape[-3], key.shape[-3]
    if heads[0] != heads[1] and heads[1] != 1 and not enable_gqa:
        return Rejected("enable_gqa", f"False with {heads[0]} query heads on {heads[1]} KV heads", "True")
    if query.is_cuda and not dispatch.has_kernels(query.device):
        return Rejected("query", f"a tensor on {torch.cuda.get_device_name(query.device)}", "a GPU with dsv4's kernels")
    if query.dtype not in (checks.LOW_PRECISION if query.is_cuda else checks.FLOATS):
        return Rejected("query", f"dtype {query.dtype} on {query.device}", "bfloat16 and float16; float32 on a CPU")
    return None


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast to the dtype of torch.autocast, as torch does for its own function."""
    kind = tensors[0].device.type if checks.is_tensor(tensors[0]) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if checks.is_tensor(x) and x.dtype in checks.FLOATS else x for x in tensors)


def _tokens_first(x: Tensor, lead: torch.Size) -> Tensor:
    """Transpose [..., heads, tokens, head dim] to [batch, tokens, heads, head dim]; a view if strides allow it."""
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:]).transpose(1, 2)


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by dsv4's where dsv4 can compute the call, and
    torch's where it cannot. A module that imported the function by name before keeps torch's."""
    functional = torch.nn.functional
    before, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, _either
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _either(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    query, key, value = _autocast(query, key, value)
    rejected = reason(query, key, value, attn_mask, dropout_p, enable_gqa)
    calls["torch" if rejected else "dsv4"] += 1
    if rejected is None:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if (rejected.argument, rejected.accepted) not in _told:
        _told.add((rejected.argument, rejected.accepted))
        warnings.warn(
            f"dsv4.integrations.sdpa: computed by torch: {rejected.argument}: got {rejected.got}; accepted: "
            f"{rejected.accepted}",
            stacklevel=2,
        )
    return TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
