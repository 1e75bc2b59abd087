"""The torch operators under the public functions: schemas, fake kernels, compile, autograd, meta."""

import pytest
import torch
from agreement import assert_same, qkv

import dsv4


def varlen_args():
    q, k, v = (x[0] for x in qkv(1, 7, 9, 4, 2, 64))
    return q, k, v, torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)


def paged_args():
    q, k, v = qkv(2, 3, 4, 4, 2, 64)
    return q, k, v, torch.tensor([[1, 0], [0, 1]], dtype=torch.int32), torch.tensor([6, 4], dtype=torch.int32)


CALLS = {
    "fmha": (dsv4.fmha, lambda: qkv(2, 5, 9, 4, 2, 64), (2, 4, 5)),
    "fmha_varlen": (dsv4.fmha_varlen, varlen_args, (7, 4)),
    "fmha_paged": (dsv4.fmha_paged, paged_args, (2, 4, 3)),
}
OPTIONS = {"causal": True, "window_left": 6, "softmax_scale": 0.2}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck(name, return_lse):
    args = CALLS[name][1]()
    options = OPTIONS | {"sink": torch.randn(4), "return_lse": return_lse}
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, args, options)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_out(name):
    _, make, lse_shape = CALLS[name]
    args = make()
    out = {"out": torch.empty_like(args[0]), "lse": torch.empty(lse_shape)}
    torch.library.opcheck(getattr(torch.ops.dsv4, f"{name}_out").default, args, OPTIONS | out)


@pytest.mark.parametrize("name", CALLS)
def test_the_op_equals_the_function(name):
    function, make, lse_shape = CALLS[name]
    args = make()
    out, lse = function(*args, causal=True, return_lse=True)
    op_out, op_lse = getattr(torch.ops.dsv4, name)(*args, causal=True, return_lse=True)
    assert torch.equal(out, op_out) and torch.equal(lse, op_lse) and lse.shape == lse_shape
    assert getattr(torch.ops.dsv4, name)(*args)[1].shape == (0,)


@pytest.mark.parametrize("name", CALLS)
def test_compile_without_graph_breaks(name):
    function, make, _ = CALLS[name]
    args = make()

    def layer(q, *rest):
        out, lse = function(q * 2, *rest, causal=True, sink=torch.zeros(4), return_lse=True)
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*args), layer(*args)):
        assert torch.equal(got, want)


def test_compile_sees_the_write_to_out():
    q, k, v = qkv(2, 5, 9, 4, 2, 64)

    def layer(q, out):
        dsv4.fmha(q, k, v, out=out)
        return out * 2

    out = torch.zeros_like(q)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, out)
    want = dsv4.fmha(q, k, v)
    assert torch.equal(out, want) and torch.equal(got, want * 2)


def test_compile_with_changing_lengths():
    compiled = torch.compile(dsv4.fmha, fullgraph=True, backend="aot_eager", dynamic=True)
    for t, s in ((3, 8), (5, 11), (9, 9)):
        q, k, v = qkv(2, t, s, 4, 2, 64)
        assert torch.equal(compiled(q, k, v, causal=True), dsv4.fmha(q, k, v, causal=True))


@pytest.mark.parametrize("name", CALLS)
def test_grad_is_refused_under_grad_mode_only(name):
    """The operator rejects them; the public functions have separate operators with gradients, except for paged keys."""
    function, make, _ = CALLS[name]
    q, *rest = make()
    q.requires_grad_()
    for call in (getattr(torch.ops.dsv4, name), *([function] if name == "fmha_paged" else [])):
        with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
            call(q, *rest)
        with torch.no_grad():
            call(q, *rest)
        with torch.inference_mode():
            call(q, *rest)


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_give_shapes(name):
    function, make, lse_shape = CALLS[name]
    args = [x.to("meta") for x in make()]
    out, lse = function(*args, return_lse=True)
    assert out.device.type == "meta" and out.shape == args[0].shape and lse.shape == lse_shape


def test_vmap_is_a_loop():
    q, k, v = qkv(2, 5, 9, 4, 2, 64)
    got = torch.func.vmap(lambda a, b, c: dsv4.fmha(a[None], b[None], c[None]))(q, k, v)
    assert_same(got[:, 0], dsv4.fmha(q, k, v))


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_derivatives_are_refused(name):
    """A tangent that is dropped without a word reads as a derivative of 0."""
    function, make, _ = CALLS[name]
    q, *rest = make()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        for call in (function, getattr(torch.ops.dsv4, name)):
            with pytest.raises(ValueError, match="q: got a tensor with a tangent"):
                call(dual, *rest)
    with pytest.raises(ValueError, match="q: got a tensor with a tangent"):
        torch.func.jvp(lambda x: function(x, *rest), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("option", [{"causal": True}, {"causal": True, "window": (40, 0)}, {"window": (-1, 3)}])
def test_the_default_dtype_is_no_matter(option):
    """Serving engines set it to bf16; the LSE stays fp32 all the way."""
    q, k, v = qkv(1, 300, 100, 4, 2, 64)
    want = dsv4.fmha(q, k, v, return_lse=True, **option)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = dsv4.fmha(q, k, v, return_lse=True, **option)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_out_apart_from_every_input():
    q, k, v, table, lengths = paged_args()
    memory = torch.zeros(q.numel())
    memory.view(torch.int32)[:2] = lengths
    with pytest.raises(ValueError, match="out: got memory that overlaps lengths"):
        dsv4.fmha_paged(q, k, v, table, memory.view(torch.int32)[:2], out=memory.view(q.shape))
    with pytest.raises(ValueError, match="out: got a lazily negated"):
        dsv4.fmha_paged(q, k, v, table, lengths, out=torch._neg_view(torch.zeros_like(q)))
    negated = torch._neg_view(q)  # as an input it counts with the values that it shows
    assert torch.equal(dsv4.fmha_paged(negated, k, v, table, lengths), dsv4.fmha_paged(-q, k, v, table, lengths))


def test_compile_of_what_is_no_operator():
    def step(kv, gate, bias, weight, outs, lses):
        rows, state = dsv4.compress(kv, gate, bias, weight)
        more, state = dsv4.compress(kv, gate, bias, weight, state=state)
        return rows, more, state.kv, *dsv4.merge_states(outs, lses)

    width = torch.randn(10, 32)
    outs, lses = [torch.randn(3, 4, 64) for _ in "ab"], [torch.randn(3, 4) for _ in "ab"]
    arguments = (width, width * 2, torch.randn(4, 32), torch.randn(16), outs, lses)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)
