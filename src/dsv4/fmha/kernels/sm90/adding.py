"""How the CTAs of backward_keys.py add their results: how many query heads of a KV head are packed into rows, and into
how many parts the rows of a key tile are cut.

A larger pack has fewer work tiles, which begin and end, and add to dK and dV; short sequences fill its tiles of rows.
TMA packs powers of two as it copies; other packs need copies of Q and dO.
"""

from dsv4.fmha.kernels.backward import TILE, Adding, Sequences, packs_by_tma, row_tiles
from dsv4.fmha.problem import FmhaProblem

IN_L2 = 40e6  # bytes of rows that CTAs may use at once
MISSES = 0.45, 1.45  # cost of L2 misses, in step times: per IN_L2 in use beyond the first, and the most, under a mask
STEP_US = {64: 2.3, 128: 2.1}  # by head dim: us of a step of rows_of_step rows with 128 keys
ENDS = 4  # the beginning and the end of a CTA, in steps
LOOPED_ENDS = 2  # the same of a work tile if CTAs loop over work tiles
BYTES_PER_US = 4e6  # speed of copies, and of additions in the L2
COPIES_US = 5.0  # launches of two copies
CLEARLY = 0.95  # copies take memory
SHORT = 512  # tokens, and keys


def find_adding(num_sms: int, p: FmhaProblem, keys: int, sequences: Sequences | None) -> Adding | None:
    """Return the pack and the parts with the least estimated time; None if sums in memory cost more than two further
    products. 12 sequences of 142 tokens at head dim 128 with 60 heads for 12 take 190 us with five heads together, 277
    with each alone; (16, 16, 512) causal takes 218 us without sums, 234 with them.

    Under a mask the CTAs of a pair are at different rows, so a large pack has more rows in use than the L2 holds:
    (2, 32:4, 8192) causal at head dim 128 takes 6017 us with all 8 heads packed, 4374 with 2."""
    if is_masked(p) and _short(num_sms, p, keys, sequences):
        return None
    found: dict[bool, tuple[float, int, int]] = {}
    for pack in range(1, p.group + 1):
        if p.group % pack == 0:
            splits = _splits(num_sms, p, keys, sequences, pack)
            us = _gradient_us(num_sms, p, keys, sequences, pack, splits)
            copied = not packs_by_tma(pack)
            found[copied] = min(found.get(copied, (us, pack, splits)), (us, pack, splits))
    us, pack, splits = found[False]
    if True in found and found[True][0] < CLEARLY * us:
        _, pack, splits = found[True]
    return Adding(pack, splits)


def _short(num_sms: int, p: FmhaProblem, keys: int, sequences: Sequences | None) -> bool:
    """Return whether a dense batch has short sequences and enough work tiles. Groups are packed, and then no longer
    short; at head dim 64 a sum is half as large."""
    tiles = row_tiles(keys, sequences) * p.batch * p.q_heads
    short = sequences is None and max(p.max_seqlen_q, keys) <= SHORT
    return short and p.head_dim == 128 and p.group == 1 and tiles >= 4 * num_sms


def is_masked(p: FmhaProblem) -> bool:
    return p.left >= 0 or p.right >= 0


def tokens_of(p: FmhaProblem, sequences: Sequences | None) -> int:
    """Return the tokens of an average sequence."""
    return p.max_seqlen_q if sequences is None else -(-p.max_seqlen_q // max(sequences.count, 1))


def rows_of_step(head_dim: int, add_dq: bool) -> int:
    return 128 if add_dq and head_dim == 64 else 64


def steps_of(rows: int, rows_of_one: int, sequences: Sequences | None) -> int:
    """Return the steps through the rows of an average sequence."""
    return -(-rows // (rows_of_one * (1 if sequences is None else max(sequences.count, 1))))


def split_rows(tiles: int, steps: int, num_sms: int) -> int:
    """Return how many parts the rows of a key tile are cut into: the number with the fewest steps, with the beginning
    and the end of a CTA. A part has at least eight. `steps`: of an average sequence."""
    if tiles >= 4 * num_sms:
        return 1
    most = max(1, min(steps // 8, 4 * num_sms // max(tiles, 1)))
    return min(range(1, most + 1), key=lambda n: -(-tiles * n // num_sms) * (-(-steps // n) + ENDS))


def loops(head_dim: int, varlen: bool, tiles: int, num_sms: int, short: bool = False) -> bool:
    """Return whether a CTA loops over the work tiles of backward_keys. That hides their beginnings and ends: at head
    dim 64 (5, 25:5, 1910) takes 636 us instead of 670, and 300 sequences of 10 to 300 tokens at head dim 128 take 576
    instead of 639. In a dense batch at head dim 128 the steps have too few registers for it: 3231 instead of 3167 us
    for (3, 20, 5000). short: few steps without sums of dQ, 218 instead of 225 us for (16, 16, 512) causal."""
    return tiles >= num_sms and (head_dim == 64 or varlen or short)


def _splits(num_sms: int, p: FmhaProblem, keys: int, sequences: Sequences | None, pack: int) -> int:
    tiles = row_tiles(keys, sequences) * p.batch * (p.q_heads // pack)
    steps = steps_of(p.max_seqlen_q * pack, rows_of_step(p.head_dim, True), sequences)
    return split_rows(tiles, steps, num_sms)


def _gradient_us(num_sms: int, p: FmhaProblem, keys: int, sequences: Sequences | None, pack: int, splits: int) -> float:
    """Return the estimated time of backward_keys, and of the memory that depends on the pack."""
    count = p.batch if sequences is None else max(sequences.count, 1)
    tokens = tokens_of(p, sequences)
    pairs = p.q_heads // pack
    tiles = -(-keys * p.batch // (count * TILE)) * count * pairs * splits
    longest, average = (-(-n * pack // rows_of_step(p.head_dim, True)) / splits for n in _tokens_seen(p, tokens))
    if loops(p.head_dim, sequences is not None, tiles, num_sms):
        turns, ends = tiles / num_sms, LOOPED_ENDS
    else:
        turns, ends = -(-tiles // num_sms), ENDS
    step = STEP_US[p.head_dim]
    if is_masked(p):
        of_pair = -(-tokens // TILE) * splits
        in_use = min(num_sms, tiles) / of_pair * tokens * pack * p.head_dim * 8  # Q, dO and the sum of dQ
        step *= min(1 + MISSES[0] * max(0.0, in_use / IN_L2 - 1), MISSES[1])
    us = step * max(turns * (average + ends), longest + ends)
    tile_bytes = TILE * p.head_dim * 4
    moved = 2 * row_tiles(p.max_seqlen_q * pack, sequences) * p.batch * pairs * tile_bytes  # sums of dQ: zeroed, read
    if Adding(pack, splits).shares_keys(p):
        moved += 2 * 2 * row_tiles(keys, sequences) * p.batch * p.kv_heads * tile_bytes + 2 * tiles * tile_bytes
    if not packs_by_tma(pack):
        moved += 2 * 2 * p.batch * p.max_seqlen_q * p.q_heads * p.head_dim * 2  # Q and dO: read, written
        us += COPIES_US
    return us + moved / BYTES_PER_US


def _tokens_seen(p: FmhaProblem, tokens: int) -> tuple[int, int]:
    """Return how many tokens see some of 128 keys: at most, and on average."""
    if p.left >= 0 and p.right >= 0:
        seen = min(tokens, p.left + p.right + TILE)
        return seen, seen
    return tokens, min(tokens, (tokens + TILE) // 2) if is_masked(p) else tokens
