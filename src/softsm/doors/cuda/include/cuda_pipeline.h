// The primitives of <cuda_pipeline.h>: cp.async and its groups, for programs without a CUDA toolkit.
#pragma once
#include <cuda/pipeline>

__device__ __forceinline__ void __pipeline_memcpy_async(void *to, const void *from, size_t size, size_t zeros = 0) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to), n = (unsigned)(size - zeros);
    if (size == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(n) : "memory");
    else if (size == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(n) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(n) : "memory");
}
__device__ __forceinline__ void __pipeline_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void __pipeline_wait_prior(unsigned left) { cuda::details::wait_groups(left); }
