"""How long a new process needs until it has its first result, with and without the wheel dsv4-cubins.

    python benchmarks/first_call.py --json FILE             # on a GPU, with the wheel installed
    python benchmarks/first_call.py --wheel DIR             # DIR contains the package dsv4_cubins
    python benchmarks/first_call.py --drop-caches           # as root: files come from the disk, as after a reboot

Each measurement is a process of its own. Ways: `wheel` takes its kernels from the wheel; `compiled` compiles them, with
an empty Triton cache; `cached` finds them in Triton's cache, as the second process of a machine does. Seconds are
counted from the start of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("wheel", "compiled", "cached")
CALLS = {
    "fmha": "fmha, head dim 128, 1 x 40:8 x 12288, causal",
    "v4": "V4 decode, FP8, 128 x 64 heads x 640 rows",
    "training": "gradients, head dim 128, 3 x 20 x 5000, causal",
}


def child(call: str, began: float) -> None:
    """Make one call in this process and print when each step had ended."""
    ends: dict[str, float] = {}

    def ended(what: str) -> None:
        ends[what] = time.time() - began

    ended("python")
    import torch

    ended("import torch")
    import dsv4

    ended("import dsv4")
    torch.zeros(1, device="cuda").cpu()
    ended("CUDA")
    from compilers import CASES, POOL, Draw

    class Zeros(Draw):
        """Draws caches of zeros: packing rows would be another kernel."""

        def packed(self, cls: Any, rows: int, per_page: int = 64) -> Any:
            size = -(-POOL // per_page) * cls.stride_for(per_page)
            return cls(torch.zeros(size, dtype=torch.uint8, device="cuda"), per_page)

    if call == "training":
        inputs = [torch.randn(3, 5000, 20, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        dout = torch.randn_like(inputs[0])

        def run() -> Any:
            return torch.autograd.grad(dsv4.fmha(*inputs, causal=True), inputs, dout)[0]
    else:
        run = CASES[CALLS[call]](Zeros("cuda"))
    torch.cuda.synchronize()
    ended("inputs")
    for n in ("first call", "second call"):
        run().flatten()[0].item()
        ended(n)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(where | {"ends": {what: round(end, 3) for what, end in ends.items()}}))


def measured(call: str, way: str, cache: str, wheel: Path | None) -> dict[str, Any]:
    paths = [*([str(wheel)] if wheel else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "TRITON_CACHE_DIR": cache, "DSV4_CUBINS": "1" if way == "wheel" else "0", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", call, str(time.time())]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.returncode, "why": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="folder that contains dsv4_cubins; default: it is installed")
    parser.add_argument("--calls", nargs="*", default=list(CALLS), choices=CALLS)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], float(given.child[1]))
        return
    found: list[dict[str, Any]] = []
    for repeat in range(given.repeats):
        for call in given.calls:
            with tempfile.TemporaryDirectory() as kept:
                for way in given.ways:
                    if given.drop_caches:
                        Path("/proc/sys/vm/drop_caches").write_text("3")
                    # `cached` comes after `compiled` and has its cache; the wheel's is empty.
                    cache = str(Path(kept, "wheel" if way == "wheel" else "triton"))
                    result = measured(call, way, cache, given.wheel)
                    found.append({"call": call, "way": way, "repeat": repeat, "cold disk": given.drop_caches} | result)
                    print(call, way, result.get("ends", result), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"calls": CALLS, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
