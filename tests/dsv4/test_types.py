"""What a type checker makes of the public functions: `make lint` reads the assertions, pytest runs the calls."""

from typing import assert_type

import torch
from torch import Tensor

import dsv4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_result_is_a_pair_only_when_the_lse_is_asked_for() -> None:
    q = torch.zeros(1, 2, 2, 64)
    assert_type(dsv4.fmha(q, q, q, causal=True), Tensor)
    assert_type(dsv4.fmha(q, q, q, return_lse=True, window=(3, 0)), tuple[Tensor, Tensor])
    rows, cuts = q[0], ints(0, 2)
    assert_type(dsv4.fmha_varlen(rows, rows, rows, cuts, cuts, max_seqlen_q=2), Tensor)
    assert_type(dsv4.fmha_varlen(rows, rows, rows, cuts, cuts, return_lse=True), tuple[Tensor, Tensor])
    table = ints(0).view(1, 1)
    assert_type(dsv4.fmha_paged(q, q, q, table, ints(2), sink=None), Tensor)
    assert_type(dsv4.fmha_paged(q, q, q, table, ints(2), return_lse=True), tuple[Tensor, Tensor])
    assert_type(dsv4.v4_attention(rows, rows[0], table.expand(2, 1)), Tensor)
    assert_type(dsv4.v4_attention(rows, rows[0], table.expand(2, 1), return_lse=True), tuple[Tensor, Tensor])
    for asked in (False, True):
        assert_type(dsv4.fmha(q, q, q, return_lse=asked), Tensor | tuple[Tensor, Tensor])
