// Device functions that a CUDA toolkit leaves to its own compiler: pairs of f32 in one instruction (sm_100), a relaxed
// load. And what clang drops: compile.py reads the annotation.
#pragma once
#undef __cluster_dims__
#define __cluster_dims__(...) __attribute__((annotate("softsm_cluster", __VA_ARGS__)))
#define SOFTSM_PAIR(name, code)                                                                                  \
    static __device__ __forceinline__ float2 name(float2 x, float2 y) {                                          \
        unsigned long long out, a = __builtin_bit_cast(unsigned long long, x);                                   \
        asm(code " %0, %1, %2;" : "=l"(out) : "l"(a), "l"(__builtin_bit_cast(unsigned long long, y)));           \
        return __builtin_bit_cast(float2, out);                                                                  \
    }
SOFTSM_PAIR(__fadd2_rn, "add.rn.f32x2")
SOFTSM_PAIR(__fmul2_rn, "mul.rn.f32x2")
#undef SOFTSM_PAIR
static __device__ __forceinline__ float2 __ffma2_rn(float2 x, float2 y, float2 z) {
    unsigned long long out, a = __builtin_bit_cast(unsigned long long, x), b = __builtin_bit_cast(unsigned long long, y);
    asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(out) : "l"(a), "l"(b), "l"(__builtin_bit_cast(unsigned long long, z)));
    return __builtin_bit_cast(float2, out);
}
// nvcc has min and max of the host, too.
#define SOFTSM_EXTREMES(T)                                          \
    static inline __host__ T max(T x, T y) { return x < y ? y : x; } \
    static inline __host__ T min(T x, T y) { return y < x ? y : x; }
SOFTSM_EXTREMES(int)
SOFTSM_EXTREMES(unsigned)
SOFTSM_EXTREMES(long)
SOFTSM_EXTREMES(unsigned long)
SOFTSM_EXTREMES(long long)
SOFTSM_EXTREMES(unsigned long long)
SOFTSM_EXTREMES(float)
SOFTSM_EXTREMES(double)
#undef SOFTSM_EXTREMES
#define _CG_CLUSTER_INTRINSICS_AVAILABLE  // clang has them: cooperative groups of a cluster
#define __NV_ATOMIC_RELAXED 0
template <class T> static __device__ __forceinline__ T __nv_atomic_load_n(T *at, int) {
    return *const_cast<T const volatile *>(at);
}
