"""Inputs for dsv4.compress of every kind, and its definition as a loop over tokens."""

import torch

from dsv4.reference import rope_table

# Gates below 16 lose at most 2^-21 when the bias is added and 2^-20 when the largest is taken off; so much, relatively,
# are the weights off, in fp32, and rows are below 8. The rest of the arithmetic adds less.
BOUND = 8 * 2.0**-20

KINDS = {  # d, m, overlap, rotated dims; V4.1's have no position bias, "token" no gate either
    "csa": (512, 4, True, 64),
    "indexer": (128, 4, True, 64),
    "hca": (512, 128, False, 64),
    "small csa": (6, 3, True, 4),
    "small hca": (7, 5, False, 2),
    "pair": (512, 2, False, 64),
    "token": (512, 1, False, 64),
}


def inputs(kind, tokens, seed=0, dtype=torch.float32, batch=()):
    d, m, overlap, r = KINDS[kind]
    width = d * (2 if overlap else 1)
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    arguments = dict(
        kv=normal(*batch, tokens, width),
        gate=2 * normal(*batch, tokens, width),
        position_bias=normal(m, width).float(),
        norm_weight=1 + 0.2 * normal(d).float(),
        cos_sin=rope_table(4096, r, 160000.0, factor=16.0),
    )
    if kind in ("pair", "token"):
        arguments |= dict(position_bias=None, ratio=m)
    return arguments | (dict(gate=None) if kind == "token" else {})


def some(args, *places):
    """kv and gate of these tokens, or of these sequences of a batch."""
    return {name: None if args[name] is None else args[name][places] for name in ("kv", "gate")}


def by_hand(kind, kv, gate, position_bias, norm_weight, cos_sin, ratio=None, eps=1e-6):
    """One token at a time, in fp64."""
    d, m, overlap, r = KINDS[kind]
    gate = torch.zeros_like(kv) if gate is None else gate
    position_bias = torch.zeros(m, kv.shape[-1]) if position_bias is None else position_bias
    kv, gate, bias, weight, table = (x.double() for x in (kv, gate, position_bias, norm_weight, cos_sin))
    rows = []
    for w in range(kv.shape[0] // m):
        slots = []
        for j in range(w * m, w * m + m):
            half = slice(d, 2 * d) if overlap else slice(0, d)
            slots.append((kv[j, half], gate[j, half] + bias[j % m, half]))
        if overlap and w > 0:
            for j in range(w * m - m, w * m):
                slots.append((kv[j, :d], gate[j, :d] + bias[j % m, :d]))
        p = torch.stack([g for _, g in slots]).softmax(0)  # one softmax per channel
        row = (p * torch.stack([c for c, _ in slots])).sum(0)
        row = row / (row.square().mean() + eps).sqrt() * weight
        for i in range(r // 2):
            cos, sin = table[w * m, i], table[w * m, r // 2 + i]
            e, o = row[d - r + 2 * i].clone(), row[d - r + 2 * i + 1].clone()
            row[d - r + 2 * i], row[d - r + 2 * i + 1] = e * cos - o * sin, o * cos + e * sin
        rows.append(row)
    return torch.stack(rows) if rows else kv.new_zeros(0, d)
