"""Speed of softsm on this machine: `python benchmarks/emulator.py [--json FILE]`, on an idle one, with the kernels of
an earlier run cached. Ratios are taken within one run; figures in CPU seconds say so, the others pass on the clock.

What must hold, and what is aimed at: ALU mix 200 (500) M warp instructions/s on one core; the 72 configurations of the
suite `seeds` on sm_100a, races checked, on two cores 30 s (15); attention of 16 heads x 1024 x 1024, causal, head dim
128, one launch on two cores 0.8 s (0.4); checking at most 2 times (1.5), and nothing when it is off; first use on a
machine 15 s (2); `make test` 4 minutes (3), with --tests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

ALU = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry mix(.param .u64 x, .param .u32 n)
{
  .reg .b32 %r<32>; .reg .f32 %f<32>; .reg .b64 %rd<8>; .reg .pred %p<4>; .shared .align 16 .b8 buffer[4096];
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mov.u32 %r3, 0; shl.b32 %r4, %r2, 2;
  mov.u32 %r5, buffer; add.u32 %r5, %r5, %r4; mov.f32 %f1, 0f3F000000; mov.f32 %f2, 0f3E800000; mov.f32 %f3, 0f3F000000;
  mov.f32 %f4, %f1; mov.f32 %f5, %f1; mov.f32 %f6, %f1; st.shared.f32 [%r5], %f1;
LOOP:
  fma.rn.f32 %f4, %f4, %f2, %f3; fma.rn.f32 %f5, %f5, %f2, %f6; add.u32 %r3, %r3, 1; mul.f32 %f7, %f4, %f2;
  ld.shared.f32 %f8, [%r5]; fma.rn.f32 %f8, %f8, %f2, %f3; ex2.approx.ftz.f32 %f9, %f6; add.f32 %f6, %f7, %f3;
  shl.b32 %r6, %r3, 3; mul.f32 %f7, %f7, %f2; max.f32 %f6, %f6, %f3; add.u32 %r6, %r6, 1;
  fma.rn.f32 %f3, %f3, %f2, %f2; add.f32 %f5, %f5, %f2; mov.b32 %r7, %f5; xor.b32 %r8, %r7, %r6;
  selp.f32 %f10, %f5, %f6, %p2; setp.lt.u32 %p1, %r3, %r1; @%p1 bra LOOP;
  mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.f32 [%rd3], %f5; ret;
}"""


def seconds(f, repeat: int = 5, clock=time.perf_counter) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = clock()
        f()
        best = min(best, clock() - start)
    return best


# Seven of the nineteen instructions of the loop make values that are never read; here the end reads them.
USED = "cvt.rn.f32.u32 %f11, %r8; " + "".join(f"add.f32 %f5, %f5, %f{i}; " for i in (7, 8, 9, 10, 11))


def instructions(text: str) -> float:
    """Warp instructions per second."""
    import softsm

    x, n = np.zeros(32, np.float32), 200_000
    kernel = softsm.load(text)
    steps = kernel.launch(1, 32, [x, n]).steps  # the loop's blocks are compiled
    return steps / seconds(lambda: kernel.launch(1, 32, [x, n]), clock=time.process_time)


def alu_mix() -> tuple[float, float, float]:
    """(warp instructions per second, with every result used, the same done by one NumPy call per instruction)."""
    engine, used = instructions(ALU), instructions(ALU.replace("mul.wide", USED + "mul.wide"))
    registers = np.zeros((8, 32), np.float32)
    mask = np.ones(32, bool)

    def numpy_loop():
        for _ in range(2000):
            np.copyto(registers[3], registers[0] * registers[1] + registers[2], where=mask)

    return engine, used, 2000 / seconds(numpy_loop, clock=time.process_time)


def mma() -> float:
    """Seconds of one bf16 128x256x16 product, operands in 128-byte-swizzled shared memory, D in tensor memory."""
    from types import SimpleNamespace

    from softsm.isa import tcgen05, tcgen05_product
    from softsm.memory import swizzle
    from softsm.memory.tensor_memory import TensorMemory

    def descriptor(address: int) -> swizzle.Descriptor:
        """K-major, 128-byte swizzle, 1024 bytes between groups of eight rows."""
        return swizzle.decode(address >> 4 | (1024 >> 4) << 32 | 1 << 46 | 2 << 61, True)

    shape = tcgen05.decode_instruction(0x08400490, "f16", 1, False)  # bf16 x bf16 -> f32, M 128, N 256, both K-major
    cta = SimpleNamespace(shared=np.zeros(1 << 17, np.uint8), tmem=TensorMemory())
    product = tcgen05.Product(shape, False, False, 0, 0, descriptor(1024), 0, descriptor(1024 + 128 * 128), add=True)
    plan = tcgen05.plan_of(product)  # once for each instruction and its operands
    multiply = tcgen05_product.multiply
    multiply(product, plan, [cta])  # compile
    return seconds(lambda: [multiply(product, plan, [cta]) for _ in range(20)], clock=time.process_time) / 20


def attention() -> tuple[float, float]:
    """Seconds of one launch: (head dim 64, 128 x 512, one head; head dim 128, 1024 x 1024 causal, 16 heads)."""
    # deterministic: short key ranges are not split, so one launch is the forward kernel alone
    import torch

    import dsv4

    def run(heads, t, s, causal, head_dim, repeat):
        q, k, v = (torch.randn(1, n, heads, head_dim).bfloat16() for n in (t, s, s))
        options = dict(causal=causal, deterministic=True, backend="softsm")
        dsv4.fmha(q[:, :8], k, v, **options)  # compile
        return seconds(lambda: dsv4.fmha(q, k, v, **options), repeat)

    return run(1, 128, 512, False, 64, 5), run(16, 1024, 1024, True, 128, 3)


def checking(arch: str) -> tuple[float, float, float]:
    """A whole attention kernel (4 heads, 512 x 512, head dim 64) on one core, CPU time: (checked / plain, checked /
    plain with asynchronous operations as late as the checks have them, plain after checking / plain before). All kinds
    take turns, so that what else the machine does falls on all."""
    import torch

    import dsv4
    import softsm
    from softsm.engine.options import options

    q, k, v = (torch.randn(1, 512, 4, 64).bfloat16() for _ in range(3))

    def plain():
        with softsm.use(arch):
            dsv4.fmha(q, k, v, deterministic=True, backend="softsm")

    def late():
        with options(order="latest"):
            plain()

    def checked():
        with softsm.checking() as report:
            plain()
        assert not report, report

    before, os.environ["SOFTSM_PROCESSES"] = os.environ.get("SOFTSM_PROCESSES"), "1"
    try:
        plain()
        first = seconds(plain, 7, time.process_time)
        late()
        checked()
        kinds = (plain, late, checked)
        times = [[seconds(kind, 1, time.process_time) for kind in kinds] for _ in range(7)]
    finally:
        if before is None:
            del os.environ["SOFTSM_PROCESSES"]
        else:
            os.environ["SOFTSM_PROCESSES"] = before
    off, latest, on = (min(column) for column in zip(*times))
    return on / off, on / latest, off / first


def seeds() -> tuple[float, float]:
    """(seconds, CPU seconds) of the suite `seeds` on sm_100a, races checked, by two processes."""
    command = [sys.executable, "-m", "dsv4", "verify", "--suite", "seeds", "--backend", "softsm", "--arch", "sm_100a"]

    def used() -> float:
        times = os.times()
        return times.children_user + times.children_system

    cpu, start = used(), time.perf_counter()
    subprocess.run([*command, "-j", "2"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, used() - cpu


def cold() -> tuple[float, float]:
    """(import time, first compilation into an empty cache), in fresh processes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import softsm"], check=True)
    imported = time.perf_counter() - start
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    imported -= time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        code = f"import softsm, numpy; softsm.load({ALU!r}).launch(1, 32, [numpy.zeros(32, numpy.float32), 1])"
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            env={**os.environ, "SOFTSM_CACHE": folder},
            stderr=subprocess.DEVNULL,
        )
        compiled = time.perf_counter() - start
    return imported, compiled


def make_test() -> float:
    """Seconds of `make test`."""
    start = time.perf_counter()
    subprocess.run(["make", "test"], check=True, cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return time.perf_counter() - start


def main(
    json_file: str = typer.Option(None, "--json"),
    skip_cold: bool = False,
    skip_seeds: bool = False,
    tests: bool = typer.Option(False, help="time `make test` too"),
) -> None:
    rows: list[tuple[str, float, str]] = []
    engine, used, loop = alu_mix()
    rows.append(("ALU mix, M warp instructions/s", engine / 1e6, ">= 200 (aim 500)"))
    rows.append(("  with every result used", used / 1e6, ">= 200 (aim 500)"))
    rows.append(("  against one NumPy call per instruction", engine / loop, ">= 100 (60 without AVX-512)"))
    if not skip_seeds:
        clock, cpu = seeds()
        rows.append(("the 72 seed configurations, sm_100a, races checked, two processes, s", clock, "<= 30 (aim 15)"))
        rows.append(("  CPU s", cpu, ""))
    one, many = attention()
    rows.append(("attention hd 128, 1024 x 1024 causal, 16 heads, s", many, "<= 0.8 (aim 0.4)"))
    rows.append(("attention hd 64, 128 x 512, 1 head, s", one, "< 0.05"))
    for arch in ("sm_100a", "sm_90a"):
        ratio, late, after = checking(arch)
        rows.append((f"checking on, against off, {arch}, attention hd 64, 4 heads, 512 x 512", ratio, "<= 2 (aim 1.5)"))
        rows.append((f"  {arch}: against off with the same order of completion", late, ""))
        rows.append((f"  {arch}: off after it was on, against off before", after, "1"))
    rows.append(("bf16 MMA 128x256x16, us", mma() * 1e6, "<= 100"))
    if not skip_cold:
        imported, compiled = cold()
        rows.append(("first use on a machine: compilation, s", compiled, "<= 15 (aim 2)"))
        rows.append(("import softsm, s", imported, "< 1"))
    rows.append(("make test, minutes", make_test() / 60 if tests else math.nan, "<= 4 (aim 3)"))
    table = Table(title="softsm on this machine", title_justify="left")
    for name in ("what", "measured", "must"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, value, target in rows:
        table.add_row(name, "not run" if math.isnan(value) else f"{value:.3g}", target)
    Console().print(table)
    if json_file:
        with open(json_file, "w") as f:
            json.dump({name.strip(): value for name, value, _ in rows if not math.isnan(value)}, f, indent=1)


if __name__ == "__main__":
    typer.run(main)
