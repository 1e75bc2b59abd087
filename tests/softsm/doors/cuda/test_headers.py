"""softsm's own headers for programs without a CUDA toolkit: cooperative groups, half and bfloat16,
products of matrices. Each group is right
and silent in every order, and a mistake with it is named."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

GROUPS = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cstdio>
namespace cg = cooperative_groups;

struct Pair { double key; int at; };

__global__ void tiles(const int *x, int *out) {
    __shared__ int sums[4];
    cg::thread_block block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    auto quarter = cg::tiled_partition<8>(warp);
    int value = x[block.thread_rank()], sum = cg::reduce(warp, value, cg::plus<int>());
    if (warp.thread_rank() == 0) sums[warp.meta_group_rank()] = sum;
    int part = quarter.shfl(cg::inclusive_scan(quarter, value), quarter.num_threads() - 1);
    Pair best = cg::reduce(warp, Pair{-1.0 * value, value}, [](Pair a, Pair b) { return b.key < a.key ? b : a; });
    bool right = part == 8 * (value / 8 * 8) + 28 && best.at == value / 32 * 32 + 31;
    right &= cg::exclusive_scan(warp, 2) == 2 * (int)warp.thread_rank() && quarter.ballot(value % 2) == 0xaa;
    right &= quarter.meta_group_size() == 4 && quarter.meta_group_rank() == block.thread_rank() % 32 / 8;
    right &= quarter.shfl_xor(value, 1) == (value ^ 1) && warp.any(value % 32 == 3) && !warp.all(value % 32 == 3);
    if (value % 3 == 0) {
        auto some = cg::coalesced_threads();
        right &= cg::reduce(some, 1, cg::plus<int>()) == (int)some.size() && some.shfl(value, 0) % 32 < 3;
        right &= some.ballot(1) == (1u << some.size()) - 1 && some.shfl_down(value, 1) - value <= 3;
    }
    right &= cg::binary_partition(warp, value % 4 == 0).size() == (value % 4 ? 24 : 8);
    block.sync();
    out[block.thread_rank()] = right ? sums[0] + sums[1] + sums[2] + sums[3] : -1;
}
__global__ void staged(const int *x, int *out, int n) {
    extern __shared__ int tile[];
    auto block = cg::this_thread_block();
    cg::memcpy_async(block, tile, x, sizeof(int) * n);
    WAIT
    for (int i = block.thread_rank(); i < n; i += block.size()) out[i] = tile[n - 1 - i];
}
__global__ void grid(int *x, int *out) {
    auto grid = cg::this_grid();
    int i = grid.thread_rank(), n = grid.size();
    for (int turn = 0; turn < 3; turn++) {
        x[i] = i + turn;
        GRID
        out[i] = x[n - 1 - i];
        grid.sync();
    }
}
__global__ void __cluster_dims__(2, 1, 1) cluster(int *out) {
    __shared__ int mine[64];
    auto pair = cg::this_cluster();
    mine[threadIdx.x] = pair.thread_rank();
    CLUSTER
    int *theirs = pair.map_shared_rank(mine, pair.block_rank() ^ 1);
    out[blockIdx.x * 64 + threadIdx.x] = theirs[threadIdx.x] + 1000 * pair.query_shared_rank(theirs);
    pair.sync();
}
int main() {
    int *x, *out, n = 256;
    cudaMallocManaged(&x, 4096);
    cudaMallocManaged(&out, 4096);
    for (int i = 0; i < n; i++) x[i] = i;
    tiles<<<1, 128>>>(x, out);
    cudaDeviceSynchronize();
    printf("tiles %d %d\n", out[0], out[127]);
    staged<<<1, 64, 1024>>>(x, out, 251);
    cudaDeviceSynchronize();
    printf("staged %d %d\n", out[0], out[250]);
    cluster<<<2, 64>>>(out);
    cudaDeviceSynchronize();
    printf("cluster %d %d\n", out[0], out[127]);
    void *args[] = {&x, &out};
    printf("%s", cudaGetErrorName(cudaLaunchCooperativeKernel((void *)grid, 4, 64, args, 0, 0)));
    cudaDeviceSynchronize();
    printf(" %d %d\n", out[0], out[255]);
#ifdef ALONE
    grid<<<4, 64>>>(x, out);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
#endif
}
"""
RIGHT = {"WAIT": "cg::wait(block);", "GRID": "grid.sync();", "CLUSTER": "pair.sync();"}


def checked(tmp_path, text, *words):
    (tmp_path / "program.cu").write_text(text)
    return CliRunner().invoke(app, ["check", str(tmp_path / "program.cu"), *words])


def groups(tmp_path, *words, **change):
    text = GROUPS
    for name, statement in (RIGHT | change).items():
        text = text.replace(f"    {name}\n", f"    {statement}\n")
    return checked(tmp_path, text, *words)


def test_groups_are_right_and_silent(tmp_path):
    done = groups(tmp_path)
    assert done.exit_code == 0 and "nothing found in 4 launches" in done.output, done.output
    for said in ("tiles 8128 8128", "staged 250 0", "cluster 1064 63", "cudaSuccess 257 2"):
        assert said in done.output.splitlines(), done.output


@pytest.mark.parametrize(
    "change, code, word",
    [
        ({"WAIT": "block.sync();"}, "race", "cp.async.wait_group"),
        ({"GRID": "__syncthreads();"}, "race", "CTAs of one grid"),
        ({"CLUSTER": "__syncthreads();"}, "race", "cluster"),
    ],
)
def test_a_missing_synchronisation_of_a_group_is_named(tmp_path, change, code, word):
    done = groups(tmp_path, "--order", "latest", **change)
    assert done.exit_code == 1 and f"{code}: " in done.output and word in done.output, done.output
    assert "program.cu:" in done.output and "cooperative_groups.h:" not in done.output, done.output


def test_a_grid_that_is_not_cooperative_cannot_meet(tmp_path):
    done = groups(tmp_path, "--order", "eager", "--clang-flags", "-DALONE")
    assert done.exit_code == 1 and "trap: " in done.output and "cudaErrorLaunchFailure" in done.output, done.output


HALVES = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdio>
template <typename T, typename T2> __device__ void each(const float *x, float *out, T *sum, T2 *sum2) {
    int i = threadIdx.x;
    T a = x[i], b = x[i + 1];
    T2 p(a, b);
    T2 q = __hfma2(p, p, p) - p * p;  // p, rounded
    T most = a;
    for (int k = 16; k; k /= 2) most = __hmax(most, __shfl_xor_sync(~0u, most, k));
    a += T(1);
    a *= b;
    bool right = (float)a == (float)T((x[i] + 1) * x[i + 1]) && __hgt(most, T(30.5f)) && (float)most == 31;
    right &= __low2float(q) == x[i] && __high2float(q) == x[i + 1] && __heq(-b, __hneg(b)) && !__hisnan(b);
    right &= (float)hsqrt(b * b) == (float)b && (float)__habs(-b) == (float)b && b / b == T(1) && b > T(0);
    atomicAdd(sum, T(1));
    atomicAdd(sum2, T2(T(1), T(2)));
    out[i] = right ? (float)a : -1;
}
__global__ void halves(const float *x, float *out, half *sum, half2 *sum2) { each(x, out, sum, sum2); }
__global__ void brains(const float *x, float *out, nv_bfloat16 *sum, nv_bfloat162 *sum2) { each(x, out, sum, sum2); }
__global__ void convert(float *out) {
    half2 h = __floats2half2_rn(1.0f, 2049.0f);
    __nv_bfloat162 b = __floats2bfloat162_rn(1.0f, 257.0f);
    float2 f = __half22float2(h), g = __bfloat1622float2(b);
    out[0] = f.x, out[1] = f.y, out[2] = g.x, out[3] = g.y;
    out[4] = __half_as_ushort(__float2half(1.5f)), out[5] = __bfloat16_as_ushort(__float2bfloat16(1.5f));
    out[6] = __half2int_rn(__high2half(__half2half2(__int2half_rn(7))));
    out[7] = __half2float(hexp(__float2half(0.0f)));
}
int main() {
    float *x, *out;
    void *sums;
    cudaMallocManaged(&x, 256);
    cudaMallocManaged(&out, 256);
    cudaMallocManaged(&sums, 64);
    memset(sums, 0, 64);
    for (int i = 0; i < 33; i++) x[i] = i;
    halves<<<1, 32>>>(x, out, (half *)sums, (half2 *)sums + 1);
    cudaDeviceSynchronize();
    half2 total = ((half2 *)sums)[1];
    printf("half %g %g: %g %g %g\n", out[1], out[31], __half2float(*(half *)sums), __low2float(total), (float)total.y);
    memset(sums, 0, 64);
    brains<<<1, 32>>>(x, out, (__nv_bfloat16 *)sums, (__nv_bfloat162 *)sums + 1);
    cudaDeviceSynchronize();
    printf("bfloat16 %g %g: %g\n", out[1], out[31], __bfloat162float(*(__nv_bfloat16 *)sums));
    convert<<<1, 1>>>(out);
    cudaDeviceSynchronize();
    for (int i = 0; i < 8; i++) printf("%g ", out[i]);
    printf("%g\n", __half2float(__float2half(0.1f) * __float2half(3.0f)));
    double between = 1.00390625;  // half-way between two numbers
    double numbers[] = {between, between + 1e-9, between - 1e-9, -0.1, 1e300, -1e-300, 0 / (double)(out[0] - 1)};
    for (double x : numbers) printf("%g %g, ", (float)nv_bfloat16(x), (float)nv_bfloat16((float)x));
    printf("rounded on the host\n");
}
"""


def test_halves_and_bfloat16_are_right_and_silent(tmp_path):
    done = checked(tmp_path, HALVES, "--order", "latest")
    assert done.exit_code == 0 and "nothing found in 3 launches" in done.output, done.output
    host = "1 1, 1.00781 1, 1 1, -0.100098 -0.100098, inf inf, -0 -0, "
    assert any(x.startswith(host) and x.count("nan") == 2 for x in done.output.splitlines()), done.output
    for said in ("half 4 1024: 32 32 64", "bfloat16 4 1024: 32", "1 2048 1 256 15872 16320 7 1 0.299805"):
        assert said in done.output.splitlines(), done.output


MATHEMATICS = r"""
#include <cuda_runtime.h>
#include <math.h>
#include <ctime>
#include <cstdio>
__global__ void functions(const float *x, float *y, int *out) {
    int i = threadIdx.x;
    float v = x[i], a = fabsf(v);
    float r[] = {floorf(v) + ceilf(v) + truncf(v) + rintf(v) + roundf(v), fmodf(v, 1.7f), powf(a, 1.3f) + powf(v, 3),
                 1e3f * expm1f(v * 1e-3f), log1pf(a) + log10f(a), tanhf(v),
                 sinhf(v) * coshf(v), erff(v), sinf(v) + cosf(v)};
    for (int k = 0; k < 9; k++) y[k * 64 + i] = r[k];
    if (i) return;
    long long before = clock64();
    out[0] = __float2int_rn(2.5f) + __float2int_rd(-2.5f) + (int)__float2uint_rz(3.9f);
    out[0] += __dp4a(0x01020304, 0x01010101, 5);
    out[1] = __ldcg(out + 4);
    __stcg(out + 2, (int)__mul24(-3, 5) + (int)__saturatef(2) + (int)__isGlobal(out));
    out[3] = (clock64() > before) + atomicCAS_system(out + 5, 0, 1);
}
int main() {
    float x[64], y[9 * 64], *dx, *dy;
    int out[6] = {0, 0, 0, 0, 88, 0}, *dout;
    for (int i = 0; i < 64; i++) x[i] = (i - 31.3f) * 0.21f;
    cudaMalloc(&dx, sizeof x), cudaMalloc(&dy, sizeof y), cudaMalloc(&dout, sizeof out);
    cudaMemcpy(dx, x, sizeof x, cudaMemcpyHostToDevice), cudaMemcpy(dout, out, sizeof out, cudaMemcpyHostToDevice);
    functions<<<1, 64>>>(dx, dy, dout);
    cudaMemcpy(y, dy, sizeof y, cudaMemcpyDeviceToHost), cudaMemcpy(out, dout, sizeof out, cudaMemcpyDeviceToHost);
    double worst = 0;
    for (int i = 0; i < 64; i++) {
        double v = x[i], a = fabs(v);
        double r[] = {floor(v) + ceil(v) + trunc(v) + rint(v) + round(v), fmod(v, 1.7f), pow(a, 1.3f) + pow(v, 3),
                      1e3 * expm1((double)(x[i] * 1e-3f)), log1p(a) + log10(a), tanh(v),
                      sinh(v) * cosh(v), erf(v), sin(v) + cos(v)};
        for (int k = 0; k < 9; k++) worst = fmax(worst, fabs(y[k * 64 + i] - r[k]) / fmax(1, fabs(r[k])));
    }
    printf("%d %d %d %d %s\n", out[0], out[1], out[2], out[3], worst < 1e-5 ? "close" : "far");
#ifdef BAD
    *(volatile int *)0 = 1;
#endif
}
"""


def test_mathematics_conversions_and_cached_accesses(tmp_path):
    done = checked(tmp_path, MATHEMATICS, "--order", "eager")
    assert done.exit_code == 0 and "17 88 -13 1 close" in done.output, done.output


def test_what_ends_the_host_side_does_not_end_the_check(tmp_path, capfd):
    text = MATHEMATICS.replace("if (i) return;", "y[63 - i] = v;")
    done = checked(tmp_path, text, "--order", "eager", "--clang-flags", "-DBAD")
    assert done.exit_code == 1 and "race: " in done.output and "ended with status 139" in done.output, done.output
    assert "was ended by a signal: Segmentation fault" in capfd.readouterr().err


MATRICES = r"""
#include <mma.h>
#include <cstdio>
using namespace nvcuda;
template <typename A, typename B, int m, int n, int k, typename T, typename S, typename D>
__global__ void product(const S *x, const S *y, const D *c, D *out) {
    wmma::fragment<wmma::matrix_a, m, n, k, T, A> a;
    wmma::fragment<wmma::matrix_b, m, n, k, T, B> b;
    wmma::fragment<wmma::accumulator, m, n, k, D> sum, other;
    wmma::load_matrix_sync(a, x, __is_same(A, wmma::row_major) ? 2 * k : m);
    wmma::load_matrix_sync(b, y, __is_same(B, wmma::row_major) ? n : 2 * k);
    wmma::load_matrix_sync(sum, c, m, wmma::mem_col_major);
    wmma::fill_fragment(other, D(1));
    wmma::mma_sync(sum, a, b, sum);
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = sum.x[i] + other.x[i];
    wmma::store_matrix_sync(out, sum, n, wmma::mem_row_major);
}
template <int m, int n, int k, typename T, typename S, typename D> void compare(const char *name) {
    S *x, *y;
    D *c, *out;
    cudaMallocManaged(&x, 4096 * sizeof(S)), cudaMallocManaged(&y, 4096 * sizeof(S));
    cudaMallocManaged(&c, m * n * sizeof(D)), cudaMallocManaged(&out, m * n * sizeof(D));
    int wrong = 0, elements = wmma::fragment<wmma::matrix_a, m, n, k, T, wmma::row_major>::num_elements;
    for (int rows_a = 0; rows_a < 2; rows_a++) for (int rows_b = 0; rows_b < 2; rows_b++) {
        auto at_a = [&](int i, int l) { return rows_a ? 2 * k * i + l : i + m * l; };
        auto at_b = [&](int l, int j) { return rows_b ? n * l + j : l + 2 * k * j; };
        for (int i = 0; i < m; i++) for (int l = 0; l < k; l++) x[at_a(i, l)] = S((7 * i + 3 * l) % 11);
        for (int j = 0; j < n; j++) for (int l = 0; l < k; l++) y[at_b(l, j)] = S((5 * j + 2 * l) % 7);
        for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i + m * j] = D(i - j);
        using R = wmma::row_major;
        using C = wmma::col_major;
        if (rows_a && rows_b) product<R, R, m, n, k, T><<<1, 32>>>(x, y, c, out);
        if (rows_a && !rows_b) product<R, C, m, n, k, T><<<1, 32>>>(x, y, c, out);
        if (!rows_a && rows_b) product<C, R, m, n, k, T><<<1, 32>>>(x, y, c, out);
        if (!rows_a && !rows_b) product<C, C, m, n, k, T><<<1, 32>>>(x, y, c, out);
        cudaDeviceSynchronize();
        for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) {
            int sum = i - j + 1;
            for (int l = 0; l < k; l++) sum += (7 * i + 3 * l) % 11 * ((5 * j + 2 * l) % 7);
            wrong += (float)out[i * n + j] != sum;
        }
    }
    printf("%s: %d elements, %d wrong\n", name, elements, wrong);
}
int main() {
    compare<16, 16, 16, half, half, float>("half, float");
    compare<32, 8, 16, half, half, half>("half");
    compare<8, 32, 16, __nv_bfloat16, __nv_bfloat16, float>("bfloat16");
    compare<32, 8, 16, signed char, signed char, int>("s8");
    compare<16, 16, 16, unsigned char, unsigned char, int>("u8");
    compare<16, 16, 8, wmma::precision::tf32, float, float>("tf32");
    compare<8, 8, 4, double, double, double>("double");
}
"""


def test_products_of_matrices_are_right_and_silent(tmp_path):
    done = checked(tmp_path, MATRICES, "--order", "latest")
    assert done.exit_code == 0 and "nothing found in 28 launches" in done.output, done.output
    elements = {"half, float": 16, "half": 16, "bfloat16": 4, "s8": 16, "u8": 8, "tf32": 4, "double": 1}
    said = [f"{name}: {count} elements, 0 wrong" for name, count in elements.items()]
    assert [x for x in done.output.splitlines() if "elements" in x] == said, done.output
