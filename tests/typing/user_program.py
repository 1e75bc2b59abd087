"""What a user writes, for type checkers: `make lint` gives it to mypy and pyright. Nothing here runs."""

from typing import assert_type

import torch
from torch import Tensor

import dsv4
import softsm
from dsv4.distributed import decode, prefill
from dsv4.integrations.flash_attn import flash_attn_func
from dsv4.integrations.sdpa import scaled_dot_product_attention


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = dsv4.fmha(q, k, v, causal=True, window=(127, 0), sink=torch.zeros(8), return_lse=True)
    assert_type(lse, Tensor)
    assert_type(dsv4.fmha(q, k, v, backend="cpu"), Tensor)
    dsv4.fmha(q, k, v, backend="tpu")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    return out


def indexer(q: Tensor, k: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    chosen, scores = dsv4.index_topk(q, k, weights, 512, positions=positions, return_scores=True)
    assert_type(scores, Tensor)
    assert_type(dsv4.index_topk(q, k, weights, 512, positions=positions), Tensor)
    return chosen


def several_gpus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = prefill(q, k, v, window=(31, 0), return_lse=True)
    assert_type(lse, Tensor)
    assert_type(prefill(q, k, v), Tensor)
    prefill(q, k, v, windw=(31, 0))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    assert_type(decode(dsv4.fmha, q, k, v, return_lse=True), tuple[Tensor, Tensor])
    return out + decode(dsv4.fmha, q, k, v, sink=torch.zeros(8))


def as_other_libraries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    return flash_attn_func(q, k, v).square() + scaled_dot_product_attention(q, k, v, is_causal=True)


def emulated(ptx: str, x: Tensor) -> str:
    with softsm.use("sm_90a"), softsm.checking(order="latest") as report:
        softsm.load(ptx).launch(grid=4, block=128, args=[x, 7])
    with softsm.timing(), softsm.counting():
        pass
    return str(report)
