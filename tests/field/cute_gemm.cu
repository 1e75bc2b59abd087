// CuTe's tutorials on GEMM that do not check their results: C = A B^T, all column-major.   -DTYPE=float -DSOURCE="..."
#define main benchmark
#include SOURCE
#undef main
#include "field.h"

int main() {
    constexpr int m = 256, n = 256, depth = 128;
    Array<TYPE> a(m * depth), b(n * depth), c(m * n);
    for (auto &x : a.host) x = TYPE(float(below(3) - 1));  // sums are exact
    for (auto &x : b.host) x = TYPE(float(below(3) - 1));
    gemm('N', 'T', m, n, depth, TYPE(1.0f), a.upload(), m, b.upload(), n, TYPE(0.0f), c.upload(), m);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    c.download();
    Agreement values;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int k = 0; k < depth; k++) s += double(float(a[i + k * m])) * float(b[j + k * n]);
            values.add(float(c[i + j * m]), s);
        }
    return values.verdict("c", 0);
}
