"""quantize_mxfp8 on a CPU and through softsm, against the recipe written once more, number by number."""

import math

import pytest
import torch

import dsv4
import softsm

BF16 = torch.bfloat16


def by_definition(x):
    """Codes and scale exponents of x [groups, 32], from the formula."""
    codes, exponents = [], []
    for group in x.double().tolist():
        target = max(*map(abs, group), 1e-4) / 448
        mantissa, exponent = math.frexp(target)
        exponent -= mantissa == 0.5
        codes.append([v / 2.0**exponent for v in group])
        exponents.append(exponent + 127)
    return torch.tensor(codes, dtype=torch.float32).to(torch.float8_e4m3fn), torch.tensor(exponents, dtype=torch.uint8)


def some_rows(dtype=BF16):
    """Groups of all sizes, of zeros, of exact powers of two, with a NaN and an infinity."""
    x = torch.randn(3, 5, 512) * torch.exp2(torch.randint(-30, 30, (3, 5, 16)).float()).repeat_interleave(32, -1)
    x[0, 0, :32] = 0
    x[0, 1, :64] = 448.0
    x[0, 2, 5], x[0, 3, 40] = float("nan"), float("inf")
    return x.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else x.to(dtype)


def raw(pair):
    return [x.view(torch.uint8) for x in pair]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_the_recipe(dtype):
    x = some_rows(dtype)
    codes, scales = dsv4.quantize_mxfp8(x)
    assert codes.shape == x.shape and scales.shape == (3, 5, 16)
    want, exponents = by_definition(torch.where(x.isfinite(), x, 0).reshape(-1, 32))
    finite = x.isfinite().unflatten(-1, (16, 32)).all(-1).flatten()
    assert torch.equal(scales.view(torch.uint8).flatten()[finite], exponents[finite])
    got = codes.view(torch.uint8).reshape(-1, 32)
    assert torch.equal(got[finite], want.view(torch.uint8)[finite])
    assert (scales.view(torch.uint8).flatten()[~finite] == 255).all() and (~finite).any()


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_kernel_makes_the_same_bytes(arch, dtype):
    x = some_rows(dtype)
    for given in (x, x[:, ::2], x[:0]):  # the second one is copied first, the third one is empty
        with softsm.use(arch), softsm.checking(races=True) as report:
            got = raw(dsv4.quantize_mxfp8(given, backend="softsm"))
        want = raw(dsv4.quantize_mxfp8(given))
        assert not report, str(report)
        finite = want[1] != 255  # any code is NaN under the scale NaN
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0].unflatten(-1, (16, 32))[finite], want[0].unflatten(-1, (16, 32))[finite])


def test_results_are_contiguous_whatever_x_is():
    x = torch.randn(3, 2, 64).transpose(0, 1)
    found = dsv4.quantize_mxfp8(x)
    assert all(y.is_contiguous() for y in found)
    for y, z in zip(found, dsv4.quantize_mxfp8(x.contiguous()), strict=True):
        assert torch.equal(y.view(torch.uint8), z.view(torch.uint8))


def test_a_compiler_and_gradients():
    x = some_rows()
    eager, compiled = dsv4.quantize_mxfp8(x), torch.compile(dsv4.quantize_mxfp8, backend="eager", fullgraph=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(raw(eager), raw(compiled)))
    with pytest.raises(ValueError, match="no gradient"):
        torch.func.grad(lambda y: dsv4.quantize_mxfp8(y)[0].float().sum())(x)
    with pytest.raises(ValueError, match="no gradient"):
        dsv4.quantize_mxfp8(x.requires_grad_())


@pytest.mark.parametrize("x", [torch.zeros(4, 48), torch.zeros(4, 32, dtype=torch.int32), "x"])
def test_what_is_refused(x):
    with pytest.raises(ValueError, match=r"^x: got .*; accepted: bf16, fp16 or fp32 \[..., D\], D a multiple of 32"):
        dsv4.quantize_mxfp8(x)


def test_sparse_rows_are_refused():
    with pytest.raises(ValueError, match="^x: got layout torch.sparse_coo; accepted: a dense strided tensor"):
        dsv4.quantize_mxfp8(torch.eye(32).to_sparse())
