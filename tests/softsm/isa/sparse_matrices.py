"""Sparse matrices for the tests of mma.sp, wgmma.sp and tcgen05.mma.sp, made and packed one chunk at a time."""

import layouts
import numpy as np

PAIRS = [(i, j) for i in range(4) for j in range(i + 1, 4)]


def drawn(rng, rows, k, name, fp4=False, shuffled=False):
    """(given elements [rows, k/2], codes [rows, chunks], A as it is meant [rows, k])."""
    wide = 8 if fp4 or name in ("s4", "u4") else 2 if name == "tf32" else 4
    given = layouts.values(rng, (rows, k // 2), name)
    codes, dense = np.zeros((rows, k // wide), int), np.zeros((rows, k), np.float32)
    for r in range(rows):
        for chunk in range(k // wide):
            first, second = PAIRS[rng.integers(6)]
            if shuffled and rng.integers(2):
                first, second = second, first
            if wide == 2:
                code = (0b0100, 0b1110)[rng.integers(2)]
                at = [0 if code == 0b0100 else 1]
            else:
                code = first | second << 2
                at = [first, second] if wide == 4 else [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]
            codes[r, chunk] = code
            for i, position in enumerate(at):
                dense[r, wide * chunk + position] = given[r, wide // 2 * chunk + i]
    return given, codes, dense


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


def put_metadata(cells, codes, column):
    """Codes of 128 rows into tensor memory [512, 128]: the first of one column (8 chunks) or two (16)."""
    rows, chunks = codes.shape
    for r in range(rows):
        for chunk in range(chunks):
            if chunks == 16:
                c, lane, shift = column + chunk // 8, r, 4 * (chunk % 8)
            else:
                c, lane = column, 16 * (r // 16) + 8 * (chunk // 4) + r % 8
                shift = 16 * (r // 8 % 2) + 4 * (chunk % 4)
            cells[c, lane] = int(cells[c, lane]) & ~(15 << shift) | int(codes[r, chunk]) << shift
