"""M7, M8: interval and latency of instructions. One dependent chain gives the latency; 16 warps with 8 chains each the
interval, in cycles of one of the four schedulers per warp instruction."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, loop

# name -> (PTX on the chain register {d}, SASS opcode that must be there, warp instructions it counts as)
OPERATIONS = {
    "ffma": ("fma.rn.f32 {d}, {d}, %f300, %f301;", "FFMA", 1),
    "fadd": ("add.f32 {d}, {d}, %f300;", "FADD", 1),
    "fmul": ("mul.f32 {d}, {d}, %f300;", "FMUL", 1),
    "fmnmx": ("max.f32 {d}, {d}, %f300; min.f32 {d}, {d}, %f301;", "FMNMX", 2),
    "iadd3": ("add.s32 {d}, {d}, %r50; xor.b32 {d}, {d}, %r51;", "IADD3", 2),
    "lop3": ("and.b32 %f310, {d}, %r50; xor.b32 {d}, %f310, {d}; shf.l.wrap.b32 {d}, {d}, {d}, 3;", "SHF", 2),
    "imad": ("mad.lo.s32 {d}, {d}, %r50, %r51;", "IMAD", 1),
    "imad.hi": ("mul.hi.u32 {d}, {d}, %r50;", "IMAD.HI", 1),
    "prmt": ("prmt.b32 {d}, {d}, %r50, 0x2541;", "PRMT", 1),
    "setp+sel": ("setp.lt.s32 %p5, {d}, %r50; selp.b32 {d}, %r51, {d}, %p5;", "SEL", 2),
    "setp.s64+sel": (
        "{{ .reg .b64 w; .reg .pred q; mov.b64 w, {{{d}, %r50}}; setp.lt.s64 q, w, 123456789012; "
        "selp.b32 {d}, %r51, {d}, q; }}",
        "SEL",
        3,
    ),
    "setp+and+sel": (
        "{{ .reg .pred q; setp.lt.s32 q, {d}, %r50; setp.gt.and.s32 q, {d}, %r51, q; selp.b32 {d}, %r51, {d}, q; }}",
        "SEL",
        3,
    ),
    "imnmx": ("max.s32 {d}, {d}, %r50; min.s32 {d}, {d}, %r51;", "MNMX", 2),
    "ex2": ("ex2.approx.ftz.f32 {d}, {d};", "MUFU.EX2", 1),
    "rcp": ("rcp.approx.ftz.f32 {d}, {d}; add.f32 {d}, {d}, %f300;", "MUFU.RCP", 1),
    "rsqrt": ("rsqrt.approx.ftz.f32 {d}, {d};", "MUFU.RSQ", 1),
    "lg2": ("lg2.approx.ftz.f32 {d}, {d};", "MUFU.LG2", 1),
    "tanh": ("tanh.approx.f32 {d}, {d};", "MUFU.TANH", 1),
    "f2fp bf16x2": ("cvt.rn.bf16x2.f32 {d}, {d}, %f300;", "F2FP.BF16", 1),
    "f2fp f16x2": ("cvt.rn.f16x2.f32 {d}, {d}, %f300;", "F2FP.F16", 1),
    "f2fp e4m3 to f16": ("mov.b32 {{%h1, %h2}}, {d}; cvt.rn.f16x2.e4m3x2 {d}, %h1;", "F2FP.F16.E4M3", 1),
    "f2fp f32 to e4m3": ("cvt.rn.satfinite.e4m3x2.f32 %h1, {d}, %f300; mov.b32 {d}, {{%h1, %h1}};", "F2FP", 2),
    "f16 to f32": ("mov.b32 {{%h1, %h2}}, {d}; cvt.f32.f16 {d}, %h1;", "HADD2.F32", 1),
    "hfma2.bf16": ("fma.rn.bf16x2 {d}, {d}, %r50, %r51;", "HFMA2.BF16", 1),
    "i2f": ("cvt.rn.f32.s32 {d}, {d};", "I2F", 1),
    "f2i": ("cvt.rzi.s32.f32 {d}, {d};", "F2I", 1),
    "popc": ("popc.b32 {d}, {d};", "POPC", 1),
    "shfl": ("shfl.sync.bfly.b32 {d}, {d}, 1, 31, -1;", "SHFL", 1),
    "vote": ("setp.lt.s32 %p5, {d}, %r50; vote.sync.ballot.b32 {d}, %p5, -1;", "VOTE", 2),
    "redux": ("redux.sync.add.s32 {d}, {d}, -1;", "REDUX", 1),
    "bra": ("add.s32 {d}, {d}, %r50;", "IADD3", 1),
}
SETUP = """
  add.u32 %r50, %thread, 3; mov.u32 %r51, 0x01234567; xor.b32 %r51, %r51, %thread;
  cvt.rn.f32.u32 %f300, %thread; mov.b32 %f301, 0x3f7fffff;
"""


def kernel(operation: str, chains: int, threads: int, unroll: int) -> str:
    text = OPERATIONS[operation][0]
    body = "".join(f"  {text.format(d=f'%f{c}')}\n" for _ in range(unroll) for c in range(chains))
    start = "".join(f"  add.u32 %f{c}, %thread, {c + 1};\n" for c in range(chains))
    end = "".join(f"  xor.b32 %acc, %acc, %f{c};\n" for c in range(chains))
    return frame(threads, loop(body) + end, SETUP + start)


class Instructions(Bench):
    group = "instructions"

    def kernels(self) -> Iterator[tuple[str, str]]:
        for op in OPERATIONS:
            yield f"{op} latency", kernel(op, 1, 32, 1 if op == "bra" else 64)
            yield f"{op} interval", kernel(op, 8, 512, 8)
            if op in ("ffma", "ex2", "f2fp bf16x2", "fmnmx", "imad"):
                yield f"{op} interval, 4 warps", kernel(op, 8, 128, 8)

    def rows(self, run) -> Iterator[Row]:
        for name, text in self.kernels():
            op = name.rpartition(" latency")[0] or name.partition(" interval")[0]
            with self.point(name) as report:
                chains = name.endswith("latency")
                threads = 32 if chains else 128 if name.endswith("4 warps") else 512
                n = 200
                stamps = run(text, 1 if chains else 132, threads, n=n)
                per_warp = n * (64 if not chains else 1 if op == "bra" else 64) * (OPERATIONS[op][2])
                cycles = stamps.cycles()
                value = cycles / per_warp if chains else cycles / (per_warp * threads / 128)
                yield report(value, "cycles", stamps, total=cycles)
