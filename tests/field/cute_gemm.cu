// CuTe's tutorials on GEMM that do not check their results: C = A B^T, all column-major; with -DTN A and B are row-major.
//   -DTYPE=float -DSOURCE="..."
#define main benchmark
#include SOURCE
#undef main
#include "field.h"

int main() {
    constexpr int m = 256, n = 256, depth = 128;
    Array<TYPE> a(m * depth), b(n * depth), c(m * n);
    for (auto &x : a.host) x = TYPE(float(below(3) - 1));  // sums are exact
    for (auto &x : b.host) x = TYPE(float(below(3) - 1));
#ifdef TN
    constexpr int step_a = depth, step_b = depth, next = 1;
    gemm('T', 'N', m, n, depth, TYPE(1.0f), a.upload(), depth, b.upload(), depth, TYPE(0.0f), c.upload(), m);
#else
    constexpr int step_a = 1, step_b = 1, next = m;
    static_assert(m == n);
    gemm('N', 'T', m, n, depth, TYPE(1.0f), a.upload(), m, b.upload(), n, TYPE(0.0f), c.upload(), m);
#endif
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    c.download();
    Agreement values;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int k = 0; k < depth; k++) s += double(float(a[i * step_a + k * next])) * float(b[j * step_b + k * next]);
            values.add(float(c[i + j * m]), s);
        }
    return values.verdict("c", 0);
}
