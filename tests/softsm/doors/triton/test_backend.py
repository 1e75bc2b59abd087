"""Triton's compiler as softsm uses it."""

from __future__ import annotations

import warnings

import pytest
from triton.backends.compiler import GPUTarget

from softsm.doors.triton.backend import SoftsmBackend


@pytest.mark.parametrize(
    "default, asked, fused",
    [(None, None, True), ("0", None, False), ("1", None, True), (None, False, False), ("0", True, True)],
)
def test_sums_and_products_fuse_as_the_program_says_without_a_warning(default, asked, fused, monkeypatch):
    """Triton 3.9 warns whoever says nothing that 3.10 will not fuse them."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if default is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = SoftsmBackend(GPUTarget("cuda", 90, 32))
        options = backend.parse_options({} if asked is None else dict(enable_fp_fusion=asked))
    assert options.enable_fp_fusion == fused
