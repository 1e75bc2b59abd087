"""The order in which the looping kernel's CTAs process the row tiles of a varlen batch: a list that a small kernel
makes.

The host does not know the lengths of the sequences, so a kernel that runs first lists the row tiles of all of them.
CTAs of the looping kernel take its entries, from their third on by tickets, in the order in which they become ready
(signals.py). Entries are in blocks of sequences and KV heads whose keys fit into the L2 cache together; within a block
the row tile that sees the most keys is first, so that at the end of the list CTAs finish at about the same time. With a
static distribution, the longest share of random batches was 1 to 24 % above the average.

Counting the row tiles of a block before row tile r of sequence s needs no sort: the keys that row tile r sees end at
row r M + ahead (causal; ahead: keys without a query) or are all keys of the sequence, so one division counts the
earlier row tiles of each other sequence."""

from typing import NamedTuple

import torch

from dsv4.fmha.kernels.causal_order import CACHED
from dsv4.fmha.kernels.prepare import most_row_tiles
from dsv4.fmha.kernels.tiles import PackedSequences, packed
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels import dependent
from dsv4.kernels.compat import Value, gl, gluon
from dsv4.kernels.signals import take
from dsv4.runtime.program import Program

FIELDS = gl.constexpr(8)  # int32, of an entry: first row, KV head, first query, queries, first key, keys, two unused
LISTING = 264  # programs that list row tiles, if there are fewer sequences
AT_ONCE = gl.constexpr(128)  # sequences that a program reads together


class SequenceOrder(NamedTuple):
    """The list in the form that the looping kernel reads. Entry 0 has the number of the others, and the tickets."""

    entries_ptr: Value
    sequences: Value


class Blocks(NamedTuple):
    """The maximum size of a block of the list."""

    sequences: Value
    heads: Value


class Rows(NamedTuple):
    """What the list is made of, besides the sequences."""

    group: Value  # rows of a query
    kv_heads: Value
    most: Value  # entries; decreasing starts, which a GPU does not check, may need more


@gluon.jit
def _sizes(i, sequences, group, M: gl.constexpr):
    """Return (row tiles, keys, keys without a query in rows) of sequences i; 0 row tiles past the last one."""
    there = i < sequences.count
    i = gl.minimum(i, sequences.count - 1)
    _, tokens, _, keys = packed(i, sequences)
    tiles = (tokens * group + M - 1) // M
    return gl.where(there, tiles, 0), keys, (keys - tokens) * group


@gluon.jit
def list_row_tiles(entries_ptr, sequences, rows, blocks, M: gl.constexpr, CAUSAL: gl.constexpr):
    """List row tiles, 16 at a time. Program (sequence, some of its row tiles, some of the heads)."""
    dependent.launch_dependents()  # the looping kernel waits before it reads the list
    R: gl.constexpr = 16
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])  # a warp has whole rows of AT_ONCE
    LC: gl.constexpr = gl.SliceLayout(0, L)
    LR: gl.constexpr = gl.SliceLayout(1, L)
    s = gl.program_id(0)
    begin = s // blocks.sequences * blocks.sequences  # first sequence of the block
    end = gl.minimum(begin + blocks.sequences, sequences.count)
    total = 0  # row tiles of one head
    before = 0  # row tiles of earlier blocks
    within = 0  # row tiles of this block
    for first in range(0, sequences.count, AT_ONCE):
        i = first + gl.arange(0, AT_ONCE, layout=LC)
        tiles, _, _ = _sizes(i, sequences, rows.group, M)
        total += gl.sum(tiles, 0)
        before += gl.sum(gl.where(i < begin, tiles, 0), 0)
        within += gl.sum(gl.where((i >= begin) & (i < end), tiles, 0), 0)
    if (s == 0) & (gl.program_id(1) == 0) & (gl.program_id(2) == 0):
        gl.store(entries_ptr, gl.minimum(total * rows.kv_heads, rows.most))
        gl.store(entries_ptr + 1, 0)
    q_start, tokens, k_start, keys = packed(s, sequences)
    tiles = (tokens * rows.group + M - 1) // M
    for first_tile in range(gl.program_id(1) * R, tiles, gl.num_programs(1) * R):
        tile = first_tile + gl.arange(0, R, layout=LR)
        reach = tile * M + (keys - tokens) * rows.group
        rank = gl.zeros([R], gl.int32, LR)
        for first in range(begin, end, AT_ONCE):
            i = first + gl.arange(0, AT_ONCE, layout=LC)
            others, other_keys, ahead = _sizes(i, sequences, rows.group, M)
            others = gl.where(i < end, others, 0)
            if CAUSAL:
                # Row tile r' of i is earlier if r' M + ahead is more than reach, or equal and i < s.
                distance = reach[:, None] - ahead[None, :] + gl.where(i < s, M - 1, M)[None, :]
                found = gl.maximum(others[None, :] - gl.maximum(distance, 0) // M, 0)
            else:
                first_ones = (other_keys > keys) | (other_keys == keys) & (i < s)
                found = gl.where((i == s)[None, :], tile[:, None], gl.where(first_ones, others, 0)[None, :])
            rank += gl.sum(found, 1)
        for head in range(gl.program_id(2), rows.kv_heads, gl.num_programs(2)):
            # Blocks of heads follow each other; the heads of a block are side by side.
            first_head = head // blocks.heads * blocks.heads
            width = gl.minimum(blocks.heads, rows.kv_heads - first_head)
            place = before * rows.kv_heads + first_head * within + rank * width + (head - first_head)
            entry = entries_ptr + (place + 1) * FIELDS
            there = (tile < tiles) & (place < rows.most)
            gl.store(entry, tile * M, mask=there)
            gl.store(entry + 1, head, mask=there)
            gl.store(entry + 2, q_start, mask=there)
            gl.store(entry + 3, tokens, mask=there)
            gl.store(entry + 4, k_start, mask=there)
            gl.store(entry + 5, keys, mask=there)


@gluon.jit
def entry_of(tile_id, order):
    """Return (first row, KV head, first query, queries, first key, keys) of entry tile_id."""
    entry = order.entries_ptr + (tile_id + 1) * FIELDS
    return (gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4),
            gl.load(entry + 5))  # fmt: skip


@gluon.jit
def next_ticket(order, is_second):
    """Return the second entry of a CTA, or a later one. The first two need no ticket: CTA c of n takes entries c and
    2 n - 1 - c, so that the longest row tile and the shortest go together. A ticket, which is taken one row tile ahead,
    would go to any CTA here: none has finished its first."""
    if is_second:
        after = 2 * gl.num_programs(0) - 1 - gl.program_id(0)
    else:
        after = 2 * gl.num_programs(0) + take(order.entries_ptr + 1)
    return after


def prepare_order(p: FmhaProblem, program: Program, rows: int) -> SequenceOrder:
    """Add the launch that lists the row tiles of a varlen batch; return the list. rows: of a row tile."""
    most = most_row_tiles(p, rows)
    entries = program.workspace("row tiles", ((most + 1) * FIELDS.value,), torch.int32)
    bytes_of_pair = p.k.shape[0] * p.head_dim * (2 if p.same_kv else 4) // p.batch
    together = max(CACHED // max(bytes_of_pair, 1), 1)
    blocks = Blocks(max(together // p.kv_heads, 1), min(together, p.kv_heads))
    sequences = PackedSequences(p.cu_seqlens_q, p.cu_seqlens_k, p.batch, p.q.shape[0], p.k.shape[0])
    arguments = dict(entries_ptr=entries, sequences=sequences, rows=Rows(p.group, p.kv_heads, most), blocks=blocks)
    heads = min(p.kv_heads, max(LISTING // p.batch, 1))
    chunks = max(1, min(-(-p.max_seqlen_q * p.group // (16 * rows)), LISTING // (p.batch * heads)))
    program.launch(list_row_tiles, (p.batch, chunks, heads), arguments, M=rows, CAUSAL=p.right >= 0, num_warps=4)
    return SequenceOrder(entries, p.batch)
