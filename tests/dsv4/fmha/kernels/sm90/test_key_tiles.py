"""The work tiles of backward_keys: every part of the rows of every key tile is processed once, the longest first."""

import launches
import pytest
import torch
from fmha_gradients import check, deterministic, request, varlen_request

import softsm
from dsv4.fmha.kernels.backward_arguments import GradientSizes, GradientTensors
from dsv4.fmha.kernels.sm90 import backward
from dsv4.fmha.kernels.sm90.key_tiles import Problem, key_order, list_key_tiles, locate
from dsv4.fmha.kernels.tiles import PackedSequences
from dsv4.kernels.compat import gl, gluon

UNBOUND = 1 << 30
FIELDS = 8
ORDERS = ("eager", "latest", "random")


@gluon.jit
def list_tiles(out_ptr, order, tensors, whole, VARLEN: gl.constexpr):
    for number in range(order.count):
        work = locate(number, Problem(order, tensors, whole), 128, 64, VARLEN, VARLEN)
        place = work.place
        found = (place.batch, place.head, place.kv_head, place.own, work.first, work.end, work.rows_block, work.part)
        for field in gl.static_range(len(found)):
            gl.store(out_ptr + number * 8 + field, found[field])


def tiles_of(batch, heads, packs, rows, keys, splits, at_once, causal):
    """The work tiles in their order, as dicts, by the kernel that lists them."""
    pairs, tiles = batch * heads, -(-keys // 128)
    starts = torch.zeros(1, dtype=torch.int32)
    order = key_order(starts, pairs, tiles, splits, packs, heads, min(at_once, pairs))
    unread = torch.zeros(1)
    tensors = GradientTensors(unread, unread, starts, starts)
    whole = GradientSizes(rows, rows, keys, 1, UNBOUND, 0 if causal else UNBOUND, heads, 0)
    out = torch.full((order.count, FIELDS), -1, dtype=torch.int32)
    with softsm.use("sm_90a"):
        list_tiles[(1,)](out, order, tensors, whole, VARLEN=False, num_warps=1)
    names = ("batch", "head", "kv_head", "key", "first", "end", "rows_block", "part")
    return [dict(zip(names, line)) for line in out.tolist()]


@pytest.mark.compile
@pytest.mark.parametrize(
    "batch, heads, packs, rows, keys, splits, at_once, causal",
    [
        (1, 1, 1, 300, 200, 1, 1, False),
        (3, 4, 2, 500, 700, 1, 5, True),  # the last pairs are fewer than those listed together
        (2, 3, 3, 900, 260, 3, 2, False),
        (1, 7, 1, 640, 640, 2, 7, True),
    ],
)
def test_every_row_meets_every_key_that_it_sees_once(batch, heads, packs, rows, keys, splits, at_once, causal):
    found = tiles_of(batch, heads, packs, rows, keys, splits, at_once, causal)
    assert len({(x["batch"], x["head"], x["key"], x["first"]) for x in found if x["first"] < x["end"]}) == sum(
        x["first"] < x["end"] for x in found
    )
    assert sorted(x["part"] for x in found) == list(range(len(found)))
    steps = {}
    for x in found:
        assert x["kv_head"] == x["head"] // packs
        assert x["rows_block"] == (x["batch"] * heads + x["head"]) * -(-rows // 128) * 4
        steps.setdefault((x["batch"], x["head"], x["key"]), []).extend(range(x["first"], x["end"], 64))
    assert len(steps) == batch * heads * -(-keys // 128)
    for (_, _, key), begun in steps.items():
        first = max(key - (keys - rows), 0) // 64 * 64 if causal else 0
        assert sorted(begun) == list(range(first, rows, 64))


@pytest.mark.compile
def test_the_longest_tiles_of_pairs_that_are_listed_together_come_first():
    found = tiles_of(2, 3, 1, 640, 640, 1, 3, True)
    for block in (found[:15], found[15:]):
        lengths = [x["end"] - x["first"] for x in block]
        assert lengths == sorted(lengths, reverse=True)
        assert len({(x["batch"], x["head"]) for x in block}) == 3


LENGTHS = {
    "of keys and queries": ([(5, 5), (400, 400), (0, 0), (129, 129), (128, 128), (400, 400)], 0),
    "unequal, with rows of no sequence": ([(3, 500), (0, 300), (200, 200), (1, 1)], 1000),
    "more than a program reads at once": ([(n % 7 * 50, n % 7 * 50) for n in range(140)], 0),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", LENGTHS)
def test_every_tile_number_is_listed_once_and_the_longest_sequences_come_first(name):
    lengths, unused = LENGTHS[name]
    cu_q, cu_k = (torch.tensor([0, *(x[i] for x in lengths)], dtype=torch.int32).cumsum(0).int() for i in (0, 1))
    total = int(cu_k[-1]) + unused
    tiles = total // 128 + len(lengths)
    listed = torch.full((tiles, 2), -1, dtype=torch.int32)
    sequences = PackedSequences(cu_q, cu_k, len(lengths), int(cu_q[-1]), total)
    with softsm.use("sm_90a"), softsm.checking():
        list_key_tiles[(len(lengths),)](listed, sequences, tiles, num_warps=1)
    found = listed.tolist()
    assert sorted(int(cu_k[seq]) // 128 + seq + tile for seq, tile in found) == list(range(tiles))
    full = [(lengths[seq][0], seq, tile) for seq, tile in found if 128 * tile < lengths[seq][1]]
    assert len(full) == sum(-(-keys // 128) for _, keys in lengths)
    assert [x[1:] for x in full] == [tuple(x) for x in found[: len(full)]]  # those without keys are last
    assert full == sorted(full, key=lambda x: (-x[0], x[1], x[2]))


LOOPS = {
    "causal-hd64": dict(t=150, s=300, heads=(2, 1), d=64, causal=True),
    "window-hd128": dict(t=200, s=330, heads=(2, 2), d=128, window=(70, 3), sink=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_cta_loops_over_several_work_tiles(name, exact, order, monkeypatch):
    launches.num_sms(monkeypatch, 2)
    monkeypatch.setattr(backward, "loops", lambda *given: True)
    b, want, low = request(**LOOPS[name])
    with launches.race_free("sm_90a", order=order, seed=7):
        launches.run(deterministic(b) if exact else b)
    check(b, want, low)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("d, listed", [(64, False), (64, True), (128, True)])
def test_a_cta_loops_over_the_sequences_of_a_varlen_batch(d, listed, order, monkeypatch):
    launches.num_sms(monkeypatch, 2)
    monkeypatch.setattr(backward, "loops", lambda *given: True)
    monkeypatch.setattr(backward, "lengths_differ", lambda x: listed)
    b, want, low = varlen_request(d=d, kv_heads=1)
    with launches.race_free("sm_90a", order=order, seed=7):
        launches.run(b)
    check(b, want, low)
