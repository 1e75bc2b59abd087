"""How fast the Hopper kernels are that different versions of Triton compile.

    PYTHONPATH=OLD:src python benchmarks/compilers.py --compile kernels/3.6   # with each Triton; needs no GPU
    python benchmarks/compilers.py kernels/3.6 kernels/3.9 --json FILE        # on a GPU
    python benchmarks/compilers.py kernels/3.6 --jit                          # beside what Triton compiles there
    python benchmarks/compilers.py --table FILE

A folder holds what the calls below launch, compiled as in a process with that Triton (OLD is a folder that contains
another one). On the GPU the kernels of all folders take turns in one process, as contenders of `dsv4 bench` do. Results
are compared with those of the first folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.runtime import aot, calls, checks, dispatch, launch
from dsv4.runtime.program import Launch, Program
from dsv4.runtime.settings import settings

ARCH = "sm_90a"
POOL = 100_000  # rows: more than the L2 holds
DIFFERENCE = 1e-2  # relative, of two results of the same call: their sums may be rounded in another order
BF16 = torch.bfloat16


class Draw:
    """Makes inputs; on a CPU, where kernels are only compiled, tensors without values."""

    def __init__(self, device: str):
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        if self.device == "cpu":
            return torch.empty(shape, dtype=BF16)
        return torch.randn(shape, device=self.device, dtype=BF16)

    def rows(self, *shape: int) -> Tensor:
        return torch.randint(0, POOL, shape, device=self.device, dtype=torch.int32)

    def packed(self, cls: Any, rows: int, per_page: int = 64) -> Any:
        if self.device == "cpu":
            return cls(torch.empty(-(-rows // per_page) * cls.stride_for(per_page), dtype=torch.uint8), per_page)
        folder, only = settings.aot, settings.aot_only
        dispatch.use_aot(None)  # the kernel that packs is not compared
        cache = cls.pack(self.normal(rows, 128 if cls is dsv4.IndexCache else 512), rows_per_page=per_page)
        dispatch.use_aot(folder, only)
        return cache


def dense(batch: int, heads: int, kv_heads: int, tokens: int, d: int, causal: bool, queries: int = 0) -> Callable:
    def make(draw: Draw) -> Callable[[], Tensor]:
        q = draw.normal(batch, queries or tokens, heads, d)
        k, v = (draw.normal(batch, tokens, kv_heads, d) for _ in "kv")
        return lambda: dsv4.fmha(q, k, v, causal=causal, backend="cuda")

    return make


def gradient(batch: int, heads: int, kv_heads: int, tokens: int, d: int, causal: bool) -> Callable:
    def make(draw: Draw) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [draw.normal(batch, tokens, n, d).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        out = dsv4.fmha(*inputs, causal=causal, backend="cuda")
        dout = draw.normal(*out.shape)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return make


def varlen(draw: Draw) -> Callable[[], Tensor]:
    """64 sequences of 100 to 2000 tokens."""
    starts = torch.arange(65, device=draw.device).mul(1050).int()
    starts[1:-1] += (torch.arange(63, device=draw.device) * 37 % 900).int()
    q, k, v = (draw.normal(64 * 1050, 16, 128) for _ in "qkv")
    options: dict[str, Any] = dict(max_seqlen_q=2000, max_seqlen_k=2000, causal=True, backend="cuda")
    return lambda: dsv4.fmha_varlen(q, k, v, starts, starts, **options)


def v4(queries: int, heads: int, listed: int, fp8: bool) -> Callable:
    def make(draw: Draw) -> Callable[[], Tensor]:
        q, sink = draw.normal(queries, heads, 512), torch.zeros(heads, device=draw.device)
        pool = draw.packed(dsv4.Fp8Cache, POOL) if fp8 else draw.normal(POOL, 512)
        window, indices = draw.rows(queries, 128), draw.rows(queries, listed)
        return lambda: dsv4.v4_attention(q, pool, window, pool, indices, sink=sink, backend="cuda")

    return make


def v4_gradient(draw: Draw) -> Callable[[], tuple[Tensor, ...]]:
    q, pool = draw.normal(2048, 64, 512).requires_grad_(), draw.normal(4096, 512).requires_grad_()
    window = torch.randint(0, 4096, (2048, 640), device=draw.device, dtype=torch.int32)
    out = dsv4.v4_attention(q, pool, window, backend="cuda")
    dout = draw.normal(*out.shape)
    return lambda: torch.autograd.grad(out, (q, pool), dout, retain_graph=True)


def index(requests: int, keys: int) -> Callable:
    def make(draw: Draw) -> Callable[[], Tensor]:
        cache = draw.packed(dsv4.IndexCache, requests * keys)
        q = draw.normal(requests, 64, 128).to(torch.float8_e4m3fn)
        weights = torch.rand(requests, 64, device=draw.device)
        table = torch.arange(requests * keys // 64, device=draw.device).int().view(requests, -1)
        lengths = torch.full((requests,), keys, dtype=torch.int32, device=draw.device)
        options: dict[str, Any] = dict(lengths=lengths, block_table=table, backend="cuda")
        return lambda: dsv4.index_topk(q, cache, weights, 512, **options)

    return make


CASES: dict[str, Callable[[Draw], Callable]] = {
    "fmha, head dim 64, 8 x 8 x 8192": dense(8, 8, 8, 8192, 64, False),
    "fmha, head dim 64, 2 x 64:8 x 4096, causal": dense(2, 64, 8, 4096, 64, True),
    "fmha, head dim 128, 3 x 20 x 5000": dense(3, 20, 20, 5000, 128, False),
    "fmha, head dim 128, 1 x 40:8 x 12288, causal": dense(1, 40, 8, 12288, 128, True),
    "fmha, head dim 128, 16 x 16 x 512, causal": dense(16, 16, 16, 512, 128, True),
    "fmha, head dim 256, 2 x 8 x 6000, causal": dense(2, 8, 8, 6000, 256, True),
    "fmha, head dim 512, 1 x 32:4 x 6144, causal": dense(1, 32, 4, 6144, 512, True),
    "fmha, head dim 128, decode 64 x 32:8 x 4096": dense(64, 32, 8, 4096, 128, False, 1),
    "fmha_varlen, head dim 128, 64 sequences, causal": varlen,
    "V4 prefill, bf16, 4096 x 64 heads x 640 rows": v4(4096, 64, 512, False),
    "V4 decode, bf16, 128 x 64 heads x 640 rows": v4(128, 64, 512, False),
    "V4 decode, FP8, 128 x 64 heads x 640 rows": v4(128, 64, 512, True),
    "V4 decode, FP8, 300 x 128 heads x 1152 rows": v4(300, 128, 1024, True),
    "V4 decode, FP8, 8 x 64 heads x 640 rows": v4(8, 64, 512, True),
    "gradients, head dim 64, 2 x 64:8 x 4096, causal": gradient(2, 64, 8, 4096, 64, True),
    "gradients, head dim 128, 3 x 20 x 5000, causal": gradient(3, 20, 20, 5000, 128, True),
    "gradients, head dim 256, 2 x 8 x 6000, causal": gradient(2, 8, 8, 6000, 256, True),
    "gradients, V4, 2048 x 64 heads x 640 rows": v4_gradient,
    "index_topk, FP8 keys, 32 x 65536": index(32, 65536),
}


def chosen(only: str) -> list[tuple[str, Callable]]:
    return [(name, make) for name, make in CASES.items() if only in name]


# ------------------------------------------------------------------------------------------------------ compiling


class Recorded:
    """Stands for launch.Ready: collects launches, compiles and runs nothing."""

    launches: dict[str, Launch] = {}

    def __init__(self, program: Program, target: Any):
        for one in program.launches:
            self.launches.setdefault(aot.variant_of(one, ARCH), one)

    def run(self, memory: list, addresses: list) -> None:
        pass


def compile_cases(folder: Path, only: str, jobs: int) -> None:
    """Write what every call launches."""
    target = dispatch.compile_target(ARCH)
    launch.Ready = Recorded  # type: ignore[assignment,misc]
    checks.values_checked = lambda x: False
    calls.run = lambda op, given, backend: calls.run_on(op, given, "cuda", target, given.tensors[0].device)
    draw = Draw("cpu")
    for name, make in chosen(only):
        known = len(Recorded.launches)
        make(draw)()
        print(f"{name}: {len(Recorded.launches) - known} more kernels", flush=True)
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        for path in pool.map(_write, [(folder, name) for name in Recorded.launches]):
            print(path.name, flush=True)


def _write(work: tuple[Path, str]) -> Path:
    folder, name = work
    one = Recorded.launches[name]
    return aot.write(folder, one.kernel, one.arguments, one.constants, ARCH)


# -------------------------------------------------------------------------------------------------------- the GPU


JIT = "jit"  # in the place of a folder: the kernels that Triton compiles here


def measure(folders: list[Path], only: str, repeats: int) -> Iterator[tuple[str, dict]]:
    """Yield (case, label of the folder -> microseconds, quartiles, clock)."""
    from dsv4.bench import time_calls

    for name, make in chosen(only):
        torch.manual_seed(0)
        found: dict[str, Any] = {}
        try:
            runs = {x.name: within(x, make) for x in folders}
            first = None
            for label, run in runs.items():
                result = flat(run())
                first = result if first is None else first
                found[label] = {"difference": float((result - first).norm() / first.norm())}
            samples, why = time_calls(runs, repeats, "queued" if "gradients" in name else "graph")
            for label, s in samples.items():
                found[label] |= {"us": s.microseconds, "low": s.low, "high": s.high, "mhz": s.megahertz}
            found |= {label: {"error": text} for label, text in why.items()}
        except Exception as why:  # one case must not lose the others
            found["error"] = f"{type(why).__name__}: {why}"[:300]
        yield name, found
        torch.cuda.empty_cache()


def within(folder: Path, make: Callable[[Draw], Callable]) -> Callable[[], Any]:
    """Return the call with the kernels of one folder and no others."""

    def inside(work: Callable[[], Any]) -> Any:
        dispatch.use_aot(None if folder.name == JIT else folder, only=folder.name != JIT)
        try:
            return work()
        finally:
            dispatch.use_aot(None)

    torch.manual_seed(0)
    call = inside(lambda: make(Draw("cuda")))
    return lambda: inside(call)


def flat(result: Any) -> Tensor:
    """Return all values of a result in one row; lists of row numbers, whose order is free, sorted."""
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([(x.sort().values if x.dtype == torch.int32 else x.detach()).float().flatten() for x in parts])


def table(path: Path) -> str:
    """Return the measurements as a Markdown table; a ratio above 1 is slower than the first folder."""
    record = json.loads(path.read_text())
    labels = record["folders"]
    lines = [f"| microseconds | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for name, found in record["cases"].items():
        first = found.get(labels[0], {}).get("us")
        cells = []
        for label in labels:
            us = found.get(label, {}).get("us")
            cells.append("" if us is None else f"{us:.4g}" + (f" ({us / first:.2f})" if label != labels[0] else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of kernels; their names are the labels")
    parser.add_argument("--compile", type=Path, metavar="DIR", help="compile with the Triton that is imported")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--jit", action="store_true", help="also time the kernels that Triton compiles here")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("compilers.json"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.compile:
        compile_cases(given.compile, given.only, given.jobs)
        return 0
    if given.table:
        print(table(given.table))
        return 0
    settings.cubins = False  # without a folder, no wheel either
    given.folders += [Path(JIT)] * given.jit
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "folders": [x.name for x in given.folders], "cases": {},
    }  # fmt: skip
    wrong = 0
    for name, found in measure(given.folders, given.only, given.repeats):
        record["cases"][name] = found
        given.json.write_text(json.dumps(record, indent=1) + "\n")
        wrong += any(x.get("difference", 0) > DIFFERENCE for x in found.values() if isinstance(x, dict))
        shown = {label: round(x["us"], 1) if "us" in x else x for label, x in found.items() if label != "error"}
        print(name, found.get("error", shown), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
