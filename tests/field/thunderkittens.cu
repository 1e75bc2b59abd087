// ThunderKittens' lessons on GEMM for B200: C = A B in bf16.   -DSOURCE=".../level_08.cu" -DSIZE=512
#define main benchmark  // of 4096 x 4096
#include SOURCE
#undef main
#include "field.h"

int main() {
    constexpr int N = SIZE;
    Array<__nv_bfloat16> a(N * N), b(N * N), c(N * N);
    for (auto &x : a.host) x = __float2bfloat16(0.5f * normal());
    for (auto &x : b.host) x = __float2bfloat16(0.5f * normal());
    matmul(a.upload(), b.upload(), c.upload(), N);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    c.download();
    std::vector<float> left(N * N), right(N * N);
    for (int i = 0; i < N * N; i++) left[i] = __bfloat162float(a[i]), right[i] = __bfloat162float(b[i]);
    Agreement values;
    std::vector<double> row(N);
    for (int i = 0; i < N; i++) {
        std::fill(row.begin(), row.end(), 0.0);
        for (int k = 0; k < N; k++)
            for (int j = 0; j < N; j++) row[j] += double(left[i * N + k]) * right[k * N + j];
        for (int j = 0; j < N; j++) values.add(__bfloat162float(c[i * N + j]), row[j]);
    }
    return values.verdict("c", 1.0 / 256);  // half a unit of bf16's last place
}
