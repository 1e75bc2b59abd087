"""Figures that Triton's Gluon tutorials print for a B200 (one or two for a GB200), beside what the model predicts.

The tutorials are not kept here. `--published FOLDER` names python/tutorials/gluon of Triton's repository at f4fca2c
(the figures below are in the comments of those files); example 04 is in python/examples/gluon beside it. Triton 3.9
compiles them. Kernels and launches are theirs, unmodified; tensors are left empty, since no time depends on their
values. Figures of one kernel differ by 10 to 15 % from run to run (cuBLAS beside them is printed three times). The
"TB/s" of tutorials 02, 03, 04 and 08 are 2^40 bytes.

Parameters of the B200 were fitted on the tutorials in FITTED; the others are the test.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from softsm_time.case import Case

FITTED = ("02", "06", "08", "11")
N = 8192
KS = (512, 1024, 2048, 4096, 8192, 16384)
TIB = 1 << 40


@dataclasses.dataclass(frozen=True)
class Published(Case):
    us: float = 0.0
    gpu: str = "b200"

    @property
    def fitted(self) -> bool:
        return self.group.startswith("tutorial") and self.group[-2:] in FITTED


def by_flops(tflops: float, K: int) -> float:
    return 2 * N * N * K / tflops * 1e-6


def by_bytes(rate: float, moved: int, unit: float) -> float:
    return moved / (rate * unit) * 1e6


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def tutorials(folder: Path) -> Callable[[str], Any]:
    """A function that imports one of them, or of the examples beside them."""
    for path in (folder, folder.parents[1] / "examples" / "gluon"):
        if str(path) not in sys.path:
            sys.path.append(str(path))
    return importlib.import_module


def matmuls(module: Callable[[str], Any]) -> Iterator[tuple[str, str, float, int, Callable]]:
    """tutorial, configuration, TFLOP/s, K, function of A, B, C"""
    K = 16384
    for tile, depth, rate in ((64, 64, 671.77), (64, 128, 660.93), (64, 256, 526.1), (128, 64, 898.61),
                              (128, 128, 1019.46), (128, 256, 563.13)):  # fmt: skip
        call = lambda a, b, c, t=tile, d=depth: module("06-tcgen05").blocked_matmul(a, b, c, t, t, d, False, 4)  # noqa: E731
        yield "06", f"blocked {tile}x{tile}x{depth}", rate, K, call
    for depth, warps, rate in ((64, 4, 1000.51), (64, 8, 1113.49), (128, 4, 1040.27), (128, 8, 1011.47)):
        call = lambda a, b, c, d=depth, w=warps: module("06-tcgen05").blocked_matmul_pipelined(a, b, c, 128, 128, d, w)  # noqa: E731
        yield "06", f"pipelined 128x128x{depth} w{warps}", rate, K, call
    for depth, buffers, warps, one, many in (
        (128, 2, 4, 735.96, 712.25),
        (128, 2, 8, 697.97, 686.64),
        (64, 3, 4, 1054.0, 1032.16),
        (64, 3, 8, 973.94, 938.81),
        (64, 4, 8, 1072.83, 1071.46),
    ):
        given = (128, 256, depth, buffers, warps)
        call = lambda a, b, c, g=given: module("07-persistence").matmul_pipelined(a, b, c, *g)  # noqa: E731
        yield "07", f"128x256x{depth} b{buffers} w{warps}", one, K, call

        def persistent(a, b, c, g=given):
            t = module("07-persistence")
            t.persistent_matmul(a, b, c, *g, t.PersistentTileScheduler)

        yield "07", f"persistent 128x256x{depth} b{buffers} w{warps}", many, K, persistent
    rates = ((615.86, 828.7, 993.5), (997.16, 1077.28, 1173.31), (1152.74, 1190.55, 1133.37),
             (1164.05, 1120.92, 1143.47), (1160.93, 1074.97, 1185.4), (1185.62, 1096.34, 1296.93))  # fmt: skip
    tile = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_buffers=4, num_warps=4)
    for K, found in zip(KS, rates):
        call = lambda a, b, c: module("07-persistence").matmul_pipelined(a, b, c, **tile)  # noqa: E731
        yield "07", "128x256x64 b4 w4", found[0], K, call
        for name, rate in zip(("persistent_matmul", "persistent_matmul_pipelined"), found[1:]):

            def grouped(a, b, c, name=name):
                t = module("07-persistence")
                getattr(t, name)(a, b, c, **tile, SchedulerImpl=t.GroupedPersistentTileScheduler(8))

            yield "07", name.replace("_matmul", "").replace("_", " ") + " in groups of 8", rate, K, grouped
    for K, rate in zip(KS, (1004.18, 1182.61, 1313.71, 1317.58, 1291.56, 1256.74)):

        def roles(a, b, c):
            t = module("08-warp-specialization")
            t.matmul_warp_specialized(
                a, b, c, **tile, SUBTILE_FACTOR=4, SchedulerImpl=t.t7.GroupedPersistentTileScheduler(8)
            )

        yield "08", "warp-specialised", rate, K, roles
    for K, rate in zip(KS, (1096.31, 1306.07, 1379.8, 1444.26, 1302.33, 1292.4)):
        yield "14", "pairs of CTAs", rate, K, lambda a, b, c: module("14-multicta").matmul_multicta(a, b, out=c)


def scaled(module: Callable[[str], Any]) -> Iterator[Published]:
    rates = {
        "contiguous scales": (663.28, 1435.05, 741.82, 1303.69),
        "packed scales": (900.97, 2081.76, 1000.48, 2002.05),
        "tcgen05.cp": (929.07, 2147.76, 1035.6, 2092.39),
        "pipelined": (2018.58, 3916.62, 2144.05, 3842.19),
        "warp-specialised": (2378.49, 4870.97, 2615.73, 4846.83),
    }
    formats = (("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"))

    def make(device: str, how: str, a_format: str, b_format: str):
        t = module("11-tcgen05-mma-scaled")
        vec = 16 if a_format == "nvfp4" else 32
        depth = 256 if "fp4" in a_format and "fp4" in b_format else 128

        def operand(form: str) -> tuple[torch.Tensor, torch.Tensor]:
            fp4 = form != "mxfp8"
            values = empty(N, N // (1 + fp4), dtype=torch.uint8 if fp4 else torch.float8_e4m3fn)
            return values, empty(N, N // vec, dtype=torch.float8_e4m3fn if form == "nvfp4" else torch.uint8)

        (a, sa), (b, sb) = operand(a_format), operand(b_format)
        if how == "contiguous scales":
            sa, sb = (t.relayout_scales_contiguous(s, n, depth, vec) for s, n in ((sa, 128), (sb, 256)))
            return lambda: t.mma_scaled_contig(a, b, sa, sb, vec, 128, 256, depth)
        sa, sb = (t.swizzle_scales_packed_block(s, vec) for s in (sa, sb))
        if how in ("packed scales", "tcgen05.cp"):
            call = t.mma_scaled_packed_block if how == "packed scales" else t.mma_scaled_tcgen05_copy
            return lambda: call(a, b, sa, sb, vec, 128, 256, depth)
        kernel = t.mma_scaled_pipelined_kernel if how == "pipelined" else t.mma_scaled_warp_specialized_kernel
        return lambda: t.mma_scaled(a, b, sa, sb, vec, kernel)

    for how, found in rates.items():
        for (a, b), rate in zip(formats, found):
            run = partial(make, how=how, a_format=a, b_format=b)
            yield Published(f"11 {how} {a} x {b}", "tutorial 11", run, us=by_flops(rate, N))


def example(module: Callable[[str], Any]) -> Iterator[Published]:
    """Example 04, with the configurations that its file fixes; figures of triton#9697."""
    rates = {
        ("mxfp8", 8192): (2526.0, 2895.0),
        ("mxfp8", 16384): (2409.0, 2755.0),
        ("nvfp4", 8192): (4782.0, 5730.0),
        ("nvfp4", 16384): (4837.0, 5562.0),
    }

    def make(device: str, form: str, side: int, variant: str):
        t = module("04-2cta-block-scale-matmul")
        fp4, vec = form == "nvfp4", 16 if form == "nvfp4" else 32
        a, b = (empty(side, side // (1 + fp4), dtype=torch.uint8 if fp4 else torch.float8_e4m3fn) for _ in "ab")
        scales = empty(side, side // vec, dtype=torch.float8_e4m3fn if fp4 else torch.uint8)
        sa, sb = (t.swizzle_scales_packed_block(scales) for _ in "ab")
        return t.make_fn(variant, a, b, sa, sb, vec, form, side)

    for (form, side), found in rates.items():
        for variant, rate in zip(("1cta", "2cta"), found):
            run = partial(make, form=form, side=side, variant=variant)
            what = "one CTA" if variant == "1cta" else "pairs of CTAs"
            us = 2 * side**3 / rate * 1e-6
            yield Published(f"example 04 {what} {form} {side}", "example 04", run, us=us)


def moved(module: Callable[[str], Any]) -> Iterator[Published]:
    """Copies, sums and softmax."""
    words = 1 << 29  # theirs has 2^31: the rate is the same
    for r, rate in zip((1, 2, 4, 8, 16), (6.574, 6.476, 6.474, 6.502, 6.214)):

        def copy(device: str, r=r):
            t = module("02-layouts")
            layout = t.gl.BlockedLayout([r], [32], [4], [0])
            x, y = (empty(words, dtype=torch.float32) for _ in "xy")
            return lambda: t.memcpy_1d_impl(x, y, XBLOCK=2048, layout=layout, num_warps=4)

        yield Published(f"02 copy, {r} in a row", "tutorial 02", copy, us=by_bytes(rate, 8 * words, TIB))
    side = 32768
    every = 12 * side * side

    def add(device: str, tutorial: str, name: str, *given: Any, plain_shared: bool = False):
        t = module(tutorial)
        a, b, c = (empty(side, side, dtype=torch.float32) for _ in "abc")
        layout = [t.gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])] if plain_shared else []
        return lambda: getattr(t, name)(a, b, c, *layout, *given)

    for what, tutorial, rate, gpu, run in (
        ("sum", "03", 1.48, "b200", partial(add, tutorial="03-async-copy", name="elementwise_add")),
        ("sum, cp.async", "03", 3.97, "b200",
         partial(add, tutorial="03-async-copy", name="elementwise_add_cpasync", plain_shared=True)),
        ("sum, two buffers", "03", 4.2, "b200",
         lambda d: add(d, "03-async-copy", "elementwise_add_pipelined", 32, 64, 2)),
        ("sum, three buffers", "03", 4.2, "b200",
         lambda d: add(d, "03-async-copy", "elementwise_add_pipelined", 32, 64, 3)),
        ("sum, TMA 32x64x2", "04", 5.5, "b200", lambda d: add(d, "04-tma", "elementwise_add_tma", 32, 64, 2)),
        ("sum, TMA 64x128x3", "04", 5.9, "b200", lambda d: add(d, "04-tma", "elementwise_add_tma", 64, 128, 3)),
        ("sum, warp-specialised", "08", 5.98, "gb200",
         lambda d: add(d, "08-warp-specialization", "elementwise_add_warp_specialized", 64, 128, 3, 1, 4)),
    ):  # fmt: skip
        yield Published(f"{tutorial} {what}", f"tutorial {tutorial}", run, us=by_bytes(rate, every, TIB), gpu=gpu)
    rates = (3661.46, 6746.45, 6740.5, 6920.01, 7065.25, 7136.76, 7157.74, 6545.11, 6057.26)
    for columns, rate in zip((256 << n for n in range(len(rates))), rates):

        def softmax(device: str, columns=columns):
            t = module("14-multicta")
            x, out = (empty(side, columns, dtype=torch.float32) for _ in "xo")
            return lambda: t.multicta_softmax_f32(x, out)

        us = by_bytes(rate, 8 * side * columns, 1e9)
        yield Published(f"14 softmax {side}x{columns}", "tutorial 14", softmax, us=us)


def cases(folder: Path) -> list[Published]:
    module = tutorials(folder)
    out = []
    for tutorial, what, rate, K, call in matmuls(module):

        def make(device: str, K=K, call=call):
            a, b, c = empty(N, K), empty(K, N), empty(N, N)
            return lambda: call(a, b, c)

        out.append(Published(f"{tutorial} {what} K={K}", f"tutorial {tutorial}", make, us=by_flops(rate, K)))
    for clc, rate in ((False, 1040.13), (True, 1080.74)):

        def launch_control(device: str, clc=clc):
            a, b, c = empty(N, N), empty(N, N), empty(N, N)
            return lambda: module("12-cluster-launch-control").run_matmul_kernel(a, b, c, use_clc=clc)

        name = f"12 {'cluster launch control' if clc else 'static'} K={N}"
        out.append(Published(name, "tutorial 12", launch_control, us=by_flops(rate, N), gpu="gb200"))
    return [*out, *scaled(module), *moved(module), *example(module)]
