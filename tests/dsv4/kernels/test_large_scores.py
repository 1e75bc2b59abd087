"""Scores of any size: from about 2^28 in base 2 on a row's result is one of the values (DESIGN.md, Rules of the
operations).

The kernels compute log2 P = s scale - m with one FMA, whose m is rounded: by up to 8 at 2^28, by 128 at 2^32. Such rows
have a power of two as their scale (`softmax.row_scale`)."""

from functools import partial

import launches
import pytest
import torch

import dsv4
import softsm
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import calls
from dsv4.suites.calls import LSE_BOUND
from dsv4.v4.kernels.sm90 import entry

LOG2E = 1.4426950408889634
SCALE = 0.3 / LOG2E  # with 0.3 no product of the scale is exact
SIZES = (20, 25, 27, 28, 29, 30, 31, 33, 40, 60, 100)  # log2 of |q . k|
ARCHES = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.compile)]
KINDS = 4  # of keys; e4m3 has them


def keys(count: int, dim: int) -> torch.Tensor:
    """k0 is 1.5, 1.625, 1.75 or 1.875, so that scores tie."""
    k = torch.zeros(count, dim)
    k[:, 0] = 1.5 + torch.randint(0, KINDS, (count,), generator=torch.Generator().manual_seed(3)) / 8
    return k


def sizes(arch: str, dim: int) -> tuple[int, ...]:
    """At head dim 64 the kernels of sm_90a have a limit of 2^30 in base 2 (work.has_limit)."""
    return tuple(e for e in SIZES if e < 31) if (arch, dim) == ("sm_90a", 64) else SIZES


def queries(dim: int, exponents: tuple[int, ...] = SIZES) -> torch.Tensor:
    """A query for each size and sign of the scores."""
    q = torch.zeros(2 * len(exponents), dim)
    q[:, 0] = torch.tensor([sign * 2.0**e for e in exponents for sign in (1, -1)])
    return q


def values(k: torch.Tensor) -> torch.Tensor:
    """Keys that tie have the same value: splits do not know how many of them the others have."""
    table = torch.randn(KINDS, k.shape[1], generator=torch.Generator().manual_seed(4))
    return table[(k[:, 0] / 2.0 ** k[:, 0].log2().floor() * 8 - 12).long()]


def assert_right(got, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out, lse = got
    s = q.double() @ k.double().T * SCALE
    right, right_lse = torch.softmax(s, -1) @ v.double(), torch.logsumexp(s, -1)
    assert out.isfinite().all() and lse.isfinite().all()
    assert ((out.double() - right).abs() <= 2.0**-7 * v.abs().max()).all()
    assert ((lse.double() - right_lse).abs() <= 2.0**-22 * right_lse.abs() + LSE_BOUND).all()


def attention(arch: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype=torch.bfloat16):
    if arch == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    q, k, v = (x.to(dtype)[None, :, None] for x in (q, k, v))
    with softsm.use(arch):
        out, lse = dsv4.fmha(q, k, v, softmax_scale=SCALE, return_lse=True, backend="softsm")
    return out[0, :, 0], lse[0, 0]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dim", [64, *(pytest.param(d, marks=pytest.mark.compile) for d in (128, 256, 512))])
def test_scores_of_one_size(arch, dim):
    q, k = queries(dim, sizes(arch, dim)), keys(300, dim)
    v = values(k).bfloat16()
    assert_right(attention(arch, q, k, v), q, k, v)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_scores_in_fp16(arch):
    """P must not exceed 65504."""
    q, k = queries(128, (20, 25, 26, 27, 28, 29)), keys(300, 128)
    v = values(k).half()
    assert_right(attention(arch, q * 2.0**-15, k * 2.0**15, v, torch.float16), q, k, v)


@pytest.mark.parametrize(
    "arch, dim", [("sm_90a", 64), *(pytest.param(x, 128, marks=pytest.mark.compile) for x in ("sm_90a", "sm_100a"))]
)
def test_keys_that_tie_share_a_row(arch, dim):
    q, k = queries(dim, sizes(arch, dim)), keys(60, dim)
    v = torch.randn(60, dim, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert_right(attention(arch, q, k, v), q, k, v)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("steps", [(0, 12, 26, 27, 28, 29, 30, 33, 60), (60, 33, 30, 29, 28, 27, 26, 12, 0)])
def test_scores_that_grow_or_shrink_from_tile_to_tile(arch, steps, dim=128):
    """A row changes from one scale to the other, and back."""
    q = torch.zeros(6, dim)
    q[:, 0] = torch.tensor([1, -1, 1.5, -1.5, 2.0**-10, -(2.0**-10)])
    k = keys(len(steps) * 128, dim)
    v = values(k).bfloat16()
    k *= 2.0 ** torch.tensor(steps).repeat_interleave(128)[:, None]
    assert_right(attention(arch, q, k, v), q, k, v)


@pytest.mark.compile
def test_many_row_tiles_on_sm_90a(monkeypatch):
    """The persistent kernel."""
    launches.num_sms(monkeypatch, 1)
    calls.forget()
    names = launches.launched(monkeypatch)
    q, k = queries(128).repeat(30, 1), keys(300, 128)
    v = values(k).bfloat16()
    assert_right(attention("sm_90a", q, k, v), q, k, v)
    assert names == ["fmha_forward_persistent"]


def test_rows_beyond_the_limit_of_head_dim_64_are_nan_and_never_zero():
    """On sm_90a a row whose P all vanish is not taken for one that sees no key."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 64, generator=generator) for n in (32, 9, 9))
    out, lse = attention("sm_90a", q * 2.0**30, k * 2.0**30, v)
    assert out.isnan().all(-1).sum() > 20 and not (out == 0).all(-1).any()
    assert (lse.isnan() | (lse == float("inf"))).sum() > 20 and not (lse == -float("inf")).any()


@pytest.mark.compile
@pytest.mark.parametrize("kernel", ["sparse", "swap_ab", "ws"])
def test_v4_on_sm_90a(kernel, monkeypatch):
    found = {
        "sparse": None,
        "swap_ab": (entry.v4_decode_swap_ab, entry.SWAP_AB[0][0][0], 2),
        "ws": (entry.v4_decode_swap_ab_ws, entry.SWAP_AB_WS[0][0][0], 2),
    }[kernel]
    monkeypatch.setattr(entry, "decode_kernel", lambda p, target: found)
    names = launches.launched(monkeypatch)
    check_v4("sm_90a", packed=kernel == "ws")
    assert kernel in names[0]


@pytest.mark.compile
def test_v4_on_sm_100a():
    if TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    check_v4("sm_100a")


def check_v4(arch: str, packed: bool = False) -> None:
    """Rows are keys and values; the queries have zeros but for column 0."""
    calls.forget()
    q, rows = queries(512), keys(300, 512)
    rows[:, 1:] = values(rows)[:, 1:].bfloat16()
    pool = dsv4.Fp8Cache.pack(rows.bfloat16(), rows_per_page=64) if packed else rows.bfloat16()
    rows = pool.unpack()[:300].float() if packed else rows
    listed = torch.arange(300, dtype=torch.int32)[None]
    attend = partial(dsv4.v4_attention, softmax_scale=SCALE, return_lse=True, backend="softsm")
    with softsm.use(arch):
        out, lse = attend(q.bfloat16()[None], pool, listed)
    assert_right((out[0], lse[0]), q, rows, rows)


@pytest.mark.compile
@pytest.mark.parametrize("size, finite", [(20, True), (33, False)])
def test_gradients_of_large_scores_are_nan(size, finite):
    """They make P from the LSE, whose rounding is 2^10 at 2^33: a wrong gradient would look right."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 4, 1, 64, generator=generator) for _ in range(3))
    q, k, v = (x.bfloat16().requires_grad_() for x in (q * 2.0 ** (size / 2), k * 2.0 ** (size / 2), v))
    with softsm.use("sm_90a"):
        dsv4.fmha(q, k, v, backend="softsm").sum().backward()
    for x in (q, k, v):
        assert x.grad.isnan().any() != finite
