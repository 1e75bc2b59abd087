// What a CUDA C++ program needs of the runtime's header, for clang without a CUDA toolkit: types, the functions that
// softsm serves (host.cpp), and device functions made of clang's own builtins. A toolkit's header, where there is one,
// is used instead.
#pragma once
#if !defined(__CUDA__)
#error "this header belongs to CUDA C++: compile with softsm, or with clang -x cuda"
#endif

extern "C" {  // clang's <new> calls them on the device
__attribute__((device)) void *malloc(__SIZE_TYPE__ size);
__attribute__((device)) void free(void *at);
}
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__ __attribute__((grid_constant))
#define __cluster_dims__(...) __attribute__((annotate("softsm_cluster", __VA_ARGS__)))  // see compile.py
#define CUDART_CB
#define CUDART_VERSION 12080
#define CUDA_VERSION 12080

// ---- vectors -------------------------------------------------------------------------------------------------------

#define SOFTSM_VECTORS(T, name, two, four)                                                     \
    struct name##1 { T x; };                                                                   \
    struct __align__(two) name##2 { T x, y; };                                                 \
    struct name##3 { T x, y, z; };                                                             \
    struct __align__(four) name##4 { T x, y, z, w; };                                          \
    __host__ __device__ inline name##2 make_##name##2(T x, T y) { return {x, y}; }             \
    __host__ __device__ inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }     \
    __host__ __device__ inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SOFTSM_VECTORS(signed char, char, 2, 4)
SOFTSM_VECTORS(unsigned char, uchar, 2, 4)
SOFTSM_VECTORS(short, short, 4, 8)
SOFTSM_VECTORS(unsigned short, ushort, 4, 8)
SOFTSM_VECTORS(int, int, 8, 16)
SOFTSM_VECTORS(unsigned, uint, 8, 16)
SOFTSM_VECTORS(long long, longlong, 16, 16)
SOFTSM_VECTORS(unsigned long long, ulonglong, 16, 16)
SOFTSM_VECTORS(float, float, 8, 16)
SOFTSM_VECTORS(double, double, 16, 16)
#undef SOFTSM_VECTORS

struct dim3 {
    unsigned x, y, z;
    __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    __host__ __device__ constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    __host__ __device__ constexpr operator uint3() const { return {x, y, z}; }
};

// ---- the runtime ---------------------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidDeviceFunction = 98,
    cudaErrorInvalidConfiguration = 9, cudaErrorInvalidSymbol = 13, cudaErrorNotSupported = 801,
    cudaErrorIllegalState = 401, cudaErrorStreamCaptureUnsupported = 900, cudaErrorStreamCaptureInvalidated,
    cudaErrorStreamCaptureMerge, cudaErrorStreamCaptureUnmatched, cudaErrorStreamCaptureUnjoined,
    cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureImplicit, cudaErrorCapturedEvent,
    cudaErrorGraphExecUpdateFailure = 910,
    cudaErrorNotReady = 600, cudaErrorIllegalAddress = 700, cudaErrorAssert = 710, cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719, cudaErrorCooperativeLaunchTooLarge = 720, cudaErrorUnknown = 999
};
typedef cudaError_t cudaError;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 15
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
    int cooperativeLaunch, managedMemory, unifiedAddressing, concurrentKernels;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor, l2CacheSize;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1 };
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
typedef void (*cudaHostFn_t)(void *data);
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0, cudaLaunchAttributeCooperative = 2, cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
    char pad[64];
    int cooperative;
    struct { unsigned x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    char pad[4];
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated
};
enum cudaGraphExecUpdateResult {
    cudaGraphExecUpdateSuccess, cudaGraphExecUpdateError, cudaGraphExecUpdateErrorTopologyChanged
};
struct cudaGraphExecUpdateResultInfo {
    cudaGraphExecUpdateResult result;
    cudaGraphNode_t errorNode, errorFromNode;
};
struct cudaKernelNodeParams {
    void *func;
    dim3 gridDim, blockDim;
    unsigned sharedMemBytes;
    void **kernelParams, **extra;
};
struct cudaMemsetParams {
    void *dst;
    size_t pitch;
    unsigned value, elementSize;
    size_t width, height;
};
struct cudaHostNodeParams {
    cudaHostFn_t fn;
    void *userData;
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaStreamDefault = 0, cudaEventDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum { cudaEnableDefault = 0 };

extern "C" {
cudaError_t cudaMalloc(void **at, size_t size);
cudaError_t cudaMallocManaged(void **at, size_t size, unsigned flags = 1);
cudaError_t cudaMallocHost(void **at, size_t size);
cudaError_t cudaMallocAsync(void **at, size_t size, cudaStream_t stream);
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void **at, void *host, unsigned flags);
cudaError_t cudaMallocPitch(void **at, size_t *pitch, size_t width, size_t height);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value);
cudaError_t cudaFuncSetCacheConfig(const void *kernel, cudaFuncCache config);
cudaError_t cudaFree(void *at);
cudaError_t cudaFreeHost(void *at);
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream);
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemset(void *to, int value, size_t size);
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream = 0);
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice);
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost);
cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t size, size_t offset, cudaMemcpyKind kind,
                                      cudaStream_t stream = 0);
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *at);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaDeviceCanAccessPeer(int *able, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaMemcpyPeer(void *to, int device, const void *from, int source, size_t size);
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t size, cudaStream_t stream = 0);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared);
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t stream);
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                        cudaStream_t stream);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args);
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *status = 0);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *result);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind, size_t count);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind,
                                   size_t count, const cudaKernelNodeParams *parameters);
cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind,
                                     size_t count, void *to, const void *from, size_t size, cudaMemcpyKind kind);
cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind,
                                   size_t count, const cudaMemsetParams *parameters);
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind, size_t count,
                                 const cudaHostNodeParams *parameters);
cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *behind,
                                       size_t count, cudaGraph_t child);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared = 0, void *stream = 0);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, cudaGraphNode_t *, char *, size_t) {
    return cudaGraphInstantiate(executable, graph, 0);
}
template <typename T> inline cudaError_t cudaMalloc(T **at, size_t size) { return cudaMalloc((void **)at, size); }
template <typename T> inline cudaError_t cudaMallocManaged(T **at, size_t size, unsigned flags = 1) {
    return cudaMallocManaged((void **)at, size, flags);
}
template <typename T> inline cudaError_t cudaMallocHost(T **at, size_t size) {
    return cudaMallocHost((void **)at, size);
}
template <typename T> inline cudaError_t cudaHostAlloc(T **at, size_t size, unsigned flags) {
    return cudaHostAlloc((void **)at, size, flags);
}
template <typename T> inline cudaError_t cudaHostGetDevicePointer(T **at, void *host, unsigned flags) {
    return cudaHostGetDevicePointer((void **)at, host, flags);
}
template <typename T> inline cudaError_t cudaMallocPitch(T **at, size_t *pitch, size_t width, size_t height) {
    return cudaMallocPitch((void **)at, pitch, width, height);
}
template <typename T> inline cudaError_t cudaMallocAsync(T **at, size_t size, cudaStream_t stream) {
    return cudaMallocAsync((void **)at, size, stream);
}
template <typename T>
inline cudaError_t cudaMemcpyToSymbol(const T &symbol, const void *from, size_t size, size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return cudaMemcpyToSymbol((const void *)&symbol, from, size, offset, kind);
}
template <typename T>
inline cudaError_t cudaMemcpyFromSymbol(void *to, const T &symbol, size_t size, size_t offset = 0,
                                        cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return cudaMemcpyFromSymbol(to, (const void *)&symbol, size, offset, kind);
}
template <typename T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T &symbol, const void *from, size_t size, size_t offset,
                                           cudaMemcpyKind kind, cudaStream_t stream = 0) {
    return cudaMemcpyToSymbolAsync((const void *)&symbol, from, size, offset, kind, stream);
}
template <typename T>
inline cudaError_t cudaMemcpyFromSymbolAsync(void *to, const T &symbol, size_t size, size_t offset,
                                             cudaMemcpyKind kind, cudaStream_t stream = 0) {
    return cudaMemcpyFromSymbolAsync(to, (const void *)&symbol, size, offset, kind, stream);
}
template <typename T> inline cudaError_t cudaGetSymbolAddress(void **at, const T &symbol) {
    return cudaGetSymbolAddress(at, (const void *)&symbol);
}
template <typename T> inline cudaError_t cudaFuncSetAttribute(T *kernel, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}
template <typename T>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T kernel, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void *)kernel, threads, shared);
}
template <typename... Parameters, typename... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                                      Arguments &&...arguments) {
    return [&](Parameters... converted) {
        void *args[] = {&converted..., nullptr};
        return cudaLaunchKernelExC(config, (const void *)kernel, args);
    }(static_cast<Arguments &&>(arguments)...);
}

// ---- on the device -------------------------------------------------------------------------------------------------

#include <__clang_cuda_builtin_vars.h>
inline __attribute__((device)) __cuda_builtin_threadIdx_t::operator dim3() const { return dim3(x, y, z); }
inline __attribute__((device)) __cuda_builtin_threadIdx_t::operator uint3() const { return {x, y, z}; }
inline __attribute__((device)) __cuda_builtin_blockIdx_t::operator dim3() const { return dim3(x, y, z); }
inline __attribute__((device)) __cuda_builtin_blockIdx_t::operator uint3() const { return {x, y, z}; }
inline __attribute__((device)) __cuda_builtin_blockDim_t::operator dim3() const { return dim3(x, y, z); }
inline __attribute__((device)) __cuda_builtin_blockDim_t::operator uint3() const { return {x, y, z}; }
inline __attribute__((device)) __cuda_builtin_gridDim_t::operator dim3() const { return dim3(x, y, z); }
inline __attribute__((device)) __cuda_builtin_gridDim_t::operator uint3() const { return {x, y, z}; }

extern "C" __device__ int printf(const char *, ...);
extern "C" __device__ void __assertfail(const char *message, const char *file, unsigned line, const char *function,
                                        size_t size);
extern "C" {
static __device__ inline void __assert_fail(const char *message, const char *file, unsigned line,
                                            const char *function) {  // assert() of the host's <assert.h> calls it
    __assertfail(message, file, line, function, 1);
}
static __device__ inline void *memcpy(void *to, const void *from, size_t size) noexcept {
    return __builtin_memcpy(to, from, size);
}
static __device__ inline void *memmove(void *to, const void *from, size_t size) noexcept {
    return __builtin_memmove(to, from, size);
}
static __device__ inline void *memset(void *to, int value, size_t size) noexcept {
    return __builtin_memset(to, value, size);
}
}

#define SOFTSM_DEVICE __device__ __forceinline__
#if defined(__CUDA_ARCH__)
#define SOFTSM_ONLY_DEVICE(...) __VA_ARGS__
#else
#define SOFTSM_ONLY_DEVICE(...)
#endif

SOFTSM_DEVICE void __syncwarp(unsigned mask = 0xffffffff) { asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory"); }
SOFTSM_DEVICE void __threadfence() { asm volatile("fence.sc.gpu;" ::: "memory"); }
SOFTSM_DEVICE void __threadfence_block() { asm volatile("fence.sc.cta;" ::: "memory"); }
SOFTSM_DEVICE void __threadfence_system() { asm volatile("fence.sc.sys;" ::: "memory"); }
SOFTSM_DEVICE void __nanosleep(unsigned ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }
SOFTSM_DEVICE void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SOFTSM_DEVICE void cudaTriggerProgrammaticLaunchCompletion() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
SOFTSM_DEVICE void __trap() { asm volatile("trap;"); }
SOFTSM_DEVICE size_t __cvta_generic_to_shared(const void *at) {
    return (size_t)(const __attribute__((address_space(3))) void *)at;
}
SOFTSM_DEVICE unsigned __activemask() {
    unsigned mask;
    asm volatile("activemask.b32 %0;" : "=r"(mask));
    return mask;
}
SOFTSM_DEVICE unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned out;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2; }"
                 : "=r"(out) : "r"(predicate), "r"(mask));
    return out;
}
SOFTSM_DEVICE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
SOFTSM_DEVICE int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

#define SOFTSM_SHUFFLE(name, mode, limit)                                                                        \
    SOFTSM_DEVICE int name(unsigned mask, int value, int lane, int width = 32) {                                 \
        int out;                                                                                                 \
        asm volatile("shfl.sync." mode ".b32 %0, %1, %2, %3, %4;"                                                \
                     : "=r"(out) : "r"(value), "r"(lane), "r"(((32 - width) << 8) | limit), "r"(mask));          \
        return out;                                                                                              \
    }                                                                                                            \
    SOFTSM_DEVICE unsigned name(unsigned mask, unsigned value, int lane, int width = 32) {                       \
        return (unsigned)name(mask, (int)value, lane, width);                                                    \
    }                                                                                                            \
    SOFTSM_DEVICE float name(unsigned mask, float value, int lane, int width = 32) {                             \
        return __builtin_bit_cast(float, name(mask, __builtin_bit_cast(int, value), lane, width));               \
    }                                                                                                            \
    SOFTSM_DEVICE unsigned long long name(unsigned mask, unsigned long long value, int lane, int width = 32) {   \
        unsigned low = name(mask, (unsigned)value, lane, width);                                                 \
        return (unsigned long long)name(mask, (unsigned)(value >> 32), lane, width) << 32 | low;                 \
    }                                                                                                            \
    SOFTSM_DEVICE long long name(unsigned mask, long long value, int lane, int width = 32) {                     \
        return (long long)name(mask, (unsigned long long)value, lane, width);                                    \
    }                                                                                                            \
    SOFTSM_DEVICE double name(unsigned mask, double value, int lane, int width = 32) {                           \
        return __builtin_bit_cast(double, name(mask, __builtin_bit_cast(unsigned long long, value), lane, width)); \
    }
SOFTSM_SHUFFLE(__shfl_sync, "idx", 31)
SOFTSM_SHUFFLE(__shfl_up_sync, "up", 0)
SOFTSM_SHUFFLE(__shfl_down_sync, "down", 31)
SOFTSM_SHUFFLE(__shfl_xor_sync, "bfly", 31)
#undef SOFTSM_SHUFFLE

#define SOFTSM_MATCH(T, bits, c)                                                                                 \
    SOFTSM_DEVICE unsigned __match_any_sync(unsigned mask, T value) {                                            \
        unsigned out;                                                                                            \
        asm volatile("match.any.sync.b" bits " %0, %1, %2;" : "=r"(out) : c(value), "r"(mask));                  \
        return out;                                                                                              \
    }                                                                                                            \
    SOFTSM_DEVICE unsigned __match_all_sync(unsigned mask, T value, int *all) {                                  \
        unsigned out;                                                                                            \
        asm volatile("{ .reg .pred p; match.all.sync.b" bits " %0|p, %2, %3; selp.s32 %1, 1, 0, p; }"            \
                     : "=r"(out), "=r"(*all) : c(value), "r"(mask));                                             \
        return out;                                                                                              \
    }
SOFTSM_MATCH(int, "32", "r")
SOFTSM_MATCH(unsigned, "32", "r")
SOFTSM_MATCH(unsigned long long, "64", "l")
#undef SOFTSM_MATCH
#define SOFTSM_REDUCE(name, T, code)                                                                             \
    SOFTSM_DEVICE T name(unsigned mask, T value) {                                                               \
        T out;                                                                                                   \
        asm volatile("redux.sync." code " %0, %1, %2;" : "=r"(out) : "r"(value), "r"(mask));                     \
        return out;                                                                                              \
    }
SOFTSM_REDUCE(__reduce_add_sync, int, "add.s32")
SOFTSM_REDUCE(__reduce_add_sync, unsigned, "add.u32")
SOFTSM_REDUCE(__reduce_min_sync, int, "min.s32")
SOFTSM_REDUCE(__reduce_min_sync, unsigned, "min.u32")
SOFTSM_REDUCE(__reduce_max_sync, int, "max.s32")
SOFTSM_REDUCE(__reduce_max_sync, unsigned, "max.u32")
SOFTSM_REDUCE(__reduce_and_sync, unsigned, "and.b32")
SOFTSM_REDUCE(__reduce_or_sync, unsigned, "or.b32")
SOFTSM_REDUCE(__reduce_xor_sync, unsigned, "xor.b32")
#undef SOFTSM_REDUCE
SOFTSM_DEVICE int __syncthreads_count(int predicate) {
    int out;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.popc.u32 %0, 0, p; }" : "=r"(out) : "r"(predicate) : "memory");
    return out;
}
SOFTSM_DEVICE int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
SOFTSM_DEVICE int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }

#define SOFTSM_ATOMIC_OF(name, T, code, c)                                                                       \
    SOFTSM_DEVICE T name(T *at, T value) {                                                                       \
        T old;                                                                                                   \
        asm volatile("atom." code " %0, [%1], %2;" : "=" c(old) : "l"(at), c(value) : "memory");                 \
        return old;                                                                                              \
    }
#define SOFTSM_ATOMIC(name, T, code, c, type)                                                                    \
    SOFTSM_ATOMIC_OF(name, T, code, c)                                                                           \
    SOFTSM_ATOMIC_OF(name##_block, T, "relaxed.cta." code, c)                                                    \
    SOFTSM_ATOMIC_OF(name##_system, T, "relaxed.sys." code, c)
SOFTSM_ATOMIC(atomicAdd, int, "add.s32", "r", s32)
SOFTSM_ATOMIC(atomicAdd, unsigned, "add.u32", "r", u32)
SOFTSM_ATOMIC(atomicAdd, unsigned long long, "add.u64", "l", u64)
SOFTSM_ATOMIC(atomicAdd, float, "add.f32", "f", f32)
SOFTSM_ATOMIC(atomicAdd, double, "add.f64", "d", f64)
SOFTSM_ATOMIC(atomicMax, int, "max.s32", "r", s32)
SOFTSM_ATOMIC(atomicMax, unsigned, "max.u32", "r", u32)
SOFTSM_ATOMIC(atomicMin, int, "min.s32", "r", s32)
SOFTSM_ATOMIC(atomicMin, unsigned, "min.u32", "r", u32)
SOFTSM_ATOMIC(atomicAnd, unsigned, "and.b32", "r", b32)
SOFTSM_ATOMIC(atomicOr, unsigned, "or.b32", "r", b32)
SOFTSM_ATOMIC(atomicXor, unsigned, "xor.b32", "r", b32)
SOFTSM_ATOMIC(atomicAnd, int, "and.b32", "r", b32)
SOFTSM_ATOMIC(atomicOr, int, "or.b32", "r", b32)
SOFTSM_ATOMIC(atomicXor, int, "xor.b32", "r", b32)
SOFTSM_ATOMIC(atomicMax, long long, "max.s64", "l", s64)
SOFTSM_ATOMIC(atomicMax, unsigned long long, "max.u64", "l", u64)
SOFTSM_ATOMIC(atomicMin, long long, "min.s64", "l", s64)
SOFTSM_ATOMIC(atomicMin, unsigned long long, "min.u64", "l", u64)
SOFTSM_ATOMIC(atomicInc, unsigned, "inc.u32", "r", u32)
SOFTSM_ATOMIC(atomicDec, unsigned, "dec.u32", "r", u32)
SOFTSM_ATOMIC(atomicExch, int, "exch.b32", "r", b32)
SOFTSM_ATOMIC(atomicExch, unsigned, "exch.b32", "r", b32)
SOFTSM_ATOMIC(atomicExch, unsigned long long, "exch.b64", "l", b64)
SOFTSM_ATOMIC(atomicExch, float, "exch.b32", "f", b32)
#undef SOFTSM_ATOMIC
#undef SOFTSM_ATOMIC_OF
SOFTSM_DEVICE int atomicSub(int *at, int value) { return atomicAdd(at, -value); }
SOFTSM_DEVICE unsigned atomicSub(unsigned *at, unsigned value) { return atomicAdd(at, 0u - value); }
#define SOFTSM_CAS_OF(name, T, code, c)                                                                          \
    SOFTSM_DEVICE T name(T *at, T compare, T value) {                                                            \
        T old;                                                                                                   \
        asm volatile("atom." code " %0, [%1], %2, %3;" : "=" c(old) : "l"(at), c(compare), c(value) : "memory"); \
        return old;                                                                                              \
    }
#define SOFTSM_CAS(T, bits, c)                                                                                   \
    SOFTSM_CAS_OF(atomicCAS, T, "cas." bits, c)                                                                  \
    SOFTSM_CAS_OF(atomicCAS_block, T, "relaxed.cta.cas." bits, c)                                                \
    SOFTSM_CAS_OF(atomicCAS_system, T, "relaxed.sys.cas." bits, c)
SOFTSM_CAS(int, "b32", "r")
SOFTSM_CAS(unsigned, "b32", "r")
SOFTSM_CAS(unsigned long long, "b64", "l")
#undef SOFTSM_CAS
#undef SOFTSM_CAS_OF

#define SOFTSM_APPROXIMATE(name, code)                                                                           \
    SOFTSM_DEVICE float name(float x) {                                                                          \
        float out;                                                                                               \
        asm(code " %0, %1;" : "=f"(out) : "f"(x));                                                               \
        return out;                                                                                              \
    }
SOFTSM_APPROXIMATE(__frcp_rn, "rcp.rn.f32")
SOFTSM_APPROXIMATE(__fsqrt_rn, "sqrt.rn.f32")
SOFTSM_APPROXIMATE(__sinf, "sin.approx.f32")
SOFTSM_APPROXIMATE(__cosf, "cos.approx.f32")
SOFTSM_APPROXIMATE(__log2f, "lg2.approx.f32")
SOFTSM_APPROXIMATE(__softsm_ex2, "ex2.approx.f32")
SOFTSM_APPROXIMATE(__softsm_rsqrt, "rsqrt.approx.f32")
#undef SOFTSM_APPROXIMATE
SOFTSM_DEVICE float __expf(float x) { return __softsm_ex2(x * 1.4426950408889634f); }
SOFTSM_DEVICE float __logf(float x) { return __log2f(x) * 0.6931471805599453f; }
SOFTSM_DEVICE float __fdividef(float x, float y) { return x / y; }
// Of the mathematical functions, those that need no library: a toolkit's header brings the rest.
SOFTSM_DEVICE float rsqrtf(float x) { return __softsm_rsqrt(x); }
SOFTSM_DEVICE float exp2f(float x) { return __softsm_ex2(x); }
SOFTSM_DEVICE float expf(float x) { return __expf(x); }
SOFTSM_DEVICE float logf(float x) { return __logf(x); }
SOFTSM_DEVICE float log2f(float x) { return __log2f(x); }
SOFTSM_DEVICE float sqrtf(float x) { return __fsqrt_rn(x); }
SOFTSM_DEVICE float fabsf(float x) { return __builtin_fabsf(x); }
SOFTSM_DEVICE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
SOFTSM_DEVICE float fminf(float x, float y) { return __builtin_fminf(x, y); }
SOFTSM_DEVICE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
#define SOFTSM_EXTREMES(T)                                                          \
    __host__ __device__ inline T max(T x, T y) { return x > y || y != y ? x : y; }  \
    __host__ __device__ inline T min(T x, T y) { return x < y || y != y ? x : y; }
SOFTSM_EXTREMES(int)
SOFTSM_EXTREMES(unsigned)
SOFTSM_EXTREMES(long long)
SOFTSM_EXTREMES(unsigned long long)
SOFTSM_EXTREMES(float)
SOFTSM_EXTREMES(double)
#undef SOFTSM_EXTREMES
// std::sqrt, fabs and the like of the host's <cmath> have overloads of the device here.
#define SOFTSM_DOUBLE(name, of) SOFTSM_DEVICE double name(double x) { return __builtin_elementwise_##of(x); }
SOFTSM_DOUBLE(fabs, abs)
SOFTSM_DOUBLE(sqrt, sqrt)
SOFTSM_DOUBLE(floor, floor)
SOFTSM_DOUBLE(ceil, ceil)
#undef SOFTSM_DOUBLE
SOFTSM_DEVICE double fmax(double x, double y) { return __builtin_fmax(x, y); }
SOFTSM_DEVICE double fmin(double x, double y) { return __builtin_fmin(x, y); }
SOFTSM_DEVICE double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
SOFTSM_DEVICE long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
SOFTSM_DEVICE double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
SOFTSM_DEVICE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
SOFTSM_DEVICE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
SOFTSM_DEVICE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
SOFTSM_DEVICE unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
SOFTSM_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
SOFTSM_DEVICE int __clz(int x) { return x ? __builtin_clz(x) : 32; }
SOFTSM_DEVICE int __ffs(int x) { return __builtin_ffs(x); }
SOFTSM_DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SOFTSM_DEVICE int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
SOFTSM_DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
SOFTSM_DEVICE unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
SOFTSM_DEVICE unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
SOFTSM_DEVICE int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
SOFTSM_DEVICE unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    unsigned out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(which & 0x7777));
    return out;
}
SOFTSM_DEVICE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (by & 31) >> 32);
}
SOFTSM_DEVICE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
#undef SOFTSM_DEVICE
#undef SOFTSM_ONLY_DEVICE
#include "softsm_math.h"
