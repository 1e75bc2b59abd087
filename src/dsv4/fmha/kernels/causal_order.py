"""The order in which the CTAs of looping kernels process row tiles, chosen so that all CTAs have about the same work.

A causal row tile has as many steps as it sees tiles of keys, from one to all. `dense_block` lists the row
tiles by blocks of `together` (sequence, KV head), and CTA c processes every CTAs-th entry of the list from c on. How
even that is depends on the lengths of blocks and rounds: with 21 heads of 3333 tokens and a block that has about one
tile for every CTA, the longest share is 1.37 times the average, with another block 1.04 times. So the shares are added
up for a few block sizes, once for a shape. On random shapes the choice is within 3 % of a dynamic scheduler, which
would need a counter in memory that something resets."""

from typing import NamedTuple

import torch

from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.compat import Value, gl, gluon
from dsv4.kernels.division import Divisor, divide, divisor

OVERHEAD = 0.8  # extra cost of a row tile, in tiles of keys
EVEN_ENOUGH = 0.985  # average share over the longest
MANY = 48  # row tiles of a CTA, from which on any order is even
CACHED = 24 << 20  # bytes of K and V that the heads of a block may have together: they share the L2 cache


class TileOrder(NamedTuple):
    """The order in the form that the kernel reads."""

    row_tiles: Value  # row tiles of a (sequence, KV head)
    num_tiles: Value
    last_block: Value
    block: Divisor  # row tiles of a block
    together: Divisor  # (sequence, KV head) of a block
    rest: Divisor  # (sequence, KV head) of the last block
    kv_heads: Divisor


class Order(NamedTuple):
    together: int  # (sequence, KV head) of a block
    longest: float  # share, in tiles of keys

    def tile_order(self, p: FmhaProblem, rows: int) -> TileOrder:
        row_tiles = -(-p.max_seqlen_q * p.group // rows)
        pairs = p.batch * p.kv_heads
        last = (pairs - 1) // self.together
        divisors = (row_tiles * self.together, self.together, pairs - last * self.together, p.kv_heads)
        return TileOrder(row_tiles, row_tiles * pairs, last, *(divisor(x) for x in divisors))


def order_of(p: FmhaProblem, rows: int, step: int, ctas: int) -> Order:
    """Return the order for work tiles of ``rows`` rows and steps of ``step`` keys."""
    pairs = p.batch * p.kv_heads
    lengths = _lengths(p, rows, step)
    if p.right < 0:  # all tiles are alike
        return Order(1, -(-lengths.numel() * pairs // ctas) * float(lengths[0]))
    first = min(max((ctas + lengths.numel() // 2) // lengths.numel(), 1), pairs)
    if lengths.numel() * pairs > MANY * ctas:
        return Order(first, float(lengths.sum()) * pairs / ctas)
    bytes_of_pair = p.max_seqlen_k * p.head_dim * (2 if p.same_kv else 4)
    most = min(max(CACHED // max(bytes_of_pair, 1), first), pairs)
    tried = dict.fromkeys([first, *(-(-most // n) for n in range(1, 9)), *range(first + 1, min(most, first + 9))])
    best = Order(first, float("inf"))
    for together in tried:
        share = _shares(lengths, pairs, together, ctas)
        longest = float(share.max())
        if longest < best.longest:
            best = Order(together, longest)
        if float(share.mean()) >= EVEN_ENOUGH * best.longest:
            break
    return best


def _lengths(p: FmhaProblem, rows: int, step: int) -> torch.Tensor:
    """Return the tiles of keys of each row tile of a (sequence, KV head), plus OVERHEAD."""
    tokens, keys = p.max_seqlen_q, p.max_seqlen_k
    row = torch.arange(0, tokens * p.group, rows)
    first = (row // p.group + (keys - tokens - p.left)).clamp(min=0) if p.left >= 0 else 0
    end = torch.full_like(row, keys)
    if p.right >= 0:
        last = ((row + (rows - 1)) // p.group).clamp(max=tokens - 1)
        end = (last + (keys - tokens + p.right + 1)).clamp(max=keys)
    return (end - first).clamp(min=1).add(step - 1).div(step, rounding_mode="floor").double() + OVERHEAD


def _shares(lengths: torch.Tensor, pairs: int, together: int, ctas: int) -> torch.Tensor:
    """Return the work of each CTA, by the list of `dense_block`."""
    row_tiles = lengths.numel()
    tile_id = torch.arange(row_tiles * pairs)
    block = tile_id // (row_tiles * together)
    width = (pairs - block * together).clamp(max=together)
    place = (tile_id - block * row_tiles * together) // width
    from_last = ((pairs - 1) // together - block) % 2 == 0
    work = lengths[torch.where(from_last, row_tiles - 1 - place, place)]
    return torch.zeros(ctas, dtype=work.dtype).index_add_(0, tile_id % ctas, work)


@gluon.jit
def dense_block(tile_id, order, M: gl.constexpr):
    """Return (first row, number of the sequence and KV head) of a work tile of a dense batch."""
    block = divide(tile_id, order.block)
    inner = tile_id - block * order.block.number
    last = block == order.last_block
    width = gl.where(last, order.rest.number, order.together.number)
    tile = gl.where(last, divide(inner, order.rest), divide(inner, order.together))
    pair = block * order.together.number + inner - tile * width
    tile_row = gl.where((order.last_block - block) % 2 == 0, order.row_tiles - 1 - tile, tile) * M
    return tile_row, pair
