"""Sparse matrices for the tests of mma.sp, wgmma.sp and tcgen05.mma.sp, made and packed one chunk at a time."""

import layouts
import numpy as np

PAIRS = [(i, j) for i in range(4) for j in range(i + 1, 4)]


def wide(name, fp4=False):
    """Columns in a chunk."""
    return 8 if fp4 or name in ("s4", "u4") else 2 if name == "tf32" else 4


def draw_codes(rng, rows, k, name, fp4=False, shuffled=False):
    """[rows, chunks]"""
    codes = np.zeros((rows, k // wide(name, fp4)), int)
    for r, chunk in np.ndindex(codes.shape):
        first, second = PAIRS[rng.integers(6)]
        if shuffled and rng.integers(2):
            first, second = second, first
        codes[r, chunk] = (0b0100, 0b1110)[rng.integers(2)] if name == "tf32" else first | second << 2
    return codes


def meant(given, codes, name, fp4=False):
    """A with zeros, [rows, k], of the given elements [rows, k/2]."""
    size = wide(name, fp4)
    dense = np.zeros((len(given), 2 * given.shape[1]), np.float32)
    for (r, chunk), code in np.ndenumerate(codes):
        first, second = code & 3, code >> 2
        at = {2: [code == 0b1110], 4: [first, second], 8: [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]}[size]
        for i, position in enumerate(at):
            dense[r, size * chunk + position] = given[r, size // 2 * chunk + i]
    return dense


def drawn(rng, rows, k, name, fp4=False, shuffled=False):
    """(given elements [rows, k/2], codes [rows, chunks], A as it is meant [rows, k])."""
    given = layouts.values(rng, (rows, k // 2), name)
    codes = draw_codes(rng, rows, k, name, fp4, shuffled)
    return given, codes, meant(given, codes, name, fp4)


def register_words(codes, selector, name, rng):
    """uint32 [32]: the metadata of 16 rows as mma.sp and wgmma take them, noise in the words that do not count."""
    words = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
    for row in range(16):
        for chunk in range(codes.shape[1]):
            g, upper = row % 8, row // 8
            if name in ("f16", "bf16", "tf32"):  # two rows in a word
                thread, place = 4 * g + selector * (codes.shape[1] // 4) + chunk // 4, 4 * upper + chunk % 4
            else:
                thread, place = 4 * g + selector * 2 + 2 * (chunk // 8) + upper, chunk % 8
            words[thread] = int(words[thread]) & ~(15 << 4 * place) | int(codes[row, chunk]) << 4 * place
    return words


def put_metadata(cells, codes, column, lanes=range(128)):
    """Codes of rows that D has in `lanes` into tensor memory [512, 128]: one column (8 chunks) or two (16)."""
    chunks = codes.shape[1]
    for r, at in zip(range(len(codes)), lanes):
        for chunk in range(chunks):
            if chunks == 16:
                c, lane, shift = column + chunk // 8, at, 4 * (chunk % 8)
            else:
                c, lane = column, 16 * (at // 16) + 8 * (chunk // 4) + at % 8
                shift = 16 * (at // 8 % 2) + 4 * (chunk % 4)
            cells[c, lane] = int(cells[c, lane]) & ~(15 << shift) | int(codes[r, chunk]) << shift
