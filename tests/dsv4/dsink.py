"""How far the gradient of a sink may be off.

dsink = - sum over queries i and columns d of share_i dO_id O_id, share = sigmoid(sink - LSE). A kernel reads O as it is
stored, so every O is off by at most u = 2^-8 of itself (bf16; 2^-11 in fp16), or by half the least subnormal number of
its dtype, errors independent of each other and zero in the mean. By Hoeffding's inequality the sum is off by more than
7 sqrt(sum of (what a term is off at most)^2) once in 2e10 heads.
Sums in fp32 and a share from an fp32 LSE are off by no more than 2^-24 of the sum of the sizes of all terms, times how
many of them are added one after the other or how large the LSE is: 2^-14 covers a thousand.
"""

import torch
from torch import Tensor

FAR_SINKS = (0.5, 65.0, 80.0, float("inf"))  # d lse / dq does not depend on the sink, however large it is


def assert_dsink(got: Tensor, want: Tensor, out: Tensor, dout: Tensor, lse: Tensor, sink: Tensor) -> None:
    """out, dout [..., H, D], out rounded from the exact one; lse [..., H] without the sink."""
    share = torch.where(lse == float("-inf"), 0, torch.sigmoid(sink.double() - lse.double()))
    terms = (share[..., None] * out.double() * dout.double()).movedim(-2, 0).flatten(1)  # [H, everything]
    info = torch.finfo(out.dtype)
    off_by = out.double().abs().clamp_min(info.tiny) * info.eps / 2
    each = (share[..., None] * off_by * dout.double()).movedim(-2, 0).flatten(1)
    bound = 7 * each.square().sum(1).sqrt() + 2.0**-14 * terms.abs().sum(1)
    off = (got.double() - want).abs()
    assert bool((off <= bound).all()), f"dsink: off by {off.tolist()}, allowed {bound.tolist()}"
