"""Gradients of fmha, from a request to the arguments of an architecture's kernels. All architectures share this file.

The kernels get a varlen batch as it is; by_sequence.py has the exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward_rows import RowSizes, RowStrides, RowTensors, backward_rows
from dsv4.fmha.kernels.backward_sequences import Past, clear_past
from dsv4.fmha.kernels.prepare import row_strides
from dsv4.fmha.kernels.round_sum import Summed, round_sum
from dsv4.fmha.kernels.scores import ScoreScale, score_scale
from dsv4.fmha.kernels.tiles import NO_BOUND
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime.program import Program, Slot

TILE = 128
# P is at most 1 and dS is scaled by its bound, so fp16 loses no exponents.
FP16_P_SCALE = 2.0**14
FP16_MOST = 2.0**14


def supports(b: FmhaBackward) -> str | None:
    """Return None, or why no kernel can run the problem."""
    return "paged keys have no gradient" if b.forward.kind == "paged" else None


class Sequences(NamedTuple):
    """Starts of the sequences of a varlen batch, which the kernels get as a dense batch of one."""

    cu_q: Slot
    cu_k: Slot
    longest_q: int  # most tokens of a sequence
    longest_k: int

    @property
    def count(self) -> int:
        return self.cu_q.shape[0] - 1


class Adding(NamedTuple):
    """How CTAs add to sums of dQ and, if several have the same keys, of dK and dV."""

    pack: int  # query heads that are packed into rows
    splits: int  # parts of these rows

    def shares_keys(self, p: FmhaProblem) -> bool:
        return self.splits * p.group > self.pack


@dataclass(frozen=True)
class Packed:
    """Inputs of an architecture's kernels: a dense batch, with the query heads of a KV head packed into its rows, all
    of them unless results are added.

    Kernels that request it (by_tma) get q, dout and dq with two dimensions for the rows, tokens and pack, if TMA
    can pack them as it copies.
    """

    p: FmhaProblem
    pack: int
    q: Slot  # [B, H, R, D], H = query heads / pack, R = tokens times pack; or [B, H, T, pack, D]
    k: Slot  # [B, Hkv, S, D]
    v: Slot
    dout: Slot  # shape as q
    lse2: Slot  # fp32 [B, H, R]: see backward_rows.py
    delta: Slot
    ds_scale: Slot  # fp32 [1], for fp16
    dq: Slot | None  # shape as q
    dk: Slot | None  # shape as k
    dv: Slot | None
    sequences: Sequences | None
    adding: Adding | None = None
    ticket: Slot | None = None  # int32 [1], 0: of kernels that loop over work tiles
    sums: Slot | None = None  # fp32, zeroed, flat, if added: tiles of 128 rows of dQ, then of dK and dV if shared

    batch = property(lambda self: self.q.shape[0])
    heads = property(lambda self: self.q.shape[1])
    rows = property(lambda self: self.p.max_seqlen_q * self.pack)
    width = property(lambda self: self.q.shape[-1])
    keys = property(lambda self: self.k.shape[2])
    fp16 = property(lambda self: self.q.dtype == torch.float16)

    @property
    def scale(self) -> ScoreScale:
        return score_scale(self.p, self.p.softmax_scale * LOG2E.value)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes by the names that the kernels use."""
        p = self.p
        return dict(
            rows=self.rows,
            tokens=p.max_seqlen_q,
            keys=self.keys,
            group=self.pack,
            left=NO_BOUND if p.left < 0 else p.left,
            right=NO_BOUND if p.right < 0 else p.right,
            heads=self.heads,
        )


Kernels = Callable[[Program, Packed], None]  # an architecture's kernels
# (problem, keys, sequences) -> how results are added, or None
FindAdding = Callable[[FmhaProblem, int, Sequences | None], Adding | None]
# (problem) -> whether the query heads of a KV head are not packed
OneHeadEach = Callable[[FmhaProblem], bool]


def prepare_at_once(
    b: FmhaBackward, program: Program, kernels: Kernels, find_adding: FindAdding | None = None,
    one_head_each: OneHeadEach | None = None,
) -> None:  # fmt: skip
    """Add the launches for any batch, by kernels that support sequences. If they make a gradient instead of filling the
    given one, it must be 0 in rows that belong to no sequence."""
    p = b.forward
    if p.kind == "dense":
        prepare_dense(b, program, kernels, find_adding=find_adding, packs=one_head_each is None or not one_head_each(p))
        return
    _prepare_clear(b, program)

    def one(x: Slot | None) -> Slot | None:
        return None if x is None else x[None]

    def by_head(x: Slot | None) -> Slot | None:
        return None if x is None else x.transpose(0, 1)[None]

    dense = replace(
        p, kind="dense", q=one(p.q), k=one(p.k), v=one(p.v), out=one(p.out), lse=by_head(p.lse),
        max_seqlen_q=p.q.shape[0], max_seqlen_k=p.k.shape[0], cu_seqlens_q=None, cu_seqlens_k=None,
    )  # fmt: skip
    gradients = (one(x) for x in (b.dq, b.dk, b.dv))
    request = FmhaBackward(dense, one(b.dout), by_head(b.dlse), *gradients, b.dsink)
    sequences = Sequences(p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k)
    prepare_dense(request, program, kernels, sequences, find_adding, one_head_each is None or not one_head_each(p))


def _prepare_clear(b: FmhaBackward, program: Program) -> None:
    """Zero the rows of a varlen batch that no sequence has; the kernels write the others anyway."""
    p = b.forward

    def past(x: Slot | None, like: Slot, cu: Slot) -> Past:
        heads = 0 if x is None else x.shape[1]
        x = like if x is None else x
        return Past(x, cu, cu.shape[0] - 1, x.shape[0], heads, *x.stride()[:2])

    gradients = dict(
        dq=past(b.dq, p.q, p.cu_seqlens_q), dk=past(b.dk, p.k, p.cu_seqlens_k), dv=past(b.dv, p.v, p.cu_seqlens_k)
    )
    program.launch(clear_past, (p.q_heads, 3, 4), gradients, D=p.head_dim, num_warps=4)


def prepare_dense(
    b: FmhaBackward,
    program: Program,
    kernels: Kernels,
    sequences: Sequences | None = None,
    find_adding: FindAdding | None = None,
    packs: bool = True,
) -> None:
    """Add the launches of a dense batch. find_adding: of kernels that pack rows by TMA and may add their results."""
    p = b.forward
    # No query sees the keys before the first window: they may hold NaN, and their gradient is 0. At the end there are
    # none: the last query sees the last key.
    invisible = 0
    if sequences is None and p.left >= 0:
        invisible = min(max(0, p.max_seqlen_k - p.max_seqlen_q - p.left), p.max_seqlen_k)
    k, v, dk, dv = p.k, p.v, b.dk, b.dv
    if invisible:
        for x in (dk, dv):
            if x is not None:
                program.fill(x[:, :invisible], 0)
        k, v, dk, dv = (None if x is None else x[:, invisible:] for x in (k, v, dk, dv))
    dout = addressable(program, b.dout)
    adding, pack, sums = None, p.group if packs else 1, None
    if find_adding and b.dq is not None and (dk is not None or dv is not None) and not p.deterministic:
        adding = find_adding(p, k.shape[1], sequences)
    if adding is not None:
        pack = adding.pack
        tiles = row_tiles(p.max_seqlen_q * pack, sequences) * p.batch * (p.q_heads // pack)
        if adding.shares_keys(p):
            tiles += 2 * row_tiles(k.shape[1], sequences) * p.batch * p.kv_heads
        sums = program.workspace("sums of gradients", (tiles * TILE * p.head_dim,), torch.float32)
    ticket = program.workspace("ticket", (1,), torch.int32)
    lse2, delta, plain = _rows(b, program, dout, pack, sums, ticket)
    if b.dsink is not None:
        program.compute(partial(_sum_dsink, pack), b.dsink, p.sink, p.lse, plain)
    if b.dq is None and b.dk is None and b.dv is None:
        return
    k, v = (addressable(program, x.transpose(1, 2)) for x in (k, v))
    ds_scale = lse2  # not read
    if p.q.dtype == torch.float16:
        ds_scale = program.workspace("ds_scale", (1,), torch.float32)
        program.compute(_find_ds_scale, ds_scale, dout, v, b.dlse, p.lse)
    dk, dv = (None if x is None else x.transpose(1, 2) for x in (dk, dv))
    terms = (lse2, delta, ds_scale)
    if find_adding and packs_by_tma(pack) and pack > 1:
        q, dout = (_by_head(addressable(program, x), pack) for x in (p.q, dout))
    else:
        q, dout = _packed(program, p.q, pack), _packed(program, dout, pack)
    dq = None if b.dq is None else _by_head(b.dq, pack)
    if find_adding or dq is None:
        kernels(program, Packed(p, pack, q, k, v, dout, *terms, dq, dk, dv, sequences, adding, ticket, sums))
        return
    rows = rows_of_dq(program, dq, sequences)
    kernels(program, Packed(p, pack, q, k, v, dout, *terms, rows, dk, dv, sequences))
    keep_dq(program, dq, rows)


def packs_by_tma(pack: int) -> bool:
    """Return whether a TMA box of 64 rows holds whole tokens of a pack."""
    return 64 % pack == 0


def row_tiles(rows: int, sequences: Sequences | None) -> int:
    """Return the row tiles of a pair of sequence and KV head; in a varlen batch, the most that there may be."""
    return -(-rows // TILE) if sequences is None else rows // TILE + sequences.count


def rows_of_dq(program: Program, dq: Slot, sequences: Sequences | None) -> Slot:
    """Return dq [B, Hkv, T, G, D] as [B, Hkv, R, D]: the same memory, or memory that keep_dq copies from."""
    b, heads, tokens, group, d = dq.shape
    if (merged := _merged(dq)) is not None:
        return merged
    return made_like(program, (b, heads, tokens * group, d), dq.dtype, sequences)


def keep_dq(program: Program, dq: Slot, rows: Slot) -> None:
    """Copy what rows_of_dq made to dq, once it is filled."""
    if dq.index != rows.index:
        _copy_by_head(program, dq, rows.unflatten(2, (-1, dq.shape[3])))


def sums_descriptor(sums: Slot) -> TensorDescriptor:
    """Return the descriptor with which kernels add blocks to sums (round_sum.py)."""
    lines = sums.view((sums.numel() // 32, 32), (32, 1))
    return TensorDescriptor(lines, list(lines.shape), [32, 1], [128, 32], gl.NVMMASharedLayout(128, 32))


class Rounding(NamedTuple):
    """A gradient and the sums that round_sum makes it from."""

    gradient: Slot  # [B, H, T, pack, D]
    sums: Slot
    tiles: int  # tiles of 128 rows
    parts: int = 1
    scale: float = 1.0
    cu: Slot | None = None  # starts of the sequences of a varlen batch


def prepare_round_sum(program: Program, x: Packed, gradients: dict[str, Rounding], **constants: Any) -> None:
    """Round the sums of dq, dk and dv, those that are given."""
    blocks = {name: of.tiles * x.width // 32 for name, of in gradients.items()}
    arguments, copies = {}, []
    for name, of in gradients.items():
        _, heads, tokens, group, _ = of.gradient.shape
        to = of.gradient
        if not is_addressable(to):
            to = made_like(program, to.shape, to.dtype, x.sequences)
            copies.append((of.gradient, to))
        arguments[name] = Summed(
            of.sums,
            of.parts,
            blocks[name],
            tokens,
            group,
            heads,
            x.lse2 if of.cu is None else of.cu,
            of.scale,
            to,
            *(stride // 8 for stride in to.stride()[:4]),
        )
    unwanted = next(iter(arguments.values()))._replace(blocks=0)
    arguments = {name: arguments.get(name, unwanted) for name in ("dq", "dk", "dv")}
    sequences = 0 if x.sequences is None else x.sequences.count
    shared = dict(sequences=sequences, ds_ptr=x.ds_scale)
    program.launch(round_sum, (sum(blocks.values()),), arguments | shared, **constants)
    for gradient, made in copies:
        program.copy(gradient, made)


def _copy_by_head(program: Program, to: Slot, source: Slot) -> None:
    """Copy in words of 8 bytes if both tensors allow it: torch copies 2-byte elements at a third of the speed."""
    if is_addressable(to) and is_addressable(source):
        to, source = (x.bytes_as(torch.int64) for x in (to, source))
    program.copy(to, source)


def made_like(program: Program, shape: tuple[int, ...], dtype: torch.dtype, sequences: Sequences | None) -> Slot:
    """Return memory for a gradient; in a varlen batch the kernels write only the rows of its sequences."""
    made = program.workspace("gradient", shape, dtype)
    if sequences is not None:
        program.fill(made, 0)
    return made


def _rows(
    b: FmhaBackward, program: Program, dout: Slot, pack: int, sums: Slot | None, ticket: Slot
) -> tuple[Slot, Slot, Slot]:
    """Return fp32 [B, H, T * pack] each: the exponent to subtract (base 2), delta including the LSE's gradient, and
    dO . O if dsink is wanted. The same launch zeroes the sums and the ticket."""
    p = b.forward
    out = addressable(program, p.out)
    shape = (p.batch, p.q_heads // pack, p.max_seqlen_q * pack)
    lse2, delta = (program.workspace(name, shape, torch.float32) for name in ("lse2", "delta"))
    plain = lse2 if b.dsink is None else program.workspace("plain", shape, torch.float32)  # not written if None
    lse, dlse, sink = p.lse, b.dlse, p.sink
    assert lse is not None
    tokens = max(1024 // p.head_dim, 8)  # tokens of a program: with fewer or more it is slower
    sink, dlse = (lse if x is None else x for x in (sink, dlse))  # not read if None
    arguments = dict(
        tensors=RowTensors(
            out_ptr=out,
            dout_ptr=dout,
            lse_ptr=lse,
            dlse_ptr=dlse,
            sink_ptr=sink,
            lse2_ptr=lse2,
            delta_ptr=delta,
            plain_ptr=plain,
            zero_ptr=lse2 if sums is None else sums,
            ticket_ptr=ticket,
        ),
        sizes=RowSizes(
            tokens=p.max_seqlen_q,
            q_heads=p.q_heads,
            group=pack,
            has_sink=int(p.sink is not None),
            has_dlse=int(b.dlse is not None),
            has_plain=int(b.dsink is not None),
            zeros=0 if sums is None else sums.numel() // (tokens * p.head_dim),
        ),
        strides=RowStrides(*row_strides(out), *row_strides(dout), *lse.stride(), *dlse.stride()),
    )
    programs = p.batch * -(-p.max_seqlen_q // tokens) * p.q_heads
    program.launch(backward_rows, (programs,), arguments, D=p.head_dim, TOKENS=tokens, num_warps=4)
    return lse2, delta, plain


def _sum_dsink(pack: int, dsink: Tensor, sink: Tensor, lse: Tensor, plain: Tensor) -> None:
    lse = lse.unflatten(1, (-1, pack)).transpose(2, 3)  # [B, H, T, pack], as plain
    share = torch.sigmoid(sink.view(-1, 1, pack) - lse)
    dsink.copy_(-(torch.where(lse == float("-inf"), 0, share) * plain.view(lse.shape)).sum((0, 2)).flatten())


def _by_head(x: Slot, group: int) -> Slot:
    """View [B, T, Hq, D] as [B, Hkv, T, G, D]."""
    return x.unflatten(2, (-1, group)).transpose(1, 2)


def _merged(x: Slot) -> Slot | None:
    """View [B, Hkv, T, G, D] as [B, Hkv, T * G, D]; None if the rows have no single stride."""
    _, _, tokens, group, _ = x.shape
    if tokens > 1 and group > 1 and x.stride(2) != group * x.stride(3):
        return None
    return x.flatten(2, 3)


def _packed(program: Program, x: Slot, group: int) -> Slot:
    """Return [B, T, Hq, D] as [B, Hkv, T * G, D], for TMA; a copy if the packed rows have no single
    stride."""
    x = addressable(program, x)
    by_head = _by_head(x, group)
    if (merged := _merged(by_head)) is not None:
        return merged
    b, t, heads, d = x.shape
    made = program.workspace(f"packed {x.name}", (b, heads // group, t * group, d), x.dtype)
    _copy_by_head(program, made.unflatten(2, (-1, group)), by_head)
    return made


def is_addressable(x: Slot) -> bool:
    """Return whether TMA can address x."""
    *strides, last = x.strides
    return (
        last == 1
        and x.data_ptr() % 16 == 0
        and all(size == 1 or stride > 0 and stride % 8 == 0 for stride, size in zip(strides, x.shape))
    )


def addressable(program: Program, x: Slot) -> Slot:
    """Return x if TMA can address it, else a copy."""
    return x if is_addressable(x) else program.copied(x)


def rows_box(x: Slot, rows: int) -> list[int]:
    """Return the box of packed rows, which TMA packs if they have two dimensions."""
    return [1, 1, rows, 64] if x.ndim == 4 else [1, 1, rows // x.shape[3], x.shape[3], 64]


def descriptor(x: Slot, block: list[int]) -> TensorDescriptor:
    """Return the descriptor of an addressable tensor."""
    strides = [stride if size > 1 else TILE for stride, size in zip(x.strides, x.shape)]
    layout = gl.NVMMASharedLayout(block[-1] * 2, 16, rank=len(block))
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], block, layout)


def _find_ds_scale(ds_scale: Tensor, dout: Tensor, v: Tensor, dlse: Tensor | None, lse: Tensor) -> None:
    """Find the power of two that brings |dS| <= 2 |dO| |v| + |dL| near the top of fp16's range."""
    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (dout, v))
    # Rows outside all sequences and keys that no query sees may hold anything.
    longest = [torch.where(norm.isfinite(), norm, 0).amax() for norm in norms]
    most = 2 * longest[0] * longest[1]
    if dlse is not None:
        most = most + torch.where(dlse.isfinite() & (lse > float("-inf")), dlse.abs(), 0).amax()
    torch.exp2(torch.log2(FP16_MOST / torch.where(most == 0, 1.0, most)).floor().reshape(1), out=ds_scale)
