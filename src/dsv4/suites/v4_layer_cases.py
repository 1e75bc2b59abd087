"""Whole V4 layers, token by token as a server runs them: compress, choose, attend, in steps of 1 to 4 tokens.

Everything the library computes on the way is compared with a definition written out here in fp64 as a loop over
tokens: the compressed rows, the rows that the indexer chooses, and the attention over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference

from .calls import FEATURES, judge, judge_lse
from .case import Check, Draw, Where

WINDOW = 128
RATIO = {"csa": 4, "hca": 128}
EPS = 1e-6  # epsilon of the RMSNorm
# Compression is fp32 throughout: sums of up to 512 terms of order one, and their squares.
FP32_BOUND = 1e-5


@dataclass
class Weights:
    """One compressor: the projections of all tokens and its parameters. width = d (HCA) or 2 d (CSA)."""

    kv: Tensor  # [L, width]
    gate: Tensor  # [L, width]
    bias: Tensor  # [m, width]
    norm: Tensor  # [d]
    cos_sin: Tensor  # [L, 64]

    @staticmethod
    def draw(draw: Draw, tokens: int, ratio: int, d: int, overlap: bool) -> Weights:
        width = 2 * d if overlap else d
        table = reference.rope_table(tokens, theta=160000.0, factor=16.0).to(draw.device)
        kv, gate = draw.normal(tokens, width), draw.normal(tokens, width)
        return Weights(kv, gate, draw.normal(ratio, width), 1 + draw.normal(d, scale=0.1), table)

    def defined(self) -> Tensor:
        """Return the rows by definition: fp64 [L // m, d], a loop over windows."""
        c, z, bias = (x.double().cpu() for x in (self.kv, self.gate, self.bias))
        m, d = len(bias), len(self.norm)
        rows = []
        for w in range(len(c) // m):
            own = range(w * m, w * m + m)
            if c.shape[1] == d:
                slots = [(c[j], z[j] + bias[j % m]) for j in own]
            else:
                slots = [(c[j, d:], z[j, d:] + bias[j % m, d:]) for j in own]
                before = range(w * m - m, w * m) if w else ()
                slots += [(c[j, :d], z[j, :d] + bias[j % m, :d]) for j in before]
            value, logit = (torch.stack(x) for x in zip(*slots, strict=True))
            row = (logit.softmax(0) * value).sum(0)  # a softmax of its own for every channel
            rows.append(row * torch.rsqrt(row.square().mean() + EPS) * self.norm.double().cpu())
        if not rows:
            return torch.zeros(0, d, dtype=torch.float64)
        return reference.apply_rope(torch.stack(rows), self.cos_sin.cpu(), torch.arange(len(rows)) * m)

    def step(self, tokens: slice, state: Any, where: Where) -> tuple[Tensor, Any]:
        with where.context():
            return dsv4.compress(
                self.kv[tokens],
                self.gate[tokens],
                self.bias,
                self.norm,
                cos_sin=self.cos_sin,
                state=state,
                eps=EPS,
                dtype=torch.float32,
                backend=where.backend,
            )


@dataclass
class Ran:
    out: Tensor  # [L, H, 512]
    lse: Tensor  # [L, H]
    rows: Tensor  # fp32 [L // m, 512], as the steps made them
    keys: Tensor  # fp32 [L // 4, 128] of the indexer
    chosen: Tensor  # int32 [L, topk]
    rows_once: Tensor  # the same rows and keys, made by one call with all tokens
    keys_once: Tensor


@dataclass
class Layer:
    """A sequence cut into `steps`; step 0 is the prefill."""

    kind: str
    steps: list[int]
    q: Tensor  # [L, H, 512], bf16
    window: Tensor  # [L, 512], bf16
    sink: Tensor  # [H]
    rope: tuple[Tensor, Tensor]  # cos_sin, positions [L]
    main: Weights | None  # makes the compressed rows
    index: Weights | None  # makes the indexer's keys
    index_q: Tensor  # [L, index heads, 128]
    index_weights: Tensor  # [L, index heads]
    topk: int
    fp8: bool

    def stored(self, rows: Tensor, rows_per_page: int) -> Any:
        rows = rows.to(torch.bfloat16)
        return dsv4.Fp8Cache.pack(rows, rows_per_page=rows_per_page) if self.fp8 else rows

    def run(self, where: Where) -> Ran:
        rows, keys, state, index_state = [], [], None, None
        none = self.q.new_zeros(0, 512, dtype=torch.float32)
        outs, lses, lists = [], [], []
        start = 0
        for count in self.steps:
            tokens = slice(start, start + count)
            start += count
            chosen: Any = self.q.new_zeros(count, self.topk, dtype=torch.int32)
            if self.main is not None:  # compress first: a row finished by token t is visible to t
                made, state = self.main.step(tokens, state, where)
                rows.append(made)
            if self.index is not None:
                made, index_state = self.index.step(tokens, index_state, where)
                keys.append(made)
                with where.context():
                    chosen = dsv4.index_topk(
                        self.index_q[tokens],
                        torch.cat(keys).bfloat16(),
                        self.index_weights[tokens],
                        self.topk,
                        positions=self.rope[1][tokens],
                        ratio=RATIO["csa"],
                        backend=where.backend,
                    )
            with where.context():
                out, lse = self.attend(tokens, torch.cat(rows) if rows else none, chosen, where)
            outs.append(out)
            lses.append(lse)
            lists.append(chosen)
        all_rows, all_keys = (torch.cat(x) if x else none for x in (rows, keys))
        tokens = slice(0, start)
        once = [x.step(tokens, None, where)[0] if x else none for x in (self.main, self.index)]
        return Ran(torch.cat(outs), torch.cat(lses), all_rows, all_keys, torch.cat(lists), *once)

    def arguments(self, tokens: slice, rows: Tensor, chosen: Tensor) -> dict[str, Any]:
        """Return the call of v4_attention for these tokens, over the compressed rows made so far."""
        position = self.rope[1][tokens]
        device = self.q.device
        back = torch.arange(WINDOW, dtype=torch.int32, device=device)
        ids = position[:, None] - back
        args: dict[str, Any] = {
            "q": self.q[tokens],
            "window": self.stored(self.window[: tokens.stop], 64),
            "window_indices": ids.clamp_min(-1).to(torch.int32),
            "inverse_rope": (self.rope[0], position),
            "sink": self.sink,
        }
        if self.kind == "csa":
            args.update(compressed=self.stored(rows, 64), compressed_indices=chosen)
        elif self.kind == "hca":
            pages = -(-len(rows) // 2)
            padded = torch.cat([rows, rows.new_zeros(2 * pages - len(rows), 512)])
            pool = self.stored(padded, 2)
            args.update(
                compressed=pool if self.fp8 else pool.view(pages, 2, 512),
                compressed_block_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
                compressed_lengths=((position + 1) // RATIO["hca"]).to(torch.int32),
                request_starts=torch.tensor([0, len(position)], dtype=torch.int32, device=device),
            )
        return args

    def attend(self, tokens: slice, rows: Tensor, chosen: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        args = self.arguments(tokens, rows, chosen)
        out = torch.full_like(args["q"], float("nan"))
        dsv4_out, lse = dsv4.v4_attention(**args, out=out, return_lse=True, backend=where.backend)
        return dsv4_out, lse

    def check(self, got: Ran) -> list[Check]:
        checks = []
        if self.main is not None:
            checks += self.check_rows("compressed rows", got.rows, self.main.defined(), got.rows_once)
        if self.index is not None:
            checks += self.check_rows("index keys", got.keys, self.index.defined(), got.keys_once)
            # Use the keys that were made, for the reason given below.
            checks.append(Check("wrong index lists", self.wrong_lists(got.chosen, got.keys.bfloat16()), 0.0))
        if not all(check.ok for check in checks):
            return checks  # attention over wrong rows would add nothing
        # The oracle gets the rows that were made, just found right to fp32: where one lies next to a rounding boundary
        # of the storage format, the definition's own row may be stored as the neighbouring number.
        refs, lows, ref_lses = [], [], []
        start = 0
        for count in self.steps:
            tokens = slice(start, start + count)
            start += count
            rows = got.rows[: start // RATIO.get(self.kind, 1)]
            args = self.arguments(tokens, rows, got.chosen[tokens])
            ref, ref_lse = reference.v4_attention(**args)
            low, _ = reference.v4_attention(**args, p_dtype=self.q.dtype)
            refs.append(ref)
            lows.append(low)
            ref_lses.append(ref_lse)
        judged = judge(got.out, torch.cat(refs), torch.cat(lows), FEATURES)
        return judged + checks + judge_lse(got.lse, torch.cat(ref_lses))

    def check_rows(self, name: str, got: Tensor, defined: Tensor, at_once: Tensor) -> list[Check]:
        """Check that rows are right, and bit for bit those of one call with all tokens."""
        if got.shape != defined.shape:
            return [Check(f"{name} {tuple(got.shape)} for {tuple(defined.shape)}", 1.0, 0.0)]
        error = (got.double().cpu() - defined).abs().max().item() if defined.numel() else 0.0
        bound = FP32_BOUND * (defined.abs().max().item() if defined.numel() else 1.0)
        changed = int((at_once != got).sum())
        return [Check(name, error, bound), Check(f"{name} that depend on the steps", changed, 0.0)]

    def wrong_lists(self, chosen: Tensor, keys: Tensor) -> int:
        """Return queries whose list is not the top-k, up to scores that fp32 cannot tell apart."""
        scores = torch.relu(torch.einsum("thd,sd->ths", self.index_q.double().cpu(), keys.double().cpu()))
        scores = (scores * self.index_weights.double().cpu()[..., None]).sum(1)  # [L, rows]
        wrong = 0
        for t, ids in enumerate(chosen.cpu().long()):
            visible = (t + 1) // RATIO["csa"]
            count = min(self.topk, visible)
            ids = ids[:count], ids[count:]
            fine = bool((ids[1] == -1).all()) and len(ids[0].unique()) == count
            fine = fine and bool(((ids[0] >= 0) & (ids[0] < visible)).all())
            if fine and count:
                least = scores[t, :visible].topk(count).values[-1]
                fine = bool((scores[t, ids[0]] >= least - FP32_BOUND * scores.abs().max()).all())
            wrong += not fine
        return wrong


def layer(
    draw: Draw, kind: str, steps: list[int], heads: int = 4, topk: int = 16, fp8: bool = False, index_heads: int = 16
) -> Layer:
    tokens = sum(steps)
    options: dict[str, Any] = {"theta": 10000.0} if kind == "swa" else {"theta": 160000.0, "factor": 16.0}
    main = None if kind == "swa" else Weights.draw(draw, tokens, RATIO[kind], 512, overlap=kind == "csa")
    return Layer(
        kind=kind,
        steps=steps,
        q=draw.normal(tokens, heads, 512, dtype=torch.bfloat16),
        window=draw.normal(tokens, 512, dtype=torch.bfloat16),
        sink=draw.normal(heads, scale=2.0),
        rope=(reference.rope_table(tokens, **options).to(draw.device), draw.int32(list(range(tokens)))),
        main=main,
        index=Weights.draw(draw, tokens, RATIO["csa"], 128, overlap=True) if kind == "csa" else None,
        index_q=draw.normal(tokens, index_heads, 128, dtype=torch.bfloat16),
        index_weights=draw.normal(tokens, index_heads),
        topk=topk,
        fp8=fp8,
    )


@dataclass
class Ties:
    """Scores that are exactly equal, made of small whole numbers: of equals the lower row must be taken."""

    q: Tensor  # [N, H, D], bf16, which holds them exactly
    k: Tensor  # [rows, D]; rows past `visible` are NaN
    weights: Tensor  # [N, H]
    visible: Tensor  # [N]
    topk: int

    def run(self, where: Where) -> Any:
        with where.context():
            return dsv4.index_topk(self.q, self.k, self.weights, self.topk, lengths=self.visible, backend=where.backend)

    def check(self, got: Tensor) -> list[Check]:
        want = torch.full_like(got, -1)
        for n, visible in enumerate(self.visible.tolist()):
            per_head = torch.relu(self.q[n].double() @ self.k[:visible].double().T)
            score = (per_head * self.weights[n].double()[:, None]).sum(0)
            order = sorted(range(visible), key=lambda s: (-score[s].item(), s))[: self.topk]
            want[n, : len(order)] = torch.tensor(order, dtype=torch.int32)
        return [Check("wrong indices", int((got != want).sum()), 0.0)]


def ties(draw: Draw, values: str, topk: int = 8) -> Ties:
    """`zero`: every product is negative, so ReLU makes every score 0. `few`: scores take only a few values."""
    n, heads, d, rows = 6, 4, 16, 24
    if values == "zero":
        q, k = torch.ones(n, heads, d), -torch.ones(rows, d)
    else:
        q, k = (draw.integers(-1, 2, shape).float().cpu() for shape in ((n, heads, d), (rows, d)))
    weights = draw.integers(-2, 3, (n, heads)).float()
    visible = draw.int32([0, 1, topk - 1, topk, topk + 1, rows - 2])  # n_c = 0, < k, = k, > k
    k[rows - 2 :] = float("nan")
    return Ties(q.bfloat16().to(draw.device), k.bfloat16().to(draw.device), weights, visible, topk)


def layer_specials() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    mtp = [1, 2, 3, 4]
    for name, kind, steps in [
        ("swa-layer", "swa", [119, *mtp]),  # ends at 129: crosses the window's edge
        ("csa-layer", "csa", [57, *mtp, 4]),  # n_c passes top-k = 16 at token 63, within a draft
        ("csa-layer-from-nothing", "csa", [1, 1, 1, 1, *mtp]),
        ("csa-layer-short", "csa", [2]),
        ("hca-layer", "hca", [118, *mtp, 4]),  # the first row is finished within the last draft
        ("hca-layer-second-row", "hca", [251, 4, 3]),
        ("hca-layer-short", "hca", [3, 1]),
    ]:
        yield name, partial(layer, kind=kind, steps=steps), {kind, "layer", "mtp"}
    yield "csa-layer-fp8", partial(layer, kind="csa", steps=[70, *mtp], fp8=True), {"csa", "layer", "fp8"}
    yield "hca-layer-fp8", partial(layer, kind="hca", steps=[126, 4], fp8=True), {"hca", "layer", "fp8"}
    yield "index-ties-zero", partial(ties, values="zero"), {"csa", "index"}
    yield "index-ties-few", partial(ties, values="few"), {"csa", "index"}
    yield "index-ties-wide", partial(ties, values="few", topk=22), {"csa", "index"}
