"""What a user writes, for type checkers: `make lint` gives it to mypy and pyright. Nothing here runs."""

from typing import TypedDict, assert_type

import torch
from torch import Tensor

import dsv4
import softsm
from dsv4.distributed import decode, prefill
from dsv4.integrations.flash_attn import flash_attn_func
from dsv4.integrations.sdpa import scaled_dot_product_attention


class Sizes(TypedDict):
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_seqlen_k: int


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


def compressor(kv: Tensor, gate: Tensor, bias: Tensor, weight: Tensor, slots: Tensor) -> dsv4.CompressState:
    rows, state = dsv4.compress(kv, gate, bias, weight)
    assert_type(rows, Tensor)
    cache, state = dsv4.compress(kv, gate, bias, weight, state=state, out=dsv4.Fp8Cache.empty(4, 64), slots=slots)
    assert_type(cache, dsv4.Fp8Cache)
    dsv4.compress(kv, gate, bias, weight, ration=4)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    return state


def names_and_keywords_that_do_not_exist(q: Tensor) -> None:
    dsv4.fhma(q, q, q)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    softsm.usee("sm_90a")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    sizes: Sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "max_seqlen_k": 64}
    assert_type(dsv4.warmup(dsv4.fmha, **sizes), dsv4.Plan)
    dsv4.warmup(dsv4.fmha, **sizes, bacth=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


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
    assert_type(softsm.ranks(2, lambda rank: rank + 1), list[int])
    return str(report)
