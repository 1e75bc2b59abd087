"""Speed on the GPU at hand: ours, the peers that can be imported, the ceilings of the machine.

Each call is captured in a CUDA graph and its replays are timed with events; between replays a buffer larger than the
L2 is read, so that nothing is found there (read, not written: writing its lines back would be timed too). Random
data, medians. `python -m dsv4 bench` prints the table.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dsv4
from dsv4.fmha import problem
from dsv4.kernels.sm90.fmha import entry as hopper
from dsv4.runtime import aot as launcher

TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip


@dataclass(frozen=True)
class BenchCase:
    """T queries of each of B sequences on S keys. same_kv: the keys are the values (MQA latents)."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    same_kv: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def flops(self) -> float:
        """Of the two products; with a causal mask only what is seen."""
        t, s = self.queries, self.keys
        pairs = t * s - (t * (t - 1) // 2 if self.causal else 0)
        return 4.0 * self.batch * self.q_heads * pairs * self.head_dim

    @property
    def bytes(self) -> float:
        """Each input read once, the output written once."""
        kv = self.keys * self.kv_heads * (1 if self.same_kv else 2)
        return 2.0 * self.batch * self.head_dim * (kv + 2 * self.queries * self.q_heads)

    def inputs(self, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(self.batch, tokens, heads, self.head_dim, device=device, dtype=self.dtype)

        q, k = draw(self.queries, self.q_heads), draw(self.keys, self.kv_heads)
        return q, k, k if self.same_kv else draw(self.keys, self.kv_heads)


def prefill(head_dim: int, causal: bool) -> BenchCase:
    name = f"prefill {'causal' if causal else 'full'} hd{head_dim}"
    return BenchCase(name, 4, 16, 16, 4096, 4096, head_dim, causal)


CASES = [
    *(prefill(d, causal) for d in (64, 128, 256, 512) for causal in (False, True)),
    BenchCase("decode hd512 64:1 b128 x 4096", 128, 64, 1, 1, 4096, 512, same_kv=True),
    BenchCase("decode hd512 64:1 b1 x 65536", 1, 64, 1, 1, 65536, 512, same_kv=True),
    BenchCase("decode hd128 64:8 b64 x 8192", 64, 64, 8, 1, 8192, 128),
]


@dataclass
class Measured:
    case: BenchCase
    microseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def tflops(self, who: str) -> float:
        return self.case.flops / self.microseconds[who] / 1e6

    def terabytes(self, who: str) -> float:
        return self.case.bytes / self.microseconds[who] / 1e6

    @property
    def best_peer(self) -> str | None:
        peers = {who: us for who, us in self.microseconds.items() if not who.startswith("dsv4")}
        return min(peers, key=peers.__getitem__) if peers else None

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name, "flops": self.case.flops, "bytes": self.case.bytes,
            "microseconds": {who: round(us, 2) for who, us in self.microseconds.items()},
            "tflops": {who: round(self.tflops(who), 1) for who in self.microseconds},
            "terabytes_per_second": {who: round(self.terabytes(who), 3) for who in self.microseconds},
            "refused": self.refused,
        }  # fmt: skip


def time_call(call: Callable[[], Any], repeats: int = 30, flush: Tensor | None = None) -> float:
    """Median microseconds of one CUDA-graph replay of ``call``."""
    flush = _flush_buffer() if flush is None else flush
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        flush.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) * 1e3


_BUFFERS: dict[int, Tensor] = {}


def _flush_buffer() -> Tensor:
    device = torch.cuda.current_device()
    if device not in _BUFFERS:
        _BUFFERS[device] = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    return _BUFFERS[device]


def triton_version() -> str:
    import triton

    return triton.__version__


def ceilings() -> dict[str, float]:
    """Device copy (TB/s, bytes read + written) and a bf16 matrix product (TFLOP/s) on random data."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    # A kernel: a plain copy_ would become a memcpy node of the graph, which is slower.
    copy = 2 * x.numel() * 2 / time_call(lambda: torch.neg(x, out=y), 10) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    c = torch.empty_like(a)
    product = 2 * 8192**3 / time_call(lambda: torch.mm(a, b, out=c), 20) / 1e6
    return {"copy_terabytes_per_second": copy, "matmul_tflops": product}


def contenders(
    case: BenchCase, q: Tensor, k: Tensor, v: Tensor, aot: Path | None = None
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, call) of ours and of everything here that can compute the case."""
    plan = dsv4.plan(dsv4.fmha, batch=case.batch, q_heads=case.q_heads, kv_heads=case.kv_heads,
                     head_dim=case.head_dim, max_seqlen_q=case.queries, max_seqlen_k=case.keys)  # fmt: skip
    out = torch.empty_like(q)
    yield "dsv4", lambda: dsv4.fmha(q, k, v, causal=case.causal, plan=plan, out=out)
    if aot is not None:

        def from_files(pair: str) -> Tensor:
            before = os.environ.get("DSV4_PAIR", "0")
            launcher.launched.clear()
            launcher.use(aot)
            os.environ["DSV4_PAIR"] = pair
            try:
                dsv4.fmha(q, k, v, causal=case.causal, plan=plan, out=out)
            finally:
                os.environ["DSV4_PAIR"] = before
                launcher.use(None)
            if len(launcher.launched) != (2 if plan.num_splits > 1 else 1):
                raise RuntimeError("the directory of --aot has not all kernels of this case")
            return out

        yield "dsv4 aot", lambda: from_files("0")
        if torch.cuda.get_device_capability() == (9, 0) and hopper.pairs(problem.dense(q, k, v)):
            yield "dsv4 aot, two CTAs", lambda: from_files("1")
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, tokens, D]
    grouped = case.q_heads != case.kv_heads

    def sdpa(backend: SDPBackend, q: Tensor, gqa: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, kh, vh, is_causal=case.causal, enable_gqa=gqa)

    for name, backend in TORCH.items():
        yield f"torch {name}", lambda backend=backend: sdpa(backend, qh, grouped)
        if grouped and case.queries == 1:
            # The heads of a KV head as the rows of one query tile.
            rows = qh.view(case.batch, case.kv_heads, -1, case.head_dim)
            yield f"torch {name}, heads as rows", lambda backend=backend, rows=rows: sdpa(backend, rows, False)
    if case.queries == 1:
        rows = qh.view(case.batch, case.kv_heads, -1, case.head_dim)

        def products() -> Tensor:
            p = torch.softmax(rows @ kh.mT * case.head_dim**-0.5, -1)
            return p @ vh

        yield "torch bmm", products


def measure(case: BenchCase, repeats: int = 30, aot: Path | None = None) -> Measured:
    """Ours is checked against torch's fp32 result on one sequence before it is timed. aot: also those kernels."""
    q, k, v = case.inputs()
    result = Measured(case)
    for name, call in contenders(case, q, k, v, aot):
        try:
            got = call()
            if name.startswith("dsv4"):
                _check(case, q, k, v, got)
            result.microseconds[name] = time_call(call, repeats)
        except (RuntimeError, torch.OutOfMemoryError) as why:
            result.refused[name] = str(why).splitlines()[0][:120]
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return result


def _check(case: BenchCase, q: Tensor, k: Tensor, v: Tensor, got: Tensor) -> None:
    """Relative error of the last sequence's first and last query heads, against fp32. A wrong kernel has no speed."""
    for head in (0, case.q_heads - 1):
        kv_head = head // (case.q_heads // case.kv_heads)
        q1, k1, v1 = q[-1, :, head].float(), k[-1, :, kv_head].float(), v[-1, :, kv_head].float()
        s = q1 @ k1.T * case.head_dim**-0.5
        if case.causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + case.keys - case.queries), float("-inf"))
        want = torch.softmax(s, -1) @ v1
        error = float((got[-1, :, head].float() - want).norm() / want.norm())
        if not error < 1e-2:
            raise AssertionError(f"{case.name}: relative error {error:.3g} of head {head}")
