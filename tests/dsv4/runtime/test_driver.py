"""Launches through the CUDA driver, without one: a driver in Python reads what a launch hands over, parameter by
parameter as the PTX declares them, and runs it in softsm."""

import ctypes
from threading import Thread
from types import SimpleNamespace

import fmha_gradients
import launches
import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.runtime import calls, driver, launch, program, structs
from dsv4.runtime.program import Number, Slot
from dsv4.v4.kernels.sm90 import entry
from softsm.memory import tensor_map_image
from softsm.memory.global_memory import GlobalMemory


class Driver:
    """The functions of libcuda that a launch uses, for one kernel."""

    def __init__(self, ptx: str, tensors: list):
        self.kernel, self.tensors = softsm.load(ptx), tensors
        self.maps: dict[int, dict] = {}
        self.configurations: list = []
        self.bound: list[str] = []
        self.attributes: list[tuple[int, int]] = []

    def cuFuncSetAttribute(self, function, attribute, value):
        assert function.value == HANDLE
        return self.attributes.append((attribute, value)) or 0

    def cuTensorMapEncodeTiled(self, to, kind, rank, address, dims, strides, box, ones, interleave, swizzle, l2, fill):
        self.maps[to.value] = dict(
            data_type=kind.value, rank=rank.value, global_address=address.value, global_dim=list(dims),
            global_strides=list(strides), box_dim=list(box), swizzle=swizzle.value, l2_promotion=l2.value,
            oob_fill=fill.value,
        )  # fmt: skip
        assert list(ones) == [1] * rank.value and interleave.value == 0
        return 0

    def cuTensorMapReplaceAddress(self, to, address):
        self.maps[to.value]["global_address"] = address.value
        return 0

    def cuLaunchKernelEx(self, reference, function, parameters, extra):
        assert extra is None and function.value == HANDLE
        configuration = reference._obj
        self.configurations.append(configuration)
        declared = self.kernel.function.params
        assert len(parameters) == len(declared)
        values = []
        for pointer, p in zip(parameters, declared):
            if p.size == driver.MAP_BYTES:
                assert pointer % driver.MAP_ALIGNMENT == 0
                values.append(bytes(tensor_map_image.encode_tiled(**self.maps[pointer])))
            else:
                values.append(ctypes.string_at(pointer, p.size))
        memory = GlobalMemory()
        storages = {x.data_ptr(): x.untyped_storage() for call in self.tensors for x in call if x is not None}
        for storage in {x.data_ptr(): x for x in storages.values()}.values():
            memory.add(storage.data_ptr(), storage.nbytes(), f"{storage.nbytes()} bytes", storage)
        grid = configuration.gx, configuration.gy, configuration.gz
        self.kernel.launch(grid, configuration.bx, values, shared=configuration.shared, memory=memory)
        return 0

    def cuGetErrorString(self, status, to):
        to._obj.value = b"an illegal something"
        return 0

    def cuDeviceGet(self, to, number):
        return self.bound.append(f"device {number.value}") or 0

    def cuDevicePrimaryCtxRetain(self, to, device):
        return self.bound.append("retained") or 0

    def cuCtxSetCurrent(self, context):
        return self.bound.append("current") or 0


HANDLE = 0x123456789ABC


@pytest.fixture
def drivers(monkeypatch):
    """Calls in softsm go through the driver above; the list gets one for each launch that is prepared."""
    made: list[Driver] = []
    tensors: list = []
    run = launch.Ready.run

    def by_driver(step, target):
        grid = (*step.grid, 1, 1)[:3]
        compiled = step.kernel.warmup(*structs.neutral(step.arguments), grid=step.grid, **step.constants)
        function = driver.Function.of(compiled, device=3)
        fixed = [step.constants.get(p.name, p.default) for p in step.kernel.params[len(step.arguments) :]]
        made.append(Driver(compiled.asm["ptx"], tensors))
        found = driver.DriverLaunch(function._replace(handle=HANDLE), grid, [*step.arguments, *fixed], made[-1])
        return found, found

    def watched(self, memory, addresses):
        tensors.append(memory)  # which gets the workspace, too
        run(self, memory, addresses)

    monkeypatch.setattr(launch, "ready_launch", by_driver)
    monkeypatch.setattr(launch.Ready, "run", watched)
    with softsm.use("sm_90a"):
        yield made


def v4_call():
    """Make a call with two launches, split and merged, of the kernels that test_calls.py compiles."""
    rows, numbers = torch.randn(40, 512).bfloat16(), torch.randint(-1, 40, (1, 20), dtype=torch.int32)
    problem = dict(q=torch.randn(1, 4, 512).bfloat16(), window=rows, window_indices=numbers, compressed=rows,
                   compressed_indices=numbers, sink=torch.randn(4))  # fmt: skip
    got = dsv4.v4_attention(**problem, return_lse=True, backend="softsm")
    assert_agrees(got, reference.v4_attention, **problem)


def dense_call():
    """k and v are read through tensor maps."""
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (2, 9, 9))
    got = dsv4.fmha(q, k, v, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, q=q, k=k, v=v)


def test_addresses_and_numbers_reach_the_kernel_in_every_call(drivers):
    for _ in range(3):
        v4_call()
    assert [len(x.configurations) for x in drivers] == [3, 3]


def test_tensor_maps_follow_their_tensors(drivers):
    for _ in range(3):
        dense_call()
    assert [len(x.maps) for x in drivers] == [2]  # encoded once, in one block


def test_tensor_maps_of_the_same_addresses_are_left_as_they_are(drivers):
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (2, 9, 9))
    first = dsv4.fmha(q, k, v, backend="softsm")
    drivers[0].cuTensorMapReplaceAddress = lambda *given: 700
    assert torch.equal(dsv4.fmha(q, k, v, backend="softsm"), first)


@pytest.mark.compile  # of the gradients, as their own tests are
def test_the_workspace_of_a_call_is_one_allocation(drivers, monkeypatch):
    """Three launches with four buffers, one of which the first launch zeroes for the second to add to."""
    allocated = []
    empty = program.Layout.empty
    monkeypatch.setattr(program.Layout, "empty", lambda self, device: allocated.append(self) or empty(self, device))
    b, want, low = fmha_gradients.request(t=70, s=90, heads=(2, 1), d=64)
    launches.run(b)
    fmha_gradients.check(b, want, low)
    assert [x.configurations[0].gx for x in drivers] == [10, 2, 8] and len(allocated) == 1


def test_kernels_that_gather_by_loads_leave_the_l1_what_shared_memory_does_not_need(drivers, monkeypatch):
    dense_call()
    monkeypatch.setattr(driver, "GATHERING", {"fmha_forward"})
    calls.forget()
    dense_call()
    before, after = drivers
    shared = after.configurations[0].shared
    assert before.attributes == [] and after.attributes == [(driver.CARVEOUT, driver.carveout(shared))]


@pytest.mark.parametrize("kb, size", [(84, 164), (163, 164), (163.5, 196), (195, 196), (196, 228), (227, 228)])
def test_the_driver_takes_the_least_size_that_holds_one_cta(kb, size):
    percent = driver.carveout(int(1024 * kb))
    assert next(x for x in driver.SHARED_KB if x >= 228 * percent / 100) == size


def test_kernels_that_gather_by_loads_are_there():
    assert {entry.v4_decode_swap_ab_ws.__name__, entry.v4_decode_swap_ab.__name__} == driver.GATHERING


def test_a_stream_is_that_of_the_call(drivers, monkeypatch):
    dense_call()
    (made,) = drivers
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 77)))
    dense_call()
    assert made.configurations[-1].stream == 77


def test_launches_at_the_same_time_have_blocks_of_their_own(drivers):
    """The second begins while the first is in the driver."""
    dense_call()
    (made,) = drivers
    start, blocks = made.cuLaunchKernelEx, []

    def slow(reference, function, parameters, extra):
        blocks.append(ctypes.addressof(parameters))
        if len(blocks) == 1:
            other = Thread(target=dense_call)
            other.start()
            other.join()
        return start(reference, function, parameters, extra)

    made.cuLaunchKernelEx = slow
    dense_call()
    assert len(set(blocks)) == 2


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuTensorMapEncodeTiled"])
def test_a_thread_without_a_context_gets_that_of_the_device(drivers, name):
    """Every one of these functions wants a context; a thread that has not used the GPU has none."""
    dense_call()
    (made,) = drivers
    real = getattr(made, name)
    if name == "cuTensorMapEncodeTiled":
        prepared().spare.clear()
    setattr(made, name, lambda *given: real(*given) if "current" in made.bound else driver.INVALID_CONTEXT)
    dense_call()
    assert made.bound == ["device 3", "retained", "current"] and len(made.configurations) == 2


def prepared():
    (call,) = calls._calls.values()
    (step,) = call.ready.steps
    return step


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuTensorMapReplaceAddress"])
def test_what_the_driver_refuses_is_an_error_that_names_the_kernel(drivers, name):
    dense_call()
    (made,) = drivers
    setattr(made, name, lambda *given: 700)
    with pytest.raises(RuntimeError, match=rf"^fmha_forward: {name}: an illegal something \(error 700\)$"):
        dense_call()
    delattr(made, name)
    dense_call()


@pytest.mark.parametrize("name, status", [("cuCtxSetCurrent", 3), ("cuLaunchKernelEx", 201)])
def test_a_context_that_cannot_be_set_is_an_error(drivers, name, status):
    dense_call()
    (made,) = drivers
    made.cuLaunchKernelEx = lambda *given: driver.INVALID_CONTEXT
    setattr(made, name, lambda *given: status)
    with pytest.raises(RuntimeError, match=rf"^fmha_forward: {name}: an illegal something \(error {status}\)$"):
        dense_call()


def function_of(types=("*bf16", "i32", "constexpr"), descriptors=(), **meta):
    known = dict(name="k", num_warps=4, shared=1024, num_ctas=1, launch_pdl=False, global_scratch_size=0,
                 profile_scratch_size=0, launch_cooperative_grid=False, tensordesc_meta=list(descriptors))  # fmt: skip
    source = SimpleNamespace(signature=dict(enumerate(types)))
    return driver.Function.of(SimpleNamespace(metadata=SimpleNamespace(**known | meta), src=source, function=5), 0)


def test_clusters_and_dependent_launches_are_attributes():
    function = function_of(num_ctas=2, launch_pdl=True)
    found = driver.DriverLaunch(function, (3, 2, 1), [launch.Null(torch.bfloat16), 1, None], SimpleNamespace())
    block = driver.Block(found, [])
    configuration = block.configuration
    assert (configuration.gx, configuration.gy, configuration.gz, configuration.bx) == (6, 2, 1, 128)
    assert configuration.attributes == ctypes.addressof(block.attributes) and configuration.count == 3
    assert [(x.id, *x.value[:3]) for x in block.attributes] == [(6, 1, 0, 0), (4, 2, 1, 1), (5, 1, 0, 0)]
    assert ctypes.sizeof(driver.Configuration) == 56 and ctypes.sizeof(driver.Attribute) == 72


def test_a_number_too_large_for_fp32_is_infinite_as_in_a_launch_of_triton():
    function = function_of(types=("fp32", "i64"))
    block = driver.Block(driver.DriverLaunch(function, (1, 1, 1), [1e300, -(1 << 40)], SimpleNamespace()), [])
    assert ctypes.c_float.from_address(block.parameters[0]).value == float("inf")
    assert ctypes.c_int64.from_address(block.parameters[1]).value == -(1 << 40)


TILED = dict(fp4_padded=False, swizzle=3, elem_size=2, elem_type=10, block_size=[64, 64])


@pytest.mark.parametrize("kernel", [
    dict(global_scratch_size=64), dict(profile_scratch_size=64), dict(launch_cooperative_grid=True), dict(num_ctas=16),
    dict(types=("bf16",)), dict(types=("tensordesc<bf16[64, 64]>",)),
    dict(types=("tensordesc<fp4[64, 64]>",), descriptors=[TILED | {"fp4_padded": True}]),
    dict(types=("tensordesc<bf16[64, 64]>",), descriptors=[TILED | {"is_im2col": True}]),
], ids=str)  # fmt: skip
def test_kernels_that_need_more_are_left_to_triton(kernel):
    assert function_of() is not None
    assert function_of(types=("tensordesc<bf16[64, 64]>",), descriptors=[TILED]) is not None
    assert function_of(**kernel) is None


def test_numbers_may_change_from_launch_to_launch():
    kinds = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp32", "fp64")
    function = function_of(types=("*bf16", *kinds))
    seen = []

    def start(reference, handle, parameters, extra):
        values = [driver.NUMBERS[kind].from_address(at).value for kind, at in zip(kinds, parameters[1:])]
        seen.append((ctypes.c_uint64.from_address(parameters[0]).value, values))
        return 0

    arguments = [Slot.of(0, "", torch.empty(8)), *(Number(n + 1) for n in range(len(kinds)))]
    found = driver.DriverLaunch(function, (1, 1, 1), arguments, SimpleNamespace(cuLaunchKernelEx=start))
    given = [
        (4096, [0, -7, -300, -70000, -(1 << 40), 1, 200, 60000, 4 << 29, 1 << 63, 0.5, 1e300]),
        (8192, [1, 7, 300, 70000, 1 << 40, 0, 1, 2, 3, 4, float("-inf"), -0.25]),
    ]
    for address, numbers in given:
        found.run([], [address, *numbers], 0)
    assert seen == given
    assert len(found.spare) == 1
