"""Kernels of other people as validation cases: Triton's tutorials 03, 06, 09, Liger-Kernel, flash-linear-attention.

Nothing of theirs is kept here. The folder TIMING_FOREIGN holds `tutorials/*.py` of Triton v3.6.0 (python/tutorials of
its repository) and the unpacked wheels of liger-kernel 0.8.5, fla-core 0.6.0 and einops. Kernels run as they are, with
one named choice of those that their authors let the tuner try.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from softsm_time.case import FP16, FP32, Call, Case, cdiv, power, sms, values

FOLDER = Path(os.environ.get("TIMING_FOREIGN", "foreign"))


@functools.cache
def tutorial(name: str, before: str = ""):
    """A tutorial as a module, up to the line that begins with `before`: the first ones test and measure on import."""
    source = (FOLDER / "tutorials" / name).read_text()
    if before:
        lines = source.splitlines(keepends=True)
        source = "".join(lines[: next(n for n, line in enumerate(lines) if line.startswith(before))])
    folder = Path(tempfile.mkdtemp())
    path = folder / name.replace("-", "_")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with hopper():
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def hopper():
    """Modules ask torch for the GPU while they are imported; without one they are told of an H200. What they were told
    only decides which configurations their tuners have."""
    if torch.cuda.is_available():
        yield
        return
    told = {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_properties": lambda *_: types.SimpleNamespace(multi_processor_count=132, name="NVIDIA H200"),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in told.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        yield


@contextlib.contextmanager
def packages():
    sys.path.insert(0, str(FOLDER.resolve()))
    try:
        with hopper():
            yield
    finally:
        sys.path.remove(str(FOLDER.resolve()))


def plain(kernel):
    """The kernel behind its tuner and heuristics."""
    while not hasattr(kernel, "arg_names") or hasattr(kernel, "configs") or type(kernel).__name__ == "Heuristics":
        kernel = kernel.fn
    return kernel


def matmul(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int) -> Case:
    def make(device: str) -> Call:
        kernel = plain(tutorial("03-matrix-multiplication.py", "torch.manual_seed").matmul_kernel)
        a, b = (values(*shape, device=device, dtype=FP16) for shape in ((M, K), (K, N)))
        c = torch.empty(M, N, device=device, dtype=FP16)
        grid = (cdiv(M, BM) * cdiv(N, BN),)
        return lambda: kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BLOCK_SIZE_M=BM,
                                    BLOCK_SIZE_N=BN, BLOCK_SIZE_K=BK, GROUP_SIZE_M=8, ACTIVATION="",
                                    num_stages=stages, num_warps=warps)  # fmt: skip

    what = f"tutorial 03 {M}x{N}x{K}"
    return Case(f"{what} {BM}x{BN}x{BK} s{stages} w{warps}", "tutorials", make, what)


def attention(
    Z: int, H: int, T: int, D: int, causal: bool, BM: int, BN: int, stages: int, warps: int, roles=False
) -> Case:
    def make(device: str) -> Call:
        kernel = plain(tutorial("06-fused-attention.py")._attn_fwd)
        q, k, v, o = (values(Z, H, T, D, device=device, dtype=FP16) for _ in "qkvo")
        lse = torch.empty(Z, H, T, device=device)

        def rows(x: torch.Tensor, block: int) -> TensorDescriptor:
            return TensorDescriptor(x, shape=[Z * H * T, D], strides=[D, 1], block_shape=[block, D])

        given = [rows(q, BM), rows(k, BN), rows(v, BN), rows(o, BM)]
        return lambda: kernel[(T // BM, Z * H)](1.3, lse, Z, H, *given, T, HEAD_DIM=D, BLOCK_M=BM, BLOCK_N=BN,
                                                FP8_OUTPUT=False, STAGE=3 if causal else 1, warp_specialize=roles,
                                                IS_HOPPER=sms() == 132, num_stages=stages,
                                                num_warps=warps)  # fmt: skip

    what = f"tutorial 06 {Z}x{H}x{T}x{D}{' causal' if causal else ''}"
    return Case(f"{what} {BM}x{BN} s{stages} w{warps}{' roles' if roles else ''}", "tutorials", make, what)


def persistent(M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, warps: int, subtile: bool) -> Case:
    def make(device: str) -> Call:
        kernel = plain(tutorial("09-persistent-matmul.py").matmul_kernel_tma_persistent)
        a, b = (values(*shape, device=device, dtype=FP16) for shape in ((M, K), (N, K)))
        c = torch.empty(M, N, device=device, dtype=FP16)
        boxes = ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN // (1 + subtile)]))
        given = [TensorDescriptor.from_tensor(x, box) for x, box in boxes]
        grid = (min(sms(), cdiv(M, BM) * cdiv(N, BN)),)
        return lambda: kernel[grid](*given, M, N, K, BLOCK_SIZE_M=BM, BLOCK_SIZE_N=BN, BLOCK_SIZE_K=BK,
                                    GROUP_SIZE_M=8, FP8_OUTPUT=False, EPILOGUE_SUBTILE=subtile, NUM_SMS=sms(),
                                    WARP_SPECIALIZE=False, num_stages=stages, num_warps=warps)  # fmt: skip

    what = f"tutorial 09 {M}x{N}x{K}"
    name = f"{what} {BM}x{BN}x{BK} s{stages} w{warps}{' subtile' if subtile else ''}"
    return Case(name, "tutorials", make, what)


def rms_norm(rows: int, columns: int) -> Case:
    def make(device: str) -> Call:
        with packages():
            from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel as kernel
            from liger_kernel.ops.utils import calculate_settings
        x, y = (values(rows, columns, device=device) for _ in "xy")
        w, rstd = values(columns, device=device), torch.empty(rows, device=device)
        block, warps = calculate_settings(columns)
        return lambda: kernel[(rows,)](y, columns, x, columns, w, 1, rstd, 1, columns, 1e-6, 0.0, casting_mode=0,
                                       elementwise_affine=True, BLOCK_SIZE=block, num_warps=warps)  # fmt: skip

    return Case(f"liger rms_norm {rows}x{columns}", "packages", make)


def cross_entropy(rows: int, columns: int) -> Case:
    def make(device: str) -> Call:
        with packages():
            from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel
        x = values(rows, columns, device=device)
        target = torch.randint(0, columns, (rows,), device=device)
        loss = torch.empty(rows, device=device)
        block = min(32768, power(columns))
        return lambda: kernel[(rows,)](x, columns, target, 1, None, loss, None, 1, None, 0, None, 0, columns, rows,
                                       float(rows), 0.0, -100, lse_square_scale=0.0, label_smoothing=0.0,
                                       reduction="mean", softcap=None, RETURN_Z_LOSS=False,
                                       RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False,
                                       BLOCK_SIZE=block, HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
                                       HAS_GRADIENTS=True, num_warps=32)  # fmt: skip

    return Case(f"liger cross_entropy {rows}x{columns}", "packages", make)


def chunk_o(batch: int, tokens: int, heads: int, d: int, BK: int, BV: int, warps: int) -> Case:
    def make(device: str) -> Call:
        with packages():
            from fla.ops.common.chunk_o import chunk_fwd_kernel_o

        kernel, BT = plain(chunk_fwd_kernel_o), 64
        q, k, v, o = (values(batch, tokens, heads, d, device=device) for _ in "qkvo")
        h = values(batch, tokens // BT, heads, d, d, device=device)
        g = -values(batch, tokens, heads, device=device, dtype=FP32).abs()
        grid = (cdiv(d, BV) * (tokens // BT), batch * heads)
        return lambda: kernel[grid](q, k, v, h, g, None, o, None, None, d**-0.5, tokens, H=heads, HV=heads, K=d,
                                    V=d, BT=BT, BK=BK, BV=BV, USE_G=True, USE_G_GAMMA=False, STATE_V_FIRST=False,
                                    IS_VARLEN=False, num_stages=3, num_warps=warps)  # fmt: skip

    what = f"fla chunk_o {batch}x{tokens}x{heads}x{d}"
    return Case(f"{what} {BK}x{BV} w{warps}", "packages", make, what)


def cases(blackwell: bool = False) -> list[Case]:
    if blackwell:  # published for a B200: tritonbench#1014
        return [
            attention(4, 48, t, 128, False, 128, 128, s, w, r)
            for t in (1024, 4096)
            for s, w, r in ((2, 4, True), (3, 8, False))
        ]
    return [
        matmul(4096, 4096, 4096, 128, 256, 64, 3, 8), matmul(4096, 4096, 4096, 128, 64, 32, 4, 4),
        matmul(2048, 2048, 2048, 128, 128, 32, 4, 4), matmul(8192, 8192, 1024, 128, 256, 64, 3, 8),
        matmul(1024, 1024, 8192, 64, 128, 32, 4, 4),
        attention(4, 32, 4096, 128, False, 128, 64, 3, 4), attention(4, 32, 4096, 128, False, 128, 128, 2, 8),
        attention(4, 32, 4096, 128, True, 128, 64, 3, 4), attention(4, 32, 4096, 64, False, 128, 64, 3, 4),
        attention(1, 32, 1024, 64, True, 64, 64, 3, 4),
        persistent(4096, 4096, 4096, 128, 256, 64, 3, 8, False), persistent(4096, 4096, 4096, 128, 128, 64, 4, 4, True),
        persistent(8192, 8192, 512, 128, 256, 64, 3, 8, True), persistent(8192, 8192, 2048, 128, 128, 64, 3, 8, False),
        persistent(2048, 2048, 4096, 128, 128, 64, 4, 8, False),
        *(rms_norm(*s) for s in ((16384, 4096), (4096, 8192), (8192, 2048), (2048, 16384), (1024, 4096))),
        *(cross_entropy(*s) for s in ((4096, 32000), (2048, 128256), (1024, 32768), (8192, 8192), (512, 50304))),
        chunk_o(8, 4096, 16, 128, 64, 64, 4), chunk_o(8, 4096, 16, 128, 32, 32, 2),
        chunk_o(2, 4096, 16, 128, 64, 64, 4), chunk_o(4, 8192, 16, 64, 64, 64, 4),
        chunk_o(1, 2048, 16, 128, 128, 128, 8),
    ]  # fmt: skip
