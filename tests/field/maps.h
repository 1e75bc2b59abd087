// Tensor maps of matrices.
#pragma once
#include <cuda.h>
#include <cstdlib>

// of a matrix with rows of `columns` elements, `stride` bytes apart, in boxes of box_columns x box_rows
inline CUtensorMap map(void *at, CUtensorMapDataType kind, size_t stride, int rows, int columns, int box_columns,
                       int box_rows, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    CUtensorMap m;
    cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[1] = {cuuint64_t(stride)};
    cuuint32_t sides[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[2] = {1, 1};
    if (cuTensorMapEncodeTiled(&m, kind, 2, at, sizes, strides, sides, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        exit(1);
    return m;
}

constexpr auto WORDS = CU_TENSOR_MAP_DATA_TYPE_INT32;
constexpr auto FLOATS = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
constexpr auto BYTES = CU_TENSOR_MAP_DATA_TYPE_UINT8;
constexpr auto HALVES = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
constexpr auto PLAIN = CU_TENSOR_MAP_SWIZZLE_NONE;

// The value of a number of four bits.
inline double e2m1(int bits) {
    constexpr double sizes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return bits & 8 ? -sizes[bits & 7] : sizes[bits & 7];
}
