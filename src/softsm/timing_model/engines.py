"""The rates of a GPU's engines for timelines of emulated runs (`softsm trace`), taken from the timing model's
parameters, in whole cycles. An emulated run has no machine code, so each warp instruction counts as one cycle."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from softsm.timing_model.parameters import gpu_for

# Multiply-adds per cycle: 64 x N x 16 in N / 2 cycles, 128 x N x 16 in N / 2 (costs.py, replay.py).
MACS = {"wgmma": 64 * 16 * 2, "tcgen05.mma": 128 * 16 * 2}


@dataclass(frozen=True)
class Engines:
    gpu: str
    copy_latency: int  # cycles, from L2
    copy_rate: float  # bytes per cycle
    tails: dict[str, int]  # cycles from the last product until its waiter continues
    tensor_latency: int  # cycles of a tcgen05.ld or st
    tensor_rate: float  # bytes per cycle

    def __str__(self) -> str:
        products = "tcgen05" if self.tensor_rate else "wgmma"
        macs = MACS["tcgen05.mma" if self.tensor_rate else "wgmma"]
        return (
            f"Cycles of a {self.gpu}, by the parameters of `softsm time`: a warp instruction takes one, a copy "
            f"{self.copy_latency} and its bytes / {self.copy_rate:.0f}, a matrix product its multiply-adds / "
            f"{macs}, and what waits for it {self.tails[products]} "
            "more. It shows who waits for whom; `softsm time` predicts how long."
        )


@functools.cache
def engines_of(arch: str) -> Engines:
    """Returns the engines of an architecture's GPU, or those of the H200 if the model does not know it."""
    g = gpu_for(None, "sm_100a" if arch.startswith("sm_10") else "sm_90a")
    return Engines(
        g.name,
        round(g["tma.l2"] * g.clock),
        g["sm.rate"],
        {"wgmma": round(g["product.tail"] + g["product.wait"]), "tcgen05": round(g["mma.tail"])},
        round(g["tmem.latency"]),
        g["tmem.rate"] if g.arch.startswith("sm_10") else 0.0,
    )
