// CUDA graphs: a part of host.cpp. graphs.py keeps them; functions of the program are called here.
// The order is that of CALLS in graphs.py.
enum { BEGIN, END, CAPTURING, CREATE, ADD, ADDED, HOST, INCLUDE, SIZE, INSTANTIATE, UPDATE, LAUNCH, RESUME, FORGET };
#define ADDING ((cudaStream_t)(1ull << 62 | 8))  // in place of a stream: the node that the program adds
enum { NOW = -1 };  // in place of a status: a function of the program is called
static int graph(int what, const void *a, const void *b = nullptr, size_t number = 0) {
    return served.graph(what, a, b, number);
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    int status = (HERE, graph(HOST, (void *)function, data, (size_t)stream));
    if (status != NOW) return done(status);
    softsm_guard(nullptr, 0);  // it runs behind the work of its stream
    return function(data), cudaSuccess;
}

#if CUDART_VERSION >= 12000
// ---- capture -------------------------------------------------------------------------------------------------------

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return done(graph(BEGIN, stream, nullptr, mode));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to) {
    *to = nullptr;
    return done(graph(END, stream, to));
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *to) {
    return done(graph(CAPTURING, stream, to));
}

// ---- launches ------------------------------------------------------------------------------------------------------

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t from, unsigned long long) {
    return done(graph(INSTANTIATE, from, to));
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *to, cudaGraph_t from, unsigned long long flags) {
    return cudaGraphInstantiate(to, from, flags);
}
API cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t from, cudaGraphExecUpdateResultInfo *to) {
    int status = graph(UPDATE, executable, from);
    memset(to, 0, sizeof *to);
    to->result = status ? cudaGraphExecUpdateErrorTopologyChanged : cudaGraphExecUpdateSuccess;
    return done(status);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    struct { cudaHostFn_t function; void *data; } call;
    int status = (HERE, graph(LAUNCH, executable, &call, (size_t)stream));
    for (; status == NOW; status = graph(RESUME, nullptr, &call)) {
        softsm_guard(nullptr, 0);
        call.function(call.data);
    }
    return done(status);
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t of) { return done(graph(FORGET, of)); }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t of) { return done(graph(FORGET, of)); }

// ---- node by node --------------------------------------------------------------------------------------------------

API cudaError_t cudaGraphCreate(cudaGraph_t *to, unsigned) { return done(graph(CREATE, to)); }
API cudaError_t cudaGraphGetNodes(cudaGraph_t of, cudaGraphNode_t *nodes, size_t *count) {
    size_t all = 0, room = *count;
    int status = graph(SIZE, of, &all);
    for (size_t i = 0; nodes && i < all && i < room; i++) nodes[i] = (cudaGraphNode_t)(i + 1);
    *count = nodes && room < all ? room : all;
    return done(status);
}
template <typename Do>
static cudaError_t added(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind, size_t count, Do work) {
    int status = graph(ADD, of, behind, count);
    return done(status ? status : graph(ADDED, to, nullptr, work()));
}
API cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind, size_t count) {
    return added(to, of, behind, count, [] { return 0; });
}
API cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind, size_t count,
                                       const cudaKernelNodeParams *p) {
    HERE;
    unsigned shape[] = {p->gridDim.x, p->gridDim.y, p->gridDim.z, p->blockDim.x, p->blockDim.y, p->blockDim.z, 0, 0, 0};
    return added(to, of, behind, count,
                 [&] { return served.launch(p->func, shape, p->kernelParams, p->sharedMemBytes, 0, ADDING); });
}
API cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind,
                                         size_t count, void *at, const void *from, size_t size, cudaMemcpyKind kind) {
    return HERE, added(to, of, behind, count, [&] { return served.copy(at, from, size, kind, ADDING, 0); });
}
API cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind, size_t count,
                                       const cudaMemsetParams *p) {
    return HERE, added(to, of, behind, count, [&] {
        int status = 0;
        for (size_t row = 0; row < p->height && !status; row++)
            status = served.set((char *)p->dst + row * p->pitch, p->value, p->width, ADDING, p->elementSize);
        return status;
    });
}
API cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind, size_t count,
                                     const cudaHostNodeParams *p) {
    return HERE, added(to, of, behind, count,
                       [&] { return graph(HOST, (void *)p->fn, p->userData, (size_t)ADDING); });
}
API cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *to, cudaGraph_t of, const cudaGraphNode_t *behind,
                                           size_t count, cudaGraph_t child) {
    return HERE, added(to, of, behind, count, [&] { return graph(INCLUDE, child, nullptr, (size_t)ADDING); });
}
#endif
