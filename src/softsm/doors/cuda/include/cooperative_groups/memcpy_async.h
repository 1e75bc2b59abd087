// cooperative_groups::memcpy_async by cp.async: from global to shared memory, in pieces of 16, 8 or 4 bytes. Any other
// copy is made at once.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {

template <size_t N> struct aligned_size_t {  // a number of bytes; both addresses are multiples of N
    size_t value;
    __host__ __device__ explicit aligned_size_t(size_t value) : value(value) {}
    __host__ __device__ operator size_t() const { return value; }
};

namespace details {
template <int Piece, typename Group>
__device__ __forceinline__ void copy_pieces_of(const Group &group, char *to, const char *from, size_t size) {
    for (size_t at = group.thread_rank() * Piece; at < size; at += group.size() * Piece) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned)__cvta_generic_to_shared(to + at)),
                     "l"(from + at), "n"(Piece) : "memory");
    }
}
template <typename Group>
__device__ __forceinline__ void copy_pieces(const Group &group, void *to, const void *from, size_t size) {
    char *out = (char *)to;
    const char *in = (const char *)from;
    size_t odd = (size_t)out | (size_t)in, whole = 0;
#if defined(__CUDA_ARCH__)
    if (__nvvm_isspacep_shared(to) && __nvvm_isspacep_global(from)) {
        int piece = odd % 16 == 0 ? 16 : odd % 8 == 0 ? 8 : odd % 4 == 0 ? 4 : 0;
        whole = piece ? size / piece * piece : 0;
        if (piece == 16) copy_pieces_of<16>(group, out, in, whole);
        if (piece == 8) copy_pieces_of<8>(group, out, in, whole);
        if (piece == 4) copy_pieces_of<4>(group, out, in, whole);
    }
#endif
    for (size_t at = whole + group.thread_rank(); at < size; at += group.size()) out[at] = in[at];
}
}  // namespace details

template <typename Group>
__device__ __forceinline__ void memcpy_async(const Group &group, void *to, const void *from, size_t size) {
    details::copy_pieces(group, to, from, size);
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <typename Group, size_t N>
__device__ __forceinline__ void memcpy_async(const Group &group, void *to, const void *from, aligned_size_t<N> size) {
    memcpy_async(group, to, from, (size_t)size);
}
template <typename Group, typename T>  // as many elements as both have
__device__ __forceinline__ void memcpy_async(const Group &group, T *to, size_t room, const T *from, size_t count) {
    memcpy_async(group, (void *)to, (const void *)from, (count < room ? count : room) * sizeof(T));
}
template <unsigned Left, typename Group> __device__ __forceinline__ void wait_prior(const Group &group) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
    group.sync();
}
template <typename Group> __device__ __forceinline__ void wait(const Group &group) { wait_prior<0>(group); }

}  // namespace cooperative_groups
