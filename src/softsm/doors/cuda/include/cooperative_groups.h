// Cooperative groups as the CUDA programming guide documents them, for programs without a CUDA toolkit: the thread
// block, tiles of a warp, coalesced threads, the cluster and the grid. reduce, scans and memcpy_async are in the folder
// of this name. A toolkit's headers, where there are some, are used instead.
#pragma once
#include <cuda_runtime.h>

#define SOFTSM_DEVICE __device__ __forceinline__

namespace cooperative_groups {

namespace details {
SOFTSM_DEVICE unsigned lane() {
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
SOFTSM_DEVICE unsigned linear(uint3 at, dim3 of) { return (at.z * of.y + at.y) * of.x + at.x; }
SOFTSM_DEVICE unsigned threads_of(dim3 of) { return of.x * of.y * of.z; }

// Any value is shuffled in words of 32 bits. `Lane` says where the word of a lane comes from.
template <typename T, typename Word> SOFTSM_DEVICE T by_words(const T &value, Word &&word) {
    constexpr int count = (sizeof(T) + 3) / 4;
    unsigned parts[count] = {};
    __builtin_memcpy(parts, &value, sizeof(T));
    for (int i = 0; i < count; i++) parts[i] = word(parts[i]);
    T out;
    __builtin_memcpy(&out, parts, sizeof(T));
    return out;
}
#define SOFTSM_SPECIAL(name, type, T, c)                              \
    SOFTSM_DEVICE T name() {                                          \
        T value;                                                      \
        asm volatile("mov." type " %0, %%" #name ";" : "=" c(value)); \
        return value;                                                 \
    }
SOFTSM_SPECIAL(cluster_ctarank, "u32", unsigned, "r")
SOFTSM_SPECIAL(cluster_nctarank, "u32", unsigned, "r")
#undef SOFTSM_SPECIAL
#define SOFTSM_SIDES(what)                                          \
    SOFTSM_DEVICE dim3 what() {                                     \
        unsigned x, y, z;                                           \
        asm volatile("mov.u32 %0, %%" #what ".x;" : "=r"(x));       \
        asm volatile("mov.u32 %0, %%" #what ".y;" : "=r"(y));       \
        asm volatile("mov.u32 %0, %%" #what ".z;" : "=r"(z));       \
        return dim3(x, y, z);                                       \
    }
SOFTSM_SIDES(cluster_ctaid)
SOFTSM_SIDES(cluster_nctaid)
#undef SOFTSM_SIDES
}  // namespace details

// ---- the thread block ----------------------------------------------------------------------------------------------

class thread_block {
  public:
    SOFTSM_DEVICE static void sync() { __syncthreads(); }
    SOFTSM_DEVICE static unsigned thread_rank() { return details::linear(threadIdx, blockDim); }
    SOFTSM_DEVICE static unsigned num_threads() { return details::threads_of(blockDim); }
    SOFTSM_DEVICE static unsigned size() { return num_threads(); }
    SOFTSM_DEVICE static dim3 group_index() { return blockIdx; }
    SOFTSM_DEVICE static dim3 thread_index() { return threadIdx; }
    SOFTSM_DEVICE static dim3 group_dim() { return blockDim; }
    SOFTSM_DEVICE static dim3 dim_threads() { return blockDim; }
};
SOFTSM_DEVICE thread_block this_thread_block() { return {}; }

// ---- some threads of a warp ----------------------------------------------------------------------------------------

class coalesced_group {
    unsigned mask, parent_rank = 0, parents = 1;
    template <typename T> friend __device__ coalesced_group labeled_partition(const coalesced_group &group, T label);
    friend __device__ coalesced_group binary_partition(const coalesced_group &group, bool predicate);

    SOFTSM_DEVICE unsigned lane_of(unsigned rank) const {  // the lane of the thread with this rank
        unsigned left = mask;
        for (unsigned i = 0; i < rank; i++) left &= left - 1;
        return __ffs(left) - 1;
    }
    SOFTSM_DEVICE unsigned packed(unsigned lanes) const {  // bits by lane -> bits by rank
        unsigned out = 0, rank = 0;
        for (unsigned left = mask; left; left &= left - 1, rank++) out |= (lanes >> (__ffs(left) - 1) & 1) << rank;
        return out;
    }

  public:
    SOFTSM_DEVICE explicit coalesced_group(unsigned mask, unsigned rank = 0, unsigned count = 1)
        : mask(mask), parent_rank(rank), parents(count) {}
    SOFTSM_DEVICE void sync() const { __syncwarp(mask); }
    SOFTSM_DEVICE unsigned num_threads() const { return __popc(mask); }
    SOFTSM_DEVICE unsigned size() const { return num_threads(); }
    SOFTSM_DEVICE unsigned thread_rank() const { return __popc(mask & ((1u << details::lane()) - 1)); }
    SOFTSM_DEVICE unsigned meta_group_rank() const { return parent_rank; }
    SOFTSM_DEVICE unsigned meta_group_size() const { return parents; }
    SOFTSM_DEVICE int any(int predicate) const { return __ballot_sync(mask, predicate) != 0; }
    SOFTSM_DEVICE int all(int predicate) const { return __ballot_sync(mask, predicate) == mask; }
    SOFTSM_DEVICE unsigned ballot(int predicate) const { return packed(__ballot_sync(mask, predicate)); }
    template <typename T> SOFTSM_DEVICE unsigned match_any(T value) const {
        return packed(__match_any_sync(mask, value));
    }
    template <typename T> SOFTSM_DEVICE T shfl(T value, unsigned rank) const {
        unsigned from = lane_of(rank % size());
        return details::by_words(value, [&](unsigned word) { return __shfl_sync(mask, word, from); });
    }
    template <typename T> SOFTSM_DEVICE T shfl_up(T value, unsigned delta) const {
        unsigned rank = thread_rank(), from = lane_of(rank < delta ? rank : rank - delta);
        return details::by_words(value, [&](unsigned word) { return __shfl_sync(mask, word, from); });
    }
    template <typename T> SOFTSM_DEVICE T shfl_down(T value, unsigned delta) const {
        unsigned rank = thread_rank(), from = lane_of(rank + delta < size() ? rank + delta : rank);
        return details::by_words(value, [&](unsigned word) { return __shfl_sync(mask, word, from); });
    }
};
SOFTSM_DEVICE coalesced_group coalesced_threads() { return coalesced_group(__activemask()); }

// ---- tiles of 1 to 32 threads --------------------------------------------------------------------------------------

template <unsigned Size, typename Parent = thread_block> class thread_block_tile {
    static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "softsm has tiles of 1, 2, 4, 8, 16, 32 threads");
    unsigned parent_rank, parents;

    SOFTSM_DEVICE static unsigned first() { return details::lane() & ~(Size - 1); }
    SOFTSM_DEVICE static unsigned mask() { return Size == 32 ? ~0u : ((1u << Size % 32) - 1) << first(); }

  public:
    SOFTSM_DEVICE thread_block_tile(unsigned rank, unsigned count) : parent_rank(rank), parents(count) {}
    SOFTSM_DEVICE operator coalesced_group() const { return coalesced_group(mask(), parent_rank, parents); }
    SOFTSM_DEVICE static void sync() { __syncwarp(mask()); }
    SOFTSM_DEVICE static constexpr unsigned num_threads() { return Size; }
    SOFTSM_DEVICE static constexpr unsigned size() { return Size; }
    SOFTSM_DEVICE static unsigned thread_rank() { return details::lane() & (Size - 1); }
    SOFTSM_DEVICE unsigned meta_group_rank() const { return parent_rank; }
    SOFTSM_DEVICE unsigned meta_group_size() const { return parents; }
    SOFTSM_DEVICE int any(int predicate) const { return __ballot_sync(mask(), predicate) != 0; }
    SOFTSM_DEVICE int all(int predicate) const { return __ballot_sync(mask(), predicate) == mask(); }
    SOFTSM_DEVICE unsigned ballot(int predicate) const { return __ballot_sync(mask(), predicate) >> first(); }
    template <typename T> SOFTSM_DEVICE unsigned match_any(T value) const {
        return __match_any_sync(mask(), value) >> first();
    }
    template <typename T> SOFTSM_DEVICE unsigned match_all(T value, int &same) const {
        return __match_all_sync(mask(), value, &same) >> first();
    }
    template <typename T> SOFTSM_DEVICE T shfl(T value, int rank) const {
        return details::by_words(value, [&](unsigned word) { return __shfl_sync(mask(), word, rank, Size); });
    }
    template <typename T> SOFTSM_DEVICE T shfl_up(T value, unsigned delta) const {
        return details::by_words(value, [&](unsigned word) { return __shfl_up_sync(mask(), word, delta, Size); });
    }
    template <typename T> SOFTSM_DEVICE T shfl_down(T value, unsigned delta) const {
        return details::by_words(value, [&](unsigned word) { return __shfl_down_sync(mask(), word, delta, Size); });
    }
    template <typename T> SOFTSM_DEVICE T shfl_xor(T value, unsigned lanes) const {
        return details::by_words(value, [&](unsigned word) { return __shfl_xor_sync(mask(), word, lanes, Size); });
    }
};
template <unsigned Size, typename Parent>
SOFTSM_DEVICE thread_block_tile<Size, Parent> tiled_partition(const Parent &parent) {
    return {(unsigned)parent.thread_rank() / Size, ((unsigned)parent.size() + Size - 1) / Size};
}
// The threads of a group by a label, or by a predicate.
template <typename T> SOFTSM_DEVICE coalesced_group labeled_partition(const coalesced_group &group, T label) {
    return coalesced_group(__match_any_sync(group.mask, label));
}
SOFTSM_DEVICE coalesced_group binary_partition(const coalesced_group &group, bool predicate) {
    unsigned lanes = __ballot_sync(group.mask, predicate);
    return coalesced_group(predicate ? lanes : group.mask & ~lanes, predicate, 2);
}

// ---- the cluster ---------------------------------------------------------------------------------------------------

class cluster_group {
  public:
    using arrival_token = unsigned;
    SOFTSM_DEVICE static arrival_token barrier_arrive() {
        asm volatile("barrier.cluster.arrive;" ::: "memory");
        return 0;
    }
    SOFTSM_DEVICE static void barrier_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
    SOFTSM_DEVICE static void barrier_wait(arrival_token &&) { barrier_wait(); }
    SOFTSM_DEVICE static void sync() { barrier_arrive(), barrier_wait(); }
    SOFTSM_DEVICE static unsigned block_rank() { return details::cluster_ctarank(); }
    SOFTSM_DEVICE static unsigned num_blocks() { return details::cluster_nctarank(); }
    SOFTSM_DEVICE static dim3 block_index() { return details::cluster_ctaid(); }
    SOFTSM_DEVICE static dim3 dim_blocks() { return details::cluster_nctaid(); }
    SOFTSM_DEVICE static unsigned num_threads() { return num_blocks() * thread_block::num_threads(); }
    SOFTSM_DEVICE static unsigned size() { return num_threads(); }
    SOFTSM_DEVICE static unsigned thread_rank() {
        return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
    }
    template <typename T> SOFTSM_DEVICE static T *map_shared_rank(T *at, int rank) {
        T *out;
        asm volatile("mapa.u64 %0, %1, %2;" : "=l"(out) : "l"(at), "r"(rank));
        return out;
    }
    SOFTSM_DEVICE static unsigned query_shared_rank(const void *at) {
        unsigned rank;
        asm volatile("getctarank.u64 %0, %1;" : "=r"(rank) : "l"(at));
        return rank;
    }
};
SOFTSM_DEVICE cluster_group this_cluster() { return {}; }

// ---- the grid of a cooperative launch ------------------------------------------------------------------------------

class grid_group {
    SOFTSM_DEVICE static unsigned *workspace() {
        unsigned long long high, low;
        asm volatile("{ .reg .b32 x; mov.u32 x, %%envreg1; cvt.u64.u32 %0, x; }" : "=l"(high));
        asm volatile("{ .reg .b32 x; mov.u32 x, %%envreg2; cvt.u64.u32 %0, x; }" : "=l"(low));
        return (unsigned *)(high << 32 | low);
    }

  public:
    SOFTSM_DEVICE static bool is_valid() { return workspace() != nullptr; }
    // One block adds what makes the sum of all 2^31: the top bit of the word changes when the last one has come.
    SOFTSM_DEVICE static void sync() {
        if (!is_valid()) __trap();  // the launch was not cooperative
        __syncthreads();
        if (thread_block::thread_rank() == 0) {
            unsigned *word = workspace() + 1, mine = block_rank() ? 1 : 0x80000000u - ((unsigned)num_blocks() - 1);
            unsigned before, now;
            asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                         : "=r"(before) : "l"(word), "r"(mine) : "memory");
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
            } while (((before ^ now) & 0x80000000u) == 0);
        }
        __syncthreads();
    }
    SOFTSM_DEVICE static unsigned long long block_rank() { return details::linear(blockIdx, gridDim); }
    SOFTSM_DEVICE static unsigned long long num_blocks() { return details::threads_of(gridDim); }
    SOFTSM_DEVICE static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
    SOFTSM_DEVICE static unsigned long long size() { return num_threads(); }
    SOFTSM_DEVICE static unsigned long long thread_rank() {
        return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
    }
    SOFTSM_DEVICE static dim3 block_index() { return blockIdx; }
    SOFTSM_DEVICE static dim3 dim_blocks() { return gridDim; }
    SOFTSM_DEVICE static dim3 group_dim() { return gridDim; }
};
SOFTSM_DEVICE grid_group this_grid() { return {}; }

// ---- for every group -----------------------------------------------------------------------------------------------

template <typename Group> SOFTSM_DEVICE void sync(const Group &group) { group.sync(); }
template <typename Group> SOFTSM_DEVICE auto thread_rank(const Group &group) { return group.thread_rank(); }
template <typename Group> SOFTSM_DEVICE auto group_size(const Group &group) { return group.size(); }

template <typename T> struct plus {
    SOFTSM_DEVICE T operator()(T x, T y) const { return x + y; }
};
template <typename T> struct less {  // reduces to the least value
    SOFTSM_DEVICE T operator()(T x, T y) const { return y < x ? y : x; }
};
template <typename T> struct greater {
    SOFTSM_DEVICE T operator()(T x, T y) const { return x < y ? y : x; }
};
template <typename T> struct bit_and {
    SOFTSM_DEVICE T operator()(T x, T y) const { return x & y; }
};
template <typename T> struct bit_or {
    SOFTSM_DEVICE T operator()(T x, T y) const { return x | y; }
};
template <typename T> struct bit_xor {
    SOFTSM_DEVICE T operator()(T x, T y) const { return x ^ y; }
};

}  // namespace cooperative_groups
#undef SOFTSM_DEVICE
