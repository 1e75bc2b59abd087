"""The Hopper kernels of V4 attention read rows of a format that they do not know, on a CPU through softsm."""

import launches
import pytest
import torch
from agreement import assert_agrees
from toy_format import TOY

import dsv4
from dsv4 import reference
from dsv4.caches.pages import PackedRows


@pytest.mark.slow  # test_v41_rows.py has the quick test of rows that are codes alone
def test_a_toy_format(monkeypatch):
    """All values are codes, scales of 32 values lie behind each row: neither is so in an Fp8Cache."""
    torch.manual_seed(0)
    names = launches.launched(monkeypatch)
    cache = PackedRows.pack(torch.randn(100, 512).bfloat16(), rows_per_page=8, format=TOY)
    arguments = dict(
        q=torch.randn(1, 16, 512).bfloat16(),
        window=cache,
        window_indices=torch.randint(-1, 100, (1, 150), dtype=torch.int32),
        sink=torch.randn(16),
    )
    with launches.race_free("sm_90a"):
        got = dsv4.v4_attention(**arguments, return_lse=True, backend="softsm")
    assert names[0] in ("v4_decode_swap_ab_ws", "v4_decode_swap_ab")
    assert_agrees(got, reference.v4_attention, **arguments)
