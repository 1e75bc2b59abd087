"""The model's parameters of each GPU: every number with its unit, its bounds and its source.

Confidence: A two or more independent measurements agree, or ours alone on the GPU itself; B one careful measurement;
C one weak source or derived; D sources disagree or nothing is known. None of these was fitted on a validation kernel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    value: float
    low: float
    high: float
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    clock: float  # GHz, highest
    values: dict[str, Parameter]

    def __getitem__(self, name: str) -> float:
        return self.values[name].value


HUT = "flash-vla hardware-unit-test, H100 SXM"
FGS = "FlashGPU-Sim, arXiv 2609.15311, H100 SXM at 1500 MHz"
SA = "SemiAnalysisAI/microbench-blackwell, B200"
QRC = "ademeure/QuickRunCUDA, B300"
BPG = "CUDA Best Practices Guide 13.4"
# An upper bound: a CTA of its sparse prefill gathers four rows 272 times for 128 keys (K 16 x 9, V 32 x 4), 17.8 MFLOP.
# At the published 1450 TFLOP/s on 148 SMs that is 1.82 us: 2614 cycles at 1.437 GHz, the model's clock at this rate.
FLASHMLA = "derived from deepseek-ai/FlashMLA, sm100 sparse prefill, 128 heads: 1450 TFLOP/s on a B200"
# A lower bound: 4096 queries with 64 heads and 1024 more rows each take 1.864 ms more and add 8.6 GB to fp32 sums: that
# is 4.6 TB/s, or 2.44 sectors/ns of a slice if there are as many slices as an H200 has (atomics.py).
CUDNN = "derived from cuDNN frontend's DSA backward on a B200, top-k 1024 and 2048 (cudnn-frontend#318)"
TMEM = "derived: accumulators of tcgen05.mma are in tensor memory"
HUE = "arXiv 2503.20481, Ampere to RTX Blackwell"
LU = "arXiv 2402.13499 and 2501.12084, H800"
OURS = "benchmarks/microbench, H200, 2026-11-15"
STRIPS = "benchmarks/microbench, group strips, H200, 2026-11-16"
TURNS = "benchmarks/microbench, groups products and turns, H200, 2026-11-16"
OVERLAP = "benchmarks/microbench, group overlap, H200, 2026-11-16"
GLUON = "Triton's Gluon tutorials 02, 06, 08 and 11, B200 (benchmarks/timing.py --published)"
# The lowest clock at which a B200 reaches its measured 1613 TFLOP/s in bf16 (FlashAttention-4, arXiv 2603.05451); the
# tutorials alone give 1.2, with hardly smaller errors.
CLOCK = "Triton's Gluon tutorials and FlashAttention-4, B200"
EVERYDAY = "benchmarks/microbench, group everyday, H200, 2026-11-17"
LIMITS = "benchmarks/microbench, group shared limits, H200, 2026-11-17"
DRAWN = "benchmarks/timing.py, kernels of development seeds 1 to 505, H200, 2026-11-17"
EXCHANGE = "benchmarks/softsm_time/parts.py, scan, H200, 2026-11-18"
COLD = "benchmarks/microbench, group cold, H200, 2026-11-19"
SUMS = "benchmarks/microbench, group sums, H200, 2026-11-19"
DEPENDENTS = "benchmarks/microbench, group dependents, H200, 2026-11-16"
CLOSE = "cycles a product is held up by an instruction within two cycles of the one before"


def _p(
    value: float, unit: str, source: str, confidence: str, low: float | None = None, high: float | None = None
) -> Parameter:
    return Parameter(value, value if low is None else low, value if high is None else high, unit, source, confidence)


HOPPER = {
    "sms": _p(132, "count", "driver", "A"),
    "interval.control": _p(1, "cycles", OURS, "A"),
    "interval.fma": _p(1.02, "cycles", OURS, "A"),
    "interval.fma2": _p(2.0, "cycles, two results", QRC, "B"),  # sm_100a only
    "interval.alu": _p(2.0, "cycles", OURS, "A"),
    "interval.imad": _p(2.0, "cycles", OURS, "A"),
    "interval.mufu": _p(8.0, "cycles", OURS, "A"),
    "interval.half": _p(2.0, "cycles", OURS, "A", 1.1, 2.0),
    "interval.uniform": _p(2, "cycles", QRC, "C", 1, 4),
    "interval.memory": _p(4.0, "cycles", OURS, "A"),
    "interval.store.64": _p(6.3, "cycles", STRIPS, "C", 4.2, 8.0),  # between 4.2 of 32 bits and that of 128
    "interval.store.128": _p(10.45, "cycles", STRIPS, "A"),
    "interval.convert": _p(8.0, "cycles", OURS, "A"),
    "interval.pack": _p(2.0, "cycles", OURS, "A"),
    "interval.hmma": _p(6.3, "cycles", HUT, "A"),
    "interval.fp64": _p(2, "cycles", BPG, "A"),
    "latency.alu": _p(4.1, "cycles", OURS, "A"),
    "latency.mufu": _p(17.0, "cycles", OURS, "A"),
    "latency.shfl": _p(24.0, "cycles", OURS, "A"),
    "latency.lds": _p(29.0, "cycles", OURS, "A"),
    "latency.s2r": _p(20, "cycles", FGS, "C"),
    "latency.r2ur": _p(9, "cycles", FGS, "C"),
    "latency.ldc": _p(8, "cycles", FGS, "C"),
    "latency.atoms": _p(32.0, "cycles", OURS, "A"),
    "latency.hmma": _p(25, "cycles", HUT, "A"),
    "latency.vote": _p(8.6, "cycles", OURS, "A"),
    "latency.redux": _p(44.0, "cycles", OURS, "A"),
    "latency.uniform": _p(6, "cycles", FGS, "C"),
    "latency.convert": _p(17.0, "cycles", OURS, "A"),
    "latency.pack": _p(4.1, "cycles", OURS, "A"),
    "issue": _p(1.1, "cycles of a scheduler that warps share, an instruction", DRAWN, "B", 1.0, 1.2),  # FFMA: 1.02 up
    "operands": _p(12, "cycles until a memory instruction has read its registers", HUE, "C", 9, 20),
    "membar": _p(9.1, "cycles", OURS, "A", 9, 94),
    "product.issue": _p(8, "cycles", FGS, "B", 4, 17),
    "product.rs.8": _p(16.8, "cycles of a product with A in registers, N = 8", OURS, "A"),
    "product.rs.16": _p(17.9, "cycles", OURS, "A"),
    "product.rs.32": _p(21.9, "cycles", OURS, "A"),
    "product.rs.64": _p(35.3, "cycles", OURS, "A"),
    "product.tail": _p(44.0, "cycles", OURS, "A", 40, 56),
    "product.wait": _p(10.0, "cycles", OURS, "A", 6, 11),  # groups of 1 to 8 products, wait 0 and wait 1
    "product.wide": _p(12.0, "cycles", OURS, "A", 11, 12),  # more of a tail with N = 256
    "product.depth": _p(6, "products", FGS, "B"),
    "mbarrier.try": _p(30.0, "cycles", OURS, "B", 20, 43),
    "mbarrier.arrive": _p(12.0, "cycles", OURS, "B", 8, 29),
    "mbarrier.wake": _p(10.0, "cycles", OURS, "B", 5, 43),
    "bar.sync": _p(12.2, "cycles", OURS, "A"),
    "bar.arrival": _p(2.0, "cycles", OURS, "A"),
    "tma.issue": _p(30.0, "cycles", OURS, "B", 15, 65),
    "tma.interval": _p(25.0, "cycles", OURS, "A", 15, 42),
    "tma.gather": _p(25.0, "cycles", OURS, "C", 15, 42),  # sm_100a only
    "tma.l2": _p(125.0, "ns", OURS, "B", 110, 180),
    "tma.hbm": _p(390.0, "ns", OURS, "B", 330, 410),
    "tma.port": _p(0.0, "share", OURS, "A", 0, 1),
    "load.l1": _p(34, "cycles", LU, "B"),
    "load.l2": _p(170.0, "ns", DRAWN, "B", 130, 210),
    "load.hbm": _p(415.0, "ns", DRAWN, "B", 320, 430),  # 330 of one lane alone, one after another
    "load.idle": _p(0.8, "times, of a CTA that is alone", OURS, "B", 0.75, 0.9),  # 330 ns of a lane alone
    "hbm.slowest": _p(65.0, "ns of a wait for 16 KB or more", OURS, "B", 50, 110),  # 8, 16, 32 KB: copies, 1 CTA
    "hbm.busy": _p(250.0, "ns, times the cube of its use", OURS, "B", 188, 290),  # gathers: 443 at 53 %, 575 at 82 %
    "l2.busy": _p(500.0, "ns, times the cube of its use", DRAWN, "B", 0, 800),
    "sm.rate": _p(107.0, "bytes/cycle", OURS, "A", 98, 120),
    "l2.rate": _p(9100.0, "bytes/ns", OURS, "A", 8500, 10100),
    "hbm.rate": _p(4600.0, "bytes/ns", OURS, "A", 4400, 4650),
    "hbm.write": _p(4400.0, "bytes/ns", OURS, "A", 4350, 4760),
    "l2.parts": _p(79.0, "parts of lines/ns that threads write", EVERYDAY, "A", 64, 80),  # st.32 scattered over 8 MB
    "hbm.mixed": _p(3900.0, "bytes/ns written beside reads", DRAWN, "B", 3800, 4400),
    "hbm.rows": _p(2700.0, "bytes/ns written by CTAs along rows of their own, 2 KB at a time", DRAWN, "B", 2300, 3200),
    "hbm.rows.wide": _p(3450.0, "bytes/ns, more at a time", DRAWN, "B", 3200, 3900),
    "hbm.piece": _p(104.0, "bytes that a sector takes which is read alone", DRAWN, "B", 64, 110),
    "atomic.slice": _p(1.8, "sectors/ns of a slice of L2", EVERYDAY, "A", 1.6, 1.9),
    "atomic.device": _p(1500.0, "bytes/ns of sums that L2 brings from device memory and evicts", SUMS, "A", 1400, 1800),
    "atomic.latency": _p(495.0, "cycles", EVERYDAY, "B", 450, 570),
    "exchange": _p(1250.0, "ns of a load behind stores to lines under way", EXCHANGE, "B", 950, 1600),
    "exchange.line": _p(0.225, "ns more for each of these lines", EXCHANGE, "B", 0.17, 0.3),
    "membar.gpu": _p(600.0, "cycles", LIMITS, "B", 300, 800),
    "cta.rate": _p(1.66, "CTAs/ns of the GPU", DRAWN, "A", 1.6, 1.7),
    "l2.bytes": _p(60e6, "bytes", "driver", "A"),
    "l2.dirty": _p(7e6, "bytes still there when a kernel ends", DRAWN, "B", 4e6, 10e6),
    "l2.held": _p(26e6, "bytes that random reads find again", STRIPS, "A", 23e6, 29e6),  # both halves hold it
    "launch": _p(3.9, "us", OVERLAP, "A", 3.6, 4.1),  # 4.0 to 4.4 with an empty kernel, which has cta.start too
    "launch.next": _p(1.2, "us", OVERLAP, "A", 1.1, 1.3),
    "launch.dependent": _p(0.7, "us", DEPENDENTS, "A", 0.6, 0.9),  # 1.4 to 1.5 in order, cta.start included
    "cta.start": _p(0.15, "us", OURS, "C", 0.1, 0.9),
    "cta.gap": _p(350.0, "cycles", DRAWN, "B", 300, 570),
    "branch": _p(5.0, "cycles", OURS, "B", 4, 12),
    "cluster.barrier": _p(900, "cycles", HUT, "C"),
    "remote": _p(200, "cycles", LU, "B"),
    "lsu.queue": _p(24, "cycles", FGS, "C"),
    "mma.issue": _p(10, "cycles", SA, "C"),
    "mma.tail": _p(104, "cycles", SA, "A"),
    "tmem.rate": _p(512, "bytes/cycle", QRC, "D", 228, 1024),
    "tmem.latency": _p(180, "cycles", QRC, "C", 100, 420),
    "commit": _p(10, "cycles", SA, "C"),
    "l2.merged": _p(188, "bytes/ns of an SM", OURS, "A", 158, 190),
    "l2.coincide": _p(0.03, "share of the sharers", DRAWN, "B", 0.02, 0.04),
    "l2.coincide.tma": _p(0.05, "share of the sharers", DRAWN, "B", 0.04, 0.07),
    "sm.write": _p(32, "bytes/cycle", OURS, "A"),
    "copy.l1": _p(
        5.4, "more cycles of a cp.async through L1, as all that copy less than 16 bytes", STRIPS, "A", 5.3, 5.6
    ),
    "copy.line": _p(1.06, "cycles of a 128-byte line that cp.async takes a part of", STRIPS, "A", 1.0, 1.13),
    "code.near": _p(220, "cycles of a jump over 1.5 KB of code, L2 emptied", STRIPS, "A", 60, 240),  # 60 with a warm L2
    "code.far": _p(480, "cycles of a jump over 8 KB", STRIPS, "A", 110, 480),
    "code.cold": _p(1.45, "cycles an instruction, L2 emptied", COLD, "A", 1.0, 1.6),
    "code.first": _p(100, "cycles before the first instruction", COLD, "B", 60, 150),
    "code.kept": _p(1100, "instructions of a kernel that are still cached when it runs again", COLD, "B", 1024, 1500),
    "beside.fma": _p(1.9, "times", OURS, "B", 1.3, 1.92),
    "beside.alu": _p(1.45, "times", OURS, "A"),
    "beside.imad": _p(1.45, "times", OURS, "C", 1.2, 1.6),
    "beside.mufu": _p(1.27, "times", OURS, "A"),
    "beside.memory": _p(1.35, "times", OURS, "A"),
    "beside.pack": _p(1.44, "times", OURS, "A"),
    "beside.logic": _p(2.1, "times", OVERLAP, "B", 1.45, 2.2),  # e4m3 to bf16
    "beside.lds": _p(1.5, "times what a product leaves", OVERLAP, "A", 1.5, 1.8),
    # FFMA every 1.97 cycles delays concurrent products, and so does IADD3 alternating with IMAD every 1.65; IMAD, FMNMX
    # or F2FP alone, every 3.1, do not.
    "product.delay": _p(0.24, CLOSE, TURNS, "B", 0.18, 0.243),
    "clock.loaded": _p(1.74, "GHz", OURS, "A", 1.65, 1.8),
    "clock.full": _p(0.5, "tensor-core use", "NOTES.md, clock: 1.61 to 1.77 GHz at 60 % use", "B", 0.4, 0.75),
}
BLACKWELL = HOPPER | {
    "issue": _p(1.0, "cycles of a scheduler, an instruction", "as fitted to the tutorials", "D", 1.0, 1.2),
    "sms": _p(148, "count", "driver", "A"),
    "tma.interval": _p(48, "cycles", QRC, "B", 48, 65),
    "l2.coincide.tma": _p(0.03, "share of the sharers", "as of other loads: nothing is known", "D", 0.02, 0.07),
    "tma.gather": _p(9.6, "cycles", FLASHMLA, "C", 4, 13),
    "atomic.slice": _p(2.44, "sectors/ns of a slice of L2", CUDNN, "C", 1.8, 4.1),
    "tma.hbm": _p(480, "ns", SA, "B", 460, 900),
    "sm.rate": _p(80, "bytes/cycle", SA, "B", 64, 130),
    "l2.rate": _p(20500, "bytes/ns", "TileSight, arXiv 2607.22432", "B", 12000, 22500),
    "hbm.rate": _p(7100, "bytes/ns", SA, "A", 7000, 7300),
    "hbm.write": _p(7000, "bytes/ns", GLUON, "B", 6500, 7300),
    "l2.bytes": _p(126e6, "bytes", "driver", "A"),
    "l2.held": _p(55e6, "bytes that random reads find again", "the H200's share of l2.bytes", "D", 50e6, 126e6),
    "l2.dirty": _p(
        15e6, "bytes that are still there when a kernel ends", "the H200's share of l2.bytes", "D", 8e6, 21e6
    ),
    "hbm.rows": _p(5000, "bytes/ns written by CTAs along rows of their own", "the H200's share", "D", 4200, 7000),
    "hbm.rows.wide": _p(6400, "bytes/ns, more at a time", "the H200's share", "D", 5900, 7200),
    "l2.parts": _p(88.0, "parts of lines/ns that threads write", "the H200's, by the number of SMs", "D", 70, 176),
    "hbm.mixed": _p(7200, "bytes/ns written beside reads", GLUON, "B", 6900, 7300),
    "cta.rate": _p(1.86, "CTAs/ns of the GPU", "the H200's, by the number of SMs", "D", 1.6, 2.0),
    # The clock falls with the utilisation of the tensor cores, most of all in runs as long as a benchmark's.
    "clock.loaded": _p(1.33, "GHz", CLOCK, "B", 1.15, 1.35),
    "clock.full": _p(1.0, "tensor-core use", GLUON, "B", 0.75, 1.0),
    "bar.sync": _p(22, "cycles", QRC, "B"),
    "latency.lds": _p(29, "cycles", QRC, "B"),
    # Products and threads share no register ports; not measured.
    "product.delay": _p(0.0, CLOSE, TMEM, "C", 0.0, 0.24),
}
GB200 = BLACKWELL | {"sms": _p(152, "count", "driver", "A")}
GPUS = {
    "h200": Gpu("H200", "sm_90a", 1.98, HOPPER),
    "b200": Gpu("B200", "sm_100a", 1.965, BLACKWELL),
    "gb200": Gpu("GB200", "sm_100a", 2.062, GB200),
}


def gpu_for(name: str | None, arch: str) -> Gpu:
    if name is None:
        name = "b200" if arch.startswith("sm_10") else "h200"
    if name not in GPUS:
        raise ValueError(f"gpu: got {name!r}; accepted: {', '.join(GPUS)}")
    gpu = GPUS[name]
    if gpu.arch[:5] != arch[:5]:
        raise ValueError(f"gpu: got {name}, which runs {gpu.arch}; the program was compiled for {arch}")
    return gpu
