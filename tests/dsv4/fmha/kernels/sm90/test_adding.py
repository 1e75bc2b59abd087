"""How many query heads backward_keys packs together, and how it cuts their rows."""

import pytest
import torch

from dsv4.fmha import problem
from dsv4.fmha.kernels.backward import Sequences
from dsv4.fmha.kernels.sm90.adding import find_adding, split_rows
from dsv4.runtime.program import Program

SMS = 132


def dense(batch, heads, tokens, d, causal):
    q, k = (torch.empty(batch, tokens, n, d, dtype=torch.bfloat16, device="meta") for n in heads)
    return problem.dense(q, k, k, causal=causal)


@pytest.mark.parametrize(
    "batch, heads, tokens, d, causal, pack",
    [
        (7, (24, 3), 2235, 128, True, 2),
        (2, (32, 4), 8192, 128, True, 2),  # the rows that four have in use are more than the L2 holds
        (5, (16, 2), 1301, 128, True, 2),
        (63, (14, 2), 949, 128, True, 1),
        (9, (7, 1), 2451, 64, True, 7),
        (2, (64, 8), 4096, 64, True, 4),
        (3, (16, 4), 2666, 128, False, 4),  # CTAs are at the same rows: no limit
        (1, (40, 8), 12288, 128, False, 1),  # copies for five heads gain nothing
        (12, (60, 12), 142, 128, False, 5),  # they do where each head fills a part of its tiles
        (178, (85, 17), 33, 128, False, 5),
        (9, (6, 6), 300, 128, False, 1),
        (1, (16, 2), 2000, 64, True, 1),  # a pack would have too few work tiles, and the longest in one part
    ],
)
def test_how_many_query_heads_go_together(batch, heads, tokens, d, causal, pack):
    found = find_adding(SMS, dense(batch, heads, tokens, d, causal), tokens, None)
    assert found is not None and found.pack == pack


@pytest.mark.parametrize(
    "batch, heads, tokens, d, causal, added",
    [
        (16, (16, 16), 512, 128, True, False),
        (16, (16, 16), 512, 64, True, True),
        (16, (16, 16), 512, 128, False, True),
        (6, (12, 12), 1024, 128, True, True),
        (3, (1, 1), 512, 128, True, True),  # too few work tiles for the SMs, so rows are split
        (14, (50, 10), 334, 128, True, True),
    ],
)
def test_short_causal_sequences_are_not_added(batch, heads, tokens, d, causal, added):
    assert (find_adding(SMS, dense(batch, heads, tokens, d, causal), tokens, None) is not None) == added


@pytest.mark.parametrize("tokens, count, pack", [(40 * 142, 40, 5), (8 * 6000, 8, 1)])
def test_sequences_go_together_by_their_average_length(tokens, count, pack):
    """40 of 142 tokens, or 8 of 6000, with five query heads for a KV head."""
    starts = Program({}, torch.device("cpu")).workspace("starts", (count + 1,), torch.int32)
    sequences = Sequences(starts, starts, tokens // count, tokens // count)
    found = find_adding(SMS, dense(1, (60, 12), tokens, 128, False), tokens, sequences)
    assert found is not None and found.pack == pack


@pytest.mark.parametrize("tiles, steps, splits", [(38, 189, 3), (1, 4, 1), (1, 100, 12), (0, 9, 1), (1000, 50, 1)])
def test_rows_are_split_where_key_tiles_are_few(tiles, steps, splits):
    assert split_rows(tiles, steps, SMS) == splits
