"""Launches of prepared calls, and single ones, in softsm."""

import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl
from agreement import assert_agrees
from triton import knobs

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha.kernels.backward import descriptor
from dsv4.runtime import launch


def call():
    """Two launches: split, then merged. Of the kernel that test_calls.py and test_v4.py compile."""
    rows, numbers = torch.randn(40, 512).half(), torch.randint(-1, 40, (1, 20), dtype=torch.int32)
    problem = dict(q=torch.randn(1, 4, 512).half(), window=rows, window_indices=numbers, compressed=rows,
                   compressed_indices=numbers, sink=torch.randn(4), softmax_scale=-0.1)  # fmt: skip
    got = dsv4.v4_attention(**problem, return_lse=True, deterministic=True, backend="softsm")
    assert_agrees(got, reference.v4_attention, **problem)


def test_hooks_of_triton_see_every_launch_of_a_call_that_was_prepared_without_them(monkeypatch):
    seen = []

    def hook(when):
        return lambda launch: seen.append((when, launch.get()["name"]))

    with softsm.use("sm_90a"):
        call()
        with monkeypatch.context() as patched:
            patched.setattr(knobs.runtime, "launch_enter_hook", hook("enter"))
            patched.setattr(knobs.runtime, "launch_exit_hook", hook("exit"))
            call()
        call()
    names = [name for when, name in seen if when == "enter"]
    assert len(names) == 2 and "combine" in names[1]
    assert seen == [(when, name) for name in names for when in ("enter", "exit")]


@triton.jit
def scaled(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


@pytest.fixture
def prepared(monkeypatch):
    """The list gets every single launch that is prepared."""
    found = []
    ready = launch.ready_launch
    monkeypatch.setattr(launch, "_prepared", {})
    monkeypatch.setattr(launch, "ready_launch", lambda given, *rest: found.append(given) or ready(given, *rest))
    with softsm.use("sm_90a"):
        yield found


def scale(n, factor, skip=0, dtype=torch.float32, block=32):
    x = torch.randn(skip + n).to(dtype)[skip:]
    y = torch.full((n + 1,), -1.0, dtype=dtype)
    launch.now(scaled, (-(-n // block),), x, y, n, factor, BLOCK=block, num_warps=1)
    assert torch.equal(y[:n], x * factor) and y[n] == -1


def test_a_single_launch_is_prepared_once_and_finds_other_tensors_numbers_and_grids(prepared):
    for n, factor in ((40, 3), (41, 5), (70, 3), (3, -9)):
        scale(n, factor)
    assert len(prepared) == 1


@pytest.mark.parametrize("other", [
    dict(n=48), dict(n=1), dict(factor=1), dict(factor=32), dict(factor=3.0), dict(skip=1), dict(dtype=torch.float16),
    dict(block=64),
], ids=str)  # fmt: skip
def test_what_a_kernel_is_compiled_for_is_in_the_key_of_a_single_launch(prepared, other):
    given = dict(n=40, factor=3)
    for _ in range(2):
        scale(**given)
        scale(**given | other)
    assert len(prepared) == 2


def test_numbers_of_64_bits_and_flags_reach_a_kernel(prepared):
    for number in (1 << 40, 3, True, (1 << 40) + 1, 5):
        x, y = torch.arange(40, dtype=torch.int64), torch.empty(40, dtype=torch.int64)
        launch.now(scaled, (2,), x, y, 40, number, BLOCK=32, num_warps=1)
        assert torch.equal(y, x * number)
    assert len(prepared) == 4


def test_a_grid_of_nothing_is_no_launch(prepared):
    launch.now(scaled, (0,), torch.randn(4), torch.empty(4), 4, 3, BLOCK=32, num_warps=1)
    assert prepared == []


def test_hooks_of_triton_see_single_launches(prepared, monkeypatch):
    scale(40, 3)
    seen = []
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda x: seen.append(x.get()["name"]))
    scale(40, 3)
    assert seen == ["scaled"] and len(prepared) == 1


def test_the_oldest_single_launch_goes_when_too_many_are_kept(prepared, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 2)
    for n in (40, 1, 48, 48, 40):
        scale(n, 3)
    assert len(prepared) == 4 and len(launch._prepared) == 2


def test_no_tensor_of_a_single_launch_is_kept(prepared):
    x, y = torch.randn(40), torch.empty(40)
    launch.now(scaled, (2,), x, y, 40, 3, BLOCK=32, num_warps=1)
    kept = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [x() for x in kept] == [None, None]
    given = launch.slots([torch.randn(40), descriptor(torch.randn(2, 64, 64).bfloat16(), [1, 64, 64]), 3])
    assert [x.index for x in (given[0], given[1].base)] == [0, 1] and given[2] == 3
