"""From a validated problem to launches: descriptors, strides, splits, the combine kernel. Shared by all architectures.

A forward kernel takes the arguments that `forward_split` passes, in that order, whatever it does with them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from dsv4.kernels import aot
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared.combine import clear_rest, combine
from dsv4.kernels.shared.loads import CELLS, PAGES, ROWS
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.shared.tiles import NO_BOUND
from dsv4.plan import choose_splits
from dsv4.problem import FmhaProblem

BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
DETERMINISTIC_KEYS = 2048  # keys per split when the cut must not depend on the batch


@dataclass(frozen=True)
class Tiling:
    """Compile-time choices of one launch."""

    rows: int  # query rows per CTA
    keys: int  # per step
    box: int  # rows of a TMA box at most
    options: dict  # further compile-time arguments of the kernel


def batch_reason(p: FmhaProblem) -> str | None:
    """None, or why no kernel of this kind can run the problem."""
    return f"batch {p.batch} is over 65535" if p.batch > 65535 else None


def forward_split(p: FmhaProblem, kernel, c: Tiling) -> None:
    """Launch the forward kernel, and the combine kernel where the keys were split."""
    row_tiles = -(-p.max_seqlen_q * p.group // c.rows)
    splits, tiles_per_split = _splits(p, c, row_tiles)
    q, scale = _scaled(p)
    how, box = ROWS, c.box
    if p.kind == "paged":
        power_of_two = p.page_size & (p.page_size - 1) == 0
        how, box = (PAGES, min(p.page_size, c.box)) if power_of_two and p.page_size >= 8 else (CELLS, c.box)
    k = _addressable(p.k)
    v = k if same(p.k, p.v) else _addressable(p.v)
    k_desc = _descriptor(k, box)
    v_desc = k_desc if v is k else _descriptor(v, box)
    out = p.out if _is_aligned(p.out) else torch.empty_like(p.out, memory_format=torch.contiguous_format)
    placeholder = _placeholder(p.q.device)
    sink = p.sink if p.sink is not None else _no_sink(p.q_heads, p.q.device)
    want_lse = int(p.lse is not None)
    lse = p.lse if p.lse is not None else sink
    varlen = p.kind == "varlen"
    total_q = p.q.shape[0] if varlen else p.batch * p.max_seqlen_q
    tokens, keys = (0, 0) if varlen else (p.max_seqlen_q, p.max_seqlen_k)
    cu_q, cu_k = (p.cu_seqlens_q, p.cu_seqlens_k) if varlen else (placeholder, placeholder)
    lengths, table = (p.lengths, p.block_table) if p.kind == "paged" else (placeholder, placeholder)
    page_size, table_stride = (p.page_size, table.stride(0)) if p.kind == "paged" else (1, 0)

    part, part_lse = sink, sink  # unused
    if splits > 1:
        part, part_lse = _scratch(p, splits, total_q * p.q_heads)
    strides_o, strides_l = _row_strides(out), _lse_strides(p, lse)
    arguments = [
        q, k_desc, v_desc, out, lse, sink, cu_q, cu_k, lengths, table, part, part_lse, k, v,
        scale, want_lse, int(varlen), total_q, p.k.shape[0], tokens, keys, p.kv_heads, p.group, page_size, table_stride,
        NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
        splits, tiles_per_split, *_row_strides(q), *strides_o, *strides_l, *_row_strides(k), *_row_strides(v),
    ]  # fmt: skip
    grid = (row_tiles, p.kv_heads * splits, p.batch)
    aot.launch(kernel, grid, arguments, HOW=how.value, num_warps=4, **c.options)
    if splits > 1:
        # Splits at a time: a fixed number where the order of additions must not depend on how many there are.
        at_a_time = 16 if p.deterministic else 8 if splits <= 8 else 64
        arguments = [
            part, part_lse, out, lse, sink, cu_q, splits, total_q * p.q_heads, max(tokens, 1), p.q_heads, p.batch,
            want_lse, *strides_o, *strides_l,
        ]  # fmt: skip
        grid = (total_q * p.q_heads, p.head_dim // 64)
        aot.launch(combine, grid, arguments, D=p.head_dim, SPLITS=at_a_time, VARLEN=varlen, num_warps=4)
    elif varlen:
        arguments = [out, lse, cu_q, total_q, p.q_heads, p.batch, want_lse, *strides_o[1:], *strides_l[1:]]
        aot.launch(clear_rest, (p.q_heads, 4), arguments, D=p.head_dim, num_warps=4)
    if out is not p.out:
        p.out.copy_(out)


def _scaled(p: FmhaProblem) -> tuple[Tensor, float]:
    """Query rows that 16-byte loads can read, and a positive scale in base 2: masked scores are -inf before it."""
    scale = abs(p.softmax_scale) * LOG2E.value
    if scale < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(p.q, memory_format=torch.contiguous_format), 1.0
    return _rows_aligned(p.q if p.softmax_scale > 0 else -p.q), scale


def _splits(p: FmhaProblem, c: Tiling, row_tiles: int) -> tuple[int, int]:
    """(number of splits, fixed tiles per split or 0 = as many as it takes to use all splits)."""
    longest = min(p.max_seqlen_k, p.left + p.right + p.max_seqlen_q if min(p.left, p.right) >= 0 else p.max_seqlen_k)
    tiles = -(-longest // c.keys) + 1  # a paged range may start within a tile
    if p.deterministic:
        if p.kind != "varlen" and p.max_seqlen_q * p.group >= 1024:
            return 1, 0  # enough rows without; T is the same for all sequences, so the choice is too
        fixed = DETERMINISTIC_KEYS // c.keys
        return -(-tiles // fixed), fixed
    if p.num_splits > 0:
        return p.num_splits, 0
    return choose_splits(row_tiles * p.kv_heads * p.batch, _multiprocessors(p.q.device), longest), 0


def _scratch(p: FmhaProblem, splits: int, rows: int) -> tuple[Tensor, Tensor]:
    """fp32 buffers for partial O [splits, rows, D] and LSE [splits, rows]: the plan's, else fresh."""
    size = splits * rows * (p.head_dim + 1)
    scratch = p.scratch
    if scratch is None or scratch.numel() < size:
        scratch = torch.empty(size, dtype=torch.float32, device=p.q.device)
    return scratch[: splits * rows * p.head_dim], scratch[splits * rows * p.head_dim :]


def same(k: Tensor, v: Tensor) -> bool:
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def _is_aligned(x: Tensor) -> bool:
    """16-byte accesses are possible: base, and all strides in units of 8 elements."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s, n in zip(x.stride()[:-1], x.shape) if n > 1)


def _rows_aligned(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) strides of q or out in units of 8 elements; varlen has no sequence stride."""
    strides = [s // 8 if n > 1 else 0 for s, n in zip(x.stride()[:-1], x.shape)]
    return (0, *strides) if x.dim() == 3 else tuple(strides)


def _lse_strides(p: FmhaProblem, lse: Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) strides of lse."""
    if p.lse is None:
        return 0, 0, 0
    if p.kind == "varlen":
        return 0, lse.stride(0), lse.stride(1)
    return lse.stride(0), lse.stride(2), lse.stride(1)


def _addressable(x: Tensor) -> Tensor:
    """K or V as [sequence or page, row, head, column]; what neither TMA nor 16-byte copies can address is copied."""
    if x.dim() == 3:
        x = x[None]
    if not _is_aligned(x) or any(s <= 0 for s, n in zip(x.stride(), x.shape) if n > 1):
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _descriptor(x: Tensor, box: int) -> TensorDescriptor:
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, box, 1, 64], BOX)


def _multiprocessors(device: torch.device) -> int:
    """Of the GPU, or of the one that plays it."""
    active = driver.active
    return active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"]


@cache
def _no_sink(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), float("-inf"), dtype=torch.float32, device=device)


@cache
def _placeholder(device: torch.device) -> Tensor:
    """For int32 pointers that this kind of problem does not read."""
    return torch.zeros(4, dtype=torch.int32, device=device)
