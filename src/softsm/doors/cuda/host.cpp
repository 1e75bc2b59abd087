// The CUDA runtime, as far as softsm serves it: linked with the host side of a program, compiled with the same headers.
// What needs the emulator goes through the table of functions that runtime.py sets before main() runs.
#include <cuda.h>
#include <cuda_runtime.h>

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <execinfo.h>
#include <sys/mman.h>
#include <ucontext.h>

#define API extern "C" __attribute__((visibility("default")))

// The order of the members is that of SERVED in runtime.py.
struct Served {
    int (*malloc)(void **at, size_t size, int host, void *stream);
    int (*free)(void *at, void *stream);
    int (*copy)(void *to, const void *from, size_t size, int kind, void *stream, int waits);
    int (*set)(void *to, unsigned value, size_t count, void *stream, int width);
    int (*symbol)(void **at, const void *symbol, size_t end);
    int (*launch)(const void *kernel, const unsigned *shape, void **args, size_t shared, int how,
                  void *stream);
    int (*most_shared)(const void *kernel, int bytes);
    int (*attribute)(int *value, int attribute);
    int (*encode)(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                  const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill);
    int (*occupancy)(const void *kernel, int threads, size_t shared);
    int (*devices)();
    int (*select)(int device);
    int (*synchronise)();
    int (*stream)(int what, void *stream, void *event);
    int (*graph)(int what, const void *a, const void *b, size_t number);  // graphs.cpp
    void (*module)(const char *ptx);
    void (*function)(const void *kernel, const char *name);
    void (*variable)(const void *symbol, const char *name);
};
static Served served;
static int last;  // the error that cudaGetLastError returns
static int current;  // device
#define IN_ORDER ((void *)-1)  // in place of a stream: when all work is complete
enum { CREATED, RECORDED, WAITED, AWAITED, AWAITED_EVENT };  // what happened to a stream or an event
API intptr_t softsm_where = 0;  // the place in the program of the last call
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
#define HERE (softsm_where = (const char *)__builtin_return_address(0) - &__ehdr_start)

// What clang calls to round to bfloat16 on the host. libgcc has these from GCC 13 on.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) bits |= 0x400000;
    else bits += 0x7FFF + (bits >> 16 & 1);
    uint16_t upper = bits >> 16;
    __bf16 out;
    memcpy(&out, &upper, 2);
    return out;
}
extern "C" __attribute__((weak)) __bf16 __truncdfbf2(double x) {
    float near = (float)x;
    uint32_t bits;
    memcpy(&bits, &near, 4);
    if (x == x && (double)near != x) {  // to odd: an inexact bit below those that count decides ties
        if ((near > x) == (x > 0)) bits--;
        bits |= 1;
        memcpy(&near, &bits, 4);
    }
    return __truncsfbf2(near);
}

static cudaError_t done(int status) {
    if (status) last = status;
    return (cudaError_t)status;
}

// ---- before main() -------------------------------------------------------------------------------------------------
// Constructors register kernels and variables when the library is loaded, before anybody can set the table.

struct Registered { const void *symbol; const char *name; };
static std::vector<const char *> &modules() { static std::vector<const char *> all; return all; }
static std::vector<Registered> &functions() { static std::vector<Registered> all; return all; }
static std::vector<Registered> &variables() { static std::vector<Registered> all; return all; }

API void **__cudaRegisterFatBinary(void *binary) {
    struct { int magic, version; const char *data; void *rest; } *wrapper = (decltype(wrapper))binary;
    modules().push_back(wrapper->data);  // the text of the PTX: see compile.py
    return (void **)binary;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *,
                                void *, int *) {
    functions().push_back({host, name});
}
API void __cudaRegisterVar(void **, char *host, char *, const char *name, int, size_t, int, int) {
    variables().push_back({host, name});
}

static sigjmp_buf end;
static int ended_with;
extern "C" [[noreturn]] void __wrap_exit(int status) {
    ended_with = status;
    siglongjmp(end, 1);
}
API int softsm_serves = 0;  // calls of the table that have not returned
// A bad pointer of the host side, or what std::terminate or free() ends, must not take softsm's findings with it.
static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static bool noted(uintptr_t at, const ucontext_t *context);
static void crashed(int signal, siginfo_t *what, void *context) {
    if (signal == SIGSEGV && noted((uintptr_t)what->si_addr, (const ucontext_t *)context)) return;
    if (softsm_serves) {  // not the program
        std::signal(signal, SIG_DFL);
        raise(signal);
        return;
    }
    __wrap_exit(128 + signal);
}
extern "C" [[noreturn]] void __wrap_abort() { __wrap_exit(134); }
extern "C" int main(int, char **);

API int softsm_main(const Served *table, int count, char **words) {
    served = *table;
    last = current = 0;
    for (auto text : modules()) served.module(text);
    for (auto &f : functions()) served.function(f.symbol, f.name);
    for (auto &v : variables()) served.variable(v.symbol, v.name);
    struct sigaction now = {}, before[sizeof fatal / sizeof *fatal];
    now.sa_sigaction = crashed, now.sa_flags = SA_SIGINFO;
    void *frames[1];
    backtrace(frames, 1);  // loads what it needs, which a handler should not
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) sigaction(fatal[i], &now, before + i);
    int jumped = sigsetjmp(end, 1), status = jumped ? ended_with : main(count, words);
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) sigaction(fatal[i], before + i, nullptr);
    if (jumped && status > 128)
        fprintf(stderr, "softsm: the host code of the program was ended by a signal: %s\n", strsignal(status - 128));
    fflush(nullptr);
    return status;
}
API void softsm_flush() { fflush(nullptr); }

// ---- accesses of the host ------------------------------------------------------------------------------------------
// Pages that work may still use, for all that the host knows, are protected (guards.py). An access is noted, and its
// page is open from then on.

struct Guard { uintptr_t start, end, readable; };
struct Access { uintptr_t at, writes, place; };
static std::vector<Guard> guards;
API Access softsm_accesses[256] = {};
API int softsm_accessed = 0;
API void softsm_guard(const Guard *now, int count) {
    for (auto &g : guards) mprotect((void *)g.start, g.end - g.start, PROT_READ | PROT_WRITE);
    guards.assign(now, now + count);
    for (auto &g : guards) mprotect((void *)g.start, g.end - g.start, g.readable ? PROT_READ : PROT_NONE);
}
extern "C" const char _end __attribute__((visibility("hidden")));
static bool noted(uintptr_t at, const ucontext_t *context) {
    constexpr uintptr_t PAGE = 4096;
    bool mine = false, readable = false;
    for (auto &g : guards)
        if (g.start <= at && at < g.end) mine = true, readable = readable || g.readable;
    if (!mine) return false;
#if defined(__x86_64__)
    const char *code = (const char *)context->uc_mcontext.gregs[REG_RIP];
    bool writes = context->uc_mcontext.gregs[REG_ERR] & 2;
#else
    const char *code = (const char *)context->uc_mcontext.pc;
    bool writes = readable;  // other guards do not tell
#endif
    void *frames[24];
    int count = backtrace(frames, 24);
    const char *own = code + 1;  // as if it were the address behind a call
    for (int i = 0; i < count && !(own > &__ehdr_start && own < &_end); i++) {
        const char *frame = (const char *)frames[i];
        if (frame > &__ehdr_start && frame < &_end && i > 1) own = frame;
    }
    if (softsm_accessed < 256)
        softsm_accesses[softsm_accessed++] = {at, writes, (uintptr_t)(own - &__ehdr_start)};
    mprotect((void *)(at & ~(PAGE - 1)), PAGE, PROT_READ | PROT_WRITE);
    return true;
}

// ---- memory --------------------------------------------------------------------------------------------------------

#undef cudaMalloc
API cudaError_t cudaMalloc(void **at, size_t size) { return done(served.malloc(at, size, 0, IN_ORDER)); }
API cudaError_t cudaMallocManaged(void **at, size_t size, unsigned) {
    return done(served.malloc(at, size, 1, IN_ORDER));
}
API cudaError_t cudaMallocAsync(void **at, size_t size, cudaStream_t stream) {
    return HERE, done(served.malloc(at, size, 0, stream));
}
API cudaError_t cudaMallocHost(void **at, size_t size) { return done(served.malloc(at, size, 1, IN_ORDER)); }
API cudaError_t cudaHostAlloc(void **at, size_t size, unsigned) {
    return done(served.malloc(at, size, 1, IN_ORDER));
}
API cudaError_t cudaFree(void *at) { return done(served.free(at, IN_ORDER)); }
API cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { return HERE, done(served.free(at, stream)); }
API cudaError_t cudaFreeHost(void *at) { return done(served.free(at, IN_ORDER)); }
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    return HERE, done(served.copy(to, from, size, kind, nullptr, 1));
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    return HERE, done(served.copy(to, from, size, kind, stream, 0));
}
API cudaError_t cudaMallocPitch(void **at, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(at, *pitch * height);
}
static cudaError_t rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                        cudaMemcpyKind kind, void *stream, int waits) {
    if (width > to_pitch || width > from_pitch) return done(12);  // cudaErrorInvalidPitchValue
    int status = 0;
    for (size_t row = 0; row < height && !status; row++)
        status = served.copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream, waits);
    return done(status);
}
API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, cudaMemcpyKind kind) {
    return HERE, rows(to, to_pitch, from, from_pitch, width, height, kind, nullptr, 1);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    return HERE, rows(to, to_pitch, from, from_pitch, width, height, kind, stream, 0);
}
API cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
    int status = (HERE, 0);
    for (size_t row = 0; row < height && !status; row++)
        status = served.set((char *)to + row * pitch, value, width, nullptr, 1);
    return done(status);
}
API cudaError_t cudaHostGetDevicePointer(void **at, void *host, unsigned) { return *at = host, cudaSuccess; }
API cudaError_t cudaMemset(void *to, int value, size_t size) {
    return HERE, done(served.set(to, value, size, nullptr, 1));
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    return HERE, done(served.set(to, value, size, stream, 1));
}
API cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) { return done(served.symbol(at, symbol, 0)); }
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                   cudaMemcpyKind) {
    void *at;
    int status = served.symbol(&at, symbol, offset + size);
    if (!status) memcpy((char *)at + offset, from, size);
    return done(status);
}
API cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, cudaMemcpyKind) {
    void *at;
    int status = served.symbol(&at, symbol, offset + size);
    if (!status) memcpy(to, (char *)at + offset, size);
    return done(status);
}

API cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset,
                                        cudaMemcpyKind kind, cudaStream_t stream) {
    void *at;
    int status = (HERE, served.symbol(&at, symbol, 0));
    return done(status ? status : served.copy((char *)at + offset, from, size, kind, stream, 0));
}
API cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t size, size_t offset,
                                          cudaMemcpyKind kind, cudaStream_t stream) {
    void *at;
    int status = (HERE, served.symbol(&at, symbol, 0));
    return done(status ? status : served.copy(to, (char *)at + offset, size, kind, stream, 0));
}

// ---- launches ------------------------------------------------------------------------------------------------------

struct Call { dim3 grid, block; size_t shared; void *stream; };
static std::vector<Call> calls;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    calls.push_back({grid, block, shared, stream});
    HERE;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Call call = calls.back();
    calls.pop_back();
    *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
    return cudaSuccess;
}
enum { DEPENDENT = 1, COOPERATIVE = 2 };  // how
static cudaError_t launch(const void *kernel, dim3 g, dim3 b, dim3 c, void **args, size_t shared, int how,
                          cudaStream_t stream) {
    unsigned shape[] = {g.x, g.y, g.z, b.x, b.y, b.z, c.x, c.y, c.z};
    return done(served.launch(kernel, shape, args, shared, how, stream));
}
API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                 cudaStream_t stream) {
    return launch(kernel, grid, block, dim3(0, 0, 0), args, shared, 0, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                            cudaStream_t stream) {
    return HERE, launch(kernel, grid, block, dim3(0, 0, 0), args, shared, COOPERATIVE, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
    dim3 cluster(0, 0, 0);
    int how = 0;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        auto &a = config->attrs[i];
        if (a.id == cudaLaunchAttributeClusterDimension)
            cluster = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
        if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization && a.val.programmaticStreamSerializationAllowed)
            how |= DEPENDENT;
        if (a.id == cudaLaunchAttributeCooperative && a.val.cooperative) how |= COOPERATIVE;
    }
    return HERE, launch(kernel, config->gridDim, config->blockDim, cluster, args, config->dynamicSmemBytes, how,
                        config->stream);
}
API cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? done(served.most_shared(kernel, value))
                                                                    : cudaSuccess;
}
API cudaError_t cudaFuncSetCacheConfig(const void *, cudaFuncCache) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                       size_t shared, unsigned) {
    *blocks = served.occupancy(kernel, threads, shared);
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                              size_t shared) {
    *blocks = served.occupancy(kernel, threads, shared);
    return cudaSuccess;
}

// ---- the device ----------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    int status = served.select(device);
    if (!status) current = device;
    return done(status);
}
API cudaError_t cudaGetDeviceCount(int *count) { return *count = served.devices(), cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *able, int device, int peer) {
    return *able = device != peer && device < served.devices() && peer < served.devices(), cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) { return done(peer < served.devices() ? 0 : 101); }
API cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
API cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) {
    return HERE, done(served.copy(to, from, size, cudaMemcpyDeviceToDevice, nullptr, 0));
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
    return HERE, done(served.copy(to, from, size, cudaMemcpyDeviceToDevice, stream, 0));
}
API cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    return done(served.attribute(value, attribute));
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "softsm");
    auto ask = [](int attribute) { int value = 0; served.attribute(&value, attribute); return value; };
    p->major = ask(75), p->minor = ask(76), p->multiProcessorCount = ask(16), p->warpSize = 32;
    p->totalGlobalMem = size_t(1) << 36, p->sharedMemPerBlock = ask(8), p->sharedMemPerBlockOptin = ask(97);
    p->sharedMemPerMultiprocessor = ask(81), p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = ask(39);
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64, p->regsPerBlock = 65536;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    return cudaSuccess;
}

// ---- streams and events: a device does one thing after the other ---------------------------------------------------

API cudaError_t cudaDeviceSynchronize() {
    done(served.stream(AWAITED, IN_ORDER, nullptr));
    return (cudaError_t)last;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = *most = 0, cudaSuccess; }
// Handles are numbers: 16 for the first stream, 32 for the second. The last bits tell what streams.py must know.
static intptr_t streams, events;
static cudaError_t create(cudaStream_t *stream, unsigned flags) {
    *stream = (cudaStream_t)(16 * ++streams + (flags & cudaStreamNonBlocking ? 8 : 0));
    return done(served.stream(CREATED, *stream, nullptr));
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) { return create(stream, flags); }
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create(stream, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return create(stream, flags); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return done(served.stream(AWAITED, stream, nullptr)); }
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return done(served.stream(AWAITED, stream, nullptr)); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return done(served.stream(WAITED, stream, event));
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = (cudaEvent_t)(16 * ++events), cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return done(served.stream(RECORDED, stream, event));
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return done(served.stream(AWAITED_EVENT, nullptr, event)); }
API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { return *ms = 0, cudaSuccess; }

// ---- errors --------------------------------------------------------------------------------------------------------

API cudaError_t cudaPeekAtLastError() { return (cudaError_t)last; }
API cudaError_t cudaGetLastError() {
    int status = last;
    last = status >= 700 && status < 720 ? status : 0;  // a kernel that failed stays failed
    return (cudaError_t)status;
}
API const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case 0: return "cudaSuccess";
        case 1: return "cudaErrorInvalidValue";
        case 2: return "cudaErrorMemoryAllocation";
        case 9: return "cudaErrorInvalidConfiguration";
        case 13: return "cudaErrorInvalidSymbol";
        case 401: return "cudaErrorIllegalState";
        case 900: return "cudaErrorStreamCaptureUnsupported";
        case 901: return "cudaErrorStreamCaptureInvalidated";
        case 902: return "cudaErrorStreamCaptureMerge";
        case 903: return "cudaErrorStreamCaptureUnmatched";
        case 904: return "cudaErrorStreamCaptureUnjoined";
        case 905: return "cudaErrorStreamCaptureIsolation";
        case 906: return "cudaErrorStreamCaptureImplicit";
        case 907: return "cudaErrorCapturedEvent";
        case 910: return "cudaErrorGraphExecUpdateFailure";
        case 98: return "cudaErrorInvalidDeviceFunction";
        case 101: return "cudaErrorInvalidDevice";
        case 12: return "cudaErrorInvalidPitchValue";
        case 700: return "cudaErrorIllegalAddress";
        case 710: return "cudaErrorAssert";
        case 716: return "cudaErrorMisalignedAddress";
        case 720: return "cudaErrorCooperativeLaunchTooLarge";
        case 719: return "cudaErrorLaunchFailure";
        default: return "cudaErrorUnknown";
    }
}
API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case 0: return "no error";
        case 1: return "invalid argument";
        case 2: return "out of memory";
        case 9: return "invalid configuration argument";
        case 13: return "invalid device symbol";
        case 401: return "the operation cannot be performed in the present state";
        case 900: return "operation not permitted when stream is capturing";
        case 901: return "operation failed due to a previous error during capture";
        case 902: return "operation would result in a merge of separate capture sequences";
        case 903: return "capture was not ended in the same stream as it began";
        case 904: return "capturing stream has unjoined work";
        case 905: return "dependency created on uncaptured work in another stream";
        case 906: return "operation would make the legacy stream depend on a capturing blocking stream";
        case 907: return "operation not permitted on an event last recorded in a capturing stream";
        case 910: return "the graph update was not performed because it included changes which violated constraints";
        case 98: return "invalid device function";
        case 101: return "invalid device ordinal";
        case 12: return "invalid pitch argument";
        case 700: return "an illegal memory access was encountered";
        case 710: return "device-side assert triggered";
        case 716: return "misaligned address";
        case 720: return "too many blocks in cooperative launch";
        case 719: return "unspecified launch failure";
        default: return "unknown error";
    }
}

// ---- the driver ----------------------------------------------------------------------------------------------------

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = size_t(1) << 36, *total = size_t(1) << 37;  // whatever the machine has
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *at) {
    bool device = !served.copy((void *)at, at, 1, cudaMemcpyDeviceToDevice, IN_ORDER, 1);  // onto itself: an error elsewhere
    *attributes = {device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, 0, device ? (void *)at : nullptr, nullptr};
    return cudaSuccess;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                    const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
    return (CUresult)served.encode(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion,
                                   fill);
}
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                        cudaDriverEntryPointQueryResult *status) {
    bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    *function = known ? (void *)cuTensorMapEncodeTiled : nullptr;
    if (status) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#include "graphs.cpp"
