"""Calls with the same key share what was prepared; what a key cannot hold is looked at in every call. In softsm."""

import gc
import weakref
from threading import Thread

import launches
import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.integrations.flash_mla import flash_mla_with_kvcache
from dsv4.runtime import calls


@pytest.fixture
def prepared(monkeypatch):
    """The list gets the name of every operation that is prepared."""
    names = []
    prepare = calls._prepare
    monkeypatch.setattr(calls, "_prepare", lambda op, *rest: names.append(op.name) or prepare(op, *rest))
    with softsm.use("sm_90a"):
        yield names


def v4_problem():
    def numbers():
        return torch.randint(-1, 40, (1, 20), dtype=torch.int32)

    def rows():
        return torch.randn(40, 512).bfloat16()

    return dict(q=torch.randn(1, 4, 512).bfloat16(), window=rows(), window_indices=numbers(), compressed=rows(),
                compressed_indices=numbers(), sink=torch.randn(4))  # fmt: skip


def test_a_call_like_an_earlier_one_is_not_prepared_again(prepared, monkeypatch):
    """Split and merged, so that there are two launches and a workspace; other tensors each time."""
    launches.num_sms(monkeypatch, 132)
    names = launches.launched(monkeypatch)
    for _ in range(3):
        q, (k, v) = torch.randn(1, 1, 8, 64).bfloat16(), torch.randn(2, 1, 400, 1, 64).bfloat16()
        problem = dict(q=q, k=k, v=v, sink=torch.randn(8))
        got = dsv4.fmha(**problem, return_lse=True, backend="softsm")
        assert_agrees(got, reference.fmha, **problem)
    assert prepared == ["fmha"] and names == 3 * ["fmha_forward", "combine"]


@pytest.mark.compile
def test_tensors_that_came_as_one_and_come_as_two(prepared):
    """k is v in the first call, by descriptors; then not; then again."""
    for turn in range(4):
        q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(1, 9, 1, 64).bfloat16()
        v = k if turn in (0, 3) else torch.randn(1, 9, 1, 64).bfloat16()
        got = dsv4.fmha(q, k, v, return_lse=True, backend="softsm")
        assert_agrees(got, reference.fmha, q=q, k=k, v=v)
    assert prepared == ["fmha", "fmha"]


@pytest.mark.compile
def test_lists_and_pools_that_came_as_one_and_come_as_two(prepared):
    """What a program makes of an argument depends on the argument, not on which other one was the same tensor, but for
    pools and for the starts of sequences: FP8 rows of one that is both are unpacked once, and with one list of starts a
    sequence has as many keys as queries."""
    for turn in range(4):
        problem = v4_problem()
        if turn in (0, 3):
            problem |= dict(compressed=problem["window"], compressed_indices=problem["window_indices"])
        got = dsv4.v4_attention(**problem, return_lse=True, backend="softsm")
        assert_agrees(got, reference.v4_attention, **problem)
    for turn in range(3):
        q, k, v = (torch.randn(9, 1, 64).bfloat16() for _ in range(3))
        cu_q = torch.tensor([0, 4, 9], dtype=torch.int32)
        cu_k = cu_q if turn == 0 else torch.tensor([0, 2, 9], dtype=torch.int32)
        given = dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        got = dsv4.fmha_varlen(**given, max_seqlen_q=5, max_seqlen_k=7, return_lse=True, backend="softsm")
        assert_agrees(got, reference.fmha_varlen, **given)
    assert prepared == ["v4_attention", "v4_attention", "fmha_varlen", "fmha_varlen"]


def test_no_tensor_of_a_call_is_kept(prepared):
    q, k, v = (torch.randn(1, 9, 1, 64).bfloat16() for _ in range(3))
    kept = [weakref.ref(x) for x in (q, k, v, dsv4.fmha(q, k, v, backend="softsm"))]
    del q, k, v
    gc.collect()
    assert [x() for x in kept] == [None] * 4


def test_a_wrapper_shares_what_is_prepared(prepared):
    for _ in range(2):
        problem = v4_problem()
        q, window, listed, compressed, also, sink = problem.values()
        out, lse = flash_mla_with_kvcache(
            q[:, None], window[None, :, None], None, None, 512, indices=listed[:, None], attn_sink=sink,
            extra_k_cache=compressed[None, :, None], extra_indices_in_kvcache=also[:, None], backend="softsm",
        )  # fmt: skip
        assert_agrees((out[:, 0], lse[:, :, 0]), reference.v4_attention, **problem)
    assert prepared == ["v4_attention"]


def test_memory_that_overlaps_is_refused_in_every_call(prepared):
    problem = v4_problem()
    out = torch.empty_like(problem["q"])
    dsv4.v4_attention(**problem, out=out, backend="softsm")
    other = v4_problem()
    assert dsv4.v4_attention(**other, out=out, backend="softsm") is out
    assert len(prepared) == 1
    with pytest.raises(ValueError, match="out: got memory that overlaps q; accepted: memory that overlaps no input"):
        dsv4.v4_attention(**other, out=other["q"], backend="softsm")


def test_values_are_checked_in_every_call(prepared):
    problem = v4_problem()
    dsv4.v4_attention(**problem, backend="softsm")
    problem["window_indices"][0, 3] = 40
    with pytest.raises(ValueError, match="window_indices: got values from .* to 40; accepted: row numbers"):
        dsv4.v4_attention(**problem, backend="softsm")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"return_lse": 1}, "return_lse: got int 1; accepted: True or False"),
        ({"window": (127.0, 0)}, "window: got tuple"),
        ({"deterministic": 0}, "deterministic: got int 0"),
        ({"backend": 3}, "backend: got int 3"),
    ],
    ids=str,
)
def test_what_compares_equal_but_is_wrong_is_refused_after_a_right_call_too(prepared, change, message):
    q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(1, 9, 1, 64).bfloat16()
    right = dict(window=(127, 0), deterministic=False, return_lse=True, backend="softsm")
    dsv4.fmha(q, k, k, **right)
    with pytest.raises(ValueError, match=message):
        dsv4.fmha(q, k, k, **right | change)


def test_other_alignments_and_strides_are_other_calls(prepared):
    """Rows whose distance is not a multiple of 16 bytes are copied, in the second call as in the first."""
    problem = v4_problem()
    dsv4.v4_attention(**problem, backend="softsm")
    for turn in range(2):
        problem = v4_problem() | {"window": torch.randn(40, 513).bfloat16()[:, :512]}
        got = dsv4.v4_attention(**problem, return_lse=True, backend="softsm")
        assert_agrees(got, reference.v4_attention, **problem)
        assert len(prepared) == 2, turn


def test_an_output_is_contiguous_whatever_q_is(prepared):
    """A contiguous q lends its layout to the output; one whose heads lie first does not."""
    k, heads_first = torch.randn(1, 9, 1, 64).bfloat16(), torch.randn(1, 3, 2, 64).bfloat16()
    for q in (heads_first.clone(), heads_first.view(1, 2, 3, 64).transpose(1, 2)):
        got = dsv4.fmha(q, k, k, return_lse=True, backend="softsm")
        assert got[0].is_contiguous() and got[0].shape == q.shape
        assert_agrees(got, reference.fmha, q=q, k=k, v=k)


def test_an_output_that_a_kernel_cannot_write_is_copied_each_time(prepared):
    for _ in range(2):
        q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(1, 9, 1, 64).bfloat16()
        out = torch.full((1, 2, 1, 65), float("nan")).bfloat16()[..., :64]
        _, lse = dsv4.fmha(q, k, k, out=out, return_lse=True, backend="softsm")
        assert_agrees((out, lse), reference.fmha, q=q, k=k, v=k)
    assert prepared == ["fmha"]


def test_the_oldest_goes_when_too_many_are_kept(prepared, monkeypatch):
    monkeypatch.setattr(calls, "MOST", 2)
    k = torch.randn(1, 9, 1, 64).bfloat16()
    for tokens in (1, 2, 3, 3, 1):
        dsv4.fmha(torch.randn(1, tokens, 1, 64).bfloat16(), k, k, backend="softsm")
    assert len(prepared) == 4 and len(calls._calls) == 2


def test_threads_share_what_is_prepared(prepared):
    """A prepared call holds no tensor, so two threads may run it at once."""
    results = {}

    def work(name):
        problem = v4_problem()
        got = [dsv4.v4_attention(**problem, return_lse=True, backend="softsm") for _ in range(2)]
        results[name] = problem, got

    threads = [Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem, got in results.values():
        for one in got:
            assert_agrees(one, reference.v4_attention, **problem)


def test_torch_compile_with_an_output_of_any_size():
    """No graph break, and no question about strides that cannot be traced."""

    def attend(q, k, out):
        return dsv4.fmha(q, k, k, out=out) + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        q, k = torch.randn(1, tokens, 2, 64), torch.randn(1, 9, 2, 64)
        out = torch.empty_like(q)
        assert torch.equal(compiled(q, k, out), dsv4.fmha(q, k, k) + 1)
        assert torch.equal(out, dsv4.fmha(q, k, k))
