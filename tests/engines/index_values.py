"""How each engine rounds the queries and keys of DeepSeek-V4's indexer to e4m3: one scale for 128 values."""

import torch
from torch import Tensor


def vllm(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scales): scales are powers of two, as of its cache's format "ue8m0"."""
    return rounded(x, torch.exp2(torch.ceil(torch.log2(least_scale(x)))))


def sglang(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scales) after a Hadamard rotation, which changes no score of a query and a key that both have it."""
    turned = x @ hadamard().to(x.dtype)
    return rounded(turned, least_scale(turned))


def least_scale(x: Tensor) -> Tensor:
    return x.abs().amax(-1).clamp_min(1e-4) / 448


def rounded(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def hadamard() -> Tensor:
    """An orthogonal matrix of 128 columns."""
    h = torch.ones(1, 1)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * 128**-0.5
