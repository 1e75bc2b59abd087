"""How much memory index_topk needs for the scores of a block of queries and for what its choice keeps."""

# Scores that one thread block chooses from; the widest lists, at most half of that, so that a round leaves less than it
# was given; bytes of the scores held at once.
INDEX_PIECE = 16384
MAX_TOPK = 4096
INDEX_BYTES = 256 << 20
# Neighbouring rows whose greatest score is kept beside the scores; the widest lists that are chosen by it.
GROUP = 16
LINE_UNIT = 4 * GROUP
MAX_TOPK_BY_GROUPS = 2048
MAX_TOPK_SHARED = 1024  # the widest lists that several CTAs make together: they compare all pairs
MOST_EACH = 8  # groups of a unit
HELD_KEYS = 4096  # of a list, that a CTA may have in registers
BLOCK = 8  # rows of a block, of those that index_blocks keeps
HELD = 32  # scores that a thread of the choice may have in registers
# CTAs that choose the rows of one query together; with fewer, one that sorts is as fast.
LEAST_SHARES, MOST_SHARES = 16, 64


def index_line(capacity: int) -> int:
    """The scores of a query with this many rows, up to what can be read 16 bytes at a time, maxima too."""
    return -(-capacity // LINE_UNIT) * LINE_UNIT


def power_of_two(n: int) -> int:
    """The least one that is not less."""
    return 1 << max(n - 1, 0).bit_length()


def index_kept(capacity: int, topk: int) -> int:
    """Rows that the choice by groups sorts at most."""
    return max(2 * power_of_two(min(topk, capacity)), 128)


def index_words(capacity: int, topk: int = MAX_TOPK) -> int:
    """fp32 words that index_topk needs for a query with this many rows: the scores, the greatest one of every group,
    and what the choice keeps, two words each: by groups, or in rounds."""
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
    """Groups that the choice by groups has to choose from where a query has more than INDEX_PIECE: those that the
    choice in pieces of half of that keeps. 0 where it has fewer, or where too many would be kept."""
    groups = index_line(capacity) // GROUP
    kept = -(-groups // (INDEX_PIECE // 2)) * index_kept(capacity, topk)
    return kept if groups > INDEX_PIECE >= kept else 0


def block_words(capacity: int, kept: int) -> int:
    """fp32 words that index_blocks needs for a query beside those of index_topk: the greatest score of every block of
    8 rows, and what the rounds of its choice keep, two words each."""
    items = index_line(capacity) // BLOCK
    words, kept = items, max(power_of_two(min(kept, items)), 4)
    while items > max(INDEX_PIECE, kept):
        items = -(-items // INDEX_PIECE) * kept
        words += 2 * items
    return -(-words // 4) * 4 + 4  # it begins at a multiple of 16 bytes


def index_groups(capacity: int) -> int:
    """Groups of a query, up to a power of two."""
    return power_of_two(index_line(capacity) // GROUP)


def index_shares(queries: int, num_sms: int, topk: int = 1) -> int:
    """CTAs to a query for the choice by groups: a power of two."""
    fit = min(num_sms // max(queries, 1), MOST_SHARES)
    return 1 << fit.bit_length() - 1 if fit >= LEAST_SHARES and topk <= MAX_TOPK_SHARED else 1


def index_each(capacity: int, wanted: int) -> int:
    """Groups of a unit, by the greatest scores of which the shares cut: enough units that a cut says something."""
    units = 4 * power_of_two(wanted)
    return next((each for each in (MOST_EACH, 4) if index_groups(capacity) // each >= units), 1)


def index_room(capacity: int, wanted: int, rows: int = 1) -> int:
    """Keys that the shares of a query find at most, of rows or of blocks of `rows`: all of the units above the cut."""
    return min(index_line(capacity), MOST_EACH * GROUP * (wanted + wanted // 8)) // rows + 4


def index_list_words(capacity: int, shares: int, topk: int, blocks: int = 0) -> int:
    """What the shares of a query need: how many keys they find, keys of 64 bits, and those that each of them keeps."""
    words = 4 + 2 * (index_room(capacity, topk) + shares * index_kept(capacity, topk))
    return words + 2 * (index_room(capacity, blocks, BLOCK) + shares * index_kept(capacity, blocks) if blocks else 0)


def index_block(queries: int, capacity: int, topk: int = MAX_TOPK) -> int:
    """Queries whose scores are held at once."""
    return max(1, min(queries, INDEX_BYTES // (4 * index_words(capacity, topk))))
