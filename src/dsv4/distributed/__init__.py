"""Context parallelism: one sequence across the ranks of a torch.distributed group. forward.py has the rules."""

from dsv4.distributed.forward import decode, local_lengths, local_rows, merge, positions, prefill, shard, unshard

__all__ = ["decode", "local_lengths", "local_rows", "merge", "positions", "prefill", "shard", "unshard"]
