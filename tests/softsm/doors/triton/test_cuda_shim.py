"""Programs that say device="cuda" get CPU tensors, and answers from torch.cuda."""

from __future__ import annotations

import io

import pytest
import torch
import triton
import triton.language as tl

import softsm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is rejected if CUDA is available")


@pytest.fixture(params=["sm_90a", "sm_100a"])
def shim(request):
    with softsm.use(request.param, cuda_shim=True, sms=6):
        yield request.param


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, device="cuda"),
        lambda: torch.empty((2, 2), device=torch.device("cuda", 0), dtype=torch.float16),
        lambda: torch.randn(4, device="cuda:0"),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.arange(4, device="cuda"),
        lambda: torch.full((4,), 3, device="cuda"),
        lambda: torch.zeros(4).cuda(),
        lambda: torch.zeros(4).to("cuda"),
        lambda: torch.zeros(4).to(torch.device("cuda"), torch.float16),
        lambda: torch.zeros(4, device="cuda").new_zeros(3),
        lambda: torch.empty_like(torch.zeros(4, device="cuda")),
        lambda: torch.zeros(4, pin_memory=True).to(device="cuda", non_blocking=True),
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
        lambda: torch.zeros(4).to(0),
        lambda: torch.ops.aten.empty.memory_format([2, 3], device="cuda"),
        lambda: torch.ops.aten.empty_strided([2, 3], [3, 1], device="cuda", dtype=torch.float16),
        lambda: torch.zeros(4, device=0),
        lambda: torch.zeros(4, device=torch.device(0)),
        lambda: torch.randn(4, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda"),
    ],
)
def test_tensors_on_cuda_live_on_the_cpu(shim, make):
    tensor = make()
    assert tensor.is_cuda and tensor.device == torch.device("cuda", 0) and tensor.device.type == "cuda"
    assert tensor.untyped_storage().device.type == "cpu"


def test_moving_copies(shim):
    host = torch.zeros(4)
    there = host.cuda()
    there += 1
    back = there.cpu()
    there += 1
    assert host.tolist() == [0] * 4 and back.tolist() == [1] * 4 and there.tolist() == [2] * 4


def test_changing_the_type_only_does_not_copy(shim):
    x = torch.zeros(4)
    assert x.to(torch.float32) is x and x.float() is x


def test_device_of_one_tensor_makes_another(shim):
    x = torch.zeros(4, device="cuda")
    assert (torch.ones(4, device=x.device) + x).sum().item() == 4


def test_torch_cuda_answers(shim):
    number = {"sm_90a": (9, 0), "sm_100a": (10, 0)}[shim]
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == number
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == number and properties.multi_processor_count == 6
    assert shim in torch.cuda.get_device_name()
    torch.cuda.synchronize()
    torch.cuda.manual_seed(0)


def test_events_measure_host_time(shim):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0


def test_streams_and_devices(shim):
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().synchronize()


def test_triton_names_the_same_device(shim):
    device = triton.runtime.driver.active.get_active_torch_device()
    assert torch.zeros(1, device=device).device == device


def test_without_the_shim_tensors_are_on_the_cpu():
    with softsm.use("sm_90a"):
        assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cpu")
        assert not torch.zeros(1).is_cuda and not torch.cuda.is_available()


def test_inner_use_keeps_the_outer_shim():
    with softsm.use("sm_90a", cuda_shim=True):
        with softsm.use("sm_100a"):
            assert torch.zeros(1, device="cuda").is_cuda
        assert torch.zeros(1, device="cuda").is_cuda
    assert not torch.zeros(1).is_cuda


def test_refused_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="cuda_shim: CUDA is available here"):
        softsm.use("sm_90a", cuda_shim=True)
    assert softsm.active_arch() is None


def test_cublas_of_triton_is_done_by_torch(shim):
    from triton._C.libtriton import nvidia

    blas = nvidia.cublas.CublasLt(torch.empty(16, device="cuda"))
    a, b = torch.randn(8, 16, device="cuda").half(), torch.randn(4, 16, device="cuda").half()
    c, d = torch.zeros(8, 4).half(), torch.zeros(8, 4).half()
    blas.matmul(a, b, c)
    torch.testing.assert_close(c, (a.float() @ b.float().t()).half())
    blas.gemm(a, b, c, d, 2.0, 1.0)
    torch.testing.assert_close(d, (2 * (a.float() @ b.float().t()) + c.float()).half())


def test_block_scaled_cublas(shim):
    from triton._C.libtriton import nvidia

    blas = nvidia.cublas.CublasLt(torch.empty(16, device="cuda"))
    values = torch.ones(256, 256).to(torch.float8_e4m3fn)
    scales = torch.full((2, 2, 32, 4, 4), 127, dtype=torch.uint8)
    scales[1, 0, 5, 2, 3] = 128  # row 128 + 2 * 32 + 5, factor 3
    out = torch.empty(256, 256, dtype=torch.float16)
    blas.block_scaled_matmul_mxfp8(values, values, out, scales.flatten(), torch.full_like(scales, 127).flatten())
    rows = out[:, 0].tolist()
    assert rows[128 + 64 + 5] == 256 + 32 and sorted(set(rows)) == [256, 288]


def test_default_device_and_accelerator(shim):
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
    finally:
        torch.set_default_device(None)
    if hasattr(torch, "accelerator"):
        assert torch.accelerator.current_accelerator().type == "cuda"
        torch.accelerator.synchronize()


def test_calls_around_launches_do_nothing(shim):
    x = torch.zeros(4, device="cuda")
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.nvtx.range_push("name")
    torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.start()
    torch.cuda._sleep(100)
    torch.cuda.ipc_collect()
    assert torch.accelerator.memory_allocated() == 0
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file, map_location="cuda").is_cuda


def test_generators_have_seeds_and_offsets(shim):
    torch.manual_seed(11)
    generator = torch.cuda.default_generators[0]
    assert generator.initial_seed() == 11 and torch.cuda.initial_seed() == 11 and generator.get_offset() == 0
    generator.set_offset(8)
    seed, offset = generator.get_state().view(torch.int64).tolist()
    assert (seed, offset) == (11, 8)
    state = generator.get_state()
    first = torch.randn(4, generator=generator, device="cuda")
    assert not torch.equal(first, torch.randn(4, generator=generator, device="cuda"))
    generator.set_state(state)
    assert torch.equal(first, torch.randn(4, generator=generator, device="cuda"))


def test_random_state_comes_back(shim):
    with torch.random.fork_rng(devices=[0]):
        first = torch.randn(4, device="cuda")
    assert torch.equal(first, torch.randn(4, device="cuda"))
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.randn(4, device="cuda"))


def test_histogram_of_integers(shim):
    counts = torch.histc(torch.tensor([0, 1, 1, 3], dtype=torch.int32, device="cuda"), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize(
    "context, dtype",
    [
        (lambda: torch.autocast("cuda"), torch.float16),
        (lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.amp.autocast("cuda", dtype=torch.float16), torch.float16),
        (lambda: torch.autocast("cuda", enabled=False), torch.float32),
    ],
)
def test_mixed_precision(shim, context, dtype):
    x = torch.randn(4, 4, device="cuda")
    with context():
        assert (x @ x).dtype == dtype
        assert torch.is_autocast_enabled("cuda") == torch.is_autocast_enabled() == (dtype != torch.float32)
        assert dtype == torch.float32 or torch.get_autocast_dtype("cuda") == dtype
    assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def test_gradients_of_a_norm_are_summed_in_float32(shim):
    x, weight = torch.randn(600, 64, device="cuda"), torch.rand(64, device="cuda")
    grads = []
    for dtype in (torch.float16, torch.float32):
        w = weight.half().to(dtype).requires_grad_()
        y = torch.nn.functional.layer_norm(x.half().to(dtype), (64,), w, None, 1e-5)
        assert y.dtype == dtype
        y.backward(torch.full_like(y, 0.0625))
        grads.append(w.grad.float())
    # Rounded to fp16 once; fp32 sums of 600 terms of up to 0.25 in another order.
    torch.testing.assert_close(*grads, rtol=2.0**-11, atol=600 * 2.0**-24 * 0.25)


@triton.jit
def add_one(x, y, n, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_graphs_do_launches_and_torch_functions_again(shim):
    x, y, count = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda"), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        twice = x * 2
        add_one[(1,)](twice, y, 8, block=8)
        z = y[:4].sum()
        count += 1
    assert not torch.cuda.is_current_stream_capturing()
    assert y.tolist() == [0] * 8 and count.item() == 0  # nothing is computed while a graph is captured
    for k in (1, 5):
        x.fill_(k)
        graph.replay()
        assert y.tolist() == [2 * k + 1] * 8 and z.item() == 4 * (2 * k + 1)
    assert count.item() == 2


def test_operators_registered_for_cuda_are_called(shim):
    library = torch.library.Library("softsm_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CUDA")
    library.impl("twice", lambda x: -x, "CPU")

    @torch.library.custom_op("softsm_test::more", mutates_args=(), device_types="cuda")
    def more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.ones(2, device="cuda")
    assert torch.ops.softsm_test.twice(x).tolist() == [2, 2] and more(x).tolist() == [2, 2]
