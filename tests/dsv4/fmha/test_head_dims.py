"""Head dims that the kernels do not have, and values of another head dim than keys: the cpu backend and the oracle."""

import pytest
import torch
from agreement import assert_agrees, qkv

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu
from dsv4.reference import backward as reference_backward

# D, Dv: those of models (80, 96, 112, 160, MLA's 192 / 128), values wider than keys, the smallest, the largest
WIDTHS = [(80, 80), (96, 96), (112, 64), (160, 160), (192, 128), (64, 128), (8, 512), (1, 3), (511, 512)]


def draw(d, width, dtype=torch.float32, t=5, s=9):
    q, k, v = qkv(2, t, s, 4, 2, max(d, width), dtype)
    return q[..., :d].contiguous(), k[..., :d].contiguous(), v[..., :width].contiguous()


def varlen(x):
    return x.flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d, width", WIDTHS)
def test_out_has_the_head_dim_of_the_values(d, width, dtype):
    q, k, v = draw(d, width, dtype)
    sink = torch.randn(4)
    got = dsv4.fmha(q, k, v, causal=True, sink=sink, return_lse=True)
    assert got[0].shape == (2, 5, 4, width) and got[0].dtype == dtype and got[0].is_contiguous()
    assert_agrees(got, reference.fmha, q, k, v, causal=True, sink=sink, sink_last=cpu.sink_last(dtype))


@pytest.mark.parametrize("d, width", [(96, 96), (192, 128)])
def test_varlen(d, width):
    q, k, v = draw(d, width)
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32)
    out = dsv4.fmha_varlen(varlen(q), varlen(k), varlen(v), cu_q, cu_k, causal=True)
    torch.testing.assert_close(out, varlen(dsv4.fmha(q, k, v, causal=True)))


def test_on_meta_tensors():
    q, k, v = (x.to("meta") for x in draw(192, 128, torch.bfloat16))
    out, lse = dsv4.fmha(q, k, v, causal=True, return_lse=True)
    assert out.shape == (2, 5, 4, 128) and lse.shape == (2, 4, 5) and out.is_meta


def test_keys_that_are_the_values_stay_so(monkeypatch):
    """Kernels of K = V read one tensor."""
    q, k, _ = draw(96, 96)
    given = []
    call = dsv4.fmha.__globals__["operators"].call
    monkeypatch.setattr(dsv4.fmha.__globals__["operators"], "call", lambda *x: given.append(x[1]) or call(*x))
    out = dsv4.fmha(q, k, k)
    assert given[0][1] is given[0][2]
    torch.testing.assert_close(out, dsv4.fmha(q, k, k.clone()))


@pytest.mark.parametrize("d, width", [(80, 80), (192, 128), (40, 72)])
def test_gradients(d, width):
    q, k, v = (x.requires_grad_() for x in draw(d, width))
    out = dsv4.fmha(q, k, v, causal=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    want = reference_backward.fmha(*(x.detach() for x in (q, k, v)), dout, causal=True)[:3]
    for x, y in zip(got, want):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


def test_out_is_written_and_returned():
    q, k, v = draw(96, 80)
    out = torch.full((2, 5, 4, 80), float("nan"))
    assert dsv4.fmha(q, k, v, out=out) is out
    torch.testing.assert_close(out, dsv4.fmha(q, k, v))
    with pytest.raises(ValueError, match=r"^out: got shape \[2, 5, 4, 80\]; accepted: shape \[2, 5, 4, 96\]"):
        dsv4.fmha(q, k, torch.zeros(2, 9, 2, 96), out=out)
    with pytest.raises(ValueError, match="^q: got a tensor that requires grad"):
        dsv4.fmha(q.requires_grad_(), k, v, out=out)


def test_out_under_vmap():
    q, k, v = draw(96, 80)
    out = torch.full((2, 5, 4, 80), float("nan"))
    torch.vmap(lambda *x: dsv4.fmha(*(y[None] for y in x[:3]), out=x[3][None]))(q, k, v, out)
    torch.testing.assert_close(out, dsv4.fmha(q, k, v))


def test_partial_results_in_fp32_are_merged_and_rounded_once():
    q, k, v = draw(96, 80, torch.bfloat16, t=40, s=90)
    outs, lses = [], []
    for some in (slice(0, 50), slice(50, 90)):
        into = torch.full((2, 40, 4, 80), float("nan"))
        outs.append(into)
        out, lse = dsv4.fmha(q, k[:, some], v[:, some], out=into, return_lse=True)
        assert out is into
        lses.append(lse)
    merged, _ = dsv4.merge_states(outs, lses)
    whole = dsv4.fmha(q.float(), k.float(), v.float())
    bound = 1.1 * (dsv4.fmha(q, k, v) - whole).norm()  # as good as one call, which rounds once, too
    assert (merged.bfloat16() - whole).norm() <= bound


def test_a_wrong_out_is_named():
    q, k, v = draw(96, 96)
    with pytest.raises(ValueError, match="^out: got strides"):
        dsv4.fmha(q, k, v, out=torch.zeros(96).expand(2, 5, 4, 96))
    with pytest.raises(ValueError, match="^out: got memory that overlaps q"):
        dsv4.fmha(q, k, v, out=q)
    with pytest.raises(ValueError, match="^out: got dtype float64; accepted: float32$"):
        dsv4.fmha(q, k, v, out=torch.zeros(2, 5, 4, 96).double())


def test_what_is_wrong_is_named():
    q, k, v = draw(96, 80)
    for arguments, words in (
        ((q, k[..., :64], v), "^k: got head dim 64; accepted: head dim 96, as q"),
        ((q, k, v[:, :8]), r"^v: got shape \[2, 8, 2, 80\]; accepted: shape \[2, 9, 2, 80\]"),
        ((q[..., :0], k[..., :0], v), "^q: got head dim 0; accepted: a head dim from 1 to 512"),
        ((torch.zeros(2, 5, 4, 520), torch.zeros(2, 9, 2, 520), v), "^q: got head dim 520; accepted: a head dim"),
        ((q, k, torch.zeros(2, 9, 2, 600)), "^v: got head dim 600; accepted: a head dim from 1 to 512"),
        ((q, "k", v), "^k: got"),
        ((q.to_sparse(), k, v), "^q: got layout torch.sparse_coo; accepted: a dense strided tensor"),
        ((q, k, v.to_mkldnn()), "^v: got layout torch._mkldnn; accepted: a dense strided tensor"),
        ((q, k, v.half()), "^v: got dtype"),
        ((q, k[:1], v[:1]), "^k: got batch 1"),
    ):
        with pytest.raises(ValueError, match=words):
            dsv4.fmha(*arguments)
    pages, table = torch.zeros(1, 16, 2, 96), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="^q: got head dim 96; accepted: head dim 64, 128, 256, 512"):
        dsv4.fmha_paged(q, pages, pages, table, torch.ones(2, dtype=torch.int32))


def test_under_torch_compile():
    q, k, v = draw(96, 96)
    compiled = torch.compile(lambda *x: dsv4.fmha(*x, causal=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), dsv4.fmha(q, k, v, causal=True))
    compiled = torch.compile(lambda *x, out: dsv4.fmha(*x, out=out), backend="eager", fullgraph=True)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(q.shape, dtype=dtype)
        compiled(q, k, v, out=out)
        assert torch.equal(out, dsv4.fmha(q, k, v, out=torch.empty_like(out)))


def test_the_compiler_does_not_warn(recwarn):
    torch._dynamo.utils.warn_once_cache.clear()
    torch.compile(dsv4.fmha, backend="eager", fullgraph=True)(*(x.bfloat16() for x in draw(96, 96)))
    assert not recwarn.list
