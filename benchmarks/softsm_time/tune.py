"""The tuning loop of docs/timing.md as cases: every tile that a user might try for one matrix product.

python benchmarks/timing.py --tune --predict --json FILE            # under a minute, without a GPU
python benchmarks/timing.py --tune --predict --gpu b200 --json FILE
python benchmarks/timing.py --tune --measure --json FILE            # all of them on an H200: the regret of the pick
"""

from __future__ import annotations

import torch
import triton.language as tl

from softsm_time.case import BF16, Call, Case, values
from softsm_time.drawn.kernels import products

M, N, K = 2048, 4096, 2048
TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))


def cases() -> list[Case]:
    return [_case(BM, BN, warps, stages) for BM, BN, warps in TILES for stages in (2, 3, 4)]


def _case(BM: int, BN: int, warps: int, stages: int) -> Case:
    def make(device: str) -> Call:
        a, b = values(M, K, device=device), values(K, N, device=device)
        c = torch.empty(M, N, dtype=BF16, device=device)
        grid = (M // BM * (N // BN),)
        return lambda: products.matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=64, GROUP=8,
                                             ACC=tl.float32, ACT="", num_stages=stages, num_warps=warps)  # fmt: skip

    return Case(f"tile {BM}x{BN} stages {stages} warps {warps}", "tiles", make, "tile")
