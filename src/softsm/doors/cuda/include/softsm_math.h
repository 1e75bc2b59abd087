// Device functions without a CUDA toolkit that are not synchronisation: conversions, arithmetic, mathematics to within a
// few units of the last place of what the approximate instructions give, and loads and stores with a cache operator.
// cuda_runtime.h includes it.
#pragma once
#define SOFTSM_DEVICE __attribute__((device)) __inline__ __attribute__((always_inline))

#define SOFTSM_ROUNDED(name, of)                                                         \
    SOFTSM_DEVICE float name##f(float x) { return __builtin_elementwise_##of(x); }       \
    SOFTSM_DEVICE double name(double x) { return __builtin_elementwise_##of(x); }
SOFTSM_DEVICE float floorf(float x) { return __builtin_elementwise_floor(x); }
SOFTSM_DEVICE float ceilf(float x) { return __builtin_elementwise_ceil(x); }
SOFTSM_ROUNDED(trunc, trunc)
SOFTSM_ROUNDED(rint, roundeven)
SOFTSM_ROUNDED(nearbyint, roundeven)
#undef SOFTSM_ROUNDED
SOFTSM_DEVICE float copysignf(float x, float sign) { return __builtin_copysignf(x, sign); }
SOFTSM_DEVICE float roundf(float x) {
    float whole = truncf(x);
    return __builtin_fabsf(x - whole) >= 0.5f ? whole + copysignf(1.0f, x) : whole;
}
SOFTSM_DEVICE long lrintf(float x) { return (long)rintf(x); }
SOFTSM_DEVICE long lroundf(float x) { return (long)roundf(x); }
SOFTSM_DEVICE float fmodf(float x, float y) { return (float)((double)x - trunc((double)x / y) * (double)y); }
SOFTSM_DEVICE float log10f(float x) { return log2f(x) * 0.30102999566f; }
SOFTSM_DEVICE float exp10f(float x) { return exp2f(x * 3.32192809489f); }
SOFTSM_DEVICE float __powf(float x, float y) { return exp2f(y * log2f(x)); }
SOFTSM_DEVICE float powf(float x, float y) {
    if (y == 0 || x == 1) return 1;
    float size = __powf(__builtin_fabsf(x), y);
    if (x >= 0 || x != x) return size;
    if (truncf(y) != y) return __builtin_nanf("");
    return truncf(y / 2) * 2 != y ? -size : size;
}
SOFTSM_DEVICE float expm1f(float x) {
    return __builtin_fabsf(x) < 0.3f ? x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
                                     : expf(x) - 1;
}
SOFTSM_DEVICE float log1pf(float x) {
    float sum = 1 + x;  // what it loses of x is made good
    return sum == 1 ? x : logf(sum) * (x / (sum - 1));
}
SOFTSM_DEVICE float tanhf(float x) {
    float t = expm1f(-2 * __builtin_fabsf(x));
    return copysignf(-t / (t + 2), x);
}
SOFTSM_DEVICE float sinhf(float x) { return 0.5f * (expm1f(x) - expm1f(-x)); }
SOFTSM_DEVICE float coshf(float x) { return 0.5f * (expf(x) + expf(-x)); }
SOFTSM_DEVICE float erff(float x) {  // Abramowitz and Stegun 7.1.28, and the series near 0
    float a = __builtin_fabsf(x);
    if (a < 0.5f) {
        float s = x * x;
        return 1.1283791671f * x * (1 + s * (-1.0f / 3 + s * (0.1f + s * (-1.0f / 42 + s * (1.0f / 216 - s / 1320)))));
    }
    float p = 1 + a * (0.0705230784f + a * (0.0422820123f + a * (0.0092705272f + a * (0.0001520143f +
              a * (0.0002765672f + a * 0.0000430638f)))));
    p *= p; p *= p; p *= p; p *= p;
    return copysignf(1 - 1 / p, x);
}
SOFTSM_DEVICE float erfcf(float x) { return 1 - erff(x); }
SOFTSM_DEVICE float hypotf(float x, float y) { return sqrtf(x * x + y * y); }
SOFTSM_DEVICE float __softsm_turn(float x) {  // to [-pi, pi], where the approximate instructions are accurate
    return (float)((double)x - rint((double)x * 0.15915494309189535) * 6.283185307179586);
}
SOFTSM_DEVICE float sinf(float x) { return __sinf(__softsm_turn(x)); }
SOFTSM_DEVICE float cosf(float x) { return __cosf(__softsm_turn(x)); }
SOFTSM_DEVICE float tanf(float x) { return sinf(x) / cosf(x); }
SOFTSM_DEVICE float __tanf(float x) { return __sinf(x) / __cosf(x); }
SOFTSM_DEVICE void sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
SOFTSM_DEVICE void __sincosf(float x, float *s, float *c) { *s = __sinf(x), *c = __cosf(x); }
SOFTSM_DEVICE double rsqrt(double x) { return 1 / sqrt(x); }
SOFTSM_DEVICE float __frsqrt_rn(float x) { return (float)rsqrt((double)x); }
SOFTSM_DEVICE float __saturatef(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0), 1); }

// With a rounding of their own they are not contracted to fused multiply-adds.
#define SOFTSM_BINARY(name, code)                                                        \
    SOFTSM_DEVICE float name(float x, float y) {                                         \
        float out;                                                                       \
        asm(code " %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));                           \
        return out;                                                                      \
    }
SOFTSM_BINARY(__fadd_rn, "add.rn.f32")
SOFTSM_BINARY(__fsub_rn, "sub.rn.f32")
SOFTSM_BINARY(__fmul_rn, "mul.rn.f32")
SOFTSM_BINARY(__fdiv_rn, "div.rn.f32")
#undef SOFTSM_BINARY
SOFTSM_DEVICE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

#define SOFTSM_CONVERSION(name, To, From, code, to, from)                                \
    SOFTSM_DEVICE To name(From x) {                                                      \
        To out;                                                                          \
        asm("cvt." code " %0, %1;" : "=" to(out) : from(x));                             \
        return out;                                                                      \
    }
#define SOFTSM_ROUNDINGS(direction, code)                                                \
    SOFTSM_CONVERSION(__float2int_##direction, int, float, code ".s32.f32", "r", "f")    \
    SOFTSM_CONVERSION(__float2uint_##direction, unsigned, float, code ".u32.f32", "r", "f")
SOFTSM_ROUNDINGS(rn, "rni")
SOFTSM_ROUNDINGS(rz, "rzi")
SOFTSM_ROUNDINGS(ru, "rpi")
SOFTSM_ROUNDINGS(rd, "rmi")
SOFTSM_CONVERSION(__int2float_rn, float, int, "rn.f32.s32", "f", "r")
SOFTSM_CONVERSION(__uint2float_rn, float, unsigned, "rn.f32.u32", "f", "r")
#undef SOFTSM_ROUNDINGS
#undef SOFTSM_CONVERSION

SOFTSM_DEVICE int __mul24(int x, int y) { return (x << 8 >> 8) * (y << 8 >> 8); }
SOFTSM_DEVICE unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffff) * (y & 0xffffff); }
SOFTSM_DEVICE unsigned __sad(int x, int y, unsigned z) { return z + (x > y ? (unsigned)x - y : (unsigned)y - x); }
SOFTSM_DEVICE unsigned __usad(unsigned x, unsigned y, unsigned z) { return z + (x > y ? x - y : y - x); }
SOFTSM_DEVICE int __dp4a(int x, int y, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(sum));
    return sum;
}
SOFTSM_DEVICE unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(sum));
    return sum;
}

SOFTSM_DEVICE long long clock64() {
    long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}
SOFTSM_DEVICE clock_t clock() { return (clock_t)clock64(); }

#define SOFTSM_SPACE(name, space)                                                        \
    SOFTSM_DEVICE unsigned __is##name(const void *at) {                                  \
        unsigned out;                                                                    \
        asm("{ .reg .pred p; isspacep." space " p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(out) : "l"(at)); \
        return out;                                                                      \
    }
SOFTSM_SPACE(Global, "global")
SOFTSM_SPACE(Shared, "shared")
SOFTSM_SPACE(Local, "local")
#undef SOFTSM_SPACE

// The values of structures go through registers of 32, 64 or 2 x 64 bits.
#define SOFTSM_LOAD(name, code)                                                                                  \
    template <typename T> SOFTSM_DEVICE T name(const T *at) {                                                    \
        if constexpr (sizeof(T) == 4) {                                                                          \
            unsigned value;                                                                                      \
            asm volatile("ld.global" code ".b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");                  \
            return __builtin_bit_cast(T, value);                                                                 \
        } else if constexpr (sizeof(T) == 8) {                                                                   \
            unsigned long long value;                                                                            \
            asm volatile("ld.global" code ".b64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");                  \
            return __builtin_bit_cast(T, value);                                                                 \
        } else if constexpr (sizeof(T) == 16) {                                                                  \
            struct { unsigned long long part[2]; } value;                                                        \
            asm volatile("ld.global" code ".v2.b64 {%0, %1}, [%2];"                                              \
                         : "=l"(value.part[0]), "=l"(value.part[1]) : "l"(at) : "memory");                       \
            return __builtin_bit_cast(T, value);                                                                 \
        } else {                                                                                                 \
            return *at;                                                                                          \
        }                                                                                                        \
    }
SOFTSM_LOAD(__ldg, ".nc")  // so that the checker sees a kernel that writes what it reads so
SOFTSM_LOAD(__ldca, ".ca")
SOFTSM_LOAD(__ldcg, ".cg")
SOFTSM_LOAD(__ldcs, ".cs")
SOFTSM_LOAD(__ldlu, ".lu")
SOFTSM_LOAD(__ldcv, ".cv")
#undef SOFTSM_LOAD
#define SOFTSM_STORE(name, code)                                                                                 \
    template <typename T> SOFTSM_DEVICE void name(T *at, T given) {                                              \
        if constexpr (sizeof(T) == 4) {                                                                          \
            asm volatile("st.global" code ".b32 [%0], %1;" ::"l"(at), "r"(__builtin_bit_cast(unsigned, given)) : "memory"); \
        } else if constexpr (sizeof(T) == 8) {                                                                   \
            auto value = __builtin_bit_cast(unsigned long long, given);                                          \
            asm volatile("st.global" code ".b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");                    \
        } else if constexpr (sizeof(T) == 16) {                                                                  \
            struct Parts { unsigned long long part[2]; } value = __builtin_bit_cast(Parts, given);               \
            asm volatile("st.global" code ".v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(value.part[0]), "l"(value.part[1]) : "memory"); \
        } else {                                                                                                 \
            *at = given;                                                                                         \
        }                                                                                                        \
    }
SOFTSM_STORE(__stwb, ".wb")
SOFTSM_STORE(__stcg, ".cg")
SOFTSM_STORE(__stcs, ".cs")
SOFTSM_STORE(__stwt, ".wt")
#undef SOFTSM_STORE
#undef SOFTSM_DEVICE
