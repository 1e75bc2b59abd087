// cooperative_groups::inclusive_scan and exclusive_scan of a tile, or of coalesced threads.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {

template <typename Group, typename T, typename Op>
__device__ __forceinline__ T inclusive_scan(const Group &group, T value, Op &&op) {
    unsigned rank = group.thread_rank(), size = group.size();
    for (unsigned delta = 1; delta < size; delta *= 2) {
        T other = group.shfl_up(value, delta);
        if (rank >= delta) value = op(other, value);
    }
    return value;
}
template <typename Group, typename T> __device__ __forceinline__ T inclusive_scan(const Group &group, T value) {
    return inclusive_scan(group, value, plus<T>());
}
template <typename Group, typename T, typename Op>  // the first thread gets T()
__device__ __forceinline__ T exclusive_scan(const Group &group, T value, Op &&op) {
    T before = group.shfl_up(inclusive_scan(group, value, op), 1);
    return group.thread_rank() ? before : T();
}
template <typename Group, typename T> __device__ __forceinline__ T exclusive_scan(const Group &group, T value) {
    return exclusive_scan(group, value, plus<T>());
}

}  // namespace cooperative_groups
