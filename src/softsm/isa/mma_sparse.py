"""mma.sp.sync: two of every four neighbours in a row of A are given, and where they stand.

Metadata are 32-bit words, one per thread, of which the selector says whose count: thread `selector` of every four for
K = 16, threads 2 * selector and the next one for K = 32, which have the first and the second half of the columns. The
low 16 bits are about row t/4, the high ones about row t/4 + 8; four bits are the two positions in a chunk of four.
This layout has not been compared with a GPU yet.
"""

from __future__ import annotations

import numpy as np

SHAPES = {"f16": (16, 32), "bf16": (16, 32)}  # K


def positions(metadata: np.ndarray, selector: int, k: int) -> np.ndarray:
    """int [16 rows, k/4 chunks, 2] from the 32 words of a warp."""
    words = metadata.reshape(8, 4)  # [t/4, t%4]
    words = words[:, selector : selector + 1] if k == 16 else words[:, 2 * selector : 2 * selector + 2]
    halves = np.stack([words & 0xFFFF, words >> 16])  # [row half, t/4, word]
    chunks = halves[..., None] >> (4 * np.arange(4, dtype=np.uint32)) & 15  # [row half, t/4, word, chunk]
    pairs = np.stack([chunks & 3, chunks >> 2], -1)
    return pairs.reshape(16, k // 4, 2).astype(np.int64)


def expand(given: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A as it is meant: float32 [16, k] from [16, k/2]."""
    rows, chunks, _ = places.shape
    dense = np.zeros((rows, chunks, 4), given.dtype)
    np.put_along_axis(dense, places, given.reshape(rows, chunks, 2), 2)
    return dense.reshape(rows, -1)
