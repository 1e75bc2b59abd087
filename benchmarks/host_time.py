"""Host time of eager calls, forward and backward: what Python, torch and the CUDA driver need to launch a call.

    python benchmarks/host_time.py              on a Hopper GPU, with torch's scaled_dot_product_attention beside it
    python benchmarks/host_time.py --stub       without one: small tensors on the CPU, a driver that does nothing

Every call begins on an idle GPU, so that no launch waits for a place in the queue. Least and median of many, in us.
`--stub` counts the time of the thread, not of the clock, which other processes would change; it leaves out the CUDA
driver and torch's allocator for GPUs: compare its figures with each other only.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dsv4
from dsv4.runtime import checks, dispatch, driver, launch, structs


class Bench:
    def __init__(self, stub: bool, calls: int):
        self.stub, self.calls, self.device = stub, calls, "cpu" if stub else "cuda"
        self.now = time.thread_time if stub else time.perf_counter

    def preparing(self) -> Any:
        """To be entered around a first call: softsm compiles for Hopper."""
        if not self.stub:
            return nullcontext()
        import softsm

        return softsm.use("sm_90a")

    def time(self, name: str, call: Callable[[], Any]) -> None:
        with self.preparing():
            call()
        found = []
        for _ in range(self.calls):
            if not self.stub:
                torch.cuda.synchronize()
            begin = self.now()
            call()
            found.append((self.now() - begin) * 1e6)
        found.sort()
        print(f"{name:56} least {found[0]:6.1f}   median {found[len(found) // 2]:6.1f}", flush=True)

    def forward_and_backward(self, name: str, call: Callable[[], Any], inputs: list[torch.Tensor]) -> None:
        """call() with inputs that require grad."""
        with torch.no_grad():
            self.time(f"{name}, forward", call)
        for x in inputs:
            x.requires_grad_()
        self.time(f"{name}, forward with grad", call)
        with self.preparing():
            out = call()
        dout = torch.randn_like(out)
        self.time(f"{name}, backward", lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
        for x in inputs:
            x.requires_grad_(False)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def fmha(self, batch: int, heads: int, tokens: int, d: int, causal: bool, kv_heads: int = 0) -> None:
        name = (
            f"fmha {batch}x{heads}x{tokens} hd{d}{' causal' if causal else ''}{f' kv {kv_heads}' if kv_heads else ''}"
        )
        if self.stub:
            batch, heads, tokens, kv_heads = 1, 2, 32, kv_heads and 1  # host time does not depend on them
        q = self.draw(batch, tokens, heads, d)
        k, v = (self.draw(batch, tokens, kv_heads or heads, d) for _ in "kv")
        self.forward_and_backward(name, lambda: dsv4.fmha(q, k, v, causal=causal), [q, k, v])
        out = torch.empty_like(q)
        with torch.no_grad():
            self.time(f"{name}, forward out=", lambda: dsv4.fmha(q, k, v, causal=causal, out=out))
        if not self.stub and not kv_heads:
            turned = [x.transpose(1, 2) for x in (q, k, v)]
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    try:
                        self.forward_and_backward(
                            f"  {backend.name}", lambda: scaled_dot_product_attention(*turned, is_causal=causal), turned
                        )
                    except RuntimeError as why:
                        print(f"  {backend.name}: {str(why).splitlines()[0]}")

    def v4(self, queries: int, heads: int, fp8: bool) -> None:
        name = f"v4_attention {queries} x {heads} heads, 128 + 512 {'FP8 ' if fp8 else ''}rows"
        q, sink = self.draw(2 if self.stub else queries, heads, 512), torch.randn(heads, device=self.device)
        pools: list[Any] = [self.draw(size, 512) for size in ((64, 64) if self.stub else (4096, 4096))]
        if fp8:
            pools = [dsv4.Fp8Cache.pack(x) for x in pools]
        lists = [torch.randint(0, 64, (len(q), n), dtype=torch.int32, device=self.device) for n in (128, 512)]
        lengths = [torch.full((len(q),), n, dtype=torch.int32, device=self.device) for n in (128, 512)]

        def call(**options: Any) -> Any:
            return dsv4.v4_attention(
                q, pools[0], lists[0], pools[1], lists[1], window_lengths=lengths[0], compressed_lengths=lengths[1],
                sink=sink, **options,
            )  # fmt: skip

        with torch.no_grad():
            out = torch.empty_like(q)
            self.time(f"{name}, forward out=", lambda: call(out=out))
        if fp8:
            with torch.no_grad():
                self.time(f"{name}, forward", call)
        else:
            self.forward_and_backward(name, call, [q, *pools, sink])


def play_a_driver() -> None:
    """CPU tensors count as those of a Hopper GPU, and every function of the driver succeeds at once."""
    nothing = ctypes.CDLL("libm.so.6").fegetround  # takes nothing and returns 0
    names = ("cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuTensorMapEncodeTiled", "cuFuncSetAttribute")
    played = SimpleNamespace(**{name: nothing for name in names})
    target = dispatch.Target("cuda", (9, 0), 132)

    def ready(step: Any, target: Any) -> tuple[Any, Any]:
        compiled = step.kernel.warmup(*structs.neutral(step.arguments), grid=step.grid, **step.constants)
        function = driver.Function.of(compiled, device=0)
        assert function is not None
        fixed = [step.constants.get(p.name, p.default) for p in step.kernel.params[len(step.arguments) :]]
        grid = (*step.grid, 1, 1)[:3]
        found = driver.DriverLaunch(function._replace(handle=1), grid, [*step.arguments, *fixed], played)
        return found, found

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: None  # as the index of the CPU device
    launch.ready_launch = ready
    launch.current_stream = lambda device, on_gpu: 0
    dispatch.resolve = lambda backend, device: "cuda"
    dispatch.cuda_target = lambda device: target
    checks.values_checked = lambda x: False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", action="store_true", help="without a GPU")
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    if given.stub:
        play_a_driver()
    bench = Bench(given.stub, given.calls)
    bench.fmha(16, 16, 512, 128, True)
    bench.fmha(6, 12, 1024, 128, False)
    bench.fmha(4, 16, 1024, 128, True, kv_heads=4)
    bench.fmha(4, 8, 1024, 512, False)
    for queries, heads in ((1, 64), (8, 64)):
        bench.v4(queries, heads, fp8=False)
        if not given.stub:  # rows are packed by a kernel
            bench.v4(queries, heads, fp8=True)


if __name__ == "__main__":
    main()
