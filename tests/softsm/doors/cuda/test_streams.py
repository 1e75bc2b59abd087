"""Streams, events and waits of the host in CUDA C++ programs: what nothing orders is reported, in the lines of both."""

import pytest
from typer.testing import CliRunner

from softsm.cli import app

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("clang")]

PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <cstring>
__global__ void make(int *x) { x[threadIdx.x] = threadIdx.x; }
__global__ void use(const int *x, int *y) { y[threadIdx.x] = x[127 - threadIdx.x]; }
__global__ void add(int *sum, int *y) { atomicAdd(sum, 1), y[threadIdx.x] = 1; }
__global__ void raise(int *x, int *flag) {
    x[threadIdx.x] = 1;
    __syncthreads();
    __threadfence();
    if (threadIdx.x == 0) atomicExch(flag, 1);
}
__global__ void follow(const int *x, int *flag, int *y) {
    if (threadIdx.x == 0) while (!atomicAdd(flag, 0)) {}
    __threadfence();
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}
int main(int, char **words) {
    auto is = [&](const char *name) { return !strcmp(words[1], name); };
    int *x, *y, *pinned, *pooled, ones[128] = {}, sum = 0;
    cudaStream_t a, b, apart;
    cudaEvent_t event;
    cudaMalloc(&x, 1024), cudaMalloc(&y, 1024), cudaMallocHost(&pinned, 1024);
    cudaStreamCreate(&a), cudaStreamCreate(&b), cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    cudaMemcpy(x, ones, 512, cudaMemcpyHostToDevice);
    if (is("event") || is("no event") || is("early event") || is("host") || is("other host")) {
        if (is("early event")) cudaEventRecord(event, a);
        make<<<1, 128, 0, a>>>(x);
        if (is("event")) cudaEventRecord(event, a);
        if (is("event") || is("early event")) cudaStreamWaitEvent(b, event);
        if (is("host")) cudaStreamSynchronize(a);
        if (is("other host")) cudaStreamSynchronize(b);
        use<<<1, 128, 0, b>>>(x, y);
    }
    if (is("default") || is("apart")) {
        cudaMemsetAsync(x, 1, 512, is("apart") ? apart : a);
        use<<<1, 128>>>(x, y);
        make<<<1, 128, 0, b>>>(x);
    }
    if (is("copies") || is("copies of one place")) {
        cudaMemcpyAsync(pinned, x, 6, cudaMemcpyDeviceToHost, a);
        cudaMemcpyAsync((char *)pinned + (is("copies") ? 6 : 5), x, 6, cudaMemcpyDeviceToHost, b);
    }
    if (is("staged")) {
        cudaMemcpyAsync(x, ones, 512, cudaMemcpyHostToDevice, a);
        cudaMemcpyAsync(ones, x, 512, cudaMemcpyDeviceToHost, a);
        use<<<1, 128, 0, b>>>(x, y);
    }
    if (is("atomics") || is("atomics and a copy")) {
        add<<<1, 32, 0, a>>>(x, y), add<<<1, 32, 0, b>>>(x, y + 32);
        if (is("atomics and a copy")) cudaMemcpyAsync(pinned, x, 4, cudaMemcpyDeviceToHost, apart);
    }
    if (is("flag")) {
        cudaMemset(x + 200, 0, 4);
        cudaDeviceSynchronize();
        raise<<<1, 128, 0, a>>>(x, x + 200), follow<<<1, 128, 0, b>>>(x, x + 200, y);
    }
    if (is("pool") || is("pool of another stream")) {
        cudaMallocAsync(&pooled, 512, a);
        make<<<1, 128, 0, a>>>(pooled);
        cudaFreeAsync(pooled, is("pool") ? a : b);
        cudaMallocAsync(&pooled, 512, b);
        make<<<1, 128, 0, b>>>(pooled);
        cudaFree(pooled);
    }
    if (is("managed") || is("managed too early")) {
        cudaMallocManaged(&pooled, 8192);
        pooled[3] = 1;
        make<<<1, 128>>>(pooled);
        pooled[1500] = 1;
        if (is("managed")) cudaDeviceSynchronize();
        sum += pooled[3];
    }
    if (is("pinned") || is("pinned too early")) {
        memset(pinned, 0, 512);
        cudaMemcpyAsync(x, pinned, 512, cudaMemcpyHostToDevice, a);
        cudaEventRecord(event, a);
        sum += pinned[1];
        if (is("pinned")) cudaEventSynchronize(event);
        memset(pinned, 1, 512);
    }
    if (is("function")) {
        cudaMemcpyAsync(pinned, x, 512, cudaMemcpyDeviceToHost, a);
        cudaLaunchHostFunc(a, [](void *at) { ((int *)at)[0] += 1; }, pinned);
    }
    if (is("mapped flag")) {
        pinned[200] = 0;
        raise<<<1, 128>>>(pinned, pinned + 200);
        while (!((volatile int *)pinned)[200]) {}
        sum += pinned[3];
    }
    cudaDeviceSynchronize();
    printf("sum %d\n", sum);
}
"""


def checked(tmp_path, what):
    (tmp_path / "program.cu").write_text(PROGRAM)
    return CliRunner().invoke(app, ["check", str(tmp_path / "program.cu"), "--order", "eager", "--", what])


def line_of(text):
    return 1 + next(i for i, line in enumerate(PROGRAM.splitlines()) if text in line)


IN_ORDER = "event, host, default, copies, staged, atomics, flag, pool, managed, pinned, function, mapped flag"


@pytest.mark.parametrize("what", IN_ORDER.split(", "))
def test_streams_in_order_are_silent(tmp_path, what):
    done = checked(tmp_path, what)
    assert done.exit_code in (0, 1) and "race" not in done.output and "failed" not in done.output, done.output


MAKE, USE = "make<<<1, 128, 0, a>>>(x)", "void use("


@pytest.mark.parametrize(
    "what, who, lines",
    [
        ("no event", "the kernel make in stream 1, wrote", (MAKE, USE)),
        ("early event", "the kernel make in stream 1, wrote", (MAKE, USE)),
        ("other host", "the kernel make in stream 1, wrote", (MAKE, USE)),
        ("apart", "the cudaMemset in stream 3, wrote", ("cudaMemsetAsync", USE)),
        ("managed too early", "the host, reads", ("sum += pooled[3]", "make<<<1, 128>>>(pooled)")),
        ("pinned too early", "the host, writes", ("memset(pinned, 1", "(x, pinned")),
        ("copies of one place", "cudaMemcpyAsync in stream 2, writes", ("(pinned, x, 6", "(char *)pinned")),
        ("atomics and a copy", "the kernel add in stream 1, wrote", ("(pinned, x, 4", "add<<<")),
        (
            "pool of another stream",
            "cudaFreeAsync in stream 2, writes",
            ("make<<<1, 128, 0, a>>>(pooled)", "FreeAsync"),
        ),
    ],
)
def test_what_nothing_orders_is_named_with_both_lines(tmp_path, what, who, lines):
    done = checked(tmp_path, what)
    assert done.exit_code == 1 and "race: " in done.output and who in done.output, done.output
    for text in lines:
        assert f"program.cu:{line_of(text)}" in done.output, done.output
    assert ("cudaDeviceSynchronize" if "host" in who else "cudaStreamWaitEvent") in done.output
