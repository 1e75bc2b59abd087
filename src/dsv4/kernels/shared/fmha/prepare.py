"""From a validated problem to launches: descriptors, strides, splits, the combine kernel. Shared by all architectures.

A forward kernel takes the arguments that `forward_split` passes, in that order, whatever it does with them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared import cluster
from dsv4.kernels.shared.combine import clear_rest, combine
from dsv4.kernels.shared.fmha.tiles import CELLS, DENSE, NO_BOUND, PAGES, ROWS
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.runtime import aot, repeat
from dsv4.runtime.plan import choose_splits, deterministic_cut

MAX_GRID = 65535  # blocks in the second and third dimension of a grid
MULTIPROCESSORS = 132  # assumed where kernels are only compiled


@dataclass(frozen=True)
class Tiling:
    """Compile-time choices of one launch."""

    rows: int  # query rows per CTA, or per cluster of CTAs
    keys: int  # per step
    box: int  # rows of a TMA box at most
    options: dict  # further compile-time arguments of the kernel
    loop: bool = False  # one CTA per multiprocessor loops over the row tiles; no splits
    dense_as_rows: bool = False  # dense and varlen problems share a variant
    halves: bool = False  # the CTAs of a pair hold K split by rows and V by columns

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.options.get("num_ctas", 1)


def batch_reason(p: FmhaProblem) -> str | None:
    """None, or why no kernel of this kind can run the problem."""
    return f"batch {p.batch} is over {MAX_GRID}" if p.batch > MAX_GRID else None


def forward_split(p: FmhaProblem, kernel, c: Tiling) -> None:
    """Launch the forward kernel, and the combine kernel where the keys were split."""
    row_tiles = -(-p.max_seqlen_q * p.group // c.rows)
    splits, tiles_per_split = _splits(p, c, row_tiles)
    grid: tuple[int, ...] = (row_tiles, p.kv_heads * splits, p.batch)
    if c.loop:
        grid = (min(row_tiles * p.kv_heads * p.batch, multiprocessors(p.q.device) // c.ctas),)
    elif grid[1] > MAX_GRID:
        raise ValueError(f"{p.kv_heads} KV heads x {splits} splits of the keys are over {MAX_GRID} blocks")
    # Deterministic: the way through the combine kernel rounds the sink differently, and how many splits the block table
    # has room for is no property of a sequence; so paged ones take that way with one split too.
    split = splits > 1 or tiles_per_split > 0 and p.kind == "paged"
    how, box = _way(p, c)
    sign, scale = sign_and_scale(p.softmax_scale)
    q = rows_aligned(p.q)
    k = _addressable(p.k)
    v = k if same(p.k, p.v) else _addressable(p.v)
    if c.halves:
        k_desc, v_desc = _half(k, c.keys, [[0, 1, 0, 0]]), _half(v, c.keys, [[0, 0, 0, 1]])
    else:
        k_desc = _descriptor(k, box, c.ctas)
        v_desc = k_desc if v is k else _descriptor(v, box, c.ctas)
    out = p.out if is_aligned(p.out) else torch.empty_like(p.out, memory_format=torch.contiguous_format)
    placeholder = unread(p.q.device)
    sink = p.sink if p.sink is not None else no_sink(p.q_heads, p.q.device)
    want_lse = int(p.lse is not None)
    lse = p.lse if p.lse is not None else sink
    varlen = p.kind == "varlen"
    total_q = p.q.shape[0] if varlen else p.batch * p.max_seqlen_q
    tokens, keys = (0, 0) if varlen else (p.max_seqlen_q, p.max_seqlen_k)  # 0 tokens: a kernel may tell varlen by it
    cu_q, cu_k = (p.cu_seqlens_q, p.cu_seqlens_k) if varlen else (placeholder, placeholder)
    lengths, table = (p.lengths, p.block_table) if p.kind == "paged" else (placeholder, placeholder)
    page_size, table_stride = (p.page_size, table.stride(0)) if p.kind == "paged" else (1, 0)

    part, part_lse = sink, sink  # unused
    if split:
        part, part_lse = partials(p, splits, total_q * p.q_heads)
    strides_o, strides_l = row_strides(out), _lse_strides(p, lse)
    arguments = [
        q, k_desc, v_desc, out, lse, sink, cu_q, cu_k, lengths, table, part, part_lse, k, v,
        scale, want_lse, total_q, p.k.shape[0], tokens, keys, p.kv_heads, p.group, page_size, table_stride,
        NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right,
        splits, tiles_per_split, *row_strides(q), *strides_o, *strides_l, *row_strides(k), *row_strides(v),
    ]  # fmt: skip
    # What the kernel was not written to be told at compile time, it finds out when it runs.
    known = dict(HOW=how, SIGN=sign, SAME_KV=v is k, k_is_v=int(v is k), sign=sign, SPLIT=split)
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    aot.launch(kernel, grid, arguments, **known, num_warps=4, **c.options)
    if split:
        merge(p, part, part_lse, out, lse, sink, cu_q, splits, total_q, max(tokens, 1), strides_o, strides_l)
    elif varlen:
        arguments = [out, lse, cu_q, total_q, p.q_heads, p.batch, want_lse, *strides_o[1:], *strides_l[1:]]
        aot.launch(clear_rest, (p.q_heads, 4), arguments, D=p.head_dim, num_warps=4)
    if out is not p.out:
        p.out.copy_(out)


def merge(p, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, sink: Tensor, cu_q: Tensor, splits: int,
          total_q: int, tokens: int, strides_o: tuple, strides_l: tuple) -> None:  # fmt: skip
    """Launch the combine kernel. total_q: query tokens in all; tokens: of one sequence."""
    kind = getattr(p, "kind", None)  # None: V4 attention, many rows and few splits
    # Splits at a time: a fixed number where the order of additions must not depend on how many there are.
    at_a_time = 16 if p.deterministic or splits <= 16 else 64
    columns = 32 if splits > 16 else min(p.head_dim, 128)
    if kind is None and splits <= 8 and not p.deterministic:
        at_a_time, columns = (4 if splits <= 4 else 8), p.head_dim
    arguments = [
        part, part_lse, out, lse, sink, cu_q, splits, total_q * p.q_heads, tokens, p.q_heads, p.batch,
        int(p.lse is not None), *strides_o, *strides_l,
    ]  # fmt: skip
    grid = (total_q * p.q_heads, p.head_dim // columns)
    varlen = kind == "varlen"
    aot.launch(combine, grid, arguments, D=p.head_dim, SPLITS=at_a_time, VARLEN=varlen, COLUMNS=columns, num_warps=4)


def _way(p: FmhaProblem, c: Tiling) -> tuple[int, int]:
    """(how tiles of keys are read, rows of a TMA box): see loads.py."""
    if p.kind == "paged":
        box = min(p.page_size & -p.page_size, c.box)  # the largest power of two that divides a page and a tile
        return (PAGES.value, box) if box >= 8 else (CELLS.value, 8)
    return (DENSE if p.kind == "dense" and not c.dense_as_rows else ROWS).value, c.box


def sign_and_scale(scale: float) -> tuple[int, float]:
    """(what Q is multiplied by as it is loaded: 1, -1 or 0; a positive scale in base 2): masked scores are -inf, so
    that a scale of 0 or less would make them NaN or seen."""
    positive = abs(scale) * LOG2E.value
    if positive < torch.finfo(torch.float32).tiny:
        return 0, 1.0
    return (1 if scale > 0 else -1), positive


def splits_keys(p: FmhaProblem, c: Tiling) -> bool:
    """Whether a launch would split the keys of the problem."""
    splits, tiles_per_split = _splits(p, c, -(-p.max_seqlen_q * p.group // c.rows))
    return splits > 1 or tiles_per_split > 0


def _splits(p: FmhaProblem, c: Tiling, row_tiles: int) -> tuple[int, int]:
    """(number of splits, least tiles per split or 0 = as many as it takes to use all splits)."""
    if c.loop:
        return 1, 0
    longest = min(p.max_seqlen_k, p.left + p.right + p.max_seqlen_q if min(p.left, p.right) >= 0 else p.max_seqlen_k)
    if p.deterministic:
        # Nothing but T, which all sequences share, and a sequence's own keys may count; varlen has no such T.
        splits, each = (0, 0) if p.kind == "varlen" else deterministic_cut(p.max_seqlen_q * p.group, longest)
        return max(splits, 1), each // c.keys
    if p.num_splits > 0:
        return p.num_splits, 0
    return choose_splits(row_tiles * p.kv_heads * p.batch * c.ctas, multiprocessors(p.q.device), longest), 0


def partials(p, splits: int, rows: int) -> tuple[Tensor, Tensor]:
    """fp32 buffers for partial O [splits, rows, D] and LSE [splits, rows]: the plan's, else fresh."""
    size = splits * rows * (p.head_dim + 1)
    scratch = p.scratch
    if scratch is None or scratch.numel() < size:
        if scratch is not None and scratch.is_cuda:
            raise ValueError(f"plan: got one with {scratch.numel()} floats of scratch; accepted: {size} or more, as "
                             f"dsv4.plan gives with deterministic={p.deterministic}")  # fmt: skip
        scratch = torch.empty(size, dtype=torch.float32, device=p.q.device)
        if repeat.current.watch is not None:
            repeat.current.watch.scratch = scratch
    return scratch[: splits * rows * p.head_dim], scratch[splits * rows * p.head_dim :]


def same(k: Tensor, v: Tensor) -> bool:
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def is_aligned(x: Tensor) -> bool:
    """16-byte accesses are possible: base, and all strides in units of 8 elements."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s, n in zip(x.stride()[:-1], x.shape) if n > 1)


def rows_aligned(x: Tensor) -> Tensor:
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def row_strides(x: Tensor) -> tuple[int, int, int]:
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
    if not is_aligned(x) or any(s <= 0 for s, n in zip(x.stride(), x.shape) if n > 1):
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _descriptor(x: Tensor, box: int, ctas: int) -> TensorDescriptor:
    return _boxes(x, [1, box, 1, 64], cluster.alike(ctas, 4))


def _half(x: Tensor, keys: int, split: list) -> TensorDescriptor:
    """Tiles of 256 columns over a pair of CTAs."""
    return _boxes(x, [1, keys, 1, 256], split)


def _boxes(x: Tensor, block: list[int], cga_layout: list) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, rank=4, cga_layout=cga_layout)
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def inverse_of(divisor: int) -> tuple[int, int]:
    """(m, s) such that n // divisor is n * m >> s for 0 <= n < 2^31; m is 32 bits wide, here as a signed number."""
    shift = 31 + (divisor - 1).bit_length()
    m = -(-(1 << shift) // divisor)
    return m - (1 << 32) if m >> 31 else m, shift


def multiprocessors(device: torch.device) -> int:
    """Of the GPU, or of what plays it."""
    if device.type == "cuda":
        return _of_gpu(device)
    try:
        active = driver.active
        return active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"]
    except RuntimeError:  # Triton found no driver
        return MULTIPROCESSORS


@cache
def _of_gpu(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def no_sink(heads: int, device: torch.device) -> Tensor:
    return repeat.constant(torch.full((heads,), float("-inf"), dtype=torch.float32, device=device))


@cache
def unread(device: torch.device) -> Tensor:
    """For int32 pointers that this kind of problem does not read."""
    return repeat.constant(torch.zeros(4, dtype=torch.int32, device=device))
