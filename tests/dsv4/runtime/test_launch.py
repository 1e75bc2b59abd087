"""Launches of prepared calls, and single ones, in softsm."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from agreement import assert_agrees
from triton import knobs

import dsv4
import softsm
from dsv4 import reference
from dsv4.runtime import calls, dispatch, launch, program
from dsv4.runtime.program import Changing, Launch


def call():
    """Make a call with two launches, split and merged, of the kernel that fmha/kernels/sm90/test_forward.py
    compiles."""
    q, k, v = (torch.randn(1, n, heads, 64).bfloat16() for n, heads in ((1, 8), (200, 1), (200, 1)))
    sink = torch.randn(8)
    plan = dsv4.plan(dsv4.fmha, batch=1, q_heads=8, kv_heads=1, head_dim=64, max_seqlen_k=200, device="cpu")
    plan = dataclasses.replace(plan, num_splits=3, scratch=torch.full((3 * 8 * 65,), float("nan")))
    got = dsv4.fmha(q, k, v, sink=sink, return_lse=True, plan=plan, backend="softsm")
    assert_agrees(got, reference.fmha, q, k, v, sink=sink)


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


@triton.jit(do_not_specialize=["shift"])
def scaled(x_ptr, y_ptr, n, factor, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor + shift, mask=at < n)


@pytest.fixture
def prepared(monkeypatch):
    """The list gets every launch that is prepared."""
    found = []
    ready = launch.ready_launch
    monkeypatch.setattr(launch, "ready_launch", lambda given, target: found.append(given) or ready(given, target))
    with softsm.use("sm_90a"):
        yield found


def scale(n=40, factor=3, skip=0, dtype=torch.float32, block=32, shift=0):
    x = torch.randint(-9, 9, (skip + n,)).to(dtype)[skip:]
    y = torch.full((n + 1,), -1.0, dtype=dtype)
    grid = (-(-n // block),)
    calls.launch(Launch(scaled, grid, [x, y, n, factor, Changing(shift)], dict(BLOCK=block, num_warps=1)))
    assert torch.equal(y[:n], x * factor + shift) and y[n] == -1


def test_a_single_launch_is_prepared_once_and_finds_other_tensors_and_numbers_that_change(prepared):
    for shift in (0, 1, 16, -5, 0):
        scale(shift=shift)
    assert len(prepared) == 1


@pytest.mark.parametrize(
    "other",
    [dict(n=48), dict(n=1), dict(factor=1), dict(factor=3.5), dict(skip=1), dict(dtype=torch.float16), dict(block=64)],
    ids=str,
)
def test_what_a_launch_depends_on_is_in_its_key(prepared, other):
    for _ in range(2):
        scale()
        scale(**other)
    assert len(prepared) == 2


def test_hooks_of_triton_see_single_launches(prepared, monkeypatch):
    scale()
    seen = []
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda x: seen.append(x.get()["name"]))
    scale()
    assert seen == ["scaled"] and len(prepared) == 1


def test_the_oldest_call_goes_when_too_many_are_kept(prepared, monkeypatch):
    monkeypatch.setattr(calls, "MOST", 2)
    for n in (40, 1, 48, 48, 40):
        scale(n)
    assert len(prepared) == 4 and len(calls._calls) == 2


def test_no_tensor_of_a_single_launch_is_kept(prepared):
    x, y = torch.randn(40), torch.empty(40)
    calls.launch(Launch(scaled, (2,), [x, y, 40, 3, Changing(0)], dict(BLOCK=32, num_warps=1)))
    kept = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [x() for x in kept] == [None, None]


def test_compiled_kernels_run_without_the_driver_of_triton(monkeypatch):
    """Its first use runs a C compiler, which many containers lack."""
    seen = []
    step = SimpleNamespace(run=lambda memory, addresses, stream: seen.append(stream), slots=lambda: ())
    monkeypatch.setattr(launch, "ready_launch", lambda one, target: (step, step))
    monkeypatch.setattr(launch, "driver", None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
    one = program.Program({}, torch.device("cuda", 2))
    one.steps.append(Launch(scaled, (1,), [], {}))
    launch.Ready(one, dispatch.Target("cuda", (9, 0), 132)).run([], [])
    assert seen == [42]
