"""One sequence, or the experts of a layer, across the ranks of a torch.distributed group. forward.py and experts.py
have the rules."""

from dsv4.distributed.experts import ExpertMemory, moe
from dsv4.distributed.forward import decode, local_lengths, local_rows, merge, positions, prefill, shard, unshard

__all__ = [
    "ExpertMemory",
    "decode",
    "local_lengths",
    "local_rows",
    "merge",
    "moe",
    "positions",
    "prefill",
    "shard",
    "unshard",
]
