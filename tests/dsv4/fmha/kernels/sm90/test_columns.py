"""Head dims between those that tiles have, on Hopper: which products there are, and the kernel in softsm."""

import dataclasses
import re

import launches
import pytest
import torch
from agreement import assert_agrees, qkv

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha import problem
from dsv4.fmha.kernels.sm90 import columns, entry
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import aot, dispatch
from dsv4.runtime.program import Program

WIDTHS = [(96, 96), (192, 128), (192, 192), (160, 160), (72, 88), (112, 64)]


def draw(d, width, tokens=300):
    q, k, v = qkv(1, tokens, tokens, 4, 2, max(d, width), torch.bfloat16)
    return q[..., :d].contiguous(), k[..., :d].contiguous(), v[..., :width].contiguous()


@pytest.mark.parametrize("width", [128, 256])
def test_pieces_cover_every_column_once(width):
    for used in range(width // 2 + 8, width + 1, 8):
        for count, piece in ((columns.score_pieces, columns.score_piece), (columns.value_pieces, columns.value_piece)):
            found = [(piece(used, width, i, 0), piece(used, width, i, 1)) for i in range(count(used, width))]
            ends = [first + n for first, n in found]
            assert [first for first, _ in found] == [0, *ends[:-1]]
            assert used <= ends[-1] <= width and all(n & (n - 1) == 0 for _, n in found)
            assert ends[-1] - used < (32 if ends[-1] < width else 64)


def steps(d, width, tokens, num_sms):
    """The steps of a program."""
    q, k, v = draw(d, width, tokens)
    p = dataclasses.replace(problem.dense(q, k, v), out=torch.empty(*q.shape[:-1], width, dtype=q.dtype))
    program = Program(dict(q=q, k=k, v=v, out=p.out), q.device)
    entry.prepare(program.slots_of(p), dispatch.compile_target("sm_90a")._replace(num_sms=num_sms), program)
    return [type(step).__name__ for step in program.steps]


def test_tensors_are_read_as_they_are_where_rows_are_many_and_padded_where_they_are_few():
    assert steps(192, 128, 300, num_sms=2) == ["Launch"]
    padded = steps(192, 128, 300, num_sms=132)
    assert padded[:2] == ["Fill", "Copy"] and padded.count("Copy") == 4 and padded[-1] == "Copy"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
@pytest.mark.parametrize("d, width", WIDTHS)
def test_the_kernel_of_many_rows(d, width, order):
    q, k, v = draw(d, width)
    sink = torch.randn(4)
    with launches.race_free("sm_90a", sms=2, order=order, seed=7):
        got = dsv4.fmha(q, k, v, causal=True, sink=sink, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, q, k, v, causal=True, sink=sink)


@pytest.mark.compile
def test_the_softmax_runs_beside_the_products_of_all_accumulators():
    """What is waited for is S. Products of P and V, one group for each accumulator of O, may be under way."""
    q, k, v = draw(192, 192)
    p = dataclasses.replace(problem.dense(q, k, v), out=torch.empty_like(q))
    program = Program(dict(q=q, k=k, v=v, out=p.out), q.device)
    entry.prepare(program.slots_of(p), dispatch.compile_target("sm_90a")._replace(num_sms=2), program)
    (launch,) = program.steps
    ptx = aot.compile_kernel(launch.kernel, launch.arguments, launch.constants).asm["ptx"]
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", ptx)) == {"0", "2"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_that_get_copies(arch):
    if arch == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    q, k, v = draw(80, 72, 40)
    with softsm.use(arch):
        got = dsv4.fmha(q, k, v, window=(7, 0), return_lse=True, backend="softsm")
        out = torch.full_like(got[0], float("nan"))
        assert dsv4.fmha(q, k, v, window=(7, 0), out=out, backend="softsm") is out
    assert_agrees(got, reference.fmha, q, k, v, window=(7, 0))
    assert torch.equal(out, got[0])
