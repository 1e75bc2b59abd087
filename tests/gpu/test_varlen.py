"""fmha_varlen on the GPU with enough row tiles that CTAs take them by tickets: against fp32, outputs poisoned."""

import random

import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.fmha import problem
from dsv4.fmha.kernels.sm90 import entry
from dsv4.runtime import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() != "sm_90a", reason="needs a Hopper GPU: the kernel is for it"),
]


def in_fp32(q, k, v, causal):
    """One sequence: (out, lse), 0 and -inf where a query sees no key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1]), float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse[..., None] == -float("inf"), 0.0, torch.exp(s - lse[..., None]))
    return (p @ v).transpose(0, 1), lse.T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("d", "heads"), [(64, (8, 2)), (128, (10, 2)), (256, (6, 6)), (192, (8, 4)), (96, (12, 3))])
def test_every_row_tile_is_taken_once(d, heads, same, causal):
    draw = random.Random(f"{d} {heads} {same} {causal}")
    tokens = [draw.choice((0, 1, draw.randint(2, 300), draw.randint(300, 2600))) for _ in range(40)]
    keys = tokens if same else [max(0, n + draw.randint(-200, 200)) for n in tokens]
    q = torch.randn(sum(tokens) + 5, heads[0], d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(keys) + 7, heads[1], d, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    k[-7:], v[-7:] = float("nan"), float("nan")
    cu_q = torch.tensor([0, *tokens], device="cuda").cumsum(0).int()
    cu_k = cu_q if same else torch.tensor([0, *keys], device="cuda").cumsum(0).int()
    assert entry.tiling(problem.varlen(q, k, v, cu_q, cu_k, causal=causal), dispatch.cuda_target(q.device)).loop
    found = []
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        _, lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=causal, out=out, return_lse=True)
        found.append((out, lse))
    (out, lse), (again, lse_again) = found
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert (out[sum(tokens) :] == 0).all() and (lse[sum(tokens) :] == -float("inf")).all()
    for n in range(len(tokens)):
        rows, seen = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        if tokens[n] == 0:
            continue
        want, want_lse = in_fp32(q[rows], k[seen], v[seen], causal)
        assert (out[rows].float() - want).abs().max() <= 0.02 * max(1.0, float(want.abs().max())), n
        torch.testing.assert_close(lse[rows], want_lse, rtol=1e-4, atol=1e-4)
