"""Triton's compiler as softsm uses it."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

import softsm
from softsm.doors.triton.backend import SoftsmBackend


@triton.jit
def nothing(x):
    pass


def test_machine_code_is_made_when_it_is_asked_for():
    with softsm.use("sm_90a"):
        asm = nothing[(1,)](torch.zeros(1)).asm
        assert "cubin" not in asm
        assert asm["cubin"][:4] == b"\x7fELF" and "EXIT" in asm["sass"]
        with pytest.raises(KeyError, match="other"):
            asm["other"]


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
