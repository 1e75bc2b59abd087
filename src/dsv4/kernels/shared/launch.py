"""From a validated problem to launches: descriptors, strides, splits, the combine kernel. Shared by all architectures.

A forward kernel takes the arguments that `forward_split` passes, in that order, whatever it does with them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared.combine import clear_rest, combine
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.shared.tiles import KINDS, NO_BOUND
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


def paged_reason(p: FmhaProblem) -> str | None:
    """None, or why TMA boxes cannot read the problem."""
    if p.kind == "paged" and _box_rows(p.page_size, 64) < 8:
        return f"page size {p.page_size} is not a multiple of 8"
    if p.batch > 65535:
        return f"batch {p.batch} is over 65535"
    return None


def forward_split(p: FmhaProblem, kernel, c: Tiling) -> None:
    """Launch the forward kernel, and the combine kernel where the keys were split."""
    row_tiles = -(-p.max_seqlen_q * p.group // c.rows)
    splits, tiles_per_split = _splits(p, c, row_tiles)
    q = _rows_aligned(p.q if p.softmax_scale >= 0 else -p.q)
    box = _box_rows(p.page_size, c.box) if p.kind == "paged" else c.box
    k_desc = _descriptor(p.k, box)
    v_desc = k_desc if same(p.k, p.v) else _descriptor(p.v, box)
    out = p.out if _is_aligned(p.out) else torch.empty_like(p.out, memory_format=torch.contiguous_format)
    placeholder = _placeholder(p.q.device)
    sink = p.sink if p.sink is not None else _no_sink(p.q_heads, p.q.device)
    want_lse = int(p.lse is not None)
    lse = p.lse if p.lse is not None else sink
    total_q = p.q.shape[0] if p.kind == "varlen" else p.batch * p.max_seqlen_q
    tokens, keys = (0, 0) if p.kind == "varlen" else (p.max_seqlen_q, p.max_seqlen_k)
    cu_q = p.cu_seqlens_q if p.kind == "varlen" else placeholder
    cu_k = p.cu_seqlens_k if p.kind == "varlen" else placeholder
    lengths, table = (p.lengths, p.block_table) if p.kind == "paged" else (placeholder, placeholder)
    table_stride = table.stride(0) if p.kind == "paged" else 0

    part, part_lse = sink, sink  # unused
    if splits > 1:
        part, part_lse = _scratch(p, splits, total_q * p.q_heads)
    strides_o, strides_l = _row_strides(out), _lse_strides(p, lse)
    kernel[(row_tiles, p.kv_heads * splits, p.batch)](
        q, k_desc, v_desc, out, lse, sink, cu_q, cu_k, lengths, table, part, part_lse,
        float(abs(p.softmax_scale) * LOG2E.value), want_lse, total_q, p.k.shape[0], tokens, keys, p.kv_heads, p.group,
        p.page_size if p.kind == "paged" else 1, table_stride,
        NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
        splits, tiles_per_split, *_row_strides(q), *strides_o, *strides_l,
        KIND=KINDS[p.kind], SPLIT=splits > 1, num_warps=4, **c.options,
    )  # fmt: skip
    if splits > 1:
        # Splits at a time: a fixed number where the order of additions must not depend on how many there are.
        at_a_time = 16 if p.deterministic else 8 if splits <= 8 else 64
        combine[(total_q * p.q_heads, p.head_dim // 64)](
            part, part_lse, out, lse, sink, cu_q, splits, total_q * p.q_heads, max(tokens, 1), p.q_heads, p.batch,
            want_lse, *strides_o, *strides_l, D=p.head_dim, SPLITS=at_a_time, VARLEN=p.kind == "varlen", num_warps=4,
        )  # fmt: skip
    elif p.kind == "varlen":
        clear_rest[(p.q_heads, 4)](
            out, lse, cu_q, total_q, p.q_heads, p.batch, want_lse, *strides_o[1:], *strides_l[1:], D=p.head_dim,
            num_warps=4,
        )  # fmt: skip
    if out is not p.out:
        p.out.copy_(out)


def _splits(p: FmhaProblem, c: Tiling, row_tiles: int) -> tuple[int, int]:
    """(number of splits, fixed tiles per split or 0 = as many as it takes to use all splits)."""
    longest = min(p.max_seqlen_k, p.left + p.right + p.max_seqlen_q if min(p.left, p.right) >= 0 else p.max_seqlen_k)
    tiles = -(-longest // c.keys) + 1  # a paged range may start within a tile
    if p.deterministic:
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


def _box_rows(page_size: int, at_most: int) -> int:
    """The largest power of two that divides a page and a tile."""
    return min(page_size & -page_size, at_most)


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


def _descriptor(x: Tensor, box: int) -> TensorDescriptor:
    """TMA descriptor of K or V as [sequence or page, row, head, column]; what TMA cannot address is copied."""
    if x.dim() == 3:
        x = x[None]
    if not _is_aligned(x) or any(s <= 0 for s, n in zip(x.stride(), x.shape) if n > 1):
        x = x.clone(memory_format=torch.contiguous_format)
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
