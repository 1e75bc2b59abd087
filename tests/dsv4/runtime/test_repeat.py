"""Calls that repeat the launches of an earlier one, played by softsm: the same results, the long way where it is due.

The kernels are those that other tests compile, too.
"""

import gc
import weakref

import pytest
import torch
from agreement import assert_agrees
from triton.runtime import driver

import dsv4
import softsm
from dsv4 import reference
from dsv4.integrations.flash_mla import flash_mla_with_kvcache
from dsv4.runtime import operators as ops
from dsv4.runtime import repeat


@pytest.fixture
def long_ways(monkeypatch):
    """CPU tensors count as a GPU's; the list gets the name of every call that went the long way."""
    names = []
    way = ops._call
    monkeypatch.setattr(ops, "_call", lambda name, *rest: names.append(name) or way(name, *rest))
    monkeypatch.setattr(repeat, "_eager", lambda q: True)
    monkeypatch.setattr(repeat, "_plain", {torch._C._dispatch_keys(torch.empty(1)).raw_repr()})
    monkeypatch.setattr(repeat, "_stream", lambda device: driver.active.get_current_stream(0))
    repeat.forget()
    with softsm.use("sm_90a"):
        yield names
    repeat.forget()


def v4_problem():
    def numbers():
        return torch.randint(-1, 40, (1, 20), dtype=torch.int32)

    def rows():
        return torch.randn(40, 512).bfloat16()

    return dict(q=torch.randn(1, 4, 512).bfloat16(), window=rows(), window_indices=numbers(), compressed=rows(),
                compressed_indices=numbers(), sink=torch.randn(4))  # fmt: skip


def test_a_call_like_an_earlier_one_takes_the_short_way(long_ways):
    """Split and merged, so that there are two launches and scratch memory; other tensors each time."""
    for _ in range(3):
        problem = v4_problem() | {"softmax_scale": -0.1}
        got = dsv4.v4_attention(**problem, return_lse=True, deterministic=True, backend="softsm")
        assert_agrees(got, reference.v4_attention, **problem)
    assert long_ways == ["v4_attention"]


def test_tensors_that_came_as_one_and_come_as_two(long_ways):
    """k is v in the first call, by descriptors; then not; then again."""
    for turn in range(4):
        q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(1, 9, 1, 64).bfloat16()
        v = k if turn in (0, 3) else torch.randn(1, 9, 1, 64).bfloat16()
        got = dsv4.fmha(q, k, v, return_lse=True, backend="softsm")
        assert_agrees(got, reference.fmha, q=q, k=k, v=v)
    assert long_ways == ["fmha", "fmha"]


def test_tensors_of_an_earlier_call_are_not_kept(long_ways):
    q, k, v = (torch.randn(1, 9, 1, 64).bfloat16() for _ in range(3))
    kept = [weakref.ref(x) for x in (q, k, v, dsv4.fmha(q, k, v, backend="softsm"))]
    del q, k, v
    gc.collect()
    assert [x() for x in kept] == [None] * 4


def test_a_wrapper_repeats_the_launches_within(long_ways):
    for _ in range(2):
        problem = v4_problem()
        q, window, listed, compressed, also, sink = problem.values()
        out, lse = flash_mla_with_kvcache(
            q[:, None], window[None, :, None], None, None, 512, indices=listed[:, None], attn_sink=sink,
            extra_k_cache=compressed[None, :, None], extra_indices_in_kvcache=also[:, None], backend="softsm",
        )  # fmt: skip
        assert_agrees((out[:, 0], lse[:, :, 0]), reference.v4_attention, **problem)
    assert long_ways == ["v4_attention"]


def test_what_depends_on_addresses_is_looked_at_each_time(long_ways):
    problem = v4_problem()
    out = torch.empty_like(problem["q"])
    dsv4.v4_attention(**problem, out=out, backend="softsm")
    other = v4_problem()
    assert dsv4.v4_attention(**other, out=out, backend="softsm") is out
    assert len(long_ways) == 1
    with pytest.raises(ValueError, match="out: got memory that overlaps q; accepted: memory apart from every input"):
        dsv4.v4_attention(**other, out=other["q"], backend="softsm")
    pool = torch.randn(41, 512).bfloat16()[1:]  # 16 bytes are 8 elements: aligned all the same
    got = dsv4.v4_attention(**other | {"window": pool}, return_lse=True, backend="softsm")
    assert_agrees(got, reference.v4_attention, **other | {"window": pool})


def test_equal_is_not_the_same(long_ways):
    """True == 1, but 1 is no flag; nor is a call with other strides the same call."""
    problem = v4_problem()
    dsv4.v4_attention(**problem, return_lse=True, backend="softsm")
    with pytest.raises(ValueError, match="return_lse: got int 1; accepted: True or False"):
        dsv4.v4_attention(**problem, return_lse=1, backend="softsm")
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        dsv4.v4_attention(**problem | {"q": problem["q"].requires_grad_()}, return_lse=True, backend="softsm")
    with pytest.raises(ValueError, match="window_indices: got dtype int64"):
        dsv4.v4_attention(**problem | {"window_indices": problem["window_indices"].long()}, backend="softsm")


def test_a_call_that_copies_is_not_repeated(long_ways):
    """Rows that are no multiple of 16 bytes apart are copied first."""
    problem = v4_problem()
    problem["window"] = torch.randn(40, 513).bfloat16()[:, :512]
    for _ in range(2):
        got = dsv4.v4_attention(**problem, return_lse=True, backend="softsm")
        assert_agrees(got, reference.v4_attention, **problem)
    assert len(long_ways) == 2


def test_a_cpu_takes_the_long_way():
    assert repeat.key_of("v4_attention", (torch.zeros(1),), ()) is None
