"""FMHA forward on sm_90a: from a validated problem to launches.

The kernels are in rows.py and rows_loop.py (head dims 64, 128, 256) and wide.py (512); this file chooses tile sizes and
splits, makes TMA descriptors, and launches.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from dsv4.kernels import aot
from dsv4.kernels.compat import TRITON_VERSION, TensorDescriptor, gl
from dsv4.kernels.shared.combine import clear_rest, combine
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.shared.tiles import KINDS, NO_BOUND
from dsv4.kernels.sm90.rows import fmha_rows
from dsv4.kernels.sm90.rows_loop import fmha_rows_loop
from dsv4.kernels.sm90.wide import fmha_wide
from dsv4.plan import choose_splits
from dsv4.problem import FmhaProblem

BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
MULTIPROCESSORS = 132  # assumed where there is no GPU to ask
DETERMINISTIC_KEYS = 2048  # keys per split when the cut must not depend on the batch


@dataclass(frozen=True)
class Config:
    """Compile-time choices of one launch. keys: per tile (head dim 512: per step of two blocks)."""

    keys: int
    box: int  # rows of a TMA box at most
    consumers: int
    options: dict  # further compile-time arguments of the kernel
    loop: bool = False  # one CTA per multiprocessor loops over the row tiles


def config(p: FmhaProblem) -> Config:
    rows = p.max_seqlen_q * p.group  # of the longest sequence
    if p.head_dim == 512:
        return Config(128, 64, 1, dict(RIGHT_REGS=232, PRODUCER_REGS=40))
    tiles = -(-rows // 128) * p.kv_heads * p.batch
    large = p.kind == "dense" and tiles >= 4 * _multiprocessors(p.q.device) and p.num_splits <= 1
    if p.head_dim == 64 and large and p.right < 0 and TRITON_VERSION < (3, 9):
        # The softmax is the limit at this head dim: three warpgroups hide more of it. Triton 3.9 spills here.
        return replace(_rows_config(64, 128, 2, 3, 160, 24), loop=True)
    if p.head_dim in (64, 256) and large:  # not 128, where looping is slower
        keys, stages = (128, 3) if p.head_dim == 64 else (64, 2)
        return replace(_rows_config(p.head_dim, keys, stages, 2, 240, 24), loop=True)
    if rows <= 64 or p.head_dim == 64:
        # One warpgroup with 2 * maxnreg - PRODUCER_REGS registers; with maxnreg 128 two CTAs share a multiprocessor.
        keys, stages, producer, maxnreg = {
            64: (128, 3, 40, 128), 128: (64, 3, 40, 128), 256: (64, 2, 96, 168)
        }[p.head_dim]  # fmt: skip
        return _rows_config(p.head_dim, keys, stages, 1, 0, producer, maxnreg=maxnreg)
    return _rows_config(p.head_dim, 128 if p.head_dim == 128 else 64, 2, 2, 232, 40)


def _rows_config(head_dim: int, keys: int, stages: int, consumers: int, regs: int, producer: int, **options) -> Config:
    return Config(keys, keys, consumers, dict(D=head_dim, BN=keys, STAGES=stages, CONSUMERS=consumers,
                                              CONSUMER_REGS=regs, PRODUCER_REGS=producer, **options))  # fmt: skip


def supports(p: FmhaProblem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if p.batch > 65535:
        return f"batch {p.batch} is over 65535"
    return None


def forward(p: FmhaProblem) -> None:
    rows = p.max_seqlen_q * p.group
    c = config(p)
    row_tiles = -(-rows // (64 * c.consumers))
    splits, tiles_per_split = _splits(p, c, row_tiles)
    same_kv = _same(p.k, p.v)
    q = _rows_aligned(p.q if p.softmax_scale >= 0 else -p.q)
    kind, box = p.kind, c.box
    if p.kind == "paged":
        box = min(p.page_size & -p.page_size, c.box)  # the largest power of two that divides a page and a tile
        if box < 8:
            kind, box = "small pages", 8
    k = _addressable(p.k)
    v = k if same_kv else _addressable(p.v)
    k_desc = _descriptor(k, box)
    v_desc = k_desc if same_kv else _descriptor(v, box)
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
    kernel = fmha_wide if p.head_dim == 512 else fmha_rows_loop if c.loop else fmha_rows
    arguments = [
        q, k_desc, v_desc, out, lse, sink, cu_q, cu_k, lengths, table, part, part_lse, k, v,
        float(abs(p.softmax_scale) * LOG2E.value), want_lse, total_q, p.k.shape[0], tokens, keys, p.kv_heads, p.group,
        p.page_size if p.kind == "paged" else 1, table_stride,
        NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
        splits, tiles_per_split, *_row_strides(q), *strides_o, *strides_l, *_row_strides(k), *_row_strides(v),
    ]  # fmt: skip
    grid: tuple[int, ...] = (row_tiles, p.kv_heads * splits, p.batch)
    if c.loop:
        grid = (min(row_tiles * p.kv_heads * p.batch, _multiprocessors(p.q.device)),)
    aot.launch(kernel, grid, arguments, KIND=KINDS[kind], SAME_KV=same_kv, SPLIT=splits > 1, num_warps=4, **c.options)
    if splits > 1:
        # Splits at a time: a fixed number where the order of additions must not depend on how many there are.
        at_a_time = 16 if p.deterministic or splits <= 16 else 64
        columns = 32 if splits > 16 else min(p.head_dim, 128)
        arguments = [
            part, part_lse, out, lse, sink, cu_q, splits, total_q * p.q_heads, max(tokens, 1), p.q_heads, p.batch,
            want_lse, *strides_o, *strides_l,
        ]  # fmt: skip
        grid = (total_q * p.q_heads, p.head_dim // columns)
        aot.launch(combine, grid, arguments, D=p.head_dim, SPLITS=at_a_time, VARLEN=p.kind == "varlen",
                   COLUMNS=columns, num_warps=4)  # fmt: skip
    elif p.kind == "varlen":
        arguments = [out, lse, cu_q, total_q, p.q_heads, p.batch, want_lse, *strides_o[1:], *strides_l[1:]]
        aot.launch(clear_rest, (p.q_heads, 4), arguments, D=p.head_dim, num_warps=4)
    if out is not p.out:
        p.out.copy_(out)


def _splits(p: FmhaProblem, c: Config, row_tiles: int) -> tuple[int, int]:
    """(number of splits, fixed tiles per split or 0 = as many as it takes to use all splits)."""
    if c.loop:
        return 1, 0
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


def _same(k: Tensor, v: Tensor) -> bool:
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
    """K or V as [sequence or page, row, head, column]; what TMA cannot address is copied."""
    if x.dim() == 3:
        x = x[None]
    if not _is_aligned(x) or any(s <= 0 for s, n in zip(x.stride(), x.shape) if n > 1):
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _descriptor(x: Tensor, box: int) -> TensorDescriptor:
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, box, 1, 64], BOX)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _no_sink(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), float("-inf"), dtype=torch.float32, device=device)


@cache
def _placeholder(device: torch.device) -> Tensor:
    """For int32 pointers that this kind of problem does not read."""
    return torch.zeros(4, dtype=torch.int32, device=device)
