"""The compress kernel and rows into pages on a CPU, through softsm."""

import compress_cases
import pytest
import torch

from dsv4.kernels.compat import TRITON_VERSION

BLACKWELL = pytest.param(
    "sm_100a",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9"),
    ],
)
pytestmark = pytest.mark.parametrize("arch", ["sm_90a", BLACKWELL])


def test_steps_give_the_bits_of_one_call(arch):
    compress_cases.assert_any_steps(arch, "indexer", 27, (1, 2, 7, 8, 9, 25))


@pytest.mark.parametrize("kind", ["pair", "token"])
def test_rows_of_two_tokens_and_of_one(arch, kind):
    compress_cases.assert_any_steps(arch, kind, 9, (1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", compress_cases.KINDS)
def test_every_kind(arch, kind, dtype):
    if kind == "small hca":  # rows of 7 values; the kernel rotates pairs
        with pytest.raises(ValueError, match="rows of 7 values"):
            compress_cases.assert_any_steps(arch, kind, 30, (1,), dtype)
        return
    compress_cases.assert_any_steps(arch, kind, 300, (3, 120, 130, 131, 256), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 127, 128, 129])
def test_a_batch_at_every_edge(arch, kind, tokens):
    compress_cases.assert_any_steps(arch, kind, tokens, (), batch=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("page, stride", [(64, None), (2, None), (3, 1753)])
def test_rows_into_pages(arch, page, stride):
    compress_cases.assert_into_pages(arch, page, stride)
    compress_cases.assert_write(arch, page, stride)


@pytest.mark.parametrize("page, stride", [(64, None), (3, 401)])
def test_index_keys_into_pages(arch, page, stride):
    compress_cases.assert_index_keys(arch, page, stride)
