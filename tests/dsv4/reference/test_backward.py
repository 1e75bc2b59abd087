"""The gradients' formulas against finite differences of the oracle, and against autograd where that is defined."""

import pytest
import torch

from dsv4 import compress, reference
from dsv4.reference import backward as backward

D = 4  # small: a difference of the whole oracle for every element


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def as_function(forward, gradients):
    """What torch's gradcheck wants: forward(*tensors) -> outputs, gradients(tensors, douts) -> theirs."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx, *douts):
            return tuple(gradients(ctx.saved_tensors, douts))

    return Function.apply


def check(forward, gradients, *tensors):
    tensors = [x.clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(as_function(forward, gradients), tensors, eps=1e-6, atol=1e-5)


def finite(out, lse):
    """A row that sees nothing has an LSE of -inf, and no difference of it is finite."""
    return out, torch.where(lse == float("-inf"), 0, lse)


@pytest.mark.parametrize(
    "b, t, s, heads, options",
    [
        (1, 4, 5, (2, 2), {}),
        (2, 5, 4, (2, 1), dict(causal=True)),  # the first query sees nothing
        (1, 5, 5, (4, 2), dict(window=(1, 0))),
        (1, 3, 6, (2, 1), dict(window=(0, 2), softmax_scale=-0.3)),
        (1, 6, 3, (2, 2), dict(window=(1, 1))),
    ],
)
def test_fmha_is_the_derivative(b, t, s, heads, options):
    sizes = ((t, heads[0], 1), (s, heads[1], 2), (s, heads[1], 3))
    q, k, v = (normal(b, n, h, 2, seed=seed) for n, h, seed in sizes)
    check(
        lambda q, k, v, sink: finite(*reference.fmha(q, k, v, sink=sink, **options)),
        lambda x, douts: backward.fmha(*x[:3], *douts, sink=x[3], **options),
        q,
        k,
        v,
        normal(heads[0]),
    )


def test_varlen_is_the_derivative():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 5], [0, 2, 4, 7]))  # one has no queries
    check(
        lambda q, k, v, sink: finite(*reference.fmha_varlen(q, k, v, cu_q, cu_k, sink=sink, causal=True)),
        lambda x, douts: backward.fmha_varlen(*x[:3], cu_q, cu_k, *douts, sink=x[3], causal=True),
        normal(6, 2, 2),
        normal(8, 1, 2),
        normal(8, 1, 2, seed=1),
        normal(2),
    )


@pytest.mark.parametrize("paged", [pytest.param(False, marks=pytest.mark.compile), True])
def test_v4_is_the_derivative(paged):
    """Duplicates, -1, an empty list, lengths, the rotation of the output; rows by list and by block table."""
    window_indices = torch.tensor([[0, 1, 1, -1], [2, 2, 0, 3], [-1, -1, -1, -1], [4, 1, 0, 9]], dtype=torch.int32)
    options = dict(
        window_lengths=torch.tensor([4, 3, 4, 3], dtype=torch.int32),
        inverse_rope=(reference.rope_table(9, 4).double(), torch.tensor([3, 0, 8, 5])),
    )
    compressed = normal(3, 2, D, seed=5)
    if paged:
        options |= dict(
            compressed_block_table=torch.tensor([[2, 0], [1, 1]], dtype=torch.int32),
            request_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
            compressed_lengths=torch.tensor([3, 4, 0, 0], dtype=torch.int32),
        )
    else:
        options |= dict(compressed_indices=torch.tensor([[5, 5], [0, -1], [-1, -1], [1, 2]], dtype=torch.int32))
    check(
        lambda q, window, rows, sink: finite(
            *reference.v4_attention(q, window, window_indices, rows, sink=sink, **options)
        ),
        lambda x, douts: backward.v4_attention(
            x[0], x[1], window_indices, x[2], dout=douts[0], dlse=douts[1], sink=x[3], **options
        ),
        normal(4, 2, D),
        normal(5, D, seed=2),
        compressed,
        normal(2),
    )


def test_sinks_without_bound():
    """+inf: out is 0 and its gradients too, but the LSE does not know the sink. -inf: as without one."""
    q, k, v = normal(1, 3, 2, D), normal(1, 4, 2, D, seed=1), normal(1, 4, 2, D, seed=2)
    dout, dlse = normal(1, 3, 2, D, seed=3), normal(1, 2, 3)
    none = backward.fmha(q, k, v, dout, dlse)
    sinks = torch.tensor([float("-inf"), float("inf")])
    got = backward.fmha(q, k, v, dout, dlse, sink=sinks)
    only_lse = backward.fmha(q, k, v, dout * 0, dlse)
    for have, want, closed in zip(got[:3], none[:3], only_lse[:3]):
        torch.testing.assert_close(have[:, :, 0], want[:, :, 0])
        torch.testing.assert_close(have[:, :, 1], closed[:, :, 1])
    assert got.sink.tolist() == [0, 0]


def test_unseen_rows_may_hold_nan():
    q, k, v = normal(1, 2, 1, D), normal(1, 5, 1, D, seed=1), normal(1, 5, 1, D, seed=2)
    k[:, :2] = v[:, :2] = float("nan")
    got = backward.fmha(q, k, v, normal(1, 2, 1, D, seed=3), window=(1, 0))
    assert all(x.isfinite().all() for x in got[:3])
    assert not got.k[:, :2].any() and not got.v[:, :2].any()


def test_merge_is_the_derivative():
    """A partial that is empty in one place, and a place where all are."""
    outs, lses = [normal(2, 3, 2, D, seed=n) for n in range(3)], [normal(2, 2, 3, seed=n) for n in range(3)]
    gone = [torch.zeros(2, 2, 3, dtype=torch.bool) for _ in range(3)]
    gone[1][0, 1, 2] = gone[0][1, 0, 0] = gone[1][1, 0, 0] = gone[2][1, 0, 0] = True

    def cut(lses):
        return [torch.where(where, float("-inf"), x) for where, x in zip(gone, lses)]

    def gradients(x, douts):
        douts_of, dlses_of, dsink = backward.merge_states(x[:3], cut(x[3:6]), x[6], *douts)
        return *douts_of, *dlses_of, dsink

    check(lambda *x: finite(*reference.merge_states(x[:3], cut(x[3:6]), x[6])), gradients, *outs, *lses, normal(2))


@pytest.mark.parametrize("width", [D, 2 * D])
def test_compress_is_the_derivative(width):
    """Three windows of 2 tokens and one token left over; HCA and CSA."""
    tables = reference.rope_table(9, 4).double()
    check(
        lambda *x: compress(*[y.detach() for y in x], cos_sin=tables)[0],
        lambda x, douts: backward.compress(*x, *douts, cos_sin=tables),
        normal(2, 7, width),
        normal(2, 7, width, seed=1),
        normal(2, width),
        normal(D),
    )


def test_index_loss_is_the_derivative():
    indices = torch.tensor([[0, 3, 1], [2, -1, -1], [-1, -1, -1], [4, 0, 2]], dtype=torch.int32)
    target = normal(4, 3).abs()
    q, k, w = (x.requires_grad_() for x in (normal(4, 3, D), normal(5, D), normal(4, 3, seed=1)))
    loss, *grads = backward.index_loss(q.detach(), k.detach(), w.detach(), indices, target)
    score = D**-0.5 * 3**-0.5 * torch.einsum("nh,nhm->nm", w, torch.einsum("nhd,md->nhm", q, k).relu())
    want = 0
    for n, line in enumerate(indices):
        rows = line[line >= 0].long()
        if len(rows):
            p = target[n][line >= 0] / target[n][line >= 0].sum()
            want = want + torch.nn.functional.kl_div(score[n][rows].log_softmax(-1), p, reduction="sum") / 4
    torch.testing.assert_close(loss, want.detach())
    for got, expected in zip(grads, torch.autograd.grad(want, (q, k, w))):
        torch.testing.assert_close(got, expected)


def test_rounding_costs_what_the_dtype_says():
    """The rounded oracle errs by a few thousandths in bf16 and about 1/8 of that in fp16, whatever the size of dout."""
    q, k, v, dout = (normal(1, 128, 2, 64, seed=n) for n in range(4))
    for dtype, least, most in ((torch.bfloat16, 1e-3, 4e-3), (torch.float16, 1e-4, 5e-4)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        for size in (1.0, 1e-6):
            ref = backward.fmha(*inputs, dout * size, causal=True)
            low = backward.fmha(*inputs, dout * size, causal=True, p_dtype=dtype)
            for a, b in zip(ref[:3], low[:3]):
                assert least < ((a - b).norm() / a.norm()).item() < most
