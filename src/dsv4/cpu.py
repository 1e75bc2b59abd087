"""The cpu backend (first version: dense arithmetic per sequence)."""

import torch

from dsv4 import reference


def forward(p) -> None:
    opts = dict(window=(p.left, p.right), sink=p.sink, softmax_scale=p.softmax_scale, compute=torch.float32)
    if p.kind == "dense":
        out, lse = reference.fmha(p.q, p.k, p.v, **opts)
    elif p.kind == "varlen":
        out, lse = reference.fmha_varlen(p.q, p.k, p.v, p.cu_seqlens_q, p.cu_seqlens_k, **opts)
    else:
        out, lse = reference.fmha_paged(p.q, p.k, p.v, p.block_table, p.lengths, **opts)
    p.out.copy_(out)
    if p.lse is not None:
        p.lse.copy_(lse)
