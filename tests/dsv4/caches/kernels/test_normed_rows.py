"""Norm, RoPE and the way into a pool as one kernel, on softsm, against fp64."""

import launches
import pytest
import torch

from dsv4 import Fp8Cache
from dsv4.caches.formats import FP8_584
from dsv4.caches.kernels.normed_rows import normed
from dsv4.reference import rope_table

EPS = 1e-6
TABLE = rope_table(64)  # [64, 64]


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)], autouse=True)
def machine(request):
    with launches.race_free(request.param):
        yield


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def exact(x, eps=None, weight=None, rope=None):
    """fp64."""
    x = x.double()
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * weight.double()
    if rope is None:
        return x
    cos, sin = rope[0].double()[rope[1]].chunk(2, -1)
    x, r = x.clone(), rope[0].shape[1]
    pairs = torch.view_as_complex(x[..., -r:].reshape(*x.shape[:-1], r // 2, 2))
    turn = torch.complex(cos, sin).reshape(-1, *(1,) * (x.ndim - 2), r // 2)
    x[..., -r:] = torch.view_as_real(pairs * turn).flatten(-2)
    return x


def near(got, want):
    """One rounding to got's dtype of an fp32 result; fp32 itself errs by less than 16 roundings."""
    fp32 = 16 * torch.finfo(torch.float32).eps
    bound = torch.finfo(got.dtype).eps / 2 + fp32
    size = want.abs() + fp32 * want.square().mean(-1, keepdim=True).sqrt()  # where a pair cancels
    assert ((got.double() - want).abs() <= 1.01 * bound * size + 1e-12).all()


POSITIONS = torch.tensor([0, 7, 63, 1, 33])


@pytest.mark.parametrize(
    "x, options",
    [
        (draw(5, 3, 512), dict(eps=EPS, rope=(TABLE, POSITIONS))),  # queries
        (draw(5, 2, 128), dict(rope=(TABLE, POSITIONS.int()))),  # the indexer's
        (draw(3, 160)[:, 32:128], dict(eps=EPS, weight=draw(96))),  # a low rank that is not a power of two; lines apart
    ],
)
def test_lines(x, options):
    near(normed(x, **options), exact(x, **options))


def test_into_pages():
    """Plain pages, apart from each other; the FP8 rows are those of the fp32 ones, byte for byte."""
    x, weight = draw(5, 512), draw(512, dtype=torch.float32)
    x[1, 70] = float("nan")  # the row is NaN; in FP8 its tiles are
    options = dict(eps=EPS, weight=weight, rope=(TABLE, POSITIONS), slots=torch.tensor([3, 11, -1, 0, 12]))
    kept, rows = [0, 1, 3], [3, 11, 0]  # one is dropped, one is outside
    pages = torch.full((3, 5, 512), 7.0)
    assert normed(x, **options, to=pages[:, :4]) is None
    got = pages[:, :4].reshape(12, 512)[rows]
    want = exact(x, EPS, weight, (TABLE, POSITIONS))[kept]
    near(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all()
    others = torch.ones(3, 5, dtype=torch.bool)
    others[torch.tensor(rows) // 4, torch.tensor(rows) % 4] = False
    assert (pages[others] == 7).all()

    cache = Fp8Cache.empty(3, 4)
    normed(x, **options, to=cache)
    data, scales = FP8_584.quantize(got)
    assert torch.equal(cache.data_view().reshape(12, -1)[rows][:, :448], data[:, :448])
    assert torch.equal(cache.scale_view().reshape(12, -1)[rows], scales)
    assert torch.equal(cache.unpack()[rows].nan_to_num(), Fp8Cache.pack(got).unpack()[:3].nan_to_num())
    assert not cache.unpack()[[r for r in range(12) if r not in rows]].any()
