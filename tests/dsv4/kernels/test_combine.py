"""Results in fp32, for merging: the kernels' own, before they are rounded to the dtype of q."""

import pytest
import torch

pytest.importorskip("triton")
import dsv4  # noqa: E402
import softsm  # noqa: E402
from dsv4.kernels.compat import TRITON_VERSION  # noqa: E402


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense(**more):
    q, k, v = draw(2, 3, 4, 64), draw(2, 80, 2, 64, seed=1), draw(2, 80, 2, 64, seed=2)
    # Deterministic: with the tiles of long sequences, whose kernels other tests have compiled.
    return dsv4.fmha(q, k, v, sink=torch.randn(4), deterministic=True, return_lse=True, **more)


def paged_wide(**more):
    q, k = draw(1, 2, 2, 512), draw(4, 32, 1, 512, seed=1)
    table, lengths = torch.tensor([[2, 0, 3]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    return dsv4.fmha_paged(q, k, k, table, lengths, causal=True, return_lse=True, **more)


def v4(**more):
    q, rows, few = draw(1, 64, 512), draw(100, 512, seed=1), draw(20, 512, seed=2)
    lists = torch.randperm(100, generator=torch.Generator().manual_seed(3))[None, :90].int().contiguous()
    twenty = torch.arange(20, dtype=torch.int32)[None]
    return dsv4.v4_attention(q, rows, lists, few, twenty, sink=torch.zeros(64), return_lse=True, **more)


SLOW = pytest.mark.slow
DENSE, WIDE, V4 = (dense, (2, 3, 4, 64)), (paged_wide, (1, 2, 2, 512)), (v4, (1, 64, 512))


@pytest.mark.parametrize(
    "arch, call, shape",
    [
        ("sm_90a", *DENSE),
        *(pytest.param("sm_100a", *x, marks=pytest.mark.compile) for x in (DENSE, V4)),
        pytest.param("sm_90a", *V4, marks=SLOW),
        *(pytest.param(arch, *WIDE, marks=SLOW) for arch in ("sm_90a", "sm_100a")),
    ],
)
def test_fp32_results_are_what_is_rounded_elsewhere(arch, call, shape):
    if arch == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    torch.manual_seed(0)
    with softsm.use(arch):
        want, want_lse = call(backend="softsm")
        torch.manual_seed(0)
        got, lse = call(backend="softsm", out=torch.full(shape, float("nan")))
    assert got.dtype == torch.float32 and not torch.equal(got, got.bfloat16().float())
    # The sum is divided by its weight in another place: a rounding of fp32 before the one to bf16.
    assert torch.all((got - want.float()).abs() <= (2**-8 + 2**-20) * got.abs())
    assert torch.allclose(lse, want_lse, rtol=2**-20, atol=2**-20)
