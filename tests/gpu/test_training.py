"""Gradients on the GPU through the public functions: what torch does around an operator leaves them as they are."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dsv4
from dsv4 import reference, suites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() != "sm_90a", reason="needs a Hopper GPU: the gradient kernels are for it"),
]


def leaves(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(x, generator=generator).to("cuda", dtype).requires_grad_() for x in shapes]


def of_fmha(d):
    tensors = leaves((2, 150, 4, d), (2, 200, 2, d), (2, 200, 2, d))
    return tensors, lambda q, k, v: dsv4.fmha(q, k, v, causal=True).float().square().mean()


def of_varlen(d):
    starts = torch.tensor([0, 40, 40, 170], dtype=torch.int32, device="cuda")
    tensors = leaves(*[(170, 2, d)] * 3)
    return tensors, lambda q, k, v: dsv4.fmha_varlen(q, k, v, starts, starts, causal=True).float().square().mean()


def of_v4():
    (q, window, compressed), (sink,) = leaves((20, 64, 512), (90, 512), (30, 512)), leaves((64,), dtype=torch.float32)
    position = torch.arange(20, device="cuda", dtype=torch.int32)
    lists = position[:, None] + torch.arange(70, device="cuda", dtype=torch.int32)
    chosen = torch.where(torch.arange(40, device="cuda") <= position[:, None], position[:, None] // 2, -1)
    rope = reference.rope_table(20, 64, device="cuda"), position

    def loss(q, window, compressed, sink):
        out = dsv4.v4_attention(q, window, lists, compressed, chosen, sink=sink, inverse_rope=rope)
        return out.float().square().mean()

    return [q, window, compressed, sink], loss


LOSSES = {
    "hd 64": lambda: of_fmha(64),
    "hd 512": lambda: of_fmha(512),
    "varlen hd 128": lambda: of_varlen(128),
    "v4": of_v4,
}
ATOMIC = ("hd 64", "varlen hd 128", "v4")  # sums in any order, without deterministic=True


def agree(got, want, exactly):
    """Adding up the rows of a pool in another order moves sums of some dozen terms by units of fp32, which are rounded
    to bf16: here and there by one unit of that, 2^-8 of an element."""
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and b.any()
        assert torch.equal(a, b) or not exactly and float((a.float() - b.float()).norm() / b.float().norm()) < 2**-8


@pytest.mark.parametrize("name", LOSSES)
def test_compiled(name):
    """Inductor compiles forward and backward into one graph each."""
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    torch.compiler.reset()
    # Inductor's mean may differ in its last bit from torch's, and dout with it.
    agree(torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors), want, exactly=False)


@pytest.mark.parametrize("name", LOSSES)
def test_checkpointed(name):
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(checkpoint(loss, *tensors, use_reentrant=False), tensors)
    agree(got, want, exactly=name not in ATOMIC)


@pytest.mark.parametrize("name", LOSSES)
def test_deterministic_algorithms(name, monkeypatch):
    """Torch fills memory that it allocates with NaN then; and it asks for cuBLAS to be set up, as for any product."""
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(loss(*tensors), tensors) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    agree(found[1], found[0], exactly=True)
    agree(found[2], found[0], exactly=True)
    agree(found[0], want, exactly=name not in ATOMIC)


def test_a_step_in_a_cuda_graph():
    """Forward and backward captured once, replayed with other values."""
    tensors, loss = of_fmha(128)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(loss(*tensors), tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(loss(*tensors), tensors)
    with torch.no_grad():
        for x in tensors:
            x.mul_(0.5)
    graph.replay()
    agree(found, torch.autograd.grad(loss(*tensors), tensors), exactly=True)
