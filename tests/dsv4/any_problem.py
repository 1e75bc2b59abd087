"""Random problems, drawn from a seed: sizes around tile edges, windows of every sign, sinks, scales, packed heads,
padded strides, pages of any size, splits and plans, NaN and inf wherever no query looks. `DSV4_SEED` draws others."""

import os
import random
from dataclasses import replace

import torch
from torch import Tensor

import dsv4
from dsv4 import suites
from dsv4.suites.calls import Call

SEED = int(os.environ.get("DSV4_SEED", "0"))
NAN, INF = float("nan"), float("inf")
DIMS = (64, 128, 256, 512)
SIZES = (0, 1, 2, 3, 17, 63, 64, 65, 127, 128, 129)
HEADS = ((1, 1), (2, 2), (3, 1), (5, 1), (7, 1), (6, 2), (16, 1), (64, 1), (128, 1))
WINDOWS = ((-1, -1), (-1, -1), (0, 0), (5, 0), (-1, 3), (3, -1), (0, 7), (63, 0), (100, 20), (0, 300), (1000, 0))


class Problem:
    """One call, drawn from a seed."""

    def __init__(self, seed: int, where: suites.Where, head_dims=DIMS):
        self.r, self.where = random.Random(seed), where
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.r.choice
        self.d, self.dtype = pick(head_dims), pick((torch.bfloat16, torch.bfloat16, torch.float16))
        self.q_heads, self.kv_heads = pick(HEADS)
        self.magnitude = pick((1, 1, 1, 8 if self.dtype == torch.float16 else 3))
        self.window, self.causal = pick(WINDOWS), self.r.random() < 0.3
        self.same_kv = self.r.random() < 0.35
        self.batch = pick((1, 1, 2, 3))
        getattr(self, pick(("dense", "varlen", "paged")))()
        self.args |= dict(
            causal=self.causal,
            window=self.window,
            sink=self.sink(),
            softmax_scale=pick((None, None, None, 0.0, -0.05, 0.3, -1.0)),
        )
        self.call = Call(self.op, self.args, out_pad=pick((0, 0, 8, 3)), extra=self.extra())

    def size(self) -> int:
        return self.r.choice(SIZES)

    def queries(self) -> int:
        return self.r.choice(SIZES[:5]) if self.q_heads > 16 else self.size()

    def draw(self, *shape: int) -> Tensor:
        """Random rows, now and then with NaN between them."""
        x = torch.randn(shape, generator=self.generator) * self.magnitude
        pad = self.r.choice((0, 0, 8, 64, 3))
        rows = torch.full((*shape[:-1], shape[-1] + pad), NAN, dtype=self.dtype, device=self.where.device)
        rows[..., : shape[-1]] = x
        return rows[..., : shape[-1]]

    def keys(self, *shape: int) -> tuple[Tensor, Tensor]:
        k = self.draw(*shape)
        return k, k if self.same_kv else self.draw(*shape)

    def integers(self, values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.where.device)

    def unseen(self, queries: int, keys: int) -> int:
        """How many of the first keys no query sees."""
        if queries == 0:
            return keys
        left = self.window[0]
        return min(max(keys - queries - left, 0), keys) if left >= 0 else 0

    def poison(self, rows: Tensor) -> None:
        rows.fill_(self.r.choice((NAN, INF, -INF)))

    def sink(self) -> Tensor | None:
        kind = self.r.choice((None, None, "random", "large", "infinite"))
        if kind is None:
            return None
        x = torch.randn(self.q_heads, generator=self.generator) * (15 if kind == "large" else 1)
        if kind == "infinite":
            x[:: self.r.choice((1, 2))] = self.r.choice((INF, -INF))
        return x.to(self.where.device)

    def dense(self) -> None:
        t, s = self.queries(), self.size()
        k, v = self.keys(self.batch, s, self.kv_heads, self.d)
        for x in (k, v):
            self.poison(x[:, : self.unseen(t, s)])
        self.op, self.args = "fmha", dict(q=self.draw(self.batch, t, self.q_heads, self.d), k=k, v=v)
        self.capacity = (self.batch, t, s)

    def varlen(self) -> None:
        ts, ss = ([n() for _ in range(self.batch)] for n in (self.queries, self.size))
        if self.r.random() < 0.3:  # many short sequences
            self.batch = 12
            ts, ss = ([self.r.choice(SIZES[:5]) for _ in range(self.batch)] for _ in "qk")
        cu_q, cu_k = ([sum(x[:n]) for n in range(self.batch + 1)] for x in (ts, ss))
        k, v = self.keys(cu_k[-1] + self.r.choice((0, 5, 70)), self.kv_heads, self.d)
        for x in (k, v):
            self.poison(x[cu_k[-1] :])
            for t, s, start in zip(ts, ss, cu_k, strict=False):
                self.poison(x[start : start + self.unseen(t, s)])
        q = self.draw(cu_q[-1] + self.r.choice((0, 3)), self.q_heads, self.d)
        self.op = "fmha_varlen"
        self.args = dict(q=q, k=k, v=v, cu_seqlens_q=self.integers(cu_q), cu_seqlens_k=self.integers(cu_k))
        self.capacity = (self.batch, q.shape[0], k.shape[0])

    def paged(self) -> None:
        page, t = self.r.choice((1, 3, 8, 16, 24, 64, 100, 256)), self.queries()
        lengths = [self.size() for _ in range(self.batch)]
        width = max(-(-max(lengths) // page), 1) + self.r.choice((0, 2))
        pages = self.r.choice((3, width * self.batch + 2))  # few: a page stands in many places
        table = torch.randint(0, pages, (self.batch, width), generator=self.generator, dtype=torch.int32)
        used = torch.zeros(pages, page, dtype=torch.bool)
        for n, s in enumerate(lengths):
            j = torch.arange(self.unseen(t, s), s)
            used[table[n, j // page].long(), j % page] = True
            table[n, -(-s // page) :] = self.r.choice((-1, 0, pages, 1 << 30))  # not read
        gap = self.r.choice((0, 0, 2))
        k, v = (x[:, :page] for x in self.keys(pages, page + gap, self.kv_heads, self.d))
        for x in (k, v):
            x[~used.to(x.device)] = NAN
        self.op, q = "fmha_paged", self.draw(self.batch, t, self.q_heads, self.d)
        self.args = dict(q=q, k_pages=k, v_pages=v, block_table=table.to(k.device), lengths=self.integers(lengths))
        self.capacity = (self.batch, t, width * page)

    def extra(self) -> dict:
        """Nothing, a plan of larger capacity, some number of splits, or deterministic=True with or without a plan."""
        kind = self.r.choice(("nothing", "plan", "splits", "deterministic", "both"))
        extra: dict = dict(deterministic=True) if kind in ("deterministic", "both") else {}
        if kind in ("plan", "splits", "both"):
            b, t, s = self.capacity
            made = dsv4.plan(getattr(dsv4, self.op), batch=b + 1, max_seqlen_q=t + 1, max_seqlen_k=s + 100,
                             q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.d,
                             device=self.where.device)  # fmt: skip
            if kind == "splits":
                n = self.r.choice((2, 3, 9))
                room = torch.full((n * made.rows * (self.d + 1),), NAN, device=self.where.device)
                made = replace(made, num_splits=n, scratch=room)
            extra["plan"] = made
        return extra

    def __str__(self) -> str:
        shapes = {
            key: (list(x.shape), x.stride()) if isinstance(x, Tensor) and x.dim() > 2 else x
            for key, x in self.args.items()
        }
        return f"{self.op}({shapes}, {list(self.call.extra)})"

    def wrong(self) -> list[str]:
        return [str(check) for check in self.call.check(self.call.run(self.where)) if not check.ok]
