"""The kernels of the residual streams, on softsm, against the model's own code in fp64."""

import pytest
import torch

import softsm
from dsv4.kernels import hyper_connections as streams

transformers = pytest.importorskip("transformers")

import in_fp64  # noqa: E402


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("d", [96, pytest.param(90, marks=pytest.mark.slow)])  # the latter in units of one
@pytest.mark.parametrize("n", [19, *(pytest.param(n, marks=pytest.mark.slow) for n in (70, 260))])  # one of each form
def test_a_block_in_streams(arch, d, n):
    config = transformers.DeepseekV4Config(hidden_size=d, hc_mult=4, hc_sinkhorn_iters=20)
    module = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HyperConnection(config)
    g = torch.Generator().manual_seed(0)
    h, y = (torch.randn(*shape, generator=g) for shape in ((1, n, 4, d), (1, n, d)))
    weight = torch.randn(d, generator=g)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.5, generator=g)
        with in_fp64.StayDouble():
            post, comb, x = module.double()(h.double())
            want = post[..., None] * y[:, :, None] + comb.mT @ h.double()
        module.float()
        with softsm.use(arch), softsm.checking(races=True) as report:
            given = h[0], module.fn, module.base, module.scale, 20, config.rms_norm_eps, config.hc_eps
            got = streams.collapse(*given)
            normed = streams.collapse(*given, weight, 1e-5)[2]
            spread = streams.spread(h[0], y[0], *got[:2])
    assert not report, str(report)
    # The projection is a sum of 4 d products of size 1; what follows has slopes of at most 1.
    bound = 4 * d * torch.finfo(torch.float32).eps
    want_normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    for ours, theirs in zip((*got, spread, normed), (post, comb, x, want, want_normed)):
        assert (ours - theirs[0]).abs().max() <= bound * max(1, theirs.abs().max())
