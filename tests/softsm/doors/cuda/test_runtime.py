"""CUDA C++ programs in softsm: kernels and main(), through clang. The machine needs clang 20 or newer."""

import html
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from softsm.cli import app
from softsm.doors.cuda.compile import compiled

pytestmark = pytest.mark.usefixtures("clang")

PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__device__ int total;
__constant__ int factors[2];
static int runs = 0;

template <bool kBarrier> __global__ void reverse(const int *x, int *out) {
    __shared__ int tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    if (kBarrier) __syncthreads();
    out[threadIdx.x] = tile[127 - threadIdx.x] * factors[1];
}
__global__ void sum(const int *x) {
    int value = x[threadIdx.x];
    for (int k = 16; k; k /= 2) value += __shfl_xor_sync(~0u, value, k);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, value);
}
__global__ void ranks(unsigned *out) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    out[blockIdx.x] = rank;
    if (blockIdx.x == 3) printf("the last of %d\n", gridDim.x);
}
__global__ void past(int *x) { x[threadIdx.x + 100] = 1; }

int main(int count, char **words) {
    int host[128], got[128], *x, *out, zero = 0;
    for (int i = 0; i < 128; i++) host[i] = i;
    const int both[2] = {1, 3};
    cudaMalloc(&x, sizeof host);
    cudaMalloc(&out, sizeof host);
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemcpyToSymbol(factors, both, sizeof both);
    reverse<true><<<1, 128>>>(x, out);
    cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost);
    printf("run %d: %d %d\n", ++runs, got[0], got[127]);
    cudaPointerAttributes of_x, of_host;
    cudaPointerGetAttributes(&of_x, x);
    cudaPointerGetAttributes(&of_host, host);
    size_t free, all;
    cudaMemGetInfo(&free, &all);
    bool on_device = of_x.type == cudaMemoryTypeDevice, on_host = of_host.type != cudaMemoryTypeDevice;
    printf("device memory: %d %d %d\n", on_device, on_host, free < all);
    sum<<<1, 128>>>(x);
    cudaMemcpyFromSymbol(&zero, total, sizeof zero);
    printf("sum %d\n", zero);
    cudaLaunchConfig_t config = {4, 32, 0, 0, nullptr, 1};
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 2, cluster[0].val.clusterDim.y = 1, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster;
    cudaLaunchKernelEx(&config, ranks, (unsigned *)out);
    cudaMemcpy(got, out, 16, cudaMemcpyDeviceToHost);
    printf("ranks %d %d %d %d\n", got[0], got[1], got[2], got[3]);
    printf("%s\n", cudaGetErrorString(cudaMemcpy(got, out, 1024, cudaMemcpyDeviceToHost)));
    cudaGetLastError();
    sum<<<1, 2048>>>(x);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    sum<<<100 / 128, 128>>>(x);
    printf("no grid: %s\n", cudaGetErrorName(cudaGetLastError()));
    if (count > 1 && !strcmp(words[1], "race")) reverse<false><<<1, 128>>>(x, out);
    if (count > 1 && !strcmp(words[1], "past")) {
        past<<<1, 128>>>(x);
        printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    }
    cudaFree(x);
    if (count > 1 && !strcmp(words[1], "exit")) exit(7);
    return 0;
}
"""
SAID = [
    "run 1: 381 0",
    "device memory: 1 1 1",
    "sum 8128",
    "the last of 4",
    "ranks 0 1 0 1",
    "invalid argument",
    "cudaErrorInvalidConfiguration",
    "no grid: cudaErrorInvalidConfiguration",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "program.cu"
    path.write_text(PROGRAM)
    return path


def softsm(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def test_a_program_runs(program):
    for _ in range(2):  # its static variables are new each time
        done = softsm("run", program)
        assert done.exit_code == 0 and done.stdout.splitlines() == [
            x for x in SAID for _ in range(32 if "last" in x else 1)
        ]
    done = softsm("run", program, "exit")
    assert done.exit_code == 7


def test_a_race_is_named_with_its_line_and_function(program):
    done = softsm("check", program, "race", "--json", "--arch", "sm_90a")
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["launches"] == 4
    found = data["findings"][0]
    assert found["code"] == "race"
    lines = PROGRAM.splitlines()
    for party in found["parties"]:
        assert party["source"]["file"].endswith("program.cu") and party["source"]["function"] == "reverse<false>"
        assert "tile[" in lines[party["source"]["line"] - 1]


def test_a_program_without_a_mistake(program):
    done = softsm("check", program, "--order", "latest")
    assert done.exit_code == 0 and "nothing found in 3 launches" in done.output, done.output


def test_a_fault_reaches_the_program_and_the_report(program):
    done = softsm("check", program, "past", "--order", "eager")
    assert done.exit_code == 1 and "cudaErrorIllegalAddress" in done.output
    line = next(i for i, text in enumerate(PROGRAM.splitlines(), 1) if "void past" in text)
    for words in ("out-of-bounds: ", "(cudaMalloc of 512 bytes)", f"program.cu:{line}"):
        assert words in done.output


def test_trace_has_readable_names(program, tmp_path):
    done = softsm("trace", program, "-o", tmp_path)
    page = html.unescape((tmp_path / "report.html").read_text())
    assert done.exit_code == 0 and "reverse<true>" in page


def test_a_source_that_does_not_compile(tmp_path):
    (tmp_path / "bad.cu").write_text("__global__ void k() { nothing(); }\nint main() { k<<<1, 1>>>(); }\n")
    done = softsm("run", tmp_path / "bad.cu")
    assert done.exit_code == 1 and "use of undeclared identifier 'nothing'" in done.output
    assert ("with CUDA_HOME=" in done.output) == ("CUDA_HOME" not in os.environ)
    done = softsm("check", tmp_path / "bad.cu")
    assert done.exit_code == 1 and done.output.splitlines()[-1] == "not checked: the program failed"


TMA = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>

__global__ void copy(const __grid_constant__ CUtensorMap map, float *out) {
    __shared__ alignas(128) float tile[16 * 16];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned to = __cvta_generic_to_shared(tile), bar = __cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(8), "r"(2), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra W; }"
                 ::"r"(bar) : "memory");
    out[threadIdx.x] = tile[threadIdx.x];
}
int main() {
    float *x, *out;
    cudaMallocManaged(&x, 24 * 64 * 4);
    cudaMallocManaged(&out, 1024);
    for (int i = 0; i < 24 * 64; i++) x[i] = i;
    CUtensorMap map;
    void *encode;
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault);
    cuuint64_t dims[] = {64, 24}, strides[] = {256};
    cuuint32_t box[] = {16, 16}, steps[] = {1, 1};
    CUresult status = ((decltype(&cuTensorMapEncodeTiled))encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    copy<<<1, 256>>>(map, out);
    cudaDeviceSynchronize();
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    printf("%d %g %g sm_%d%d\n", status, out[0], out[255], p.major, p.minor);
}
"""


def test_tensor_maps(tmp_path):
    (tmp_path / "tma.cu").write_text(TMA)
    done = softsm("check", tmp_path / "tma.cu", "--order", "latest", "--arch", "sm_100a")
    assert done.exit_code == 0 and "0 136 1111 sm_100" in done.output, done.output


PEERS = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>

__device__ void raise(int *flag) { asm volatile("st.release.SCOPE.global.u32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ void wait(int *flag) {
    int now;
    do asm volatile("ld.acquire.SCOPE.global.u32 %0, [%1];" : "=r"(now) : "l"(flag) : "memory");
    while (now != 1);
}
__global__ void meet(int *mine, int *theirs, int *out, int value) {
    mine[0] = value;
    raise(mine + 1);
    wait(theirs + 1);
    *out = theirs[0];
}
__global__ void twice(int *out) { *out *= 2; }

int main(int, char **words) {
    int count, accessible, *at[8], *out[8];
    cudaGetDeviceCount(&count);
    for (int d = 0; d < count; d++) {
        cudaSetDevice(d);
        cudaMalloc(&at[d], 8);
        cudaMalloc(&out[d], 4);
        cudaDeviceCanAccessPeer(&accessible, d, (d + 1) % count);
        if (count > 1) cudaDeviceEnablePeerAccess((d + 1) % count, 0);
    }
    for (int d = 0; d < atoi(words[1]); d++) {
        cudaSetDevice(d);
        cudaMemset(at[d], 0, 8);  // the kernel of the device before waits for ours meanwhile
        meet<<<1, 1>>>(at[d], at[(d + 1) % count], out[d], 10 + d);
        twice<<<1, 1>>>(out[d]);
    }
    for (int d = 0; d < count; d++) {
        int got = 0, device;
        cudaSetDevice(d);
        cudaGetDevice(&device);
        cudaMemcpy(&got, out[d], 4, cudaMemcpyDeviceToHost);
        printf("device %d of %d (%d): %d\n", device, count, accessible, got);
    }
    printf("%s\n", cudaGetErrorName(cudaSetDevice(count)));
}
"""


@pytest.mark.compile
def test_kernels_of_several_devices_run_together(tmp_path):
    """`--ranks 3` are three devices, whose memory all reach; what they order needs .sys scope."""
    source = tmp_path / "peers.cu"
    source.write_text(PEERS.replace("SCOPE", "sys"))
    done = softsm("check", source, "--ranks", 3, "--", 3)
    assert done.exit_code == 0 and "nothing found in 2 launches" in done.output, done.output
    for d, value in enumerate((22, 24, 20)):
        assert f"device {d} of 3 (1): {value}" in done.output
    assert "cudaErrorInvalidDevice" in done.output
    source.write_text(PEERS.replace("SCOPE", "gpu"))
    done = softsm("check", source, "--ranks", 2, "--order", "eager", "--", 2)
    assert done.exit_code == 1 and "of GPU 1" in done.output and ".sys scope" in done.output, done.output


TURNS = r"""
#include <cuda_runtime.h>
#include <cstdio>
__global__ void exchange(int *mine, const int *theirs, unsigned *flag, unsigned *raised, int *out, int turn) {
    *mine = turn;
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(raised), "r"(turn) : "memory");
    unsigned seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (seen < turn);
    *out = *theirs;
}
int main() {
    int *data[2], *out[2];
    unsigned *flag[2];
    cudaEvent_t event;
    cudaEventCreate(&event);
    for (int d = 0; d < 2; d++) {
        cudaSetDevice(d);
        cudaMalloc(&data[d], 8);
        cudaMalloc(&out[d], 4);
        cudaMalloc(&flag[d], 4);
        cudaMemset(flag[d], 0, 4);
    }
    for (int turn = 1; turn < 4; turn++) {
        for (int d = 0; d < 2; d++) {
            cudaSetDevice(d);
            EVENT;
            exchange<<<1, 1>>>(data[d] + SLOT, data[1 - d] + SLOT, flag[d], flag[1 - d], out[d], turn);
        }
        WAIT;
    }
    for (int d = 0; d < 2; d++) {
        int got;
        cudaSetDevice(d);
        cudaMemcpy(&got, out[d], 4, cudaMemcpyDeviceToHost);
        printf("device %d: %d\n", d, got);
    }
}
"""


@pytest.mark.compile
@pytest.mark.parametrize(
    "slot, event, wait",
    [
        ("0", "", ""),
        ("turn % 2", "", ""),
        ("0", "cudaStreamWaitEvent(0, event, 0)", ""),
        ("0", "", "for (int d = 0; d < 2; d++) { cudaSetDevice(d); cudaDeviceSynchronize(); }"),
    ],
    ids=["one buffer", "two buffers", "events", "the host waits"],
)
def test_launches_of_two_devices_do_not_follow_each_other(tmp_path, slot, event, wait):
    """Each turn exchanges a word; nothing keeps a device from writing the next one before the other has read."""
    text = TURNS.replace("SLOT", slot).replace("EVENT", event).replace("WAIT", wait)
    (tmp_path / "turns.cu").write_text(text)
    done = softsm("check", tmp_path / "turns.cu", "--ranks", 2, "--order", "eager")
    assert "device 0: 3" in done.output and "device 1: 3" in done.output, done.output
    if slot == "0" and not event and not wait:
        assert done.exit_code == 1 and "launch before this one on another GPU" in done.output, done.output
    else:
        assert done.exit_code == 0 and "nothing found in 3 launches" in done.output, done.output


@pytest.mark.compile
def test_a_device_that_launches_nothing_is_waited_for_in_vain(tmp_path):
    (tmp_path / "peers.cu").write_text(PEERS.replace("SCOPE", "sys"))
    done = softsm("check", tmp_path / "peers.cu", "--ranks", 2, "--order", "eager", "--", 1)
    assert done.exit_code == 1 and "GPU 0: 0 of 1 CTAs have ended" in done.output, done.output
    done = softsm("run", tmp_path / "peers.cu", "--ranks", 9, "--", 1)
    assert done.exit_code == 2 and "ranks: got 9; accepted: ints from 1 to 8" in done.output


CLUSTERS = r"""
#include <cuda_runtime.h>
#include <cstdio>
template <int N> __global__ __cluster_dims__(N, 1, 1) void __launch_bounds__(32, 1) ranks(unsigned *out) {
    unsigned rank, count;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    if (threadIdx.x == 0) out[blockIdx.x] = 10 * count + rank;
}
int main() {
    unsigned *x, got[4];
    cudaMalloc(&x, sizeof got);
    ranks<2><<<4, 32>>>(x);
    cudaMemcpy(got, x, sizeof got, cudaMemcpyDeviceToHost);
    printf("%d %d %d %d\n", got[0], got[1], got[2], got[3]);
    ranks<4><<<3, 32>>>(x);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
}
"""


@pytest.mark.compile
def test_a_kernel_with_cluster_dims_needs_no_attribute_of_the_launch(tmp_path):
    (tmp_path / "clusters.cu").write_text(CLUSTERS)
    done = softsm("run", tmp_path / "clusters.cu")
    assert done.exit_code == 0 and "20 21 20 21\ncudaErrorInvalidConfiguration\n" in done.output, done.output


@pytest.mark.compile
def test_the_page(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "cuda.md").read_text()
    (tmp_path / "sum.cu").write_text(re.search(r'^```cuda title="sum.cu"\n(.*?)^```$', page, re.M | re.S)[1])
    done = softsm("check", tmp_path / "sum.cu", "--order", "latest")
    said = re.search(r"^```text\n(.*?)^```$", page, re.M | re.S)[1].splitlines()
    assert done.exit_code == 1 and set(said) <= set(done.output.splitlines())


LIBRARY = r"""
#pragma once
__device__ inline void put(int *dst, int value) { *dst = value; }
__device__ inline void prefetch(unsigned dst_addr, const void *src_addr) {
    asm volatile("{ .reg .b64 a; mov.b64 a, %1; }"
    :
    : "r"(dst_addr)  "l"(src_addr));
}
"""
USER = r"""
#include <cute/arch/copy_sm100.hpp>
__global__ void racy(int *out) {
    __shared__ int tile[64];
    prefetch(0, out);
    put(&tile[threadIdx.x], threadIdx.x);
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
int main() {
    int *out;
    cudaMalloc(&out, 256);
    racy<<<1, 64>>>(out);
}
"""


@pytest.mark.compile
def test_a_library_is_corrected_and_named_by_its_user(tmp_path):
    """What clang rejects in CUTLASS is corrected in a copy; a place in it is shown as the line that calls it."""
    (tmp_path / "include" / "cute" / "arch").mkdir(parents=True)
    (tmp_path / "include" / "cute" / "arch" / "copy_sm100.hpp").write_text(LIBRARY)
    (tmp_path / "user.cu").write_text(USER)
    done = softsm(
        "check", tmp_path / "user.cu", "--clang-flags", f"-I {tmp_path}/include", "--order", "latest", "--json"
    )
    race = next(found for found in json.loads(done.stdout)["findings"] if found["code"] == "race")
    lines = {USER.splitlines()[party["source"]["line"] - 1].strip() for party in race["parties"]}
    assert {party["source"]["file"] for party in race["parties"]} == {str(tmp_path / "user.cu")}
    assert lines == {"put(&tile[threadIdx.x], threadIdx.x);", "out[threadIdx.x] = tile[63 - threadIdx.x];"}


LONG_LAMBDA = r"""
#include <cuda_runtime.h>
#define FOUR(x) x x x x
__global__ void steps(float *x) {
    float a = x[threadIdx.x], b = x[32 + threadIdx.x];
    auto step = [&](float by) { FOUR(FOUR(FOUR(FOUR(a = a * by + b; b = b * by - a;)))) };
    step(x[0]);
    step(x[1]);
    x[threadIdx.x] = a + b;
}
int main() {}
"""


@pytest.mark.compile
def test_what_a_lambda_captures_stays_in_registers(tmp_path):
    """nvcc does the same: the accumulators of FlashMLA's prefill kernel for sm_90a are captured."""
    (tmp_path / "steps.cu").write_text(LONG_LAMBDA)
    text = compiled(tmp_path / "steps.cu", "sm_90a").ptx
    assert "fma.rn" in text and "call" not in text and ".local" not in text


INTRINSICS = """
#include <cuda_runtime.h>
#include <cstdio>

__global__ void all(const int4 *x, unsigned long long *out, unsigned *count) {
    unsigned t = threadIdx.x;
    unsigned long long big = t * 0x100000001ull;
    int same;
    unsigned long long n = 0;
    auto put = [&](unsigned long long value) { out[n++ * 64 + t] = value; };
    put(__match_any_sync(~0u, t % 3));
    put(__match_any_sync(~0u, big % 5));
    unsigned long long met = __match_all_sync(~0u, (int)(t / 32), &same);
    put(met + same);
    put(__match_all_sync(~0u, t, &same) + same);
    put(__reduce_add_sync(~0u, t) + __reduce_max_sync(~0u, (int)t - 99) + __reduce_xor_sync(~0u, t * t));
    put(__shfl_xor_sync(~0u, big, 5));
    put((unsigned long long)__shfl_down_sync(~0u, t * 0.5, 3, 16));
    put(__syncthreads_count(t % 7 == 0) * 100 + __syncthreads_or(t == 40) * 10 + __syncthreads_and(t < 63));
    put(__brev(t) + __popcll(big) + __clzll(big) + __ffsll(big));
    put(__umulhi(t << 27, 77) + __mulhi(-(int)t, 1 << 30));
    put(__byte_perm(0x03020100, 0x07060504, t * 0x1111) + __funnelshift_l(t, 7, t) + __funnelshift_r(t, 7, t));
    int4 v = __ldg(x + t);
    put(v.x + v.w + __ldg((const int *)x + t) + __ldg((const double *)x + 2 * t));
    atomicInc(count, 9);
    atomicMax((unsigned long long *)count + 1, big);
    atomicOr((int *)count + 4, 1 << t % 32);
    atomicAdd_block(count + 5, 1u), atomicAdd_system(count + 5, 2u);
}

int main() {
    int4 x[64];
    for (int i = 0; i < 64; i++) x[i] = {i, 0, 3 * i, 5 * i};
    int4 *from;
    unsigned long long *out, host[12 * 64];
    unsigned *count, counted[6];
    cudaMalloc(&from, sizeof x), cudaMalloc(&out, sizeof host), cudaMalloc(&count, sizeof counted);
    cudaMemcpy(from, x, sizeof x, cudaMemcpyHostToDevice), cudaMemset(count, 0, sizeof counted);
    all<<<1, 64>>>(from, out, count);
    cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    cudaMemcpy(counted, count, sizeof counted, cudaMemcpyDeviceToHost);
    for (int row = 0; row < 12; row++) printf("%llu %llu\\n", host[row * 64 + 9], host[row * 64 + 46]);
    printf("%u %u %u %u\\n", counted[0], counted[2], counted[4], counted[5]);
}
"""


def lanes(f, t):
    return sum(1 << k for k in range(32) if f(t // 32 * 32 + k) == f(t))


def test_intrinsics_need_no_toolkit(tmp_path):
    """Warp votes, 64-bit shuffles and atomics, scopes of atomics, bits: what small programs use."""
    path = tmp_path / "intrinsics.cu"
    path.write_text(INTRINSICS)
    done = softsm("check", path)
    assert done.exit_code == 0, done.output
    full = 2**32 - 1
    want = []
    for t in (9, 46):
        warp = range(t // 32 * 32, t // 32 * 32 + 32)
        xors = 0
        for k in warp:
            xors ^= k * k
        down = t + 3 if t % 16 + 3 < 16 else t
        big = t * 0x100000001
        table = bytes(range(8))
        turn = t * 0x1111 & 0x7777
        permuted = sum(table[turn >> 4 * k & 7] << 8 * k for k in range(4))
        both = 7 << 32 | t
        want.append([
            lanes(lambda k: k % 3, t), lanes(lambda k: k * 0x100000001 % 5, t), full + 1, 0,
            (sum(warp) + max(warp) - 99 + xors) & full, (t ^ 5) * 0x100000001, int(down * 0.5), 1010,
            int(f"{t:032b}"[::-1], 2) + bin(big).count("1") + 64 - big.bit_length() + (big & -big).bit_length(),
            (((t << 27) % 2**32 * 77 >> 32) + (-t * 2**30 >> 32)) % 2**32,
            (permuted + ((both << t % 32) >> 32) % 2**32 + (both >> t % 32) % 2**32) % 2**32,
        ])  # fmt: skip
    rows = [[int(x) for x in line.split()] for line in done.stdout.splitlines()[:12]]
    for k, (first, second) in enumerate(zip(want[0], want[1])):
        assert rows[k] == [first, second], (k, rows[k], first, second)
    assert done.stdout.splitlines()[12] == f"4 63 {full} 192"
