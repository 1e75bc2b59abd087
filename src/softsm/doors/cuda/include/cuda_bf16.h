// bfloat16 as the CUDA math API documents it, for programs without a CUDA toolkit: arithmetic, comparisons,
// conversions, shuffles and atomics. A toolkit's header, where there is one, is used instead.
#pragma once
#include <cuda_runtime.h>

#define SOFTSM_BOTH __host__ __device__ __forceinline__
#define SOFTSM_T __nv_bfloat16
#define SOFTSM_T2 __nv_bfloat162
#define SOFTSM_RAW __bf16
#define SOFTSM_MAKE softsm_bfloat16
#define SOFTSM_PTX "bf16"
#include "softsm_half.h"
#undef SOFTSM_T
#undef SOFTSM_T2
#undef SOFTSM_RAW
#undef SOFTSM_MAKE
#undef SOFTSM_PTX
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// ---- conversions ---------------------------------------------------------------------------------------------------

SOFTSM_BOTH __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
SOFTSM_BOTH __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
SOFTSM_BOTH __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
SOFTSM_BOTH __nv_bfloat16 __int2bfloat16_rn(int x) { return __nv_bfloat16(x); }
SOFTSM_BOTH __nv_bfloat16 __uint2bfloat16_rn(unsigned x) { return __nv_bfloat16(x); }
SOFTSM_BOTH float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
SOFTSM_BOTH int __bfloat162int_rz(__nv_bfloat16 x) { return (int)(float)x; }
SOFTSM_BOTH int __bfloat162int_rn(__nv_bfloat16 x) { return (int)__builtin_rintf((float)x); }
SOFTSM_BOTH __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
SOFTSM_BOTH __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
SOFTSM_BOTH __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
SOFTSM_BOTH float2 __bfloat1622float2(__nv_bfloat162 x) { return {(float)x.x, (float)x.y}; }
SOFTSM_BOTH __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
SOFTSM_BOTH __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SOFTSM_BOTH __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SOFTSM_BOTH __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
SOFTSM_BOTH __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
SOFTSM_BOTH float __low2float(__nv_bfloat162 x) { return (float)x.x; }
SOFTSM_BOTH float __high2float(__nv_bfloat162 x) { return (float)x.y; }
SOFTSM_BOTH __nv_bfloat162 __low2bfloat162(__nv_bfloat162 x) { return {x.x, x.x}; }
SOFTSM_BOTH __nv_bfloat162 __high2bfloat162(__nv_bfloat162 x) { return {x.y, x.y}; }
SOFTSM_BOTH __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 x) { return {x.y, x.x}; }
SOFTSM_BOTH unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return __builtin_bit_cast(unsigned short, x); }
SOFTSM_BOTH short __bfloat16_as_short(__nv_bfloat16 x) { return __builtin_bit_cast(short, x); }
SOFTSM_BOTH __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __builtin_bit_cast(__nv_bfloat16, x); }
SOFTSM_BOTH __nv_bfloat16 __short_as_bfloat16(short x) { return __builtin_bit_cast(__nv_bfloat16, x); }
#undef SOFTSM_BOTH
