"""How many ways the keys of a problem are split over CTAs."""

ROWS_PER_TILE = 64  # query rows (tokens x grouped heads) of one CTA
STEP = 128  # keys that a kernel processes at a time; a split is one or more of them
MAX_SPLITS = 256
MERGED_AT_ONCE = 16  # splits; more are merged more slowly
ROWS_PER_STEP = 3000  # rows whose partial results, of one split, are written and merged in the time of a step
MOST_SHORT = 4  # splits of one step that a CTA processes one after the other; more were not measured
FMHA_ENDS = {1: 5, 2: 3}  # steps that a CTA of dense decode takes to start and finish, by the CTAs that share an SM
WORTH_WHOLE = 0.96
WHOLE = 4  # rounds of whole tiles from which on keys are not split
# deterministic=True: keys per split and ROWS_PER_TILE rows; the most splits; rows per KV head that are not split
DETERMINISTIC_KEYS = 2048
DETERMINISTIC_SPLITS = 32
DETERMINISTIC_ROWS = 1024
DECODE_HEADS, DECODE_KEYS = 16, 64  # heads and keys of a CTA of V4 attention with few queries


def choose_splits(
    tiles: int, num_sms: int, keys: int, merged: bool = True, shared: int = 1, many_rows: int = 0, ends: int = 1
) -> int:
    """Return the KV splits for ``tiles`` CTAs' worth of query rows that see at most ``keys`` keys each.

    Time is in units of STEP keys: tiles * n CTAs run in waves, each CTA costs its steps and `ends` more to start and
    finish; merging costs one, and a little per split. If the tiles alone fill the SMs WHOLE times or more, the last
    wave is a small part of the time, and partial results of every row would be a large one: no splits.
    merged: whether there are partial results. shared: CTAs that run on one SM at a time; if each SM has
    more than one, the last wave costs as much as a full one: (6, 32:8, 35325) at head dim 64 takes 117 us with 11
    splits, 528 CTAs, and 125 with 8, 384 CTAs. many_rows: the query rows of a prefill, all of which have partial
    results: (1, 32:8, 737) causal at head dim 128 takes 44 us with two splits, of which merging takes 16.
    """
    if merged and tiles >= WHOLE * num_sms:
        return 1
    steps = -(-keys // STEP)
    return min(
        range(1, max(1, min(steps, MAX_SPLITS)) + 1),
        key=lambda n: _steps_in_a_row(tiles, num_sms, steps, n, shared, many_rows, ends),
    )


def _steps_in_a_row(
    tiles: int, num_sms: int, steps: int, n: int, shared: int = 1, many_rows: int = 0, ends: int = 1
) -> float:
    """Return the time of n equal splits: see choose_splits."""
    rounds = 1 if tiles * n <= num_sms else shared * -(-tiles * n // (shared * num_sms))
    return rounds * (-(-steps // n) + ends) + (1 + n / 64 + n * many_rows / ROWS_PER_STEP if n > 1 else 0)


def whole_rounds(queries: int, head_tiles: int, num_sms: int) -> tuple[int, int]:
    """Return (rounds in which every SM has a work tile, queries whose work tiles are all in them)."""
    rounds = queries * head_tiles // num_sms
    return rounds, rounds * num_sms // head_tiles


def whole_first(
    queries: int, head_tiles: int, num_sms: int, steps: int, splits: int, more: float = 0
) -> tuple[int, int]:
    """Return (queries whose rows are not split, splits of the others); (0, splits) if it pays less than it might cost.

    With more work tiles than SMs, each CTA can process whole tiles first, as many as all of them get; only the last
    round is split. So fewer partial results are merged, and the last round is short: (160, 64, 128+1024) in FP8 takes
    82 instead of 97 us. Times as in choose_splits: for 36 shapes they predict this ratio within 4 % on average.
    more: steps that it takes besides.
    """
    tiles = queries * head_tiles
    rounds, whole = whole_rounds(queries, head_tiles, num_sms)
    rest = tiles - whole * head_tiles
    if rounds == 0 or rest == 0:
        return 0, splits
    n = choose_splits(rest, num_sms, steps * STEP)
    time = rounds * (steps + 1) + _steps_in_a_row(rest, num_sms, steps, n) + more
    pays = n > 1 and time < WORTH_WHOLE * _steps_in_a_row(tiles, num_sms, steps, splits)
    return (whole, n) if pays else (0, splits)


def fmha_splits(tiles: int, num_sms: int, keys: int, shared: int, many_rows: int) -> int:
    """Return the splits of fmha. In decode, starts and ends count: (48, 64:1, 6000) at head dim 512 takes 103 us with 5
    splits and 97 with 2, (90, 64:1, 2000) 80 us with 5 and 66 with one."""
    return choose_splits(
        tiles, num_sms, keys, shared=shared, many_rows=many_rows, ends=1 if many_rows else FMHA_ENDS[shared]
    )


def uneven(tiles: int, num_sms: int, steps: int, splits: int) -> tuple[int, int, int]:
    """Return (splits, CTAs that have one of the equal splits each, steps from which on splits are uneven).

    If one step is left over, it becomes its own split instead of lengthening others: the SMs that
    have none of the equal splits share those of all tiles. The host knows how many steps there can be, the kernel how
    many there are: it cuts evenly what is shorter than uneven_from, or leaves over more than one step.
    """
    free = num_sms - tiles * splits
    if 1 < splits < MERGED_AT_ONCE and free > 0 and steps % splits == 1:
        each = -(-tiles // free)  # short work tiles of a CTA; about as long as two steps
        if each <= MOST_SHORT and 2 * each <= steps // splits:
            return splits + 1, tiles * splits, 2 * each * splits + 1
    return splits, 0, 0x7FFFFFFF


def deterministic_cut(rows: int, keys: int) -> tuple[int, int]:
    """Return (splits, least keys of one) for sequences of at most ``keys`` keys and ``rows`` query rows per KV head;
    (0, 0) = they are not split.

    A sequence is cut in the same places whatever ``keys`` is: at equal distances, or into the most splits if those
    are longer. The more rows, the longer the splits, so that the partial results stay small compared with the keys.
    """
    if rows >= DETERMINISTIC_ROWS:
        return 0, 0
    each = DETERMINISTIC_KEYS * -(-rows // ROWS_PER_TILE)
    return min(-(-(keys + 2 * STEP) // each), DETERMINISTIC_SPLITS), each  # a range may start within a step


def decode_splits(tiles: int, num_sms: int, blocks: int) -> int:
    """Return the splits, of one block of keys or more, if latency counts: CTAs for three quarters of the
    SMs; 0 = there are more tiles than that."""
    places = 3 * num_sms // 4
    return max(1, min(blocks, places // tiles)) if tiles <= places else 0
