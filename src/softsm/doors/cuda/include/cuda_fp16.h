// Half precision as the CUDA math API documents it, for programs without a CUDA toolkit: arithmetic, comparisons,
// conversions, shuffles and atomics. A toolkit's header, where there is one, is used instead.
#pragma once
#include <cuda_runtime.h>

#define SOFTSM_BOTH __host__ __device__ __forceinline__
#define SOFTSM_T __half
#define SOFTSM_T2 __half2
#define SOFTSM_RAW _Float16
#define SOFTSM_MAKE softsm_half
#define SOFTSM_PTX "f16"
#include "softsm_half.h"
#undef SOFTSM_T
#undef SOFTSM_T2
#undef SOFTSM_RAW
#undef SOFTSM_MAKE
#undef SOFTSM_PTX
typedef __half half;
typedef __half2 half2;

// ---- conversions ---------------------------------------------------------------------------------------------------

SOFTSM_BOTH __half __float2half(float x) { return __half(x); }
SOFTSM_BOTH __half __float2half_rn(float x) { return __half(x); }
SOFTSM_BOTH __half __double2half(double x) { return __half(x); }
SOFTSM_BOTH __half __int2half_rn(int x) { return __half(x); }
SOFTSM_BOTH __half __uint2half_rn(unsigned x) { return __half(x); }
SOFTSM_BOTH float __half2float(__half x) { return (float)x; }
SOFTSM_BOTH int __half2int_rz(__half x) { return (int)(float)x; }
SOFTSM_BOTH int __half2int_rn(__half x) { return (int)__builtin_rintf((float)x); }
SOFTSM_BOTH __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
SOFTSM_BOTH __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
SOFTSM_BOTH __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
SOFTSM_BOTH float2 __half22float2(__half2 x) { return {(float)x.x, (float)x.y}; }
SOFTSM_BOTH __half2 __half2half2(__half x) { return {x, x}; }
SOFTSM_BOTH __half2 __halves2half2(__half x, __half y) { return {x, y}; }
SOFTSM_BOTH __half2 make_half2(__half x, __half y) { return {x, y}; }
SOFTSM_BOTH __half __low2half(__half2 x) { return x.x; }
SOFTSM_BOTH __half __high2half(__half2 x) { return x.y; }
SOFTSM_BOTH float __low2float(__half2 x) { return (float)x.x; }
SOFTSM_BOTH float __high2float(__half2 x) { return (float)x.y; }
SOFTSM_BOTH __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
SOFTSM_BOTH __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
SOFTSM_BOTH __half2 __lowhigh2highlow(__half2 x) { return {x.y, x.x}; }
SOFTSM_BOTH unsigned short __half_as_ushort(__half x) { return __builtin_bit_cast(unsigned short, x); }
SOFTSM_BOTH short __half_as_short(__half x) { return __builtin_bit_cast(short, x); }
SOFTSM_BOTH __half __ushort_as_half(unsigned short x) { return __builtin_bit_cast(__half, x); }
SOFTSM_BOTH __half __short_as_half(short x) { return __builtin_bit_cast(__half, x); }
#undef SOFTSM_BOTH
