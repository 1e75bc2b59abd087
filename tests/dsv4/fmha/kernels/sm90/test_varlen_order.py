"""The list of row tiles of a varlen batch, and the looping kernel that goes through it."""

from dataclasses import replace

import launches
import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha import problem
from dsv4.fmha.kernels.sm90 import entry, varlen_order
from dsv4.fmha.kernels.tiles import PackedSequences
from dsv4.runtime import calls, dispatch
from dsv4.runtime.program import Launch

SEED = 20261118


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def list_row_tiles(programs, lists, rows, causal):
    """As a call launches it: for all numbers one variant."""
    constants = dict(M=rows, CAUSAL=causal, num_warps=4)
    with softsm.use("sm_90a"):
        calls.launch(Launch(varlen_order.list_row_tiles, (programs,), [*lists], constants))


def listed(q_lengths, k_lengths, kv_heads, group, blocks, rows, causal):
    """-> the entries: (first row, KV head, first query, queries, first key, keys)"""
    cu_q, cu_k = starts(q_lengths), starts(k_lengths)
    most = (int(cu_q[-1]) * group // rows + len(q_lengths)) * kv_heads
    entries = torch.full(((most + 1) * 8,), -1, dtype=torch.int32)
    sequences = PackedSequences(cu_q, cu_k, len(q_lengths), int(cu_q[-1]), int(cu_k[-1]))
    lists = entries, sequences, varlen_order.Rows(group, kv_heads, most), blocks
    list_row_tiles(len(q_lengths), lists, rows, causal)
    return entries.view(-1, 8)[1 : 1 + int(entries[0]), :6].tolist()


LENGTHS = [130, 0, 517, 1, 77, 260, 128, 900, 5]
KEYS = [200, 10, 517, 0, 90, 130, 700, 400, 1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [varlen_order.Blocks(4, 3), varlen_order.Blocks(1, 2), varlen_order.Blocks(100, 3)])
def test_every_row_tile_is_listed_once_and_a_block_by_its_keys(blocks, causal):
    rows, kv_heads, group = 128, 3, 2
    found = listed(LENGTHS, KEYS, kv_heads, group, blocks, rows, causal)
    cu_q, cu_k = starts(LENGTHS).tolist(), starts(KEYS).tolist()
    expected = [
        (row, head, cu_q[n], length, cu_k[n], KEYS[n])
        for n, length in enumerate(LENGTHS)
        for row in range(0, length * group, rows)
        for head in range(kv_heads)
    ]
    assert sorted(map(tuple, found)) == sorted(expected)
    of_query = {cu_q[n]: n for n, length in enumerate(LENGTHS) if length}
    numbers, reach = [], []
    for row, head, first, tokens, _, keys in found:
        numbers.append((of_query[first] // blocks.sequences, head // blocks.heads))
        reach.append(row + (keys - tokens) * group if causal else keys)
    assert numbers == sorted(numbers)
    for block in set(numbers):
        inside = [x for x, number in zip(reach, numbers) if number == block]
        assert inside == sorted(inside, reverse=True)


def test_more_sequences_than_a_program_looks_at_together():
    lengths = [1 + n % 3 * 70 for n in range(300)]
    found = listed(lengths, lengths, 1, 1, varlen_order.Blocks(150, 1), 128, True)
    assert len(found) == sum(-(-n // 128) for n in lengths) == len(set(map(tuple, found)))


@pytest.mark.parametrize("causal", [True, False])
def test_starts_that_fall_write_no_more_entries_than_there_are(causal):
    """No values are checked on a GPU. Three sequences have all 600 rows: 15 row tiles, in a list of 9."""
    cu = torch.tensor([0, 600, 0, 600, 0, 600]).int()
    entries = torch.full((100 * 8,), -1, dtype=torch.int32)
    lists = entries, PackedSequences(cu, cu, 5, 600, 600), varlen_order.Rows(1, 1, 9), varlen_order.Blocks(5, 1)
    list_row_tiles(5, lists, 128, causal)
    assert int(entries[0]) == 9 and (entries.view(-1, 8)[10:] == -1).all()
    for row, head, first, tokens, first_key, keys in entries.view(-1, 8)[1:10, :6].tolist():
        assert (head, first, tokens, first_key, keys) == (0, 0, 600, 0, 600) and row in range(0, 600, 128)


CASES = [(128, True, True), (128, False, False), (128, True, False), (64, True, True), (64, False, True),
         (256, True, True), (192, True, True), (96, False, False)]  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize(
    ("d", "causal", "same", "order"),
    [
        pytest.param(*case, order, marks=[pytest.mark.slow] if n or order != "latest" else [])
        for n, case in enumerate(CASES)
        for order in ("latest", "eager", "random")
    ],
)
def test_the_looping_kernel_takes_sequences(d, causal, same, order, monkeypatch):
    """The GPU seems to have two SMs. There are sequences without queries or keys, rows past the last sequence, and NaN
    in the keys past it."""
    tokens = [130, 0, 300, 1, 77, 260]
    keys = tokens if same else [200, 10, 300, 0, 90, 130]
    cu_q = starts(tokens)
    cu_k = cu_q if same else starts(keys)
    q = torch.randn(sum(tokens) + 3, 2, d).bfloat16()
    k, v = (torch.randn(sum(keys) + 5, 1, d).bfloat16() for _ in "kv")
    expected = reference.fmha_varlen(q, k, v, cu_q, cu_k, causal=causal)
    k[-5:], v[-5:] = float("nan"), float("nan")
    out, names = torch.full_like(q, float("nan")), launches.launched(monkeypatch)
    with softsm.use("sm_90a", sms=2), softsm.checking(races=True, order=order, seed=SEED) as report:
        _, lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=causal, out=out, return_lse=True, backend="softsm")
    assert names == ["list_row_tiles", "fmha_forward_persistent"]
    assert "nothing found" in str(report), str(report)
    k, v = k.nan_to_num(), v.nan_to_num()
    assert_agrees((out, lse), reference.fmha_varlen, q, k, v, cu_q, cu_k, causal=causal)
    assert torch.equal(lse == -float("inf"), expected[1] == -float("inf"))


@pytest.mark.compile
def test_fewer_row_tiles_than_there_might_be():
    """The grid is for the most row tiles that the shapes allow; here one CTA has none, and one has all."""
    q = torch.randn(1030, 1, 128).bfloat16()
    cu = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 60]).int()
    out = torch.full_like(q, float("nan"))
    with softsm.use("sm_90a", sms=2), softsm.checking(races=True, order="latest") as report:
        _, lse = dsv4.fmha_varlen(q, q, q, cu, cu, causal=True, out=out, return_lse=True, backend="softsm")
    assert "nothing found" in str(report), str(report)
    assert_agrees((out, lse), reference.fmha_varlen, q, q, q, cu, cu, causal=True)


def test_who_loops_over_a_varlen_batch():
    """CTAs loop from about two row tiles for every SM on, and never where the bits may not depend on the batch."""
    target = dispatch.compile_target("sm_90a")

    def loops(tokens, **options):
        q = torch.empty(tokens, 8, 128, dtype=torch.bfloat16, device="meta")
        cu = torch.empty(9, dtype=torch.int32, device="meta")
        p = problem.varlen(q, q, q, cu, cu, **options)
        return entry.tiling(replace(p, same_sequences=True), target)

    assert not loops(2000).loop and loops(5000).loop
    assert not loops(9000, deterministic=True).loop
    assert loops(9000, causal=True).options["EVEN"]


def test_a_mask_is_left_out_of_the_loop_only_if_queries_and_keys_have_one_list_of_starts():
    q = torch.empty(20000, 8, 128, dtype=torch.bfloat16, device="meta")
    cu = torch.empty(9, dtype=torch.int32, device="meta")
    p = problem.varlen(q, q, q, cu, cu, causal=True)
    assert not entry.tiling(p, dispatch.compile_target("sm_90a")).options["EVEN"]
