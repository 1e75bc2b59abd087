"""Structured sparsity of A: half of its elements are given, and four bits of metadata per chunk give their positions.

    16 and 8 bits   chunks of 4 columns, two elements given: their positions, two bits each
    tf32            chunks of 2 columns, one element given: 0b0100 the first, 0b1110 the second
    packed 4 bits   chunks of 8 columns, two pairs of neighbours given: the positions of the pairs, two bits each

A product has K columns and K/2 given elements in a row. mma.sp and wgmma read the codes from registers, one word per
thread. A row with 4, 8 or 16 chunks uses the words of 1, 2 or 4 of every four threads; a sparsity selector chooses
them. The j-th of these, thread t with g = t/4, holds:

    16 and 32 bits  chunks 4j to 4j + 3 of rows g (low half of the word) and g + 8
    8 and 4 bits    chunks 8*(j/2) to 8*(j/2) + 7 of row g + 8*(j%2)

tcgen05 reads them from tensor memory, from the lanes that hold the rows of D. Elements of B that meet no given element
are not read: a NaN there has no effect. Sparse products of tcgen05 have not been compared with a GPU.
"""

from __future__ import annotations

import numpy as np

from softsm.errors import Fault

ONE_OF_TWO, TWO_OF_FOUR, PAIRS_OF_EIGHT = "tf32", "2:4", "4:8 in pairs"
# The valid codes of mma.sp and wgmma, of sp::ordered_metadata, and of tcgen05 (as the PTX ISA lists them)
DIFFERENT = frozenset(i | j << 2 for i in range(4) for j in range(4) if i != j)
ASCENDING = frozenset(i | j << 2 for i in range(4) for j in range(i + 1, 4))
OF_TCGEN05 = ASCENDING | {0b0110}
WORD_IS_A_ROW = ("e4m3", "e5m2", "s8", "u8", "s4", "u4")  # a word per row in registers; otherwise two rows share it
_SINGLE = frozenset({0b0100, 0b1110})
_CHUNK = {ONE_OF_TWO: 2, TWO_OF_FOUR: 4, PAIRS_OF_EIGHT: 8}


def granularity(element: str, packed_fp4: bool = False) -> str:
    if packed_fp4 or element in ("s4", "u4"):
        return PAIRS_OF_EIGHT
    return ONE_OF_TWO if element == "tf32" else TWO_OF_FOUR


def chunks_of(element: str, k: int) -> int:
    """Returns the chunks in a row of a product by mma.sp or wgmma."""
    return k // _CHUNK[granularity(element)]


def register_codes(words: np.ndarray, selector: int, chunks: int, element: str) -> np.ndarray:
    """Returns the codes of a warp's 16 rows, uint8 [16, chunks], from its 32 words; a row has 4, 8 or 16 chunks."""
    threads = chunks // 4
    words = words.reshape(8, 4)[:, selector * threads : (selector + 1) * threads, None]  # [g, thread, 1]
    codes = words >> (4 * np.arange(8, dtype=np.uint32)) & 15
    if element in WORD_IS_A_ROW:
        codes = codes.reshape(8, threads // 2, 2, 8).transpose(2, 0, 1, 3)  # [row half, g, thread pair, chunk]
    else:
        codes = codes.reshape(8, threads, 2, 4).transpose(2, 0, 1, 3)  # [row half, g, thread, chunk]
    return codes.reshape(16, chunks).astype(np.uint8)


def tensor_codes(cells: np.ndarray) -> np.ndarray:
    """Returns the codes of 128 rows, uint8 [128, 8 or 16], from their columns of tensor memory, [1 or 2, 128 lanes]."""
    codes = cells[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15  # [column, lane, 8]
    if len(cells) == 2:
        codes = codes.transpose(1, 0, 2)
    else:  # kinds f16 and tf32: 16 rows as a warp's in mma.sp, with lanes 16i + 8h + j for threads 4j + h
        codes = codes.reshape(8, 2, 8, 2, 4).transpose(0, 3, 2, 1, 4)  # [i, row half, j, h, chunk]
    return codes.reshape(128, -1).astype(np.uint8)


def columns(codes: np.ndarray, kind: str) -> np.ndarray:
    """Returns the columns of the given elements, int [rows, K/2], from codes [rows, chunks]."""
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
    """Raises Fault('metadata') for a code that is not accepted."""
    if kind == ONE_OF_TWO:
        accepted = _SINGLE
    wrong = ~np.isin(codes, list(accepted))
    if wrong.any():
        row, chunk = (int(x) for x in np.argwhere(wrong)[0])
        size, code = _CHUNK[kind], int(codes[row, chunk])
        what = f"the positions are {code & 3} and {code >> 2}"
        if kind == ONE_OF_TWO:
            what = f"the code is 0b{code:04b}; accepted: 0b0100 and 0b1110"
        raise Fault("metadata", f"row {row}, columns {size * chunk} to {size * chunk + size - 1}: {what}")


def expand(given: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Expands A from [rows, K/2] to [rows, K], with zeros; `where` is the result of `columns`."""
    dense = np.zeros((given.shape[0], 2 * given.shape[1]), given.dtype)
    np.put_along_axis(dense, where, given, 1)
    return dense


def set_aside(a: np.ndarray, where: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Sets the infinities and NaNs of B [n, K] to 0 and returns their products with the given elements of A [rows, K]:
    float32 [n, rows], to be added to the product of the rest. Returns None where B is finite."""
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
