"""Suite `backward`: the gradients of fmha, fmha_varlen and v4_attention, by autograd, against the fp64 formulas.

The inputs are those of the other suites. Every floating-point input requires its gradient; out gets one from outside,
and so does lse if a case requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference
from dsv4.reference import backward as reference_backward

from . import fmha_cases, v4_cases
from .calls import Call, raw_bytes, tensors
from .case import Case, Check, Draw, Where
from .seed_cases import HEAD_DIMS

INPUTS = ("q", "k", "v", "window", "compressed", "sink")  # what may have a gradient


@dataclass
class Gradients:
    """`dsv4.<op>(**args)` and its gradients for dout and dlse (None: lse is not used)."""

    op: str
    args: dict[str, Any]
    dout: Tensor
    dlse: Tensor | None
    repeat: bool = False  # run twice with deterministic=True: the bits must be equal

    def run(self, where: Where) -> tuple[dict[str, Tensor], list[Check]]:
        before = [raw_bytes(t).clone() for t in self._inputs()]
        found, checks = self._once(where), []
        if self.repeat:
            again = self._once(where)
            changed = sum(int((x != again[name]).sum()) for name, x in found.items())
            checks.append(Check("elements that changed on repeat", changed, 0.0))
        touched = sum(int((raw_bytes(t) != b).sum()) for t, b in zip(self._inputs(), before, strict=True))
        return found, [*checks, Check("input bytes changed", touched, 0.0)]

    def _inputs(self) -> list[Tensor]:
        return [t for value in (*self.args.values(), self.dout) for t in tensors(value)]

    def _once(self, where: Where) -> dict[str, Tensor]:
        leaves = {name: self.args[name].detach().requires_grad_() for name in self._wanted()}
        with where.context():
            out, lse = getattr(dsv4, self.op)(
                **{**self.args, **leaves}, return_lse=True, backend=where.backend, deterministic=self.repeat
            )
            results, given = ([out], [self.dout]) if self.dlse is None else ([out, lse], [self.dout, self.dlse])
            found = torch.autograd.grad(results, list(leaves.values()), given)
        return dict(zip(leaves, found, strict=True))

    def _wanted(self) -> list[str]:
        """Return the names of gradients to check. Rows of an Fp8Cache have no gradient."""
        return [name for name in INPUTS if isinstance(self.args.get(name), Tensor)]

    def check(self, got: tuple[dict[str, Tensor], list[Check]]) -> list[Check]:
        found, checks = got
        oracle, dtype = getattr(reference_backward, self.op), self.args["q"].dtype
        given: dict[str, Any] = dict(**self.args, dout=self.dout, dlse=self.dlse)
        ref, low = oracle(**given)._asdict(), oracle(**given, p_dtype=dtype)._asdict()
        unseen = self.unseen(oracle)
        for name, x in found.items():
            if name != "sink":
                dead = unseen.get(name, (ref[name] == 0).all(-1))
                checks = judge(f"d{name}", x, ref[name], low[name], dead, self.noise(name)) + checks
        if "sink" in found:
            checks.append(judge_sink(found["sink"], ref["sink"], self.sink_terms(), dtype))
        return checks

    def unseen(self, oracle: Callable[..., Any]) -> dict[str, Tensor]:
        """Return queries that see nothing and keys that no query sees. Not read off the gradient itself: that of a
        query which sees one key is 0 too, but as a difference."""
        dlse = torch.ones_like(lse_like(self.args["q"]))  # dS = P alone: no term cancels another
        probe = oracle(**self.args, dout=torch.zeros_like(self.dout), dlse=dlse)._asdict()
        return {name: (probe[name] == 0).all(-1) for name in ("q", "k") if name in probe}

    def noise(self, name: str) -> float:
        """Return the size of what fp32 leaves of a row of dq or dk when P (dP - delta) is 0: 2^-20 of its largest
        term."""
        if name not in ("q", "k") or "k" not in self.args:
            return 0.0
        q, k, v = (self.args[x].double().nan_to_num(0, 0, 0).norm(dim=-1) for x in "qkv")
        longest = [x.max().item() if x.numel() else 0.0 for x in (k if name == "q" else q, v, self.dout.norm(dim=-1))]
        scale = abs(self.args.get("softmax_scale") or self.args["q"].shape[-1] ** -0.5)
        return 2.0**-20 * scale * longest[0] * longest[1] * longest[2]

    def sink_terms(self) -> Tensor:
        """Return the terms of dsink for every query and head: the weight of the sink times |dO * O|, elementwise.
        [rows, H]"""
        out, lse = getattr(reference, self.op)(**self.args)
        if lse.ndim == 3:
            lse = lse.transpose(1, 2)  # [B, T, H], as out
        share = torch.where(lse.isneginf(), 0, torch.sigmoid(self.args["sink"].double() - lse))
        return (share * (self.dout.double() * out).norm(dim=-1)).flatten(0, -2)


def lse_like(q: Tensor) -> Tensor:
    """Draw fp32 numbers in the shape of the LSE."""
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else q.shape[:2]
    return torch.empty(shape, device=q.device)


def judge(name: str, got: Tensor, ref: Tensor, low: Tensor, dead: Tensor, noise: float) -> list[Check]:
    """Apply the rules of calls.judge; `dead` rows are exactly 0. Rows are held to the size of a typical row: that
    of a query which sees one key is 0 but for rounding. `noise` is the absolute error that a row may have."""
    if got.shape != ref.shape:
        return [Check(f"{name}: shape {tuple(got.shape)} for {tuple(ref.shape)}", 1.0, 0.0)]
    floor = torch.finfo(got.dtype).eps / 4
    got, ref, low = got.double().cpu(), ref.double().cpu(), low.to(got.dtype).double().cpu()
    if got.isnan().any():
        return [Check(f"{name}: NaN elements", float(got.isnan().sum()), 0.0)]
    if got.numel() == 0:
        return [Check(f"{name} norm", 0.0, 0.0)]
    rows, dead = ref.norm(dim=-1), dead.cpu()
    least = max(noise / floor, torch.finfo(torch.float32).tiny)
    typical = max(rows[~dead].square().mean().sqrt().item() if not dead.all() else 0.0, least)
    whole = max(ref.norm().item(), least * rows.numel() ** 0.5)
    worst, worst_low = (((x - ref).norm(dim=-1) / rows.clamp_min(typical)).max().item() for x in (got, low))
    error, error_low = ((x - ref).norm().item() / whole for x in (got, low))
    return [
        Check(f"{name} norm", error, max(1.5 * error_low, floor)),
        Check(f"{name} row", worst, max(3 * worst_low, 4 * floor)),
        Check(f"{name} dead rows", got[dead].abs().max().item() if dead.any() else 0.0, 0.0),
    ]


def judge_sink(got: Tensor, ref: Tensor, terms: Tensor, dtype: torch.dtype) -> Check:
    """Judge dsink = - sum share (dO . O): it is a sum with cancellation, so it is held to what rounding does to its
    terms.

    O is rounded, and made of a P that was rounded: two independent errors of 0.29 units in the last place (standard
    deviation) in each of its elements, 0.41 together. The bound is six standard deviations of the sum.
    """
    deviation = 0.41 * torch.finfo(dtype).eps * terms.double().square().sum(0).sqrt().cpu()
    error = (got.double() - ref).abs().cpu() / (6 * deviation + torch.finfo(torch.float32).eps * (1 + ref.abs().cpu()))
    return Check("dsink", error.max().item() if error.numel() else 0.0, 1.0)


def of(maker: Callable[..., Call], lse: bool = False, repeat: bool = False) -> Callable[..., Gradients]:
    """Return the gradients of a call of another suite."""

    def make(draw: Draw, **options: Any) -> Gradients:
        call = maker(draw, **options)
        q = call.args["q"]
        dout = draw.normal(*q.shape, dtype=q.dtype)
        return Gradients(call.op, call.args, dout, draw.normal(*lse_like(q).shape) if lse else None, repeat)

    return make


def dense_forms() -> Iterator[tuple[str, Callable[..., Gradients], set[str]]]:
    """Yield cases with sizes on both sides of the tiles of 64 and 128, every mask, sinks, groups, layouts."""
    dense, sinks = fmha_cases.dense, fmha_cases.with_sink
    two = {"heads": 2, "kv_heads": 2}
    for t, s in [(1, 1), (1, 140), (64, 128), (129, 257), (65, 31)]:
        yield f"t{t}-s{s}", of(partial(dense, size={"t": t, "s": s, **two})), {"sizes"}
    table: list[tuple[str, int, int, dict[str, Any]]] = [
        ("causal-square", 140, 140, {"causal": True}),
        ("causal-more-queries", 80, 50, {"causal": True}),  # the first 30 queries see nothing
        ("window-both", 150, 200, {"window": (20, 7)}),
        ("window-unseen-keys", 40, 290, {"window": (20, 0)}),
        ("window-self", 33, 64, {"window": (0, 0)}),  # one key each: dq and dk are 0 but for rounding
        ("scale-negative", 25, 60, {"softmax_scale": -0.1}),
    ]
    for name, t, s, options in table:
        yield name, of(partial(dense, size={"t": t, "s": s, **two}, **options)), {"masks"}
    for heads, kv_heads in [(8, 1), (6, 2)]:
        size = {"t": 40, "s": 130, "heads": heads, "kv_heads": kv_heads, "batch": 2}
        yield f"heads-{heads}-on-{kv_heads}", of(partial(dense, size=size, causal=True)), {"gqa"}
    size = {"t": 70, "s": 90, "heads": 4, "kv_heads": 2}
    mixed = [float("-inf"), 0.5, float("inf"), 30.0]
    yield "sink-mixed", of(partial(sinks, size=size, sink=mixed, causal=True)), {"sink"}
    yield "sink-lse", of(partial(sinks, size=size, sink="random", window=(50, 3)), lse=True), {"sink", "lse"}
    yield "lse", of(partial(dense, size=size, causal=True), lse=True), {"lse"}
    yield "unseen-nan", of(fmha_cases.unseen_nan), {"nan"}
    for how in ("heads-first", "packed-qkv", "padded-rows", "shared-keys"):
        yield f"strided-{how}", of(partial(fmha_cases.strided, how=how)), {"strided"}
    yield "k-is-v", of(fmha_cases.same_kv), {"mqa"}
    yield "repeatable", of(partial(dense, size={"t": 130, "s": 140, **two}), repeat=True), {"deterministic"}
    packed: list[tuple[str, list[tuple[int, int]], dict[str, Any]]] = [
        ("mixed", [(1, 129), (50, 50), (0, 0), (64, 128)], {"causal": True}),
        ("window-sink", [(30, 60), (61, 61), (2, 150)], {"window": (31, 0), "sink": True}),
    ]
    for name, lengths, options in packed:
        yield f"varlen-{name}", of(partial(fmha_cases.varlen, lengths=lengths, **options), lse=True), {"varlen"}
    yield "varlen-nan-neighbour", of(fmha_cases.varlen_nan), {"varlen", "nan"}


def v4_forms() -> Iterator[tuple[str, Callable[..., Gradients], set[str]]]:
    """Yield every kind of layer, lists with holes, heads on both sides of the tile of 64, both orders of summation.
    Rows of an Fp8Cache have no gradient and are left out: no kernel computes dq for them."""
    step = v4_cases.step
    yield "swa", of(partial(step, kind="swa", start=126, count=4)), {"swa"}
    yield "csa", of(partial(step, kind="csa", start=126, count=4), lse=True), {"csa", "lse"}
    yield "hca-table", of(partial(step, kind="hca", start=254, count=4, table=True)), {"hca", "table"}
    yield "csa-lengths", of(partial(step, kind="csa", start=130, count=2, lengths=True)), {"csa", "lengths"}
    yield "csa-padded-rows", of(partial(step, kind="csa", start=70, store="padded")), {"csa", "strided"}
    yield "csa-nothing-listed", of(partial(v4_cases.holes, everywhere=True)), {"csa", "holes"}
    yield "csa-sink-none", of(partial(step, kind="csa", start=90, sink=None, rope=False)), {"csa", "sink"}
    yield "csa-sink-plus-inf", of(partial(step, kind="csa", start=90, sink=float("inf"))), {"csa", "sink"}
    for heads in (1, 64, 65):
        yield f"csa-heads{heads}", of(partial(step, kind="csa", start=140, count=2, heads=heads)), {"csa", "heads"}
    yield "csa-repeatable", of(partial(step, kind="csa", start=60, count=3), repeat=True), {"csa", "deterministic"}


def v4_halves() -> Iterator[tuple[str, Callable[..., Gradients], set[str]]]:
    """Yield cases with q and rows in fp16."""
    half = partial(v4_cases.step, dtype=torch.float16)
    yield "swa-fp16", of(partial(half, kind="swa", start=126, count=2)), {"swa"}
    yield "csa-fp16", of(partial(half, kind="csa", start=126, count=2, heads=65), lse=True), {"csa", "lse", "heads"}
    yield "hca-table-fp16", of(partial(half, kind="hca", start=254, count=4, table=True)), {"hca", "table"}
    yield "csa-sink-large-fp16", of(partial(half, kind="csa", start=90, sink=12.0)), {"csa", "sink"}
    yield "csa-nothing-listed-fp16", of(partial(v4_cases.holes, everywhere=True, dtype=torch.float16)), {"csa", "holes"}
    repeated = of(partial(half, kind="csa", start=60, count=3), repeat=True)
    yield "csa-repeatable-fp16", repeated, {"csa", "deterministic"}


def backward() -> list[Case]:
    """Return the suite, in a fixed order."""
    cases = []

    def add(name: str, maker: Callable[..., Any], features: set[str], d: int, dtype: torch.dtype) -> None:
        full_name = f"{name}-d{d}-{fmha_cases.SHORT[dtype]}"
        make = partial(maker, d=d, dtype=dtype)
        cases.append(Case("backward", full_name, make, d, dtype, frozenset(features)))

    size = {"t": 100, "s": 140, "heads": 4, "kv_heads": 2}
    every = of(partial(fmha_cases.with_sink, size=size, sink="random", causal=True))
    for d in HEAD_DIMS:
        for dtype in fmha_cases.DTYPES:
            add("causal-gqa-sink", every, {"causal", "gqa", "sink"}, d, dtype)
    turns = cycle([(HEAD_DIMS[(i + i // 8) % 4], fmha_cases.DTYPES[(i // 4 + i) % 2]) for i in range(32)])
    for (name, maker, features), (d, dtype) in zip(dense_forms(), turns):
        add(name, maker, features, d, dtype)
    capped = of(partial(fmha_cases.with_sink, size=size, sink="random", causal=True, softcap=0.7), lse=True)
    for n, d in enumerate(HEAD_DIMS):
        add("softcap", capped, {"softcap"}, d, fmha_cases.DTYPES[n % 2])
    for forms, dtype in ((v4_forms(), torch.bfloat16), (v4_halves(), torch.float16)):
        cases += [Case("backward", f"v4-{name}", make, 512, dtype, frozenset(words)) for name, make, words in forms]
    return cases
