"""Gradients through the public functions: against the formulas, and what torch asks of an operator."""

from contextlib import nullcontext

import pytest
import torch
from agreement import FP32_BOUND
from dsink import assert_dsink
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import dsv4
from dsv4 import reference
from dsv4.reference import backward as reference_backward
from dsv4.runtime import calls

D = 64
FP32 = 2 * FP32_BOUND  # P, and the LSE from which it is taken again


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def agree(got, want, bound=FP32):
    for a, b in zip(got, want, strict=True):
        assert a.dtype != torch.float64 and a.shape == b.shape
        assert float((a.double() - b).norm()) <= bound * max(float(b.norm()), 1e-30)


def dense(t=19, s=23, heads=(4, 2), dtype=torch.float32):
    q, k, v = draw(2, t, heads[0], D, dtype=dtype), *(draw(2, s, heads[1], D, seed=n, dtype=dtype) for n in (1, 2))
    return leaves(q, k, v, draw(heads[0]))


OPTIONS = [dict(), dict(causal=True), dict(window=(5, 2)), dict(window=(3, 0), softmax_scale=0.2)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("t, s", [(19, 23), (23, 19)])
def test_fmha(t, s, options):
    """out and lse both used; GQA, sink, windows, rows that see nothing."""
    q, k, v, sink = dense(t, s)
    out, lse = dsv4.fmha(q, k, v, sink=sink, return_lse=True, **options)
    dout, dlse = draw(*out.shape, seed=7), draw(*lse.shape, seed=8)
    got = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    args = [x.detach() for x in (q, k, v)]
    agree(got, reference_backward.fmha(*args, dout, dlse, sink=sink.detach(), **options))


def test_varlen():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 9, 20], [0, 4, 12, 30]))
    q, k, v, sink = leaves(draw(22, 4, D), draw(31, 2, D), draw(31, 2, D, seed=1), draw(4))
    out = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=True, sink=sink, max_seqlen_q=11, max_seqlen_k=18)
    dout = draw(*out.shape, seed=3)
    got = torch.autograd.grad(out, (q, k, v, sink), dout)
    args = [x.detach() for x in (q, k, v)]
    agree(got, reference_backward.fmha_varlen(*args, cu_q, cu_k, dout, causal=True, sink=sink.detach()))


def v4_inputs(n=7, heads=3, dtype=torch.float32):
    window_indices = torch.tensor([[i, max(i - 1, 0), -1, i] for i in range(n)], dtype=torch.int32)  # i stands twice
    window_indices[3] = -1
    compressed_indices = torch.tensor([[4, -1], [0, 0], [2, 3], [-1, -1], [1, 2], [5, 4], [3, 3]], dtype=torch.int32)
    tensors = leaves(*(draw(*shape, dtype=dtype) for shape in ((n, heads, D), (9, D), (6, D))), draw(heads))
    rope = (reference.rope_table(20, 16), torch.arange(n) * 2)
    return tensors, window_indices, compressed_indices, rope


def v4(q, window, compressed, sink, window_indices, compressed_indices, rope, **options):
    return dsv4.v4_attention(
        q, window, window_indices, compressed, compressed_indices, inverse_rope=rope, sink=sink, **options
    )


def test_v4():
    tensors, *rest = v4_inputs()
    out, lse = v4(*tensors, *rest, return_lse=True)
    dout, dlse = draw(*out.shape, seed=7), draw(*lse.shape, seed=8)
    got = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    q, window, compressed, sink = (x.detach() for x in tensors)
    want = reference_backward.v4_attention(
        q, window, rest[0], compressed, rest[1], dout=dout, dlse=dlse, sink=sink, inverse_rope=rest[2]
    )
    agree(got, want)


def test_v4_rows_in_fp8_leave_the_gradient_of_q():
    cache = dsv4.Fp8Cache.empty(2, 64)
    cache.write(torch.arange(128, dtype=torch.int32), draw(128, 512, dtype=torch.bfloat16))
    q, sink = leaves(draw(3, 4, 512, dtype=torch.bfloat16), draw(4))
    lists = torch.arange(30, dtype=torch.int32).view(3, 10)
    out = dsv4.v4_attention(q, cache, lists, sink=sink)
    dout = draw(*out.shape, seed=3, dtype=torch.bfloat16)
    got = torch.autograd.grad(out, (q, sink), dout)
    rows, args = cache.unpack(), dict(dout=dout, sink=sink.detach())
    want = reference_backward.v4_attention(q.detach(), rows, lists, **args)
    low = reference_backward.v4_attention(q.detach(), rows, lists, p_dtype=torch.bfloat16, **args)
    agree(got[:1], [want.q], 1.5 * float((low.q.bfloat16().double() - want.q).norm() / want.q.norm()))
    _, lse = reference.v4_attention(q.detach(), rows, lists, sink=sink.detach())
    assert_dsink(got[1], want.sink, out.detach(), dout, lse, sink.detach())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_any_subset(wanted):
    """Others are neither asked for nor computed; what is computed does not change."""
    for tensors, call in ((dense(), dsv4.fmha), (v4_inputs()[0], None)):
        rest = v4_inputs()[1:]

        def loss(*x, call=call, rest=rest):
            return (dsv4.fmha(*x[:3], sink=x[3]) if call else v4(*x, *rest)).square().sum()

        whole = torch.autograd.grad(loss(*tensors), tensors)
        only = [x if n in wanted else x.detach() for n, x in enumerate(tensors)]
        got = torch.autograd.grad(loss(*only), [only[n] for n in wanted])
        assert all(torch.equal(a, whole[n]) for a, n in zip(got, wanted))


def test_only_the_lse_is_used():
    q, k, v, sink = dense()
    _, lse = dsv4.fmha(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    want = reference_backward.fmha(*(x.detach() for x in (q, k, v)), torch.zeros_like(q), torch.ones_like(lse))
    agree(got, want[:3])
    assert not got[2].any()


def test_strides_of_the_output_gradient():
    """sum() hands over zeros of stride 0; a transposed output comes back transposed."""
    q, k, v, sink = dense()
    ones = torch.autograd.grad(dsv4.fmha(q, k, v).sum(), (q, k, v))
    agree(ones, reference_backward.fmha(*(x.detach() for x in (q, k, v)), torch.ones(q.shape))[:3])
    turned = torch.autograd.grad((dsv4.fmha(q, k, v).transpose(1, 3) * draw(2, D, 4, 19)).sum(), (q,))
    plain = torch.autograd.grad((dsv4.fmha(q, k, v) * draw(2, D, 4, 19).transpose(1, 3)).sum(), (q,))
    assert torch.equal(turned[0], plain[0])


@pytest.mark.parametrize("packed", [False, True])
def test_v4_strides_of_the_output_gradient(packed):
    """This includes the rotated columns: sum() passes ones of stride 0."""
    q, rows = leaves(draw(3, 2, 512)), draw(9, 512)
    lists, rope = (
        torch.tensor([[0, 5], [3, -1], [8, 8]], dtype=torch.int32),
        (reference.rope_table(20, 64), torch.arange(3)),
    )
    pool = dsv4.Fp8Cache.pack(rows, rows_per_page=4) if packed else rows
    (got,) = torch.autograd.grad(dsv4.v4_attention(*q, pool, lists, inverse_rope=rope).sum(), q)
    seen = pool.unpack(torch.float32) if packed else rows
    agree(
        [got],
        [reference_backward.v4_attention(q[0].detach(), seen, lists, dout=torch.ones(3, 2, 512), inverse_rope=rope).q],
    )


def test_one_tensor_as_keys_and_values():
    q, k, _, _ = dense(heads=(4, 1))
    (got,) = torch.autograd.grad(dsv4.fmha(q, k, k).sum(), (k,))
    want = reference_backward.fmha(q.detach(), k.detach(), k.detach(), torch.ones(q.shape))
    agree([got], [want.k + want.v])


def test_gradients_have_the_dtype_of_their_inputs():
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v, sink = dense(dtype=dtype)
        dout = draw(*q.shape, seed=5, dtype=dtype)
        got = torch.autograd.grad(dsv4.fmha(q, k, v, sink=sink, causal=True), (q, k, v, sink), dout)
        assert [x.dtype for x in got] == [dtype] * 3 + [torch.float32]
        args = (*(x.detach() for x in (q, k, v)), dout)
        want = reference_backward.fmha(*args, causal=True, sink=sink.detach())
        low = reference_backward.fmha(*args, causal=True, sink=sink.detach(), p_dtype=dtype)
        for a, ref, rounded in zip(got[:3], want, low):
            agree([a], [ref], 1.5 * float((rounded.to(dtype).double() - ref).norm() / ref.norm()))


def beside(x, *rest):
    """The other arguments of a loss, where its tensors x are."""
    return [beside(x, *y) if isinstance(y, tuple) else y.to(x[0].device) for y in rest]


def of_fmha():
    return dense(), lambda *x: dsv4.fmha(*x[:3], sink=x[3], causal=True).square().sum()


def of_varlen():
    cu = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
    tensors = leaves(draw(22, 4, D), draw(22, 2, D, seed=1), draw(22, 2, D, seed=2), draw(4))
    return tensors, lambda *x: dsv4.fmha_varlen(*x[:3], *beside(x, cu, cu), sink=x[3], window=(5, 1)).square().sum()


def of_v4():
    tensors, *rest = v4_inputs()
    return tensors, lambda *x: v4(*x, *beside(x, *rest)).square().sum()


def of_compress():
    tensors = leaves(*(draw(*x) for x in ((2, 14, 12), (2, 14, 12), (4, 12), (6,))))
    return (
        tensors,
        lambda *x: dsv4.compress(*x, cos_sin=reference.rope_table(20, 4, device=x[0].device))[0].square().sum(),
    )


def of_merge_states():
    tensors = leaves(*(draw(7, 3, D, seed=n) for n in (0, 1)), *(draw(7, 3, seed=n) for n in (2, 3)), draw(3))
    return tensors, lambda *x: dsv4.merge_states(x[:2], x[2:4], x[4])[0].square().sum()


def of_index_loss():
    lists = torch.tensor([[0, 3, 1], [2, -1, -1], [-1, -1, -1], [4, 0, 2]], dtype=torch.int32)
    attention = draw(4, 2, D, seed=5), draw(5, D, seed=6), draw(4, 2, seed=7)
    tensors = leaves(draw(4, 3, 16), draw(5, 16), draw(4, 3))
    return tensors, lambda *x: dsv4.index_loss(*x, *beside(x, lists, *attention))


LOSSES = {"fmha": of_fmha, "fmha_varlen": of_varlen, "v4_attention": of_v4, "compress": of_compress,
          "merge_states": of_merge_states, "index_loss": of_index_loss}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_checkpointing_recomputes_the_same(name):
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(checkpoint(loss, *tensors, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("name", LOSSES)
def test_compile_sees_forward_and_backward(name):
    """One graph each, no break; the backend that runs the traced graphs as they are."""
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


class Calls(TorchDispatchMode):
    """The operators of dsv4 that are called, and with what."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "dsv4":
            self.seen.append((function, args))
        return function(*args, **(kwargs or {}))

    def named(self, end):
        """(operator, its arguments) of the only one whose name ends so."""
        (found,) = [x for x in self.seen if x[0]._schema.name.endswith(end)]
        return found


@pytest.mark.parametrize("name", LOSSES)
def test_operators_keep_torchs_rules(name):
    """One case of the fourth of torch's checks, test_aot_dispatch_dynamic, is enough: it lasts seconds."""
    tensors, loss = LOSSES[name]()
    with Calls() as calls:
        loss(*tensors).backward()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for end in ("_training", "_backward"):
        more = ("test_aot_dispatch_dynamic",) if name + end == "fmha_training" else ()
        torch.library.opcheck(*calls.named(end), test_utils=checks + more)


def in_another_order(x: torch.Tensor) -> torch.Tensor:
    """The same values, the first two of three or more dimensions swapped in memory."""
    return x if x.ndim < 3 else x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()


@pytest.mark.parametrize("name", LOSSES)
def test_results_have_the_strides_that_a_compiler_expects(name):
    tensors, loss = LOSSES[name]()
    with Calls() as calls:
        loss(*map(in_another_order, tensors)).backward()
    for end in ("_training", "_backward"):
        operator, given = calls.named(end)
        real = operator(*given)
        with FakeTensorMode() as mode:
            fake = operator(*tree_map_only(torch.Tensor, mode.from_tensor, given))
        for x, y in zip(real, fake, strict=True):
            assert x.shape == y.shape and (x.numel() == 0 or x.stride() == y.stride())


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_same_whether_somebody_sees_the_operators_or_not(name):
    """The operators are seen in the forward pass, in the backward pass, or in both."""
    tensors, loss = LOSSES[name]()
    want = torch.autograd.grad(loss(*tensors), tensors)
    for forward, backward in ((True, False), (False, True), (True, True)):
        with Calls() if forward else nullcontext() as first:
            made = loss(*tensors)
        with Calls() if backward else nullcontext() as second:
            got = torch.autograd.grad(made, tensors)
        if forward:
            first.named("_training")
        if backward:
            second.named("_backward")
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("name", LOSSES)
def test_the_second_derivative_is_refused_by_name(name):
    tensors, loss = LOSSES[name]()
    first = torch.autograd.grad(loss(*tensors), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="dsv4.*double backward"):
        first[0].sum().backward()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_by_torch_func_are_refused_by_name(name):
    tensors, loss = LOSSES[name]()
    first, *rest = (x.detach() for x in tensors)
    with pytest.raises(NotImplementedError, match=r"dsv4\..*torch.func .*is not supported; use .backward\(\)"):
        torch.func.grad(loss)(first, *rest)


@pytest.mark.parametrize("name", LOSSES)
def test_tangents_are_refused_by_name(name):
    tensors, loss = LOSSES[name]()
    first, *rest = (x.detach() for x in tensors)
    for grad in (False, True):
        rest[0].requires_grad_(grad)
        with forward_ad.dual_level(), pytest.raises(ValueError, match="got a tensor with a tangent"):
            loss(forward_ad.make_dual(first, first), *rest)


@pytest.mark.parametrize("name", ["fmha", "fmha_varlen", "v4_attention"])
def test_deterministic_is_asked_for_by_the_call_or_by_torch(name, monkeypatch):
    """What counts is how torch is set when the backward pass runs."""
    tensors, loss = LOSSES[name]()
    asked, run = [], calls._in_torch

    def noted(op, problem, outputs):
        if op.backward:
            asked.append(problem.deterministic)
        return run(op, problem, outputs)

    monkeypatch.setattr(calls, "_in_torch", noted)
    value = loss(*tensors)
    want = torch.autograd.grad(value, tensors, retain_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        got = torch.autograd.grad(value, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    call = getattr(dsv4, name)
    monkeypatch.setattr(dsv4, name, lambda *args, **options: call(*args, **options, deterministic=True))
    again = torch.autograd.grad(loss(*tensors), tensors)
    assert asked == [False, True, True]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, want, again))


def test_what_has_no_gradient_says_so():
    q, k, v, sink = dense()
    with pytest.raises(ValueError, match="q: got a tensor that requires grad.*no gradient"):
        dsv4.fmha(q, k, v, out=torch.empty(q.shape))
    pages = k.detach().reshape(-1, 1, 2, D)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        dsv4.fmha_paged(q, pages, pages, table, lengths)
    with torch.no_grad():
        dsv4.fmha_paged(q, pages, pages, table, lengths)


@pytest.mark.parametrize("name", [x for x in LOSSES if x != "index_loss"])
def test_inference_saves_nothing(name):
    """Without a gradient in sight the training operators are not called, and autograd keeps no tensor."""
    tensors, loss = LOSSES[name]()
    with Calls() as calls, torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: x):
        with torch.no_grad():
            assert not loss(*tensors).requires_grad
        loss(*(x.detach() for x in tensors))
    assert not [x for x, _ in calls.seen if "training" in str(x) or "backward" in str(x)]
    with calls:
        loss(*tensors)
    assert [x for x, _ in calls.seen if "training" in str(x)]


@pytest.mark.parametrize("width", [6, 12])
@pytest.mark.parametrize("batched", [False, True])
def test_compress(width, batched, monkeypatch):
    """HCA and CSA, in fp64, one window at a time; the tokens of an unfinished window have no gradient."""
    from dsv4.compress import training

    monkeypatch.setattr(training, "BLOCK_BYTES", 0)
    shape = (2, 14, width) if batched else (14, width)
    kv, gate, bias, weight = leaves(*(draw(*x).double() for x in (shape, shape, (4, width), (6,))))
    tables = reference.rope_table(20, 4).double()
    rows, state = dsv4.compress(kv, gate, bias, weight, cos_sin=tables)
    assert rows.requires_grad and not state.kv.requires_grad and state.tokens == 14
    drows = draw(*rows.shape, seed=5).double()
    got = torch.autograd.grad(rows, (kv, gate, bias, weight), drows)
    args = [x.detach() for x in (kv, gate)]
    if not batched:
        args, drows = [x[None] for x in args], drows[None]
    want = reference_backward.compress(*args, bias.detach(), weight.detach(), drows, cos_sin=tables)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.view(a.shape), rtol=1e-10, atol=1e-12)  # fp64: 2^-53 a rounding
    with torch.no_grad():
        assert torch.equal(dsv4.compress(kv, gate, bias, weight, cos_sin=tables)[0], rows)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compress_without_position_bias(ratio):
    """V4.1's rows: of one token, without a gate, and of two."""
    kv, gate, weight = leaves(*(draw(*x).double() for x in ((7, 6), (7, 6), (6,))))
    zeros, tables = torch.zeros(ratio, 6).double(), reference.rope_table(20, 4).double()
    given = (kv, weight) if ratio == 1 else (kv, gate, weight)
    rows, _ = dsv4.compress(kv, None if ratio == 1 else gate, None, weight, ratio=ratio, cos_sin=tables)
    drows = draw(*rows.shape, seed=5).double()
    got = torch.autograd.grad(rows, given, drows)
    args = [x.detach()[None] for x in (kv, gate)]
    want = reference_backward.compress(*args, zeros, weight.detach(), drows[None], cos_sin=tables)
    want = (want[0], want[3]) if ratio == 1 else (want[0], want[1], want[3])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.view(a.shape), rtol=1e-10, atol=1e-12)  # fp64: 2^-53 a rounding


@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12)])
def test_compress_of_no_tokens(shape):
    kv, gate, bias, weight = leaves(*(draw(*x) for x in (shape, shape, (4, 12), (6,))))
    rows, _ = dsv4.compress(kv, gate, bias, weight)
    got = torch.autograd.grad(rows.sum(), (kv, gate, bias, weight))
    assert [x.shape for x in got] == [x.shape for x in (kv, gate, bias, weight)] and not any(x.any() for x in got)


@pytest.mark.parametrize("name", LOSSES)
def test_meta_tensors_have_gradients_of_the_right_shape(name):
    """Forward and backward work, plain and with grad mode off: tools that count the memory of a model run them so."""
    tensors, loss = LOSSES[name]()
    tensors = leaves(*(x.detach().to("meta") for x in tensors))
    got = torch.autograd.grad(loss(*tensors), tensors)
    assert [(x.shape, x.dtype, x.device) for x in got] == [(x.shape, x.dtype, x.device) for x in tensors]
    with torch.no_grad():
        assert loss(*tensors).is_meta


@pytest.mark.parametrize("shape", [(2, 5, 3, D), (7, 3, D)])
def test_merge_states(shape):
    """In one place one partial is empty, its out NaN, and in another all are; then the same compiled."""
    lse_shape = shape[:2] if len(shape) == 3 else (shape[0], shape[2], shape[1])
    outs, lses = leaves(*(draw(*shape, seed=n) for n in range(3))), [draw(*lse_shape, seed=n) for n in range(3)]
    lses[1].view(-1)[3] = float("-inf")
    for x in lses:
        x.view(-1)[0] = float("-inf")
    lses, (sink,) = leaves(*lses), leaves(draw(3))
    out, lse = dsv4.merge_states(outs, lses, sink)
    dout, dlse = draw(*shape, seed=8), draw(*lse_shape, seed=9)
    got = torch.autograd.grad((out, lse), (*outs, *lses, sink), (dout, dlse))
    args = [x.detach() for x in outs], [x.detach() for x in lses], sink.detach()
    douts, dlses, dsink = reference_backward.merge_states(*args, dout, dlse)
    agree(got, [*douts, *dlses, dsink])
    loss = lambda *x: dsv4.merge_states(x[:3], x[3:6], x[6])[0].sum()  # noqa: E731
    everything = (*outs, *lses, sink)
    want = torch.autograd.grad(loss(*everything), everything)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(compiled(*everything), everything), want))


@pytest.mark.parametrize("below", [14.0, 18.0, 60.0])
def test_merge_states_of_a_sink_far_below_the_lse(below):
    """dsink is keep (1 - keep) of something, and in fp32 1 - keep is off by 2 % at a distance of 14 and 0 at 18."""
    outs = [draw(4, 3, 64, seed=n) for n in range(2)]
    lses, (sink,) = [torch.full((4, 3), below), torch.full((4, 3), below - 2)], leaves(torch.zeros(3))
    dout = draw(4, 3, 64, seed=8)
    (got,) = torch.autograd.grad(dsv4.merge_states(outs, lses, sink)[0], sink, dout)
    agree([got], [reference_backward.merge_states(outs, lses, sink.detach(), dout)[2]])


def test_attention_in_two_parts_and_merged_has_the_gradient_of_the_whole():
    q, k, v, sink = dense(heads=(4, 2))
    whole = torch.autograd.grad(dsv4.fmha(q, k, v, sink=sink).square().sum(), (q, k, v, sink))
    parts = [dsv4.fmha(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 9), slice(9, None))]
    out, _ = dsv4.merge_states(*zip(*parts), sink)
    agree(torch.autograd.grad(out.square().sum(), (q, k, v, sink)), [x.double() for x in whole], 2 * FP32)


@pytest.mark.parametrize("d", [64, 80])
def test_flash_attn_func_has_the_same_gradients(d):
    """Also at a head dim that is padded."""
    from dsv4.integrations.flash_attn import flash_attn_func

    q, k, v = leaves(*(draw(2, n, 4, d, seed=n) for n in (9, 11, 12)))
    v = v[:, :11]
    out = flash_attn_func(q, k, v, causal=True)
    dout = draw(*out.shape, seed=3)
    got = torch.autograd.grad(out, (q, k), dout)
    agree(got, reference_backward.fmha(*(x.detach() for x in (q, k, v)), dout, causal=True)[:2])
