"""This library's calls as cases."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

import dsv4
from dsv4.index.sizes import GROUP, index_block, index_line, index_list_words, index_shares, index_words
from dsv4.reference import rope_table
from dsv4.runtime import plan as plans
from softsm_time.case import FP32, Call, Case, cdiv, sms, values


def fmha(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, d: int, causal=False, same=False) -> Case:
    def make(device: str) -> Call:
        q = values(batch, queries, q_heads, d, device=device)
        k = values(batch, keys, kv_heads, d, device=device)
        v = k if same else values(batch, keys, kv_heads, d, device=device)
        out = torch.empty_like(q)
        sizes = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, max_seqlen_q=queries, max_seqlen_k=keys)
        plan = dsv4.plan(dsv4.fmha, head_dim=d, device=q.device, **sizes)
        if device == "cpu":  # as many splits as a GPU would get
            splits, words = plans.RULES["fmha"](plans.Capacities(head_dim=d, **sizes), sms(), True)
            plan = dataclasses.replace(plan, num_splits=splits, scratch=torch.empty(words))
        return lambda: dsv4.fmha(q, k, v, causal=causal, plan=plan, out=out, backend=backend(device))

    kind = "decode" if queries == 1 else "prefill"
    heads = f"{q_heads}" if q_heads == kv_heads else f"{q_heads}:{kv_heads}"
    shape = (
        f"{batch} x {heads} x {keys}" if queries == 1 or queries == keys else f"{batch} x {heads} x {queries} x {keys}"
    )
    return Case(f"fmha {kind} hd{d} {shape}{' causal' if causal else ''}", f"fmha {kind}", make)


def backend(device: str) -> str:
    return "cuda" if device == "cuda" else "softsm"


def v4(queries: int, heads: int, window: int, compressed: int, fp8: bool, pool: int = 200_000) -> Case:
    def make(device: str) -> Call:
        rows = values(pool, 512, device=device)
        held: Any = dsv4.Fp8Cache.pack(rows) if fp8 else rows
        q = values(queries, heads, 512, device=device)
        sink = values(heads, device=device, dtype=FP32)
        picks = [
            torch.randint(0, pool, (queries, n), device=device, dtype=torch.int32) for n in (window, compressed) if n
        ]
        out = torch.empty_like(q)
        given = [x for pick in picks for x in (held, pick)]
        return lambda: dsv4.v4_attention(q, *given, sink=sink, out=out, backend=backend(device))

    listed = f"{window}+{compressed}" if compressed else f"{window}"
    kind = "fp8" if fp8 else "bf16"
    return Case(f"v4 {kind} {queries} x {heads} x {listed} of {pool}", f"v4 {kind}", make)


def scored(queries: int, keys: int, topk: int) -> torch.Tensor:
    """A plan's room with scores as the first kernel would leave them: a timing run executes a few of its CTAs, without
    their products, and how many rounds the choice takes depends on the scores of all."""
    line, words = index_line(keys), index_words(keys, topk)
    room = index_block(queries, keys, topk)
    count = cdiv(queries, cdiv(queries, room))
    shares = index_shares(queries, sms(), keys, topk, 0)
    scratch = torch.zeros(room * words + (queries * index_list_words(keys, shares, topk) if shares > 1 else 0))
    scores = values(count, line, device="cpu", dtype=FP32)
    scratch[: scores.numel()] = scores.flatten()
    maxima = scores.view(count, line // GROUP, GROUP).amax(2)
    scratch[scores.numel() :][: maxima.numel()] = maxima.flatten()
    return scratch


def index(requests: int, each: int, keys: int, topk: int = 512) -> Case:
    def make(device: str) -> Call:
        n, pages = requests * each, keys // 64
        q, weights = values(n, 64, 128, device=device), values(n, 64, device=device)
        pool = values(requests * pages, 64, 128, device=device)
        table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
        lengths = torch.full((n,), keys, dtype=torch.int32, device=device)
        starts = torch.arange(0, n + 1, each, dtype=torch.int32, device=device) if each > 1 else None
        out = torch.empty(n, topk, dtype=torch.int32, device=device)
        plan = dsv4.plan(
            dsv4.index_topk, batch=n, q_heads=64, kv_heads=1, head_dim=128, max_seqlen_k=keys, device=q.device
        )
        if device == "cpu":  # a plan of the CPU has no room for scores
            scratch = scored(n, keys, topk)
            plan = dataclasses.replace(plan, scratch=scratch)
        return lambda: dsv4.index_topk(q, pool, weights, topk, lengths=lengths, block_table=table,
                                       request_starts=starts, out=out, plan=plan, backend=backend(device))  # fmt: skip

    # From 16 queries of a sequence on, the CTA that is looked at makes all scores of the queries that are looked at.
    return Case(f"index {requests} x {each} x {keys}", "index", make, values=each >= 16)


def varlen(lengths: list[int], heads: int, d: int, causal: bool) -> Case:
    def make(device: str) -> Call:
        q, k, v = (values(sum(lengths), heads, d, device=device) for _ in "qkv")
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        out, most = torch.empty_like(q), max(lengths)
        return lambda: dsv4.fmhavarlen(q, k, v, ends, ends, max_seqlen_q=most, max_seqlen_k=most, causal=causal,
                                        out=out, backend=backend(device))  # fmt: skip

    shape = f"{len(lengths)} x {heads} x up to {max(lengths)}"
    return Case(f"fmha varlen hd{d} {shape}{' causal' * causal}", "fmha varlen", make)


def backward(batch: int, heads: int, tokens: int, d: int, causal: bool = False) -> Case:
    """Forward and backward pass in one graph. Nothing is added to gradients of the call before."""

    def make(device: str) -> Call:
        given = [values(batch, tokens, heads, d, device=device).requires_grad_() for _ in "qkv"]
        dout = values(batch, tokens, heads, d, device=device)
        return lambda: torch.autograd.grad(dsv4.fmha(*given, causal=causal, backend=backend(device)), given, dout)

    shape = f"{batch} x {heads} x {tokens}{' causal' * causal}"
    return Case(f"fmha forward and backward hd{d} {shape}", "fmha backward", make)


def v4_backward(queries: int, heads: int, rows: int, pool: int) -> Case:
    def make(device: str) -> Call:
        q, kv = (values(*s, 512, device=device).requires_grad_() for s in ((queries, heads), (pool,)))
        sink, dout = values(heads, device=device, dtype=FP32), values(queries, heads, 512, device=device)
        picks = torch.randint(0, pool, (queries, rows), device=device, dtype=torch.int32)
        return lambda: torch.autograd.grad(
            dsv4.v4_attention(q, kv, picks, sink=sink, backend=backend(device)), (q, kv), dout
        )

    return Case(f"v4 forward and backward {queries} x {heads} x {rows} of {pool}", "v4 backward", make)


def compress(kind: str, tokens: int) -> Case:
    d, m, overlap = {"csa": (512, 4, True), "keys": (128, 4, True), "hca": (512, 128, False)}[kind]

    def make(device: str) -> Call:
        width = d * (1 + overlap)
        rest: dict[str, Any] = dict(
            position_bias=values(m, width, device=device, dtype=FP32),
            norm_weight=values(d, device=device, dtype=FP32),
            cos_sin=rope_table(max(8192, tokens), 64, 160000.0, factor=16.0).to(device),
        )
        kv, gate = values(tokens, width, device=device), values(tokens, width, device=device)
        return lambda: dsv4.compress(kv, gate, **rest, backend=backend(device))

    return Case(f"compress {kind} {tokens}", "compress", make)
