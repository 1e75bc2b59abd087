"""Each V4 kernel that decoding takes on an H200, in the shapes that `dsv4 bench` times, against the definition.

They are few and small enough for compute-sanitizer, memcheck and synccheck::

    compute-sanitizer --tool memcheck python -m pytest -q -p no:cacheprovider tests/gpu/test_v4_kernels.py
"""

import os
from dataclasses import dataclass

import launches
import pytest
import torch
from agreement import assert_agrees

import dsv4
from dsv4 import reference, suites
from dsv4.runtime import calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() not in suites.ARCHS, reason="needs a GPU that dsv4 has kernels for"),
]
SEED = int(os.environ.get("DSV4_SEED", "0"))
ROWS = 20_480  # more than pay for being unpacked first
WINDOW = 128


@dataclass(frozen=True)
class Case:
    kernel: str
    queries: int
    heads: int
    rows: int  # in addition to the window's
    fp8: bool = True
    table: bool = False
    lengths: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        said = [name for name in ("table", "lengths", "deterministic") if getattr(self, name)]
        store = "fp8" if self.fp8 else "bf16"
        return "-".join([self.kernel, f"{self.queries}x{self.heads}x{WINDOW}+{self.rows}", store, *said])


CASES = [
    Case("v4_decode_swap_ab_ws", 128, 16, 512),
    Case("v4_decode_swap_ab_ws", 128, 8, 512, lengths=True),
    Case("v4_decode_swap_ab_ws", 256, 16, 512),  # two rounds of CTAs
    Case("v4_decode_swap_ab_ws", 128, 32, 512),
    Case("v4_decode_swap_ab_ws", 8, 128, 1024),  # four splits
    Case("v4_decode_swap_ab_ws", 2, 128, 1024),
    Case("v4_decode_swap_ab_ws", 3, 64, 512, lengths=True),
    Case("v4_decode_swap_ab", 1, 64, 512),
    Case("v4_decode_swap_ab", 1, 128, 512, lengths=True),
    Case("v4_decode_swap_ab", 1, 64, 512, fp8=False),
    Case("v4_sparse", 128, 64, 512),
    Case("v4_sparse", 128, 128, 512),
    Case("v4_sparse", 32, 128, 1024, lengths=True),
    Case("v4_sparse", 16, 128, 512, deterministic=True),
    Case("v4_sparse", 16, 64, 8192, table=True),  # a step left over is a split by itself
    Case("v4_sparse", 5, 64, 4096, table=True, lengths=True),
    Case("v4_sparse", 64, 64, 512, fp8=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, monkeypatch):
    """The result and the LSE, into poisoned memory; twice the same bits."""
    generator = torch.Generator("cuda").manual_seed(SEED)

    def picked(*shape: int, low: int = -1, of: int = ROWS) -> torch.Tensor:
        return torch.randint(low, of, shape, device="cuda", generator=generator, dtype=torch.int32)

    rows = torch.randn(ROWS, 512, device="cuda", generator=generator).bfloat16()
    pool = dsv4.Fp8Cache.pack(rows) if case.fp8 else rows.view(-1, 64, 512)
    q = torch.randn(case.queries, case.heads, 512, device="cuda", generator=generator).bfloat16()
    given = dict(q=q, window=pool, window_indices=picked(case.queries, WINDOW), compressed=pool)
    if case.table:
        given["compressed_block_table"] = picked(case.queries, case.rows // 64, low=0, of=ROWS // 64)
    else:
        given["compressed_indices"] = picked(case.queries, case.rows)
    if case.lengths:
        given["compressed_lengths"] = picked(case.queries, low=0, of=case.rows + 1)
    elif case.table:
        given["compressed_lengths"] = torch.full((case.queries,), case.rows, device="cuda", dtype=torch.int32)
    sink = torch.randn(case.heads, device="cuda", generator=generator)
    names = launches.launched(monkeypatch)
    calls.forget()
    results = []
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        results.append(
            dsv4.v4_attention(**given, sink=sink, out=out, return_lse=True, deterministic=case.deterministic)
        )
    calls.forget()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:
        assert case.kernel in names
    some = [0, case.queries // 2, case.queries - 1]
    per_query = {name: x[some] for name, x in given.items() if name not in ("window", "compressed")}
    out, lse = results[0]
    assert_agrees((out[some], lse[some]), reference.v4_attention, **given | per_query, sink=sink)
