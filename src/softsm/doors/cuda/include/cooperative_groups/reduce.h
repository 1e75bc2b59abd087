// cooperative_groups::reduce of a tile, or of coalesced threads: every thread gets the result.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {

// After the step of `delta`, a thread has the result of those from its own rank up to its rank + 2 delta - 1.
template <typename Group, typename T, typename Op>
__device__ __forceinline__ T reduce(const Group &group, T value, Op &&op) {
    unsigned rank = group.thread_rank(), size = group.size();
    for (unsigned delta = 1; delta < size; delta *= 2) {
        T other = group.shfl_down(value, delta);
        if (rank + delta < size) value = op(value, other);
    }
    return group.shfl(value, 0);
}
template <typename Group, typename To, typename T, typename Op>
__device__ __forceinline__ void reduce_store_async(const Group &group, To *to, T value, Op &&op) {
    T all = reduce(group, value, op);
    if (group.thread_rank() == 0) *to = all;
}

}  // namespace cooperative_groups
