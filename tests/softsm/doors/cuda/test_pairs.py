"""Kernels as their authors write them, each with one mistake that can be planted: softsm names it, in the right line,
and is silent without it."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

PREFETCH = r"""
#include <cuda_runtime.h>
#include <cstdio>
__device__ void copy(float *to, const float *from) {
    unsigned at = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__global__ void sums(const float *x, float *y, int count) {
    __shared__ __align__(16) float buffer[2][512];
    int t = threadIdx.x;
    float sum[4] = {};
    copy(&buffer[0][4 * t], x + 4 * t);
    for (int i = 0; i < count; i++) {
        copy(&buffer[(i + 1) & 1][4 * t], x + (i + 1) % count * 512 + 4 * t);  // behind the last tile: the first again
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        for (int j = 0; j < 4; j++) sum[j] += buffer[i & 1][128 * j + t];
        __syncthreads();
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");  // MISTAKE
    for (int j = 0; j < 4; j++) buffer[0][4 * t + j] = sum[j];
    __syncthreads();
    for (int j = 0; j < 4; j++) y[128 * j + t] = buffer[0][128 * j + t];
}
int main() {
    float *m;
    cudaMallocManaged(&m, 5 * 2048);
    for (int i = 0; i < 2048; i++) m[i] = i;
    sums<<<1, 128>>>(m, m + 2048, 4);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 512; i++) right &= m[2048 + i] == 4 * (i % 4 * 128 + i / 4) + 3072;
    puts(right ? "right" : "wrong");
}
"""

EXCHANGE = r"""
#include <cuda_runtime.h>
#include <cooperative_groups.h>
#include <cstdio>
namespace cg = cooperative_groups;
__global__ void __cluster_dims__(2, 1, 1) exchange(const float *x, float *y) {
    __shared__ float in[128];
    auto cluster = cg::this_cluster();
    int t = threadIdx.x, rank = cluster.block_rank();
    cluster.sync();  // MISTAKE
    cluster.map_shared_rank(in, rank ^ 1)[t] = x[blockIdx.x * 128 + t];
    cluster.sync();
    y[blockIdx.x * 128 + t] = in[t];
}
int main() {
    float *m;
    cudaMallocManaged(&m, 4096);
    for (int i = 0; i < 512; i++) m[i] = i;
    exchange<<<4, 128>>>(m, m + 512);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 512; i++) right &= m[512 + i] == (i ^ 128);
    puts(right ? "right" : "wrong");
}
"""

TILES = r"""
#include <cuda_runtime.h>
#include <cstdio>
__global__ void tiles(const float *x, float *y, int *next, int count) {
    __shared__ int tile;
    for (;;) {
        if (threadIdx.x == 0) tile = atomicAdd(next, 1);
        __syncthreads();
        if (tile >= count) return;
        y[tile * 128 + threadIdx.x] = 2 * x[tile * 128 + threadIdx.x];
        __syncthreads();  // MISTAKE
    }
}
int main() {
    float *m;
    int *next;
    cudaMallocManaged(&m, 8 * 1024);
    cudaMallocManaged(&next, 4);
    *next = 0;
    for (int i = 0; i < 1024; i++) m[i] = i;
    tiles<<<2, 128>>>(m, m + 1024, next, 8);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 1024; i++) right &= m[1024 + i] == 2 * i;
    puts(right ? "right" : "wrong");
}
"""

PAIRS = {
    "prefetch": (PREFETCH, "race: ", "cp.async.wait_group 0", "buffer[0][4 * t + j] = sum[j]"),
    "exchange": (EXCHANGE, "peer-start: ", "barrier.cluster.arrive", "map_shared_rank(in"),
    "tiles": (TILES, "race: ", "put a barrier", "tile = atomicAdd"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_mistake_is_named_and_its_twin_is_silent(tmp_path, name):
    text, code, advice, line = PAIRS[name]
    kept = [row for row in text.splitlines() if "// MISTAKE" not in row]
    for planted, program in ((False, text), (True, "\n".join(kept))):
        (tmp_path / "program.cu").write_text(program)
        done = CliRunner().invoke(app, ["check", str(tmp_path / "program.cu")])
        if not planted:
            assert done.exit_code == 0 and "right" in done.output and "nothing found" in done.output, done.output
            continue
        number = 1 + next(i for i, row in enumerate(kept) if line in row)
        assert done.exit_code == 1 and code in done.output and advice in done.output, done.output
        assert f"program.cu:{number} in " in done.output, done.output
