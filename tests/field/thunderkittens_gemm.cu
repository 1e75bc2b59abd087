// ThunderKittens' GEMMs for B200, one launch of their own benchmark: beside the product that it computes on the device in
// f32; arguments: M, N, K.   -DSOURCE=".../bf16_b200_gemm.cu" -DCONFIG=config<256,...>
#include <common.cuh>
#include "field.h"

static Agreement values;
static void compare(__nv_bfloat16 *found, __nv_bfloat16 *right, size_t n) {
    std::vector<__nv_bfloat16> a(n), b(n);
    check(cudaDeviceSynchronize(), "the kernel");
    check(cudaMemcpy(a.data(), found, n * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(b.data(), right, n * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t i = 0; i < n; i++) values.add(__bfloat162float(a[i]), __bfloat162float(b[i]));
}

#define main() benchmark(auto)  // a template that nobody calls: its sizes are large
#define check_correctness compare
#define cudaDeviceGetAttribute(value, ...) (*(value) = 0)  // an L2 cache of 0 bytes: one set of arguments
#include SOURCE
#undef main

int main(int, char **words) {
    run_benchmark<CONFIG>(atoi(words[1]), atoi(words[2]), atoi(words[3]), true);
    return values.verdict("d", 1.0 / 128);  // both are rounded to bf16
}
