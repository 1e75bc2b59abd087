"""Speed on the GPU at hand: ours and every peer that can be imported, in one process, on the same tensors.

    timing      alternating CUDA-graph replays (ours, theirs, ours, ...), a cold L2 before each, the clock after each
    peers       who can be imported here, and their calls
    dense       fmha and torch, FFPA and flash-attn
    varlen      fmha_varlen and its gradients, flash-attn and torch
    v4, v41     v4_attention and FlashMLA, with rows of V4 and of V4.1
    index       index_topk and DeepGEMM's logits, torch.topk; compress, the writing of rows and torch
    moe         a layer of FP4 experts, Humming's (humming.py) and torch's grouped products
    backward    the gradients of fmha and torch, FFPA and flash-attn; those of v4_attention
    drawn       cases of every suite, drawn at random by a seed
    measured    one case: every contender is checked first, then timed; as JSON

`python -m dsv4 bench` runs a suite and prints its table.
"""

from dsv4.bench.measured import Case, Measured, measure
from dsv4.bench.timing import ceilings, time_call, time_calls

__all__ = ["SUITES", "Case", "Measured", "cases", "ceilings", "measure", "time_call", "time_calls"]

SUITES = ("dense", "varlen", "v4", "index", "moe", "backward")


def cases(suite: str, seed: int | None = None, count: int = 20) -> list[Case]:
    """Return the cases of a suite, or of all; with a seed, `count` of each, drawn at random."""
    from dsv4.bench import backward, dense, drawn, index, moe, v4, v41, varlen

    if seed is not None:
        return [case for name in (SUITES if suite == "all" else (suite,)) for case in drawn.cases(name, seed, count)]
    modules = {"dense": dense, "varlen": varlen, "v4": v4, "index": index, "moe": moe, "backward": backward}
    by_name: dict[str, list[Case]] = {name: [*module.CASES] for name, module in modules.items()}
    by_name["v4"] += v41.CASES
    return [case for name in (SUITES if suite == "all" else (suite,)) for case in by_name[name]]
