"""softsm's own cuda::atomic, barrier, pipeline and the primitives of cuda_pipeline.h, for programs without a CUDA
toolkit. Each is right and silent in every order, and a mistake with it is named in the program's line."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

ATOMICS = r"""
#include <cuda/atomic>
#include <cstdio>
__device__ cuda::atomic<int, cuda::thread_scope_device> ready{0};
struct Sums { unsigned most, any; int least; float f; double d; long long n; };
__global__ void message(float *data, float *out, Sums *sums) {
    __shared__ cuda::atomic<unsigned long long, cuda::thread_scope_block> count;
    int t = threadIdx.x;
    if (t == 0) count = 0;
    __syncthreads();
    count += 2;
    cuda::atomic_ref<unsigned, cuda::thread_scope_device>(sums->most).fetch_max(t, cuda::memory_order_relaxed);
    cuda::atomic_ref<unsigned, cuda::thread_scope_device>(sums->any) |= 1u << t % 32;
    cuda::atomic_ref<int, cuda::thread_scope_device>(sums->least).fetch_min(-t);
    cuda::atomic_ref<float>{sums->f}.fetch_add(0.5f);
    cuda::atomic_ref<double>{sums->d}.fetch_sub(0.5, cuda::std::memory_order_acq_rel);
    cuda::atomic_ref<long long, cuda::thread_scope_device> n(sums->n);
    for (long long seen = n.load(); !n.compare_exchange_weak(seen, seen + t);) {}
    if (blockIdx.x == 0) {
        data[t] = t;
        __syncthreads();
        if (t == 0) ready.store(1, cuda::std::memory_order_release);
    } else {
        if (t == 0) ready.wait(0, cuda::memory_order_acquire);
        __syncthreads();
        out[t] = data[63 - t] + count.load();
    }
}
int main() {
    float *m;
    Sums *sums;
    cudaMallocManaged(&m, 512);
    cudaMallocManaged(&sums, sizeof(Sums));
    *sums = {};
    message<<<2, 64>>>(m, m + 64, sums);
    cudaDeviceSynchronize();
    printf("%g: %u %x %d %g %g %lld", m[65], sums->most, sums->any, sums->least, sums->f, sums->d, sums->n);
    cuda::atomic<int> host{3};
    int expected = host++ + 1;
    bool same = host.compare_exchange_strong(expected, 9);
    printf(" %d %d\n", (int)same, host.load());
}
"""

BARRIERS = r"""
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda_pipeline.h>
#include <cstdio>
#include <utility>
using barrier = cuda::barrier<cuda::thread_scope_block>;
namespace cde = cuda::device::experimental;
__global__ void split(const float *x, float *y) {
    __shared__ alignas(16) float in[128], out[128];
    __shared__ barrier bar;
    auto block = cooperative_groups::this_thread_block();
    int t = threadIdx.x;
    if (t == 0) init(&bar, block.size());
    block.sync();
    cuda::memcpy_async(block, in, x, cuda::aligned_size_t<16>(sizeof in), bar);
    auto token = bar.arrive();
    float own = x[t];
    bar.wait(std::move(token));  // SPLIT
    out[t] = own + in[127 - t];
    bar.arrive_and_wait();
    y[t] = out[t ^ 1];
}
__global__ void shared(const float *x, float *y, int tiles) {
    __shared__ alignas(16) float stage[2][128];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto block = cooperative_groups::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    float sum = 0;
    for (int c = 0, f = 0; c < tiles; c++) {
        for (; f < tiles && f < c + 2; f++) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, stage[f % 2], x + f * 128, sizeof(float) * 128, pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();  // SHARED
        sum += stage[c % 2][127 - threadIdx.x];
        pipe.consumer_release();
    }
    y[threadIdx.x] = sum;
}
__global__ void roles(const float *x, float *y, int tiles) {
    __shared__ alignas(16) float stage[2][96];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto block = cooperative_groups::this_thread_block();
    bool produces = threadIdx.x < 32;
    auto role = produces ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer;
    auto pipe = cuda::make_pipeline(block, &state, role);
    float sum = 0;
    for (int k = 0; k < tiles; k++) {
        if (produces) {
            pipe.producer_acquire();
            cuda::memcpy_async(cooperative_groups::tiled_partition<32>(block), stage[k % 2], x + k * 96, 384, pipe);
            pipe.producer_commit();
        } else {
            pipe.consumer_wait();
            sum += stage[k % 2][threadIdx.x - 32];
            pipe.consumer_release();
        }
    }
    y[threadIdx.x] = sum;
}
__global__ void own(const float4 *x, float *y) {
    __shared__ float4 stage[2][64];
    auto pipe = cuda::make_pipeline();
    for (int k = 0; k < 2; k++) {
        pipe.producer_acquire();
        cuda::memcpy_async(&stage[k][threadIdx.x], x + 64 * k + threadIdx.x, sizeof(float4), pipe);
        pipe.producer_commit();
    }
    float sum = 0;
    for (int k = 0; k < 2; k++) {
        cuda::pipeline_consumer_wait_prior<0>(pipe);  // OWN
        sum += stage[k][threadIdx.x].y;
        pipe.consumer_release();
    }
    __pipeline_memcpy_async(&stage[0][threadIdx.x], x + threadIdx.x, 16, 8);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    y[threadIdx.x] = sum + stage[0][threadIdx.x].w;
}
__global__ void boxes(const __grid_constant__ CUtensorMap map, float *y) {
    __shared__ alignas(128) float tile[8][16];
    __shared__ barrier bar;
    int t = threadIdx.x;
    if (t == 0) init(&bar, blockDim.x), cde::fence_proxy_async_shared_cta();
    __syncthreads();
    barrier::arrival_token token;
    if (t == 0) {
        cde::cp_async_bulk_tensor_2d_global_to_shared(&tile, &map, 16, 8, bar);
        token = cuda::device::barrier_arrive_tx(bar, 1, sizeof tile);
    } else {
        token = bar.arrive();
    }
    bar.wait(std::move(token));
    tile[t / 16][t % 16] *= 2;
    cde::fence_proxy_async_shared_cta();  // BOXES
    __syncthreads();
    if (t == 0) {
        cde::cp_async_bulk_tensor_2d_shared_to_global(&map, 0, 0, &tile);
        cde::cp_async_bulk_shared_to_global(y, &tile, sizeof tile);
        cde::cp_async_bulk_commit_group();
        cde::cp_async_bulk_wait_group_read<0>();
    }
}
int main() {
    float *x, *y;
    cudaMallocManaged(&x, 4096);
    cudaMallocManaged(&y, 4096);
    for (int i = 0; i < 1024; i++) x[i] = i;
    auto show = [&](const char *name) { cudaDeviceSynchronize(), printf("%s %g %g\n", name, y[0], y[63]); };
    split<<<1, 128>>>(x, y), show("split");
    shared<<<1, 128>>>(x, y, 5), show("shared");
    roles<<<1, 128>>>(x, y, 5), show("roles");
    own<<<1, 64>>>((float4 *)x, y), show("own");
    CUtensorMap map;
    cuuint64_t sides[] = {32, 32}, stride[] = {128};
    cuuint32_t box[] = {16, 8}, steps[] = {1, 1};
    void *encode;
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault);
    ((decltype(&cuTensorMapEncodeTiled))encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x, sides, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    boxes<<<1, 128>>>(map, y), show("boxes");
}
"""


def checked(tmp_path, text, *words):
    (tmp_path / "program.cu").write_text(text)
    return CliRunner().invoke(app, ["check", str(tmp_path / "program.cu"), *words])


def test_atomics_are_right_and_silent(tmp_path):
    done = checked(tmp_path, ATOMICS, "--order", "eager")
    assert done.exit_code == 0 and "190: 63 ffffffff -63 64 -64 4032 1 9" in done.output, done.output


@pytest.mark.parametrize("sound, wrong", [("order_release", "order_relaxed"), ("device> ready", "block> ready")])
def test_an_atomic_has_its_order_and_scope(tmp_path, sound, wrong):
    done = checked(tmp_path, ATOMICS.replace(sound, wrong, 1), "--order", "latest")
    assert done.exit_code == 1 and "race: " in done.output and "program.cu:26" in done.output, done.output


def test_barriers_and_pipelines_are_right_and_silent(tmp_path):
    done = checked(tmp_path, BARRIERS)
    assert done.exit_code == 0 and "nothing found in 5 launches" in done.output, done.output
    for said in ("split 127 127", "shared 1915 1600", "roles 0 1115", "own 258 762", "boxes 544 766"):
        assert said in done.output.splitlines(), done.output


@pytest.mark.parametrize(
    "name, instead, code, distance",
    [
        ("SPLIT", "", "race", 1),
        ("SHARED", "if (c) pipe.consumer_wait();", "race", 1),
        ("OWN", "cuda::pipeline_consumer_wait_prior<1>(pipe);", "race", 1),
        ("BOXES", "", "fence.proxy.async", 4),
    ],
)
def test_a_mistake_is_named_in_the_line_of_the_program(tmp_path, name, instead, code, distance):
    lines = BARRIERS.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(f"// {name}"))
    lines[at] = instead
    done = checked(tmp_path, "\n".join(lines), "--order", "latest")
    assert done.exit_code == 1 and code in done.output, done.output
    assert f"program.cu:{at + 1 + distance}" in done.output and "cuda/barrier:" not in done.output, done.output
