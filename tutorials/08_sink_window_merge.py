"""# 8. Sink, window, and merging by LSE

DeepSeek-V4's layers attend to a window of recent keys, to compressed older ones, and to a *sink*: one learned logit
per head that takes part in the denominator and contributes no value. None of this needs another softmax kernel. It
needs the LSE.

A partial result over some keys is O (normalised) and LSE = log of its denominator. Two of them merge exactly: the
weight of part i is exp(LSE_i - LSE), LSE = log(sum of exp(LSE_i)). The sink is one more term of that sum, with no O:
apply it once, after everything else is merged. Applied in each part it would count twice, and the error is small
enough to be taken for rounding.

The corner cases decide whether this is a library. A part that saw no key has LSE = -inf and weight 0, and its O may
be anything, NaN included: 0 * NaN is NaN, so it must not be read or must be replaced. If no part saw a key the result
is 0, and LSE is -inf, whatever the sink is. A sink of -inf means no sink, one of +inf makes every result 0.

The window is a matter of which keys a row sees: query i of T sees key j of S iff i + S - T - left <= j <= i + S - T +
right. Rows of one tile see different keys, so a mask is needed at the edges and nowhere else.

The chapter's kernel merges two parts, and is given parts that the library's Blackwell kernel computed in softsm: the
window, and everything older.

Museum: exhibits 11 (scales applied twice), 27 (a NaN row times 0).
"""

from ladder import compare, gl, gluon, normal, run, say, torch

import dsv4
from dsv4 import reference


@gluon.jit
def merge(o_ptr, lse_ptr, sink_ptr, out_ptr, rows, D: gl.constexpr):
    """out [rows, D] of two parts: o [2, rows, D], lse [2, rows] natural logarithms, sink [rows]; a row per program."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.program_id(0)
    column = gl.arange(0, D, layout=L)
    first = gl.load(lse_ptr + row)
    second = gl.load(lse_ptr + rows + row)
    top = gl.maximum(first, second)
    base = gl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
    a = gl.exp(first - base)
    b = gl.exp(second - base)
    denominator = a + b + gl.exp(gl.load(sink_ptr + row) - base)
    # A part without keys has weight 0 and perhaps no O: it is masked, not multiplied by 0.
    x = gl.load(o_ptr + row * D + column, mask=column * 0 + a > 0.0, other=0.0)
    y = gl.load(o_ptr + (rows + row) * D + column, mask=column * 0 + b > 0.0, other=0.0)
    seen = a + b > 0.0
    factor = gl.where(seen, 1.0 / gl.where(seen, denominator, 1.0), 0.0)
    gl.store(out_ptr + row * D + column, (x * a + y * b) * factor)


def parts(t: int, s: int, window: int, d: int = 64):
    """(inputs, O of the window and of what is older, their LSE), by the library's kernel in softsm."""
    q, k, v = normal(1, t, 1, d), normal(1, s, 1, d, seed=1), normal(1, s, 1, d, seed=2)
    older = s - t - window  # keys that lie before every query's window
    recent = dsv4.fmha(q, k[:, older:], v[:, older:], causal=True, return_lse=True, backend="softsm")
    past = dsv4.fmha(q, k[:, :older], v[:, :older], return_lse=True, backend="softsm")
    o = torch.stack([x[0][0, :, 0] for x in (recent, past)]).float()
    lse = torch.stack([x[1][0, 0] for x in (recent, past)])
    return (q, k, v), o, lse


def merged(o, lse, sink):
    out = torch.full(o.shape[1:], float("nan"))
    report = run(merge, o.contiguous(), lse.contiguous(), sink, out, o.shape[1], o.shape[2], grid=(o.shape[1],))
    assert not report, str(report)
    return out


def check_two_parts_make_the_whole() -> None:
    t, s = 20, 150
    (q, k, v), o, lse = parts(t, s, window=30)
    for logit in (float("-inf"), 0.7):
        want, _ = reference.fmha(q, k, v, causal=True, sink=torch.tensor([logit]))
        compare(merged(o, lse, torch.full((t,), logit)), want[0, :, 0])


def check_parts_without_keys() -> None:
    o, lse = torch.randn(2, 4, 64), torch.randn(2, 4)
    o[1], lse[1] = float("nan"), float("-inf")
    lse[0, 3] = float("-inf")  # row 3 sees nothing at all
    o[0, 3] = float("nan")
    got = merged(o, lse, torch.tensor([float("-inf"), 0.0, float("inf"), 1.0]))
    assert torch.allclose(got[0], o[0, 0]) and not got[2:].any()
    assert torch.allclose(got[1], o[0, 1] * lse[0, 1].exp() / (lse[0, 1].exp() + 1), atol=1e-6)


def show() -> None:
    (q, k, v), o, lse = parts(20, 150, window=30)
    want, _ = reference.fmha(q, k, v, causal=True, sink=torch.tensor([0.7]))
    once = merged(o, lse, torch.full((20,), 0.7))
    twice = once * (1 - torch.sigmoid(0.7 - torch.logsumexp(lse, 0)))[:, None]
    wrong = ((twice - want[0, :, 0]).norm() / want.norm()).item()
    say(f"sink applied once: relative error {compare(once, want[0, :, 0]):.2g}; in each part: {wrong:.2g}")


if __name__ == "__main__":
    from read import main

    main(__file__)
