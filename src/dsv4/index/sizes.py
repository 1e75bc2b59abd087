"""Sizes of the memory that index_topk needs, for the scores of a block of queries and for what its choice keeps."""

from dsv4.runtime.splits import choose_splits

# Scores that one CTA chooses from; the widest lists, at most half of that, so that a round leaves less than it
# was given; bytes of the scores held at once.
INDEX_PIECE = 16384
MAX_TOPK = 4096
INDEX_BYTES = 256 << 20
# Neighbouring rows whose greatest score is stored with the scores; the widest lists that are chosen by it.
GROUP = 16
LINE_UNIT = 4 * GROUP
MAX_TOPK_BY_GROUPS = 2048
MAX_TOPK_SHARED = 1024  # the widest lists that several CTAs make together: they compare all pairs
MOST_EACH = 8  # groups of a unit
HELD_KEYS = 4096  # keys of a list that a CTA may hold in registers
BLOCK = 8  # rows of a block of index_blocks
HELD = 32  # scores that a thread of the choice may hold in registers
# CTAs that choose the rows of one query together (and its blocks), and the fewest rows of a query for as many. With
# fewer, a single CTA that sorts is faster (benchmarks/NOTES.md).
LEAST_SHARES, BLOCK_SHARES, MOST_SHARES = 16, 32, 64
LEAST_ROWS = {32: 16385, 16: 65536}


def index_line(capacity: int) -> int:
    """Return the scores of a query with this many rows, rounded up so that 16-byte loads can read scores and maxima."""
    return -(-capacity // LINE_UNIT) * LINE_UNIT


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def index_kept(capacity: int, topk: int) -> int:
    """Return the most rows that the choice by groups sorts."""
    return max(2 * power_of_two(min(topk, capacity)), 128)


def index_words(capacity: int, topk: int = MAX_TOPK) -> int:
    """Return the fp32 words that index_topk needs for a query with this many rows: the scores, the greatest of every
    group, and what the choice keeps, by groups or in rounds, two words each."""
    kept = power_of_two(max(min(topk, capacity), 1))
    items, rounds = capacity, 0
    while True:
        pieces = -(-items // max(INDEX_PIECE, kept))
        rounds += pieces * kept
        if pieces <= 1:
            break
        items = pieces * kept
    by_groups = index_kept(capacity, min(topk, MAX_TOPK_BY_GROUPS)) + index_candidates(capacity, topk)
    return index_line(capacity) + index_line(capacity) // GROUP + 2 * max(rounds, by_groups)


def index_candidates(capacity: int, topk: int) -> int:
    """Return how many groups the choice by groups chooses from if a query has more than INDEX_PIECE: those that the
    choice in pieces of half of that keeps. 0 if it has fewer, or if too many would be kept."""
    groups = index_line(capacity) // GROUP
    kept = -(-groups // (INDEX_PIECE // 2)) * index_kept(capacity, topk)
    return kept if groups > INDEX_PIECE >= kept else 0


def block_words(capacity: int, kept: int) -> int:
    """Return the fp32 words that index_blocks needs for a query in addition to index_topk: the greatest score of every
    block of 8 rows, and what the rounds of its choice keep, two words each."""
    items = index_line(capacity) // BLOCK
    words, kept = items, max(power_of_two(min(kept, items)), 4)
    while items > max(INDEX_PIECE, kept):
        items = -(-items // INDEX_PIECE) * kept
        words += 2 * items
    return -(-words // 4) * 4 + 4  # every array begins at a multiple of 16 bytes


def index_groups(capacity: int) -> int:
    """Return the groups of a query, rounded up to a power of two."""
    return power_of_two(index_line(capacity) // GROUP)


def index_shares(queries: int, num_sms: int, capacity: int, topk: int, blocks: int) -> int:
    """Return the CTAs per query of the choice by groups, a power of two, for queries with this many rows."""
    fit = min(num_sms // max(queries, 1), MOST_SHARES)
    if fit < LEAST_SHARES or topk > MAX_TOPK_SHARED or INDEX_PIECE // 2 < capacity and cut_by_rows(capacity, topk):
        return 1
    shares = 1 << fit.bit_length() - 1
    return 1 if capacity < LEAST_ROWS.get(shares, 0) or blocks and shares < BLOCK_SHARES else shares


def index_splits(blocks: int, num_sms: int, residents: int, columns: int, tile: int, spare: bool) -> int:
    """Return the CTAs that share the scores of one query, or of a few that go together, of which there are `blocks`.
    An SM needs `residents` CTAs to keep the memory busy. tile: rows of a step; spare: registers allow one CTA more."""
    places = residents * num_sms
    # few blocks: one tile per CTA, or as many CTAs as fit
    splits = max(choose_splits(blocks, places, columns, merged=False), min(places // blocks, -(-columns // tile)))
    if 4 * blocks > places:
        # One wave, if it nearly fills the SMs: 200 x 8192 FP8 keys are 600 CTAs, not one and a half waves. Else, if the
        # last wave is filled badly, shorter CTAs, which end at different times.
        whole = (residents + 1) * num_sms // blocks if spare else 0
        if 4 * blocks * whole >= 3 * places:
            splits = whole
        elif blocks * splits / places < 0.9 * -(-blocks * splits // places) and columns >= 8 * 1024:
            splits = max(splits, 8)
    return splits


def cut_by_rows(capacity: int, topk: int) -> bool:
    """Return whether the shares of a query cut by its scores: it has too few groups for a cut by their maxima."""
    return index_groups(capacity) < 2 * power_of_two(topk) and capacity <= INDEX_PIECE


def index_each(capacity: int, wanted: int) -> int:
    """Return the groups of a unit. The shares cut by the maxima of units, so there must be enough of them."""
    units = 4 * power_of_two(wanted)
    return next((each for each in (MOST_EACH, 4) if index_groups(capacity) // each >= units), 1)


def index_room(capacity: int, wanted: int, rows: int = 1) -> int:
    """Return the most keys, of rows or of blocks of `rows`, that shares of a query find: all units above the cut."""
    return min(index_line(capacity), MOST_EACH * GROUP * (wanted + wanted // 8)) // rows + 4


def index_list_words(capacity: int, shares: int, topk: int, blocks: int = 0) -> int:
    """Return the words that the shares of a query need: the number of keys, 64-bit keys, and those that each keeps."""
    words = 4 + 2 * (index_room(capacity, topk) + shares * index_kept(capacity, topk))
    return words + 2 * (index_room(capacity, blocks, BLOCK) + shares * index_kept(capacity, blocks) if blocks else 0)


def index_block(queries: int, capacity: int, topk: int = MAX_TOPK) -> int:
    """Return the number of queries whose scores are held at once."""
    return max(1, min(queries, INDEX_BYTES // (4 * index_words(capacity, topk))))
