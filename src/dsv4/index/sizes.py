"""How much memory index_topk needs for the scores of a block of queries and for what its choice keeps."""

# Scores that one thread block chooses from; the widest lists, at most half of that, so that a round leaves less than it
# was given; bytes of the scores held at once.
INDEX_PIECE = 16384
MAX_TOPK = 4096
INDEX_BYTES = 256 << 20
# Neighbouring rows whose greatest score is kept beside the scores; the widest lists that are chosen by it.
GROUP = 16
MAX_TOPK_BY_GROUPS = 1024


def index_line(capacity: int) -> int:
    """Scores of a query with so many rows, up to whole groups."""
    return -(-capacity // GROUP) * GROUP


def index_words(capacity: int, topk: int = MAX_TOPK) -> int:
    """fp32 words that index_topk needs for a query with so many rows: the scores, the greatest one of every group, and
    what each round of the choice keeps (an ordered score and a number)."""
    kept = 1 << (max(min(topk, capacity), 1) - 1).bit_length()
    items = capacity
    words = index_line(capacity) + index_line(capacity) // GROUP
    while True:
        pieces = -(-items // max(INDEX_PIECE, kept))
        words += 2 * pieces * kept
        if pieces <= 1:
            return words
        items = pieces * kept


def index_block(queries: int, capacity: int, topk: int = MAX_TOPK) -> int:
    """Queries whose scores are held at once."""
    return max(1, min(queries, INDEX_BYTES // (4 * index_words(capacity, topk))))
