"""Structured sparsity of A: half of its elements are given, and four bits for each chunk say where they stand.

    16 and 8 bits   chunks of 4 columns, two elements given: their positions, two bits each
    tf32            chunks of 2 columns, one element given: 0b0100 the first, 0b1110 the second
    packed fp4      chunks of 8 columns, two pairs of neighbours given: the positions of the pairs, two bits each

A product has K columns and K/2 given elements in a row. mma.sp and wgmma take the codes from registers, one word per
thread; with g = t/4 of thread t, and a sparsity selector s that says whose words count:

    K is 16 bytes   thread s of every four: rows g (low half of the word) and g + 8, all four chunks
    K is 32 bytes   threads 2s and 2s + 1: the same rows, the first and the second four chunks; s = 0 or 1
    8-bit elements  all threads: row g + 8*(t%2), chunks 0-7 (t%4 < 2) or 8-15; s = 0

where K counts bytes of given elements; 32 bytes of 8-bit elements are the third case. Elements of B that meet no given
element do not take part: a NaN there is not seen. Sparse products of wgmma and tcgen05 have not been compared with a
GPU.
"""

from __future__ import annotations

import numpy as np

from softsm.errors import Fault

ONE_OF_TWO, TWO_OF_FOUR, PAIRS_OF_EIGHT = "tf32", "2:4", "4:8 in pairs"
# Codes that have a meaning: of mma.sp and wgmma, of sp::ordered_metadata, of tcgen05 (as the PTX ISA lists them)
DIFFERENT = frozenset(i | j << 2 for i in range(4) for j in range(4) if i != j)
ASCENDING = frozenset(i | j << 2 for i in range(4) for j in range(i + 1, 4))
OF_TCGEN05 = ASCENDING | {0b0110}
_SINGLE = frozenset({0b0100, 0b1110})
_CHUNK = {ONE_OF_TWO: 2, TWO_OF_FOUR: 4, PAIRS_OF_EIGHT: 8}


def granularity(element: str, packed_fp4: bool = False) -> str:
    if packed_fp4:
        return PAIRS_OF_EIGHT
    return ONE_OF_TWO if element == "tf32" else TWO_OF_FOUR


def register_codes(words: np.ndarray, selector: int, chunks: int) -> np.ndarray:
    """The codes of a warp's 16 rows, uint8 [16, chunks], from its 32 words; 4, 8 or 16 chunks in a row."""
    words = words.reshape(8, 4)  # [t/4, t%4]
    eight = 4 * np.arange(8, dtype=np.uint32)
    if chunks == 16:
        codes = words[:, :, None] >> eight & 15  # [g, t%4, 8 chunks]
        return codes.reshape(8, 2, 2, 8).transpose(2, 0, 1, 3).reshape(16, 16).astype(np.uint8)
    count = chunks // 4
    codes = (
        words[:, selector * count : (selector + 1) * count, None] >> eight & 15
    )  # [g, thread, row half and chunk]
    return codes.reshape(8, count, 2, 4).transpose(2, 0, 1, 3).reshape(16, chunks).astype(np.uint8)


def tensor_codes(cells: np.ndarray) -> np.ndarray:
    """The codes of 128 rows from their columns of tensor memory, [1 or 2, 128 lanes]: uint8 [128, 8 or 16]."""
    codes = cells[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15  # [column, lane, 8]
    if len(cells) == 2:
        codes = codes.transpose(1, 0, 2)
    else:  # kinds f16 and tf32: 16 rows as a warp's in mma.sp, with lanes 16i + 8h + j for threads 4j + h
        codes = codes.reshape(8, 2, 8, 2, 4).transpose(0, 3, 2, 1, 4)  # [i, row half, j, h, chunk]
    return codes.reshape(128, -1).astype(np.uint8)


def columns(codes: np.ndarray, kind: str) -> np.ndarray:
    """Where the given elements stand: int [rows, K/2] from codes [rows, chunks]."""
    rows, chunks = codes.shape
    start = _CHUNK[kind] * np.arange(chunks)[:, None]
    codes = codes.astype(np.int64)[:, :, None]
    if kind == ONE_OF_TWO:
        return (start + (codes == 0b1110)).reshape(rows, -1)
    places = np.concatenate([codes & 3, codes >> 2], 2)  # [rows, chunks, 2]
    if kind == PAIRS_OF_EIGHT:
        places = (2 * places[..., None] + np.arange(2)).reshape(rows, chunks, 4)
    return (start + places).reshape(rows, -1)


def check(codes: np.ndarray, kind: str, accepted: frozenset[int] = DIFFERENT) -> None:
    """Fault('metadata') for a code that is not accepted."""
    if kind == ONE_OF_TWO:
        accepted = _SINGLE
    wrong = ~np.isin(codes, list(accepted))
    if wrong.any():
        row, chunk = (int(x) for x in np.argwhere(wrong)[0])
        size, code = _CHUNK[kind], int(codes[row, chunk])
        what = f"the positions are {code & 3} and {code >> 2}"
        if kind == ONE_OF_TWO:
            what = f"the code is 0b{code:04b}, accepted are 0b0100 and 0b1110"
        raise Fault("metadata", f"row {row}, columns {size * chunk} to {size * chunk + size - 1}: {what}")


def expand(given: np.ndarray, where: np.ndarray) -> np.ndarray:
    """A as it is meant, [rows, K], from [rows, K/2]; `where` as `columns` gives it."""
    dense = np.zeros((given.shape[0], 2 * given.shape[1]), given.dtype)
    np.put_along_axis(dense, where, given, 1)
    return dense


def set_aside(a: np.ndarray, where: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Infinities and NaNs of B [n, K], which become 0 there, times the elements of A [rows, K] that meet them: float32
    [n, rows], to be added to the product of the rest. None where B is finite."""
    special = ~np.isfinite(b)
    if not special.any():
        return None
    given = np.zeros(a.shape, bool)
    np.put_along_axis(given, where, True, 1)
    total = np.zeros((b.shape[0], a.shape[0]), np.float32)
    with np.errstate(invalid="ignore"):
        for k in np.flatnonzero(special.any(0)):
            meets = special[:, k, None] & given[None, :, k]
            total += np.where(meets, b[:, k, None] * a[None, :, k], np.float32(0))
    b[special] = 0
    return total
