"""CUDA C++ programs as strangers write them: streams, pitched memory, symbols, cooperative launches, shared memory on
request. Each runs without a finding, and with a mistake that is named."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorName(status));
    exit(1);
}
__global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
__constant__ float weights[3];
__global__ void weigh(float *x, size_t pitch, int width, int taps) {
    float *row = (float *)((char *)x + blockIdx.x * pitch), sum = 0;
    for (int k = 0; k < taps; k++) sum += weights[k];
    if (threadIdx.x < width) row[threadIdx.x] = sum + blockIdx.x;
}
extern __shared__ float tile[];
__global__ void large(float *out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *out = tile[n - 1];
}
// What cooperative_groups::this_grid().sync() does.
__device__ void meet() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    unsigned *barrier = (unsigned *)((unsigned long long)high << 32 | low) + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned mine = blockIdx.x ? 1 : 0x80000000 - (gridDim.x - 1);
        __threadfence();
        unsigned before = atomicAdd(barrier, mine);
        while (((before ^ *(volatile unsigned *)barrier) & 0x80000000) == 0) {}
        __threadfence();
    }
    __syncthreads();
}
__global__ void reverse(int *x, int *y, int n, bool together) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = i;
    if (together) meet();
    y[i] = x[n - 1 - i];
}
static void called(void *data) { *(int *)data = 7; }

int main(int, char **words) {
    const std::string what = words[1];
    const int n = 1000;
    std::vector<float> host(n, 1.0f), got(n);
    cudaStream_t first, second;
    cudaEvent_t ready, over;
    check(cudaStreamCreateWithPriority(&first, cudaStreamNonBlocking, 0), "stream");
    check(cudaStreamCreate(&second), "stream");
    check(cudaEventCreate(&ready), "event");
    check(cudaEventCreateWithFlags(&over, cudaEventDisableTiming), "event");
    float *x, *y;
    check(cudaMallocAsync(&x, n * sizeof(float), first), "cudaMallocAsync");
    check(cudaMallocAsync(&y, n * sizeof(float), first), "cudaMallocAsync");
    check(cudaMemcpyAsync(x, host.data(), n * sizeof(float), cudaMemcpyHostToDevice, first), "copy");
    check(cudaMemsetAsync(y, 0, n * sizeof(float), first), "set");
    check(cudaEventRecord(ready, first), "record");
    check(cudaStreamWaitEvent(second, ready), "wait");
    saxpy<<<min(4, 9), 256, 0, second>>>(n + (what == "past"), 3, x, y);
    check(cudaGetLastError(), "saxpy");
    check(cudaEventRecord(over, second), "record");
    while (cudaEventQuery(over) == cudaErrorNotReady) {}
    check(cudaMemcpyAsync(got.data(), y, n * sizeof(float), cudaMemcpyDeviceToHost, second), "copy");
    int seen = 0;
    check(cudaLaunchHostFunc(second, called, &seen), "cudaLaunchHostFunc");
    check(cudaStreamQuery(second), "query");
    printf("saxpy %g %g, host %d\n", got[0], got[n - 1], seen);

    const float three[3] = {1, 2, 3};
    float *rows, *pinned;
    size_t pitch;
    check(cudaMemcpyToSymbol(weights, three, sizeof three), "symbol");
    check(cudaMallocPitch(&rows, &pitch, 33 * sizeof(float), 5), "pitch");
    check(cudaHostAlloc(&pinned, 33 * 5 * sizeof(float), cudaHostAllocDefault), "cudaHostAlloc");
    weigh<<<5, 64>>>(rows, pitch, 33, what == "taps" ? 4 : 3);
    check(cudaMemcpy2D(pinned, 33 * 4, rows, pitch, 33 * 4, 5, cudaMemcpyDeviceToHost), "cudaMemcpy2D");
    printf("rows %g %g\n", pinned[0], pinned[5 * 33 - 1]);

    if (what != "shared")
        check(cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, 80000), "attribute");
    large<<<1, 256, 80000>>>(x, 20000);
    check(cudaGetLastError(), "large");

    int count = 512, *a, *b, ends[2];
    bool together = what != "barrier";
    check(cudaMalloc(&a, count * 4), "cudaMalloc");
    check(cudaMalloc(&b, count * 4), "cudaMalloc");
    void *args[] = {&a, &b, &count, &together};
    check(cudaLaunchCooperativeKernel((void *)reverse, 4, 128, args, 0, 0), "reverse");
    check(cudaMemcpy(ends, b, sizeof ends, cudaMemcpyDeviceToHost), "copy");
    printf("reverse %d %d\n", ends[0], ends[1]);
    printf("%s\n", cudaGetErrorName(cudaLaunchCooperativeKernel((void *)reverse, 4096, 128, args, 0, 0)));
    check(cudaFreeAsync(x, first), "free");
    check(cudaStreamDestroy(first), "destroy");
}
"""


# Another style: owners of memory, generic kernels, doubles, a grid that starts before the one before has ended, and
# shared memory of the whole cluster.
MODERN = r"""
#include <cuda_runtime.h>
#include <cassert>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

struct Freed { void operator()(void *at) const { cudaFree(at); } };
template <class T> std::unique_ptr<T[], Freed> make(size_t n) {
    T *at = nullptr;
    if (cudaError_t error = cudaMallocManaged(&at, n * sizeof(T))) throw std::runtime_error(cudaGetErrorString(error));
    return std::unique_ptr<T[], Freed>(at);
}
template <class F, class... Rest> __global__ void for_each(int n, F function, Rest... rest) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) function(i, rest...);
}
struct Roots { __device__ void operator()(int i, double *x) const { x[i] = sqrt(fabs((double)-i)); } };
__device__ double *counted;
struct Count {
    bool atomic;
    __device__ void operator()(int i, double *x) const {
        if (atomic) atomicAdd(counted, floor(x[i]));
        else *counted += floor(x[i]);
    }
};
__global__ void first(int *x) {
    cudaTriggerProgrammaticLaunchCompletion();
    x[blockIdx.x * blockDim.x + threadIdx.x] = 3 * threadIdx.x;
}
__global__ void second(const int *x, int *y, bool waits) {
    if (waits) cudaGridDependencySynchronize();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i] + 1;
}
__global__ void histogram(const int *data, int n, int *out, bool meets) {
    __shared__ int bins[16];
    unsigned rank, at = (unsigned)__cvta_generic_to_shared(bins), there;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at + data[i] % 16 * 4), "r"(data[i] / 16 % 2));
        asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], 1;" ::"r"(there) : "memory");
    }
    if (meets) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    else __syncthreads();
    if (threadIdx.x < 16) atomicAdd(out + rank * 16 + threadIdx.x, bins[threadIdx.x]);
    assert(n == 256 && "all of them");
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
int main(int, char **words) try {
    const std::string what = words[1];
    const int n = 200;
    auto x = make<double>(n + 1);
    double *last = x.get() + n;
    *last = 0;
    cudaMemcpyToSymbol(counted, &last, sizeof last);
    for_each<<<2, 64>>>(n, Roots{}, x.get());
    for_each<<<2, 64>>>(n, Count{what != "counts"}, x.get());
    cudaDeviceSynchronize();
    printf("sum of roots %g\n", *last);

    auto from = make<int>(256), to = make<int>(256);
    first<<<4, 64>>>(from.get());
    cudaLaunchAttribute how;
    how.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {4, 64, 0, 0, &how, 1};
    cudaLaunchKernelEx(&config, second, from.get(), to.get(), what != "dependent");

    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim.x = 2, how.val.clusterDim.y = how.val.clusterDim.z = 1;
    auto bins = make<int>(32);
    for (int i = 0; i < 32; i++) bins[i] = 0;
    cudaLaunchKernelEx(&config, histogram, to.get(), what == "assert" ? 255 : 256, bins.get(), what != "cluster");
    cudaError_t error = cudaDeviceSynchronize();
    printf("%s, bins %d %d\n", cudaGetErrorName(error), bins[1], bins[30]);
} catch (const std::exception &problem) {
    printf("%s\n", problem.what());
    return 2;
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "program.cu").write_text(PROGRAM)
    (folder / "modern.cu").write_text(MODERN)
    return folder


@pytest.fixture(scope="module")
def program(programs):
    return programs / "program.cu"


def checked(program, what):
    return CliRunner().invoke(app, ["check", str(program), "--order", "latest", "--", what])


def test_a_program_without_a_mistake(program):
    done = checked(program, "fine")
    assert done.exit_code == 0 and "nothing found in 4 launches" in done.output, done.output
    said = ("saxpy 3 3, host 7", "rows 6 10", "reverse 511 510", "cudaErrorCooperativeLaunchTooLarge")
    assert all(line in done.output for line in said), done.output


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("past", ("saxpy: cudaErrorIllegalAddress", "out-of-bounds:", "cudaMalloc of 4000 bytes")),
        ("taps", ("cudaMemcpy2D: cudaErrorIllegalAddress", "past the end of variable weights")),
        ("shared", ("large: cudaErrorInvalidValue", "80000 bytes of dynamic shared memory need cudaFuncSetAttribute")),
        ("barrier", ("race: two accesses of global memory", "in reverse")),
    ],
)
def test_a_mistake_is_named(program, what, named):
    done = checked(program, what)
    assert done.exit_code == 1 and all(text in done.output for text in named), done.output


def test_a_modern_program_without_a_mistake(programs):
    done = checked(programs / "modern.cu", "fine")
    assert done.exit_code == 0 and "nothing found in 5 launches" in done.output, done.output
    assert "sum of roots 1785" in done.output and "cudaSuccess, bins 8 8" in done.output, done.output


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("counts", ("race: two accesses of global memory", "in for_each<Count")),
        ("dependent", ("the grid before this one", "griddepcontrol.wait", "in second")),
        ("assert", ("assert: device-side assert triggered", 'n == 256 && "all of them"', "cudaErrorAssert")),
        ("cluster", ("race: two accesses of shared memory", "CTAs of one cluster", "in histogram")),
    ],
)
def test_a_mistake_of_a_modern_program_is_named(programs, what, named):
    done = checked(programs / "modern.cu", what)
    assert done.exit_code == 1 and all(text in done.output for text in named), done.output
