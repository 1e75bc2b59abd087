"""Drafts of DeepSeek-V4.1 (DSpark): the queries of a block see 128 rows of context and all rows of their block, later
ones too. A list says so; nothing else is causal."""

import launches
import pytest
import torch

import dsv4
from dsv4 import reference

CONTEXT, WIDTH = 128, 192  # engines pad lists to multiples of 64


def block(requests, queries, heads, seed=0):
    """(arguments of v4_attention, rows [requests, CONTEXT + queries, 512] as they are stored)"""
    g = torch.Generator().manual_seed(seed)
    count = CONTEXT + queries
    rows = torch.randn(requests * count, 512, generator=g)
    window = dsv4.Mxfp8Cache.pack(rows, rows_per_page=32)
    lists = torch.full((requests, queries, WIDTH), -1, dtype=torch.int32)
    lists[:, :, :count] = torch.arange(requests * count, dtype=torch.int32).view(requests, 1, count)
    arguments = dict(
        q=torch.randn(requests * queries, heads, 512, generator=g).bfloat16(),
        window=window,
        window_indices=lists.flatten(0, 1),
        sink=torch.randn(heads, generator=g),
        window_lengths=torch.full((requests * queries,), count, dtype=torch.int32),
    )
    return arguments, window.unpack(torch.float64)[: len(rows)].view(requests, count, 512)


def by_definition(arguments, rows):
    """Dense attention of each block, no mask, in fp64."""
    q = arguments["q"].double().view(len(rows), -1, *arguments["q"].shape[1:])
    scores = torch.einsum("rqhd,rsd->rhqs", q, rows) * 512**-0.5
    sink = arguments["sink"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("rhqs,rsd->rqhd", p, rows).flatten(0, 1)


def assert_close(out, want):
    assert (out.double() - want).norm() <= 2.0**-8 * want.norm()  # bf16 rounds P and the result


@pytest.mark.parametrize("queries", [1, 5, 8])
def test_every_query_of_a_block_sees_all_of_it(queries):
    arguments, rows = block(2, queries, 4)
    assert_close(dsv4.v4_attention(**arguments), by_definition(arguments, rows))


def test_without_the_later_rows_the_result_is_another():
    arguments, rows = block(1, 5, 4)
    arguments["window_lengths"] = CONTEXT + 1 + torch.arange(5, dtype=torch.int32)  # causal
    out, want = dsv4.v4_attention(**arguments), by_definition(arguments, rows)
    assert_close(out[4:], want[4:])
    with pytest.raises(AssertionError):
        assert_close(out[:1], want[:1])


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 64])
def test_the_kernels_do_the_same(heads):
    arguments, rows = block(2, 8, heads)
    with launches.race_free("sm_90a"):
        out = dsv4.v4_attention(**arguments, backend="softsm", out=torch.full_like(arguments["q"], torch.nan))
    assert_close(out, by_definition(arguments, rows))
    assert_close(out, reference.v4_attention(**arguments)[0])
