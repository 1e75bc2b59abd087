"""CUDA graphs in CUDA C++ programs, captured or added node by node: what a launch does, what nothing in it orders, and
the calls that a capture forbids."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstring>
__constant__ int factor;
__global__ void make(int *x, int first) { x[threadIdx.x] = threadIdx.x + first; }
__global__ void use(const int *x, int *y) { y[threadIdx.x] += factor * x[127 - threadIdx.x]; }
__global__ void past(int *x) { x[threadIdx.x + 4096] = 1; }
static void count(void *at) { ++*(int *)at; }
int main(int, char **words) {
    auto is = [&](const char *name) { return !strcmp(words[1], name); };
    auto say = [](const char *what, cudaError_t status) { printf("%s: %s\n", what, cudaGetErrorName(status)); };
    int *x, *y, *pooled, *pinned, host[128] = {}, calls = 0, one = 1;
    cudaMalloc(&x, 512), cudaMalloc(&y, 512), cudaMallocHost(&pinned, 512);
    cudaMemset(y, 0, 512), cudaDeviceSynchronize();
    cudaStream_t a, b, apart;
    cudaEvent_t event, outside;
    cudaStreamCreate(&a), cudaStreamCreate(&b), cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking);
    cudaEventCreate(&event), cudaEventCreate(&outside);
    cudaEventRecord(outside, b);
    cudaGraph_t graph = nullptr, other;
    cudaGraphExec_t exec;
    cudaStreamCaptureStatus status;
    if (is("node by node") || is("node by node, a race")) {
        cudaGraphNode_t node[6], last;
        int first = 5;
        void *of_make[] = {&x, &first}, *of_use[] = {&x, &y};
        cudaKernelNodeParams makes = {(void *)make, 1, 128, 0, of_make, nullptr}, uses = makes;
        uses.func = (void *)use, uses.kernelParams = of_use;
        cudaMemsetParams sets = {y, 512, 0x00010002, 4, 128, 1};
        cudaHostNodeParams counts = {count, &calls};
        cudaGraphCreate(&graph, 0), cudaGraphCreate(&other, 0);
        cudaGraphAddMemcpyNode1D(node, graph, nullptr, 0, pinned, x, 512, cudaMemcpyDeviceToHost);
        cudaGraphAddKernelNode(node + 1, graph, node, is("node by node") ? 1 : 0, &makes);
        cudaGraphAddMemsetNode(node + 2, graph, nullptr, 0, &sets);
        cudaGraphAddEmptyNode(node + 3, graph, node + 1, 2);
        cudaGraphAddKernelNode(node + 4, graph, node + 3, 1, &uses);
        cudaGraphAddHostNode(&last, other, nullptr, 0, &counts);
        cudaGraphAddHostNode(&last, other, nullptr, 0, &counts);
        cudaGraphAddChildGraphNode(node + 5, graph, node + 4, 1, other);
        cudaGraphAddMemcpyNode1D(&last, graph, node + 5, 1, host, y, 512, cudaMemcpyDeviceToHost);
    } else {
        auto mode = is("relaxed") ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
        say("begin", cudaStreamBeginCapture(a, mode));
        cudaMemcpyToSymbolAsync(factor, &one, 4, 0, cudaMemcpyHostToDevice, a);
        if (is("again")) say("again", cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
        if (is("host waits")) say("wait", cudaStreamSynchronize(a));
        if (is("device waits")) say("wait", cudaDeviceSynchronize());
        if (is("allocation") || is("relaxed")) say("allocation", cudaMalloc(&pooled, 64));
        if (is("default stream")) say("set", cudaMemset(x, 0, 512));
        if (is("outside")) say("wait", cudaStreamWaitEvent(a, outside));
        if (is("other stream")) use<<<1, 128, 0, apart>>>(x, y);
        cudaEventRecord(event, a);
        if (is("event waits")) say("wait", cudaEventSynchronize(event));
        if (is("merge")) {
            cudaStreamBeginCapture(apart, cudaStreamCaptureModeGlobal);
            say("merge", cudaStreamWaitEvent(apart, event));
        }
        cudaStreamWaitEvent(b, event);
        cudaMallocAsync(&pooled, 512, a);
        make<<<1, 128, 0, a>>>(pooled, 5);
        if (!is("a race")) cudaEventRecord(event, a), cudaStreamWaitEvent(b, event);
        use<<<1, 128, 0, b>>>(pooled, y);
        if (is("past")) past<<<1, 128, 0, b>>>(y);
        cudaEventRecord(event, b);
        if (!is("unjoined")) cudaStreamWaitEvent(a, event);
        cudaFreeAsync(pooled, a);
        cudaLaunchHostFunc(a, count, &calls);
        cudaMemcpyAsync(host, y, 512, cudaMemcpyDeviceToHost, a);
        cudaStreamIsCapturing(b, &status);
        printf("status %d\n", status);
        if (is("unmatched")) say("end", cudaStreamEndCapture(b, &graph));
        say("end", cudaStreamEndCapture(a, &graph));
        if (is("late")) say("wait", cudaStreamWaitEvent(apart, event));
    }
    printf("nothing ran: %d %d\n", host[0], calls);
    cudaError_t made = cudaGraphInstantiate(&exec, graph, 0);
    if (made) return say("instantiate", made), 0;
    size_t nodes;
    cudaGraphGetNodes(graph, nullptr, &nodes);
    printf("%d nodes\n", (int)nodes);
    cudaGraphDestroy(graph);
    if (is("beside a stream") || is("behind a stream")) {
        make<<<1, 128, 0, b>>>(y, 0);
        if (is("behind a stream")) cudaEventRecord(event, b), cudaStreamWaitEvent(apart, event);
    }
    if (is("nested")) {
        cudaStreamBeginCapture(b, cudaStreamCaptureModeGlobal);
        cudaGraphLaunch(exec, b), cudaGraphLaunch(exec, b);
        cudaStreamEndCapture(b, &graph);
        cudaGraphExecUpdateResultInfo result;
        say("update", cudaGraphExecUpdate(exec, graph, &result)), cudaGetLastError();
        cudaGraphInstantiate(&exec, graph, 0);
        say("update", cudaGraphExecUpdate(exec, graph, &result));
    }
    for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, i == 1 ? a : apart);
    if (is("before a stream")) make<<<1, 128, 0, a>>>(y, 0);
    if (is("host too early")) pinned[0] = 1, memcpy(pinned, host, 4);
    say("ran", cudaDeviceSynchronize());
    printf("%d calls: %d %d\n", calls, host[0], host[127]);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("graphs") / "program.cu"
    path.write_text(PROGRAM)
    return path


def checked(program, what):
    return CliRunner().invoke(app, ["check", str(program), "--order", "eager", "--", what])


@pytest.mark.parametrize(
    "what, said",
    [
        ("capture", "3 calls: 396 15"),
        ("nested", "6 calls: 792 30"),
        ("relaxed", "3 calls: 396 15"),
        ("node by node", "6 calls: 65538 65538"),
        ("behind a stream", "3 calls: 396 142"),
    ],
)
def test_a_launch_does_the_work_of_all_nodes_in_order(program, what, said):
    done = checked(program, what)
    assert done.exit_code == 0 and "nothing found" in done.output, done.output
    assert {"nothing ran: 0 0", "ran: cudaSuccess", said} <= {*done.output.splitlines()}, done.output
    updates = [x for x in done.output.splitlines() if x.startswith("update")]
    assert updates == ["update: cudaErrorGraphExecUpdateFailure", "update: cudaSuccess"] * (what == "nested")


def line_of(text):
    return 1 + next(i for i, line in enumerate(PROGRAM.splitlines()) if text in line)


@pytest.mark.parametrize(
    "what, who, lines",
    [
        ("a race", "the kernel make in graph 1, wrote", ("make<<<1, 128, 0, a>>>(pooled", "void use(")),
        ("node by node, a race", "the cudaMemcpyAsync in graph 1, read", ("(node, graph", "void make(")),
        ("beside a stream", "the kernel make in stream 2, wrote", ("(y, 0);", "void use(")),
        ("before a stream", "the kernel use in graph 1, wrote", ("use<<<1, 128, 0, b>>>(pooled", "void make(")),
    ],
)
def test_what_nothing_orders_is_named(program, what, who, lines):
    done = checked(program, what)
    assert done.exit_code == 1 and "race: two accesses of global memory are not ordered" in done.output, done.output
    assert who in done.output, done.output
    for line in lines:
        assert f"program.cu:{line_of(line)}" in done.output, done.output


@pytest.mark.parametrize(
    "what, said",
    [
        ("again", ["again: cudaErrorIllegalState", "status 1", "end: cudaSuccess"]),
        ("host waits", ["wait: cudaErrorStreamCaptureUnsupported", "end: cudaErrorStreamCaptureInvalidated"]),
        ("device waits", ["wait: cudaErrorStreamCaptureUnsupported", "end: cudaErrorStreamCaptureInvalidated"]),
        ("event waits", ["wait: cudaErrorCapturedEvent", "end: cudaErrorStreamCaptureInvalidated"]),
        ("allocation", ["allocation: cudaErrorStreamCaptureUnsupported", "end: cudaErrorStreamCaptureInvalidated"]),
        ("default stream", ["set: cudaErrorStreamCaptureImplicit", "end: cudaErrorStreamCaptureInvalidated"]),
        ("outside", ["wait: cudaErrorStreamCaptureIsolation", "end: cudaErrorStreamCaptureInvalidated"]),
        ("merge", ["merge: cudaErrorStreamCaptureMerge", "end: cudaErrorStreamCaptureInvalidated"]),
        ("unjoined", ["status 1", "end: cudaErrorStreamCaptureUnjoined", "instantiate: cudaErrorInvalidValue"]),
        ("unmatched", ["end: cudaErrorStreamCaptureUnmatched", "end: cudaErrorStreamCaptureInvalidated"]),
        ("late", ["end: cudaSuccess", "wait: cudaErrorCapturedEvent"]),
    ],
)
def test_calls_that_a_capture_forbids(program, what, said):
    done = checked(program, what)
    lines = done.output.splitlines()
    assert [x for x in lines if x in said] == said, done.output
    assert done.stderr.count("softsm: ") == 1, done.stderr


def test_a_kernel_that_fails_is_an_error_of_the_launch(program):
    done = checked(program, "past")
    assert done.exit_code == 1 and "ran: cudaErrorIllegalAddress" in done.output.splitlines(), done.output
    assert "out-of-bounds" in done.output, done.output


def test_work_of_other_streams_runs_during_a_capture(program):
    done = checked(program, "other stream")
    assert "nothing ran: 0 0" in done.output and "3 calls: 396 15" in done.output, done.output
