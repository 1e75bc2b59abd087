// What cuda_fp16.h and cuda_bf16.h have in common. Each defines SOFTSM_T, SOFTSM_T2 (a number and two) and SOFTSM_RAW
// (clang's type) and includes this file, which therefore has no guard. Operations are clang's own, on the host too.

struct __align__(2) SOFTSM_T {
    SOFTSM_RAW value;
    SOFTSM_T() = default;
    SOFTSM_BOTH SOFTSM_T(float x) : value((SOFTSM_RAW)x) {}
    SOFTSM_BOTH SOFTSM_T(double x) : value((SOFTSM_RAW)x) {}
    SOFTSM_BOTH SOFTSM_T(int x) : value((SOFTSM_RAW)(float)x) {}
    SOFTSM_BOTH SOFTSM_T(unsigned x) : value((SOFTSM_RAW)(float)x) {}
    SOFTSM_BOTH operator float() const { return (float)value; }
    SOFTSM_BOTH SOFTSM_T &operator+=(const SOFTSM_T &other);
    SOFTSM_BOTH SOFTSM_T &operator-=(const SOFTSM_T &other);
    SOFTSM_BOTH SOFTSM_T &operator*=(const SOFTSM_T &other);
    SOFTSM_BOTH SOFTSM_T &operator/=(const SOFTSM_T &other);
};
struct __align__(4) SOFTSM_T2 {
    SOFTSM_T x, y;
    SOFTSM_T2() = default;
    SOFTSM_BOTH SOFTSM_T2(const SOFTSM_T &x, const SOFTSM_T &y) : x(x), y(y) {}
};
#define SOFTSM_OF(raw) SOFTSM_MAKE((SOFTSM_RAW)(raw))
SOFTSM_BOTH SOFTSM_T SOFTSM_MAKE(SOFTSM_RAW value) {
    SOFTSM_T out;
    out.value = value;
    return out;
}

// ---- one number, and two at a time ---------------------------------------------------------------------------------

#define SOFTSM_ARITHMETIC(sign, one, two)                                                                        \
    SOFTSM_BOTH SOFTSM_T operator sign(const SOFTSM_T &a, const SOFTSM_T &b) {                                   \
        return SOFTSM_OF(a.value sign b.value);                                                                  \
    }                                                                                                            \
    SOFTSM_BOTH SOFTSM_T &SOFTSM_T::operator sign##=(const SOFTSM_T &other) { return *this = *this sign other; } \
    SOFTSM_BOTH SOFTSM_T2 operator sign(const SOFTSM_T2 &a, const SOFTSM_T2 &b) {                                \
        return {a.x sign b.x, a.y sign b.y};                                                                     \
    }                                                                                                            \
    SOFTSM_BOTH SOFTSM_T2 &operator sign##=(SOFTSM_T2 &a, const SOFTSM_T2 &b) { return a = a sign b; }           \
    SOFTSM_BOTH SOFTSM_T one(SOFTSM_T a, SOFTSM_T b) { return a sign b; }                                        \
    SOFTSM_BOTH SOFTSM_T2 two(SOFTSM_T2 a, SOFTSM_T2 b) { return a sign b; }
SOFTSM_ARITHMETIC(+, __hadd, __hadd2)
SOFTSM_ARITHMETIC(-, __hsub, __hsub2)
SOFTSM_ARITHMETIC(*, __hmul, __hmul2)
SOFTSM_ARITHMETIC(/, __hdiv, __h2div)
#undef SOFTSM_ARITHMETIC
SOFTSM_BOTH SOFTSM_T operator-(const SOFTSM_T &a) { return SOFTSM_OF(-a.value); }
SOFTSM_BOTH SOFTSM_T2 operator-(const SOFTSM_T2 &a) { return {-a.x, -a.y}; }
SOFTSM_BOTH SOFTSM_T __hneg(SOFTSM_T a) { return -a; }
SOFTSM_BOTH SOFTSM_T2 __hneg2(SOFTSM_T2 a) { return -a; }

#define SOFTSM_COMPARISON(sign, one, two)                                                                 \
    SOFTSM_BOTH bool operator sign(const SOFTSM_T &a, const SOFTSM_T &b) { return a.value sign b.value; } \
    SOFTSM_BOTH bool one(SOFTSM_T a, SOFTSM_T b) { return a.value sign b.value; }                         \
    SOFTSM_BOTH SOFTSM_T2 two(SOFTSM_T2 a, SOFTSM_T2 b) {                                                 \
        return {SOFTSM_T(a.x sign b.x ? 1 : 0), SOFTSM_T(a.y sign b.y ? 1 : 0)};                          \
    }
SOFTSM_COMPARISON(==, __heq, __heq2)
SOFTSM_COMPARISON(!=, __hne, __hne2)
SOFTSM_COMPARISON(<, __hlt, __hlt2)
SOFTSM_COMPARISON(<=, __hle, __hle2)
SOFTSM_COMPARISON(>, __hgt, __hgt2)
SOFTSM_COMPARISON(>=, __hge, __hge2)
#undef SOFTSM_COMPARISON
SOFTSM_BOTH bool __hisnan(SOFTSM_T a) { return a.value != a.value; }
SOFTSM_BOTH bool __hisinf(SOFTSM_T a) { return __builtin_isinf((float)a); }

SOFTSM_BOTH SOFTSM_T __hfma(SOFTSM_T a, SOFTSM_T b, SOFTSM_T c) {
#if defined(__CUDA_ARCH__)
    return SOFTSM_OF(__builtin_elementwise_fma(a.value, b.value, c.value));
#else
    return SOFTSM_T(__builtin_fma((double)(float)a, (double)(float)b, (double)(float)c));
#endif
}
SOFTSM_BOTH SOFTSM_T2 __hfma2(SOFTSM_T2 a, SOFTSM_T2 b, SOFTSM_T2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

// By way of float, whose result is rounded again.
#define SOFTSM_BY_FLOAT(one, two, expression)                                                  \
    SOFTSM_BOTH SOFTSM_T one(SOFTSM_T of) {                                                    \
        float x = (float)of;                                                                   \
        return SOFTSM_T(expression);                                                           \
    }                                                                                          \
    SOFTSM_BOTH SOFTSM_T2 two(SOFTSM_T2 of) { return {one(of.x), one(of.y)}; }
SOFTSM_BY_FLOAT(__habs, __habs2, __builtin_fabsf(x))
SOFTSM_BY_FLOAT(hfloor, h2floor, __builtin_floorf(x))
SOFTSM_BY_FLOAT(hceil, h2ceil, __builtin_ceilf(x))
SOFTSM_BY_FLOAT(htrunc, h2trunc, __builtin_truncf(x))
SOFTSM_BY_FLOAT(hrcp, h2rcp, 1.0f / x)
#undef SOFTSM_BY_FLOAT
#define SOFTSM_ON_DEVICE(one, two, function)                                                                         \
    static __device__ __forceinline__ SOFTSM_T one(SOFTSM_T of) { return SOFTSM_T(function((float)of)); }            \
    static __device__ __forceinline__ SOFTSM_T2 two(SOFTSM_T2 of) { return {one(of.x), one(of.y)}; }
SOFTSM_ON_DEVICE(hexp, h2exp, expf)
SOFTSM_ON_DEVICE(hexp2, h2exp2, exp2f)
SOFTSM_ON_DEVICE(hlog, h2log, logf)
SOFTSM_ON_DEVICE(hlog2, h2log2, log2f)
SOFTSM_ON_DEVICE(hsqrt, h2sqrt, sqrtf)
SOFTSM_ON_DEVICE(hrsqrt, h2rsqrt, rsqrtf)
#undef SOFTSM_ON_DEVICE

#define SOFTSM_EXTREME(one, two, sign)                                                                        \
    SOFTSM_BOTH SOFTSM_T one(SOFTSM_T a, SOFTSM_T b) { return a.value sign b.value || __hisnan(b) ? a : b; }  \
    SOFTSM_BOTH SOFTSM_T2 two(SOFTSM_T2 a, SOFTSM_T2 b) { return {one(a.x, b.x), one(a.y, b.y)}; }
SOFTSM_EXTREME(__hmax, __hmax2, >)
SOFTSM_EXTREME(__hmin, __hmin2, <)
#undef SOFTSM_EXTREME

// ---- on the device: shuffles and atomics ---------------------------------------------------------------------------

#define SOFTSM_SHUFFLE(name)                                                                                     \
    static __device__ __forceinline__ SOFTSM_T name(unsigned mask, SOFTSM_T value, int lane, int width = 32) {   \
        unsigned got = name(mask, (unsigned)__builtin_bit_cast(unsigned short, value), lane, width);             \
        return __builtin_bit_cast(SOFTSM_T, (unsigned short)got);                                                \
    }                                                                                                            \
    static __device__ __forceinline__ SOFTSM_T2 name(unsigned mask, SOFTSM_T2 value, int lane, int width = 32) { \
        return __builtin_bit_cast(SOFTSM_T2, name(mask, __builtin_bit_cast(unsigned, value), lane, width));      \
    }
SOFTSM_SHUFFLE(__shfl_sync)
SOFTSM_SHUFFLE(__shfl_up_sync)
SOFTSM_SHUFFLE(__shfl_down_sync)
SOFTSM_SHUFFLE(__shfl_xor_sync)
#undef SOFTSM_SHUFFLE
static __device__ __forceinline__ SOFTSM_T atomicAdd(SOFTSM_T *at, SOFTSM_T value) {
    unsigned short old;
    asm volatile("atom.add.noftz." SOFTSM_PTX " %0, [%1], %2;"
                 : "=h"(old) : "l"(at), "h"(__builtin_bit_cast(unsigned short, value)) : "memory");
    return __builtin_bit_cast(SOFTSM_T, old);
}
static __device__ __forceinline__ SOFTSM_T2 atomicAdd(SOFTSM_T2 *at, SOFTSM_T2 value) {
    unsigned old;
    asm volatile("atom.add.noftz." SOFTSM_PTX "x2 %0, [%1], %2;"
                 : "=r"(old) : "l"(at), "r"(__builtin_bit_cast(unsigned, value)) : "memory");
    return __builtin_bit_cast(SOFTSM_T2, old);
}
#undef SOFTSM_OF
