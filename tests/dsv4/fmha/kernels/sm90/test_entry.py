"""Which tiles a forward problem gets on sm_90a: what an H200 took least time with."""

import pytest
import torch

pytest.importorskip("triton")
from dsv4.fmha import problem  # noqa: E402
from dsv4.fmha.kernels.sm90 import entry  # noqa: E402
from dsv4.runtime import dispatch  # noqa: E402


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def tiles(kind, batch, heads, tokens, d, causal, total=None, **options):
    """rows of a tile, and whether CTAs loop over them. tokens: of the longest sequence; total: of all."""
    hq, hk = heads
    if kind == "varlen":
        cu = empty(batch + 1, dtype=torch.int32)
        q, k = empty(total, hq, d), empty(total, hk, d)
        p = problem.varlen(q, k, k, cu, cu, causal=causal, max_seqlen_q=tokens, max_seqlen_k=tokens, **options)
    elif kind == "paged":
        pages, table = empty(99, 64, hk, d), empty(batch, -(-tokens // 64), dtype=torch.int32)
        lengths = empty(batch, dtype=torch.int32)
        p = problem.paged(empty(batch, tokens, hq, d), pages, pages, table, lengths, causal=causal, **options)
    else:
        q, k = empty(batch, tokens, hq, d), empty(batch, tokens, hk, d)
        p = problem.dense(q, k, k, causal=causal, **options)
    found = entry.tiling(p, dispatch.compile_target("sm_90a"))
    return found.rows, found.loop


# us with row tiles of 64, of 128, and with CTAs that loop
@pytest.mark.parametrize(
    "shape, total, rows, loop",
    [
        (("dense", 840, (1, 1), 37, 64, True), None, 64, False),  # 20.4, -, 29.0
        (("dense", 5, (4, 1), 2129, 64, True), None, 128, True),  # 45.6, -, 42.1
        (("dense", 1076, (2, 2), 70, 128, False), None, 128, True),  # 85.1, 103.8, 73.5
        (("dense", 6, (6, 6), 366, 128, True), None, 64, False),  # 14.7, 15.7, 16.6
        (("dense", 30, (8, 8), 696, 128, True), None, 128, True),  # 99.1, 118.0, 91.7
        (("varlen", 136, (8, 8), 51, 64, True), 5508, 64, False),  # 29.3, -, 61.5
        (("varlen", 8, (8, 8), 653, 128, True), 2960, 64, False),  # 24.2, 28.6, 30.5
        (("varlen", 3, (32, 8), 888, 128, False), 1875, 128, True),  # 59.9, 62.2, 57.8
        (("varlen", 45, (2, 2), 494, 256, False), 20025, 128, True),  # 77.2, 61.8, 56.1
        (("dense", 3, (4, 1), 407, 128, True), None, 64, False),  # 12.7, 15.2, 15.7
        (("dense", 15, (8, 1), 299, 64, True), None, 64, False),  # 18.2, -, 21.2
        (("dense", 1, (32, 8), 737, 128, True), None, 64, False),  # 20.2, 23.2, 21.2
        (("dense", 6, (1, 1), 1065, 256, True), None, 64, False),  # 26.5, 31.8, 30.2
        (("varlen", 2, (8, 2), 932, 256, True), 1682, 64, False),  # 26.2, 32.6, 32.5
        (("varlen", 4, (3, 3), 2484, 256, False), 6688, 128, True),  # 98.2, 75.2, 70.9
        (("varlen", 1, (32, 8), 737, 128, True), 737, 64, False),  # 22.0, 26.4, 25.0
        (("varlen", 3, (8, 8), 754, 128, True), 1867, 64, False),  # 19.4, 20.9, 24.1
        (("varlen", 4, (8, 8), 492, 256, True), 1554, 128, False),  # 23.6, 22.1, 26.0
        (("varlen", 14, (2, 2), 232, 256, True), 2310, 64, False),  # 13.9, 17.8, 20.1
        (("paged", 45, (8, 8), 176, 128, True), None, 64, False),  # 39.1, 70.3
        (("paged", 1, (16, 2), 4361, 128, True), None, 128, False),  # 434.5, 394.8
    ],
)
def test_the_fastest_of_those_measured(shape, total, rows, loop):
    found, loops = tiles(*shape, total=total)
    assert (found > 64, loops) == (rows > 64, loop)  # at head dim 64 tiles may have 192 rows


@pytest.mark.parametrize("kind", ["dense", "varlen", "paged"])
def test_the_same_bits_in_any_batch(kind):
    """deterministic: no row tile may depend on the batch."""
    for d in (64, 128, 256):
        found = {tiles(kind, n, (8, 8), 300, d, True, total=300 * n, deterministic=True) for n in (1, 8, 800)}
        assert len(found) == 1 and not found.pop()[1]
