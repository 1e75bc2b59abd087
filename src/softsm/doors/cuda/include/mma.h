// nvcuda::wmma as the CUDA C++ Programming Guide documents it, for programs without a CUDA toolkit: products of half,
// bfloat16, tf32, double and 8-bit integers, by clang's builtins. A toolkit's header, where there is one, is used instead.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SOFTSM_DEVICE static __device__ __forceinline__

namespace nvcuda {
namespace wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major { enum { columns = 0 }; };
struct col_major { enum { columns = 1 }; };
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32;
}
SOFTSM_DEVICE float __float_to_tf32(float x) {
    asm("cvt.rna.tf32.f32 %0, %0;" : "+f"(x));
    return x;
}

// What a fragment holds, and as what clang's builtins take it
template <typename T> struct softsm_held { typedef T type; typedef int word; };
template <> struct softsm_held<precision::tf32> { typedef float type; typedef int word; };
template <> struct softsm_held<float> { typedef float type; typedef float word; };
template <> struct softsm_held<double> { typedef double type; typedef double word; };
template <typename Use, typename T> constexpr int softsm_elements(int m, int n, int k) {
    if (__is_same(Use, accumulator)) return m * n / 32;
    if (__is_same(T, __half)) return 16;  // in every shape: where fewer are needed, they are repeated
    return (__is_same(Use, matrix_a) ? m : n) * k / 32;
}
template <typename Use, int m, int n, int k, typename T, typename Layout = void> struct __align__(8) fragment {
    typedef T element_type;
    typedef typename softsm_held<T>::type storage_element_type;
    enum { num_elements = softsm_elements<Use, T>(m, n, k), num_storage_elements = num_elements };
    storage_element_type x[num_elements];
};
template <typename Use, int m, int n, int k, typename T, typename Layout>
SOFTSM_DEVICE void fill_fragment(fragment<Use, m, n, k, T, Layout> &f, const typename softsm_held<T>::type &value) {
    for (auto &x : f.x) x = value;
}
template <typename Use, int m, int n, int k, typename T, typename Layout>
SOFTSM_DEVICE typename softsm_held<T>::word *softsm_words(const fragment<Use, m, n, k, T, Layout> &f) {
    return (typename softsm_held<T>::word *)f.x;
}

// ---- by shape and type ---------------------------------------------------------------------------------------------

#define SOFTSM_LOAD(part, m, n, k, T, builtin)                                                                  \
    template <typename Layout>                                                                                  \
    SOFTSM_DEVICE void load_matrix_sync(fragment<matrix_##part, m, n, k, T, Layout> &f,                         \
                                        const softsm_held<T>::type *at, unsigned ld) {                          \
        builtin(softsm_words(f), (const softsm_held<T>::word *)at, ld, Layout::columns);                        \
    }
#define SOFTSM_ACCUMULATOR(m, n, k, T, load, store)                                                             \
    SOFTSM_DEVICE void load_matrix_sync(fragment<accumulator, m, n, k, T> &f, const T *from, unsigned ld,       \
                                        layout_t layout) {                                                      \
        auto at = (const softsm_held<T>::word *)from;                                                           \
        layout == mem_col_major ? load(softsm_words(f), at, ld, 1) : load(softsm_words(f), at, ld, 0);          \
    }                                                                                                           \
    SOFTSM_DEVICE void store_matrix_sync(T *to, const fragment<accumulator, m, n, k, T> &f, unsigned ld,        \
                                         layout_t layout) {                                                     \
        auto at = (softsm_held<T>::word *)to;                                                                   \
        layout == mem_col_major ? store(at, softsm_words(f), ld, 1) : store(at, softsm_words(f), ld, 0);        \
    }
#define SOFTSM_PRODUCT(m, n, k, T, D, C, builtin, saturated)                                                    \
    template <typename A, typename B>                                                                           \
    SOFTSM_DEVICE void mma_sync(fragment<accumulator, m, n, k, D> &d,                                           \
                                const fragment<matrix_a, m, n, k, T, A> &a,                                     \
                                const fragment<matrix_b, m, n, k, T, B> &b,                                     \
                                const fragment<accumulator, m, n, k, C> &c, bool saturate = false) {            \
        constexpr int layouts = 2 * A::columns + B::columns;                                                    \
        auto x = softsm_words(d);                                                                               \
        auto y = softsm_words(c);                                                                               \
        saturate ? builtin(x, softsm_words(a), softsm_words(b), y, layouts, saturated)                          \
                 : builtin(x, softsm_words(a), softsm_words(b), y, layouts, 0);                                 \
    }
#define SOFTSM_OPERANDS(m, n, k, T, name, type)                                                                 \
    SOFTSM_LOAD(a, m, n, k, T, name##_ld_a##type) SOFTSM_LOAD(b, m, n, k, T, name##_ld_b##type)
#define SOFTSM_SHAPE(m, n, k, shape)                                                                            \
    SOFTSM_OPERANDS(m, n, k, __half, __hmma_##shape, )                                                          \
    SOFTSM_ACCUMULATOR(m, n, k, __half, __hmma_##shape##_ld_c_f16, __hmma_##shape##_st_c_f16)                   \
    SOFTSM_ACCUMULATOR(m, n, k, float, __hmma_##shape##_ld_c_f32, __hmma_##shape##_st_c_f32)                    \
    SOFTSM_PRODUCT(m, n, k, __half, __half, __half, __hmma_##shape##_mma_f16f16, 0)                             \
    SOFTSM_PRODUCT(m, n, k, __half, __half, float, __hmma_##shape##_mma_f16f32, 0)                              \
    SOFTSM_PRODUCT(m, n, k, __half, float, __half, __hmma_##shape##_mma_f32f16, 0)                              \
    SOFTSM_PRODUCT(m, n, k, __half, float, float, __hmma_##shape##_mma_f32f32, 0)                               \
    SOFTSM_OPERANDS(m, n, k, __nv_bfloat16, __mma_bf16_##shape, )                                               \
    SOFTSM_PRODUCT(m, n, k, __nv_bfloat16, float, float, __mma_bf16_##shape##_mma_f32, 0)                       \
    SOFTSM_OPERANDS(m, n, k, signed char, __imma_##shape, _s8)                                                  \
    SOFTSM_OPERANDS(m, n, k, unsigned char, __imma_##shape, _u8)                                                \
    SOFTSM_ACCUMULATOR(m, n, k, int, __imma_##shape##_ld_c, __imma_##shape##_st_c_i32)                          \
    SOFTSM_PRODUCT(m, n, k, signed char, int, int, __imma_##shape##_mma_s8, 1)                                  \
    SOFTSM_PRODUCT(m, n, k, unsigned char, int, int, __imma_##shape##_mma_u8, 1)
SOFTSM_SHAPE(16, 16, 16, m16n16k16)
SOFTSM_SHAPE(32, 8, 16, m32n8k16)
SOFTSM_SHAPE(8, 32, 16, m8n32k16)
SOFTSM_OPERANDS(16, 16, 8, precision::tf32, __mma_tf32_m16n16k8, )
SOFTSM_ACCUMULATOR(16, 16, 8, float, __mma_tf32_m16n16k8_ld_c, __mma_m16n16k8_st_c_f32)
SOFTSM_PRODUCT(16, 16, 8, precision::tf32, float, float, __mma_tf32_m16n16k8_mma_f32, 0)
SOFTSM_OPERANDS(8, 8, 4, double, __dmma_m8n8k4, )
SOFTSM_ACCUMULATOR(8, 8, 4, double, __dmma_m8n8k4_ld_c, __dmma_m8n8k4_st_c_f64)
SOFTSM_PRODUCT(8, 8, 4, double, double, double, __dmma_m8n8k4_mma_f64, 0)
#undef SOFTSM_LOAD
#undef SOFTSM_ACCUMULATOR
#undef SOFTSM_PRODUCT
#undef SOFTSM_OPERANDS
#undef SOFTSM_SHAPE
#undef SOFTSM_DEVICE
}  // namespace wmma
}  // namespace nvcuda
