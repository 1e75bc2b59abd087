"""Turn a checked problem of compress into one launch. All architectures share this file."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.caches.formats import RowFormat, format_of
from dsv4.caches.kernels.pack import PoolRows
from dsv4.compress.kernels.arguments import Finish, NewTokens, TokenState, Windows
from dsv4.compress.kernels.compress_rows import compress_rows
from dsv4.compress.problem import CompressProblem
from dsv4.runtime import calls
from dsv4.runtime.program import Changing, Launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(p: CompressProblem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    if p.kv.dtype not in DTYPES or p.given.dtype not in DTYPES:
        return f"kv {p.kv.dtype} and rows {p.given.dtype}; the GPU kernels accept bfloat16, float16 and float32"
    if p.d > 1024:
        return f"rows of {p.d} values; the GPU kernels accept up to 1024"
    if p.given.cos_sin is not None and p.d % 2:
        return f"rows of {p.d} values with RoPE; the GPU kernels accept an even number"
    return None


def run(p: CompressProblem, launch: Callable[[Launch], None] = calls.launch) -> None:
    """Fill p.rows or the pool, and the new state."""
    given = p.given
    kv, norm = _unit(p.kv), _unit(given.norm_weight)
    gate = kv if p.gate is None else _unit(p.gate)  # kv: not read, here and below
    bias = kv if given.position_bias is None else given.position_bias.contiguous()
    # Without old tokens the kernel reads nothing from there.
    old_kv = p.new_kv if p.old_kv is None else p.old_kv.contiguous()
    old_gate = p.new_gate if p.old_gate is None else p.old_gate.contiguous()
    cos_sin = kv if given.cos_sin is None else _unit(given.cos_sin)
    r, rope_line = (0, 0) if given.cos_sin is None else (cos_sin.shape[1], cos_sin.stride(0))
    format, pool, slots = _target(p)
    arguments = [
        NewTokens(kv, gate, bias, *kv.stride()[:2], *gate.stride()[:2]),
        TokenState(old_kv, old_gate),
        TokenState(p.new_kv, p.new_gate),
        Finish(norm, cos_sin, given.eps),
        pool,
        slots,
        Windows(
            tokens=kv.shape[1], kept=p.kept, base=Changing(p.base), first=Changing(p.first_window), count=p.windows,
            drop=p.drop, m=p.m, d=p.d, r=r, rope_line=rope_line,
        ),
    ]  # fmt: skip
    slots_at_once = 8 if p.overlap else min(16, 1 << (p.m - 1).bit_length())
    constants = dict(
        OVERLAP=p.overlap,
        ROPE=given.cos_sin is not None,
        FORMAT=format,
        D=max(16, 1 << (p.d - 1).bit_length()),
        SLOTS=slots_at_once,
        DTYPE=str(given.dtype).removeprefix("torch."),
        GATED=p.gate is not None,
        BIASED=given.position_bias is not None,
        # 16 values of a tile per thread: with 32 there are too few registers to have all its loads in flight.
        num_warps=8 if p.overlap else max(slots_at_once, 4),
    )
    launch(Launch(compress_rows, (p.windows + p.new_kv.shape[1], kv.shape[0]), arguments, constants))


def _target(p: CompressProblem) -> tuple[RowFormat | None, PoolRows, Tensor]:
    """Return (format or None = lines, where rows go, slots)."""
    if p.pool is None:
        assert p.rows is not None
        return None, PoolRows(p.rows, 0, 1, 0, 0), p.new_kv  # new_kv: not read
    assert p.slots is not None
    pool = p.pool[:, None] if isinstance(p.pool, Tensor) and p.pool.ndim == 2 else p.pool
    return format_of(pool), PoolRows.of(pool), p.slots.contiguous()


def _unit(x: Tensor) -> Tensor:
    """Return x with stride 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
