"""Blocks smaller than the CTA: several warps do the same work, one stores. No race, unless the others' values count."""

import pytest
import torch
import triton
import triton.language as tl

import softsm


@triton.jit
def in_place(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def softmax_in_place(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.exp(tl.load(x + i))
    tl.store(x + i, v / tl.sum(v))


@triton.jit
def there_and_back(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i.to(tl.float32))
    tl.store(o + i, tl.load(x + i) + 1)


@triton.jit
def counter(x, o, n, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x) + 1)


@triton.jit
def masked_ticket(x, o, n, BLOCK: tl.constexpr):
    taken = tl.program_id(0) < n
    ticket = tl.atomic_add(x, 1.0, mask=taken)
    tl.store(o, ticket, mask=taken)


@triton.jit
def counter_that_is_used(x, o, n, BLOCK: tl.constexpr):
    v = tl.load(x)
    tl.store(x, v + 1)
    tl.store(o + tl.arange(0, 128), v + tl.zeros((128,), tl.float32))


@triton.jit
def counter_that_decides(x, o, n, BLOCK: tl.constexpr):
    v = tl.load(x)
    tl.store(x, v + 1)
    if v > 0:
        tl.store(o + tl.arange(0, 128), tl.zeros((128,), tl.float32))


@triton.jit
def gathered_in_place(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + (i // 2)), mask=i < n)


@triton.jit
def counter_that_points(x, o, n, BLOCK: tl.constexpr):
    for _ in range(2):
        tl.debug_barrier()
        v = tl.load(x).to(tl.int32) - 1
        tl.store(x, tl.load(x + v))  # x has one element: v must be 0, or the program reads outside
        tl.store(x, v + 2)
        tl.debug_barrier()
        tl.store(x, v + 1)


@triton.jit(noinline=True)
def add_one(x):
    tl.store(x, tl.load(x) + 1)


@triton.jit
def counter_in_a_function(x, o, n, BLOCK: tl.constexpr):
    add_one(x)


@triton.jit(noinline=True)
def fetch_and_add_one(x):
    v = tl.load(x)
    tl.store(x, v + 1)
    return v


@triton.jit
def counter_that_a_function_returns(x, o, n, BLOCK: tl.constexpr):
    v = fetch_and_add_one(x)
    tl.store(o + tl.arange(0, 128), v + tl.zeros((128,), tl.float32))


@triton.jit(noinline=True)
def fill(o, v):
    tl.store(o + tl.arange(0, 128), v + tl.zeros((128,), tl.float32))


@triton.jit
def counter_that_a_function_gets(x, o, n, BLOCK: tl.constexpr):
    v = tl.load(x)
    tl.store(x, v + 1)
    fill(o, v)


def findings(kernel, arch, block, strict=False, n=4096):
    with softsm.use(arch), softsm.checking(strict=strict) as report:
        kernel[(1,)](torch.ones(4096), torch.zeros(4096), n, BLOCK=block)
    return [d.code for d in report]


HARMLESS = [in_place, softmax_in_place, there_and_back, counter, counter_in_a_function]
RACES = [counter_that_is_used, counter_that_decides, gathered_in_place]
RACES += [counter_that_a_function_returns, counter_that_a_function_gets]


@pytest.mark.parametrize("kernel", HARMLESS, ids=lambda k: k.__name__)
def test_repeated_work_is_no_race(kernel):
    for block, arch in ((16, "sm_90a"), (32, "sm_100a"), (64, "sm_90a"), (512, "sm_90a")):
        assert findings(kernel, arch, block) == [], (block, arch)


def test_the_strict_level_calls_it_one():
    assert "race" in findings(in_place, "sm_90a", 32, strict=True)


@pytest.mark.parametrize("kernel", RACES, ids=lambda k: k.__name__)
def test_values_that_count_are_races(kernel):
    assert "race" in findings(kernel, "sm_90a", 128)


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_without_checks_the_warp_that_stores_comes_last(warps):
    """This is the order on a GPU, where the warps run nearly in step."""
    x = torch.ones(1)
    with softsm.use("sm_90a"):
        counter_that_points[(1,)](x, x, 1, BLOCK=1, num_warps=warps)
    assert x.item() == 1


def test_the_result_of_an_atomic_that_was_masked_off():
    assert findings(masked_ticket, "sm_90a", 1, n=0) == []
    assert "uninitialised" in findings(masked_ticket, "sm_90a", 1, n=0, strict=True)


@triton.jit
def squares(x, o, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.store(o, tl.sum(v * v))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_lanes_that_disagree_in_the_last_bit_repeat_the_same_store(arch):
    """x * x plus the neighbour's square is one fma, rounded differently on both sides; all lanes store to one place."""
    x, o = torch.randn(64), torch.zeros(1)
    with softsm.use(arch), softsm.checking() as report:
        squares[(1,)](x, o, 61, BLOCK=64)
    torch.testing.assert_close(o[0], (x[:61] ** 2).sum())
    assert not report, str(report)
