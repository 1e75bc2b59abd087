"""What softsm's timing model predicts for the kernel of a whole layer of experts (moe(fused=True)) on a B200.

    python benchmarks/mega_moe.py                 # V4-Flash, one of eight ranks: 1, 512 and 8192 tokens per rank
    python benchmarks/mega_moe.py --nvfp4 --tokens 512

The model runs a few CTAs of a grid and follows no kernel whose branches depend on other CTAs. So a copy of the kernel
is timed in which CTAs take work by turns instead of tickets, nobody waits for a counter, and every chosen expert
has as many rows. What is left out: waiting for other CTAs, and everything between ranks. One rank of eight that have
256 experts in all has 32 of them, and as many rows as its own tokens have slots, if tokens choose evenly.
"""

import argparse
import importlib.util
import re
import tempfile
from pathlib import Path

import torch

import dsv4
import softsm
from dsv4.moe.kernels.sm100 import mega

EXPERTS, TOPK, HIDDEN, INNER = 32, 6, 4096, 2048  # of one rank of eight
PUBLISHED = {1: 56.5, 512: 146.5, 8192: 1283}  # us on a B200, DeepGEMM#316, eight ranks with NVLink
NO_WAIT = """@gluon.jit
def wait_for(word, count, SCOPE: gl.constexpr = "gpu"):
    barrier()


"""


def by_turns(rows: int, chosen: int, folder: Path):
    """The kernel, with the schedule known beforehand."""
    text = Path(mega.__file__).read_text()
    uniform = f"gl.where(expert < {chosen}, {rows}, 0)"
    for old, new in (
        ("import fence_async, signal, take, wait_for", "import fence_async, signal"),
        ("@gluon.jit\ndef distance(", f"{NO_WAIT}@gluon.jit\ndef distance("),
        ("gl.load(counters.rows_ptr + expert, mask=expert < pool.experts, other=0)", uniform),
        ("gl.load(counters.rows_ptr + expert)", uniform),
        (
            "gl.load(pool.line_ptr + atom * N + n, mask=n < rows, other=0)",
            f"((atom * N + n) % {rows * chosen}).to(gl.int64) * (out.width // 8)",
        ),
        ("gl.load(pool.place_ptr + rank * tokens.slots + slot)", f"(rank * tokens.slots + slot) % {rows}"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = re.sub(r"^    (\w+) = take\(.*\)$", r"    \1 = gl.program_id(0)", text, flags=re.M)
    text = re.sub(r"^        (\w+) = take\(.*\)$", r"        \1 += gl.num_programs(0)", text, flags=re.M)
    assert "take(" not in text
    file = folder / f"mega_{rows}_{chosen}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.moe_mega_sm100


def layer(nvfp4: bool) -> dsv4.Fp4Experts:
    given = {}
    for name, rows, columns in (("w1", INNER, HIDDEN), ("w3", INNER, HIDDEN), ("w2", HIDDEN, INNER)):
        given[name] = torch.zeros(EXPERTS, rows, columns // 2, dtype=torch.uint8)
        if nvfp4:
            given[f"{name}_scale"] = torch.ones(EXPERTS, rows, columns // 16).to(torch.float8_e4m3fn)
            given[f"{name}_global"] = torch.ones(EXPERTS)
        else:
            given[f"{name}_scale"] = torch.full((EXPERTS, rows, columns // 32), 120, dtype=torch.uint8)
    return dsv4.Fp4Experts.pack(**given, layout="sm100")


def predicted(experts: dsv4.Fp4Experts, tokens: int, folder: Path) -> float:
    slots = tokens * TOPK
    chosen = min(EXPERTS, slots)
    mega.moe_mega_sm100 = by_turns(-(-slots // chosen), chosen, folder)
    ids = (torch.arange(slots) % chosen).view(tokens, TOPK).int()
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, TOPK)
    recipe = "nvfp4" if experts.format == "nvfp4" else "fp8_128"
    with softsm.use("sm_100a", sms=148), softsm.timing("b200") as timer:
        dsv4.moe(x, experts, ids, weights, activations=recipe, fused=True, backend="softsm")
    return timer.us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(PUBLISHED))
    parser.add_argument("--nvfp4", action="store_true")
    given = parser.parse_args()
    experts = layer(given.nvfp4)
    with tempfile.TemporaryDirectory() as folder:
        for tokens in given.tokens:
            us = predicted(experts, tokens, Path(folder))
            rate = 6 * HIDDEN * INNER * tokens * TOPK / us / 1e6
            print(f"{tokens} tokens: predicted {us:.1f} us, {rate:.0f} TFLOP/s; DeepGEMM {PUBLISHED.get(tokens)} us")


if __name__ == "__main__":
    main()
