"""`softsm.use`: what it puts under Triton, and that all of it goes away again."""

from __future__ import annotations

import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.driver import driver

import softsm


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def call(x, out=None, grid=(4,), block=64):
    return add[grid](x, x, x if out is None else out, x.numel(), BLOCK=block)


def traces() -> tuple:
    """Everything `use` touches, as identities."""
    import triton.testing
    from triton.backends import backends
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.autotuner import Autotuner

    return (
        dict(backends), driver._active, CUDABackend.__dict__["supports_target"], CudaDriver.__dict__["is_active"],
        torch.Tensor.__dict__.get("data_ptr"), triton.testing.do_bench, triton.testing.do_bench_cudagraph,
        torch.cuda.is_available, torch.cuda.get_device_capability, dict(vars(Autotuner)),
    )  # fmt: skip


def test_context_manager_restores_everything():
    before = traces()
    with softsm.use("sm_90a", cuda_shim=True):
        assert traces() != before and softsm.active_arch() == "sm_90a"
        with softsm.use("sm_100a"):
            assert softsm.active_arch() == "sm_100a"
        assert softsm.active_arch() == "sm_90a"
    assert traces() == before and softsm.active_arch() is None
    assert torch.zeros(1).device.type == "cpu"


def test_restores_after_an_exception():
    before = traces()
    with pytest.raises(KeyError), softsm.use("sm_100a"):
        raise KeyError
    assert traces() == before


def test_plain_call_lasts_until_stop():
    before = traces()
    use = softsm.use("sm_100a")
    assert softsm.active_arch() == "sm_100a"
    use.stop()
    use.stop()
    assert traces() == before


def test_outer_stop_ends_inner_uses():
    before = traces()
    outer = softsm.use("sm_90a")
    softsm.use("sm_100a")
    outer.stop()
    assert traces() == before


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "", "cuda"])
def test_unknown_architecture(arch):
    before = traces()
    with pytest.raises(ValueError, match="arch: got .* accepted: sm_90a, sm_100a, sm_103a"):
        softsm.use(arch)
    assert traces() == before


def test_launch_reaches_the_engine(launches):
    x = torch.arange(200, dtype=torch.float32)
    with softsm.use("sm_100a", sms=7):
        call(x)
    (launch,) = launches
    assert launch.grid == (4, 1, 1) and launch.block == (128, 1, 1) and launch.cluster == (1, 1, 1)
    assert launch.sms == 7
    assert launch.args[0] == struct.pack("<Q", x.data_ptr()) and launch.args[3] == struct.pack("<i", 200)
    assert launch.args[-2:] == [bytes(8), bytes(8)]  # no scratch
    assert launch.memory.find(x.data_ptr(), 800).name == "argument x [200]"


def test_targets_alternate_in_one_process(launches):
    x = torch.zeros(64)
    targets = []
    for arch in ("sm_90a", "sm_100a", "sm_90a"):
        with softsm.use(arch):
            targets.append(call(x).metadata.target.arch)
    assert targets == [90, 100, 90] and len(launches) == 3


def test_ptx_is_text_and_there_is_no_cubin(launches):
    with softsm.use("sm_90a"):
        kernel = call(torch.zeros(64))
    assert kernel.asm["ptx"].lstrip().startswith("//") and "cubin" not in kernel.asm


def test_whole_storage_of_a_view_is_accessible(launches):
    storage = torch.zeros(1000)
    with softsm.use("sm_90a"):
        call(storage[100:200])
    assert launches[0].memory.find(storage.data_ptr(), 4000) is not None


def test_empty_grid_launches_nothing(launches):
    with softsm.use("sm_90a"):
        call(torch.zeros(64), grid=(0,))
    assert launches == []


def test_hooks_are_called(launches, monkeypatch):
    seen = []
    from triton import knobs

    with softsm.use("sm_90a"):
        for when in ("enter", "exit"):
            hook = lambda md, when=when: seen.append((when, md.get()["name"]))  # noqa: E731
            monkeypatch.setattr(knobs.runtime, f"launch_{when}_hook", hook)
        call(torch.zeros(64))
    assert seen == [("enter", "add"), ("exit", "add")]


def test_autotune_runs_every_configuration_once(launches):
    @triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64, 128)], key=["n"])
    @triton.jit
    def tuned(x, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, 0.0, mask=i < n)

    with softsm.use("sm_90a"):
        tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](torch.zeros(64), 64)
    assert len(launches) == 4  # three configurations, then the call itself


def test_autotuned_choices_stay_with_their_target(launches):
    """Triton keeps them by the arguments alone: what is fastest here says nothing about a GPU."""
    timed = []

    def bench(call, quantiles):
        timed.append(softsm.active_arch())
        call()
        return [{"sm_90a": -1, "sm_100a": 1}[softsm.active_arch()] * len(timed)] * 3

    for given in (bench, None):

        @triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"], do_bench=given)
        @triton.jit
        def tuned(x, n, BLOCK: tl.constexpr):
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + i, 0.0, mask=i < n)

        def chosen(arch, tuned=tuned):
            with softsm.use(arch):
                tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](torch.zeros(64), 64)
                assert len(tuned.cache) == 1
                return tuned.best_config.kwargs["BLOCK"]

        def on_a_gpu(call, quantiles):
            raise AssertionError("the benchmark function of another driver")

        if given is None:
            vars(tuned)["do_bench"] = on_a_gpu  # as Triton keeps it
        first = chosen("sm_100a"), chosen("sm_90a")
        if given is bench:
            assert first == (32, 64) and timed == ["sm_100a"] * 2 + ["sm_90a"] * 2
        runs = len(launches)
        assert (chosen("sm_100a"), chosen("sm_90a")) == first and len(launches) == runs + 2  # kept, each for itself
        assert tuned.cache == {}
        with softsm.use("sm_90a"):
            made_here = triton.autotune([], key=[])(add)
        assert made_here.cache == {}


def test_do_bench(launches):
    x = torch.zeros(64)
    with softsm.use("sm_90a"):
        assert triton.testing.do_bench(lambda: call(x)) > 0
        assert len(triton.testing.do_bench(lambda: call(x), quantiles=[0.5, 0.2])) == 2
    assert len(launches) == 2


def test_autotuners_count_instructions():
    """The same choice on every machine, however busy."""

    @triton.autotune([triton.Config({"TURNS": n}) for n in (300, 20, 100)], key=["n"])
    @triton.jit
    def tuned(x, n, TURNS: tl.constexpr):
        value = n
        for _ in range(TURNS):
            value = value * 3 + 1
        tl.store(x, value)

    x = torch.zeros(1, dtype=torch.int32)
    with softsm.use("sm_90a"):
        tuned[(1,)](x, 1)
        times = [triton.testing.do_bench(lambda: tuned[(1,)](x, 1)) for _ in range(2)]
    assert tuned.best_config.kwargs["TURNS"] == 20
    assert times[0] == times[1] > 0


def test_too_much_shared_memory_is_refused(launches):
    from triton.runtime.errors import OutOfResources

    @gluon.jit
    def big(SIZE: gl.constexpr):
        room = gl.allocate_shared_memory(gl.float32, [SIZE // 4], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        room.slice(0, 128).store(gl.full([128], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))

    with softsm.use("sm_90a"):
        big[(1,)](128 * 1024)
        with pytest.raises(OutOfResources, match="shared memory"):
            big[(1,)](256 * 1024)


def test_pointer_arrays_reach_their_tensors(launches):
    @triton.jit
    def through(pointers, n):
        p = tl.load(pointers).to(tl.pointer_type(tl.float32))
        tl.store(p, 1.0)

    with softsm.use("sm_90a"):
        target, freed = torch.zeros(100), torch.zeros(50)
        address = freed.data_ptr()
        array = torch.tensor([target.data_ptr(), address])
        del freed
        through[(1,)](array, 2)
    memory = launches[0].memory
    assert memory.find(target.data_ptr(), 400) is not None
    assert memory.find(address, 200) is None  # freed: no longer known


def in_another_thread(function):
    with ThreadPoolExecutor(1) as other:
        return other.submit(function).result()


def test_a_use_in_another_thread_is_a_guest():
    """Triton has one driver: the threads share it, and it stays until the last of them is done."""

    def stays_on(owner):
        with softsm.use("sm_100a"):
            mine = driver.active
            owner.stop()
            return mine is driver.active and softsm.active_arch() == "sm_100a"

    owner = softsm.use("sm_100a")
    played = driver.active
    try:
        with softsm.use("sm_100a"):  # nested, in the thread that owns it
            assert driver.active is not played
        assert in_another_thread(lambda: stays_on(owner))
        assert softsm.active_arch() is None
    finally:
        owner.stop()
    assert in_another_thread(softsm.active_arch) is None


def test_an_ended_use_waits_for_the_guests_and_spares_the_use_that_came_after():
    owner = softsm.use("sm_90a")
    guest = in_another_thread(lambda: softsm.use("sm_90a"))
    owner.stop()
    with softsm.use("sm_90a"):
        guest.stop()
        assert softsm.active_arch() == "sm_90a"
    assert softsm.active_arch() is None


def test_another_thread_cannot_bring_another_architecture():
    """LLVM ends the process when a kernel for one target is compiled for another."""

    def other():
        with pytest.raises(RuntimeError, match="another thread uses sm_90a"), softsm.use("sm_100a"):
            pass
        with pytest.raises(RuntimeError, match="without the shim"), softsm.use("sm_90a", cuda_shim=True):
            pass

    with softsm.use("sm_90a"):
        in_another_thread(other)
        with softsm.use("sm_100a"):  # in one thread they nest
            pass
    assert softsm.active_arch() is None


def test_importing_softsm_is_quick_and_light():
    code = "import sys, softsm; print([m for m in ('torch', 'triton', 'numba', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        softsm.nonsense  # noqa: B018


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_without_triton_it_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf"softsm.use: {missing} is not installed; .*softsm\[triton\]"):
        softsm.use("sm_90a")
    monkeypatch.undo()
    assert softsm.active_arch() is None
