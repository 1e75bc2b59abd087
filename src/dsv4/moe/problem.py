"""Validated problems of moe and moe_route: the input of every backend.

The `build` functions read no tensor values; the `check_values` functions do, where `checks.values_checked` allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4.moe import formats
from dsv4.moe.options import MoeOptions
from dsv4.runtime import checks

INTEGERS = (torch.int32, torch.int64)
E8M0, E4M3 = torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class MoeProblem:
    """Token t uses expert ids[t, j] with weights[t, j]. An id of -1 is nothing; without value checks (on a GPU) other
    ids out of range count as -1."""

    operation: ClassVar[str] = "moe"
    backward: ClassVar[bool] = False
    empty_outputs: ClassVar[dict[str, float]] = {"out": 0.0, "slots": 0.0}

    x: Tensor  # [T, H]
    w13: Tensor  # tiles (experts.Fp4Experts), or [E, 2 I, H]
    w2: Tensor  # tiles, or [E, H, I]
    ids: Tensor  # int32 or int64 [T, k]
    weights: Tensor  # fp32 [T, k]
    w13_scales: Tensor | None
    w2_scales: Tensor | None
    w13_factors: Tensor | None
    w2_factors: Tensor | None
    shared_w13: Tensor | None  # [2 S, H]
    shared_w2: Tensor | None  # [H, S]
    options: MoeOptions
    out: Tensor | None = None  # [T, H], of x's dtype; set before a backend sees the problem
    slots: Tensor | None = None  # [T, k, H]: weighted outputs of experts, or None when not wanted
    num_splits: int = 0  # from a plan; not used
    scratch: Tensor | None = None  # from a plan: flat fp32, for all workspace

    activations = property(lambda self: self.options.activations)
    limit = property(lambda self: self.options.limit)
    format = property(lambda self: self.options.format)
    spread = property(lambda self: self.options.spread)
    deterministic = property(lambda self: self.options.deterministic)
    layout = property(lambda self: self.options.layout)
    fused = property(lambda self: self.options.fused)

    q = property(lambda self: self.x)  # a tensor on the device of the problem
    tokens = property(lambda self: self.x.shape[0])
    hidden = property(lambda self: self.x.shape[1])
    topk = property(lambda self: self.ids.shape[1])
    experts = property(lambda self: self.w13.shape[0])

    @property
    def intermediate(self) -> int:
        return self.w2.shape[2] * (1 if self.format == "bf16" else formats.TILE_COLUMNS)

    # The names of FmhaProblem, so that a Plan fits.
    batch = property(lambda self: self.tokens)
    q_heads = property(lambda self: self.topk)
    kv_heads = property(lambda self: self.experts)
    head_dim = property(lambda self: self.hidden)
    max_seqlen_q = property(lambda self: 1)
    max_seqlen_k = property(lambda self: self.intermediate)

    def no_keys(self) -> bool:
        """Return whether the shapes alone leave nothing to compute."""
        return self.x.numel() == 0


def build(
    x,
    w13,
    w2,
    ids,
    weights,
    *,
    w13_scales=None,
    w2_scales=None,
    w13_factors=None,
    w2_factors=None,
    shared_w13=None,
    shared_w2=None,
    **fields,
) -> MoeProblem:
    """Check the arguments of dsv4.moe and return them as a problem. fields: of the options."""
    options = MoeOptions(**fields)
    checks.tensor("x", x, ("T", "H"), checks.FLOATS)
    t, h = x.shape
    like = ("x", x)
    if options.format == "bf16":
        checks.tensor("experts[0]", w13, ("E", "2 I", h), (x.dtype,), like=like)
        e, i = w13.shape[0], w13.shape[1] // 2
        if w13.shape[1] % 2 or i == 0:
            checks.fail("experts[0]", f"shape {list(w13.shape)}", f"shape [E, 2 I, {h}]: gate above up")
        checks.tensor("experts[1]", w2, (e, h, i), (x.dtype,), like=like)
    else:
        columns, (each, dtype) = formats.TILE_COLUMNS, (4, E8M0) if options.format == "mxfp4" else (8, E4M3)
        checks.tensor("experts.w13", w13, ("E", "I / 128", "H / 128", 256, 64), (torch.uint8,), like=like)
        e, i = w13.shape[0], w13.shape[1] * columns
        if w13.shape[2] * columns != h:
            checks.fail("experts", f"weights for hidden size {w13.shape[2] * columns}", f"{h}, as x")
        tiles = {"w13": (w13, w13_scales, w13_factors), "w2": (w2, w2_scales, w2_factors)}
        checks.tensor("experts.w2", w2, (e, h // 256, i // columns, 256, 64), (torch.uint8,), like=like)
        for name, (codes, scales, factors) in tiles.items():
            checks.tensor(f"experts.{name}_scales", scales, (*codes.shape[:4], each), (dtype,), like=like)
            checks.tensor(f"experts.{name}_factors", factors, (e, codes.shape[1] * 256), (torch.float32,), like=like)
            for part, tiled in (("", codes), ("_scales", scales), ("_factors", factors)):
                if not tiled.is_contiguous():
                    checks.fail(f"experts.{name}{part}", f"strides {list(tiled.stride())}", "a contiguous tensor")
    if e == 0:
        checks.fail("experts", "no expert", "one at least")
    checks.tensor("ids", ids, (t, "k"), INTEGERS, like=like, unit_last=False)
    checks.tensor("weights", weights, (t, ids.shape[1]), (torch.float32,), like=like, unit_last=False)
    if ids.shape[1] == 0:
        checks.fail("ids", f"shape {list(ids.shape)}", "shape [T, k], k at least 1")
    if (shared_w13 is None) != (shared_w2 is None):
        checks.fail("shared", "one tensor", "None or (gate above up [2 S, H], down [H, S])")
    if shared_w13 is not None:
        checks.tensor("shared[0]", shared_w13, ("2 S", h), (x.dtype,), like=like)
        if shared_w13.shape[0] % 2:
            checks.fail("shared[0]", f"shape {list(shared_w13.shape)}", f"shape [2 S, {h}]: gate above up")
        checks.tensor("shared[1]", shared_w2, (h, shared_w13.shape[0] // 2), (x.dtype,), like=like)
    sizes = [h, i] if shared_w2 is None else [h, i, shared_w2.shape[1]]
    group = formats.columns(options.activations, 1)
    if any(size % group for size in sizes):
        checks.fail(
            "activations", f"{options.activations!r} with sizes {sizes}", f"multiples of {group}, or another recipe"
        )
    return MoeProblem(
        x, w13, w2, ids, weights, w13_scales, w2_scales, w13_factors, w2_factors, shared_w13, shared_w2, options
    )


def check_values(p: MoeProblem) -> None:
    """Check that expert ids are in range."""
    checks.in_range("ids", p.ids, -1, p.experts - 1)


@dataclass(frozen=True, eq=False)
class RouteProblem:
    """Scores of the experts for every token, and the choice of topk of them."""

    operation: ClassVar[str] = "moe"
    backward: ClassVar[bool] = False
    empty_outputs: ClassVar[dict[str, float]] = {"ids": -1, "weights": 0.0}

    x: Tensor  # [T, H]
    gate: Tensor  # [E, H]
    bias: Tensor | None  # fp32 [E]
    bias_vl: Tensor | None  # fp32 [E]: for image tokens
    image: Tensor | None  # bool [T]: which tokens these are
    table: Tensor | None  # int32 or int64 [vocabulary, topk]
    token_ids: Tensor | None  # int32 or int64 [T]
    topk: int
    scale: float
    eps: float
    ids: Tensor | None = None  # int32 [T, topk]; set before a backend sees the problem
    weights: Tensor | None = None  # fp32 [T, topk]

    q = property(lambda self: self.x)

    def no_keys(self) -> bool:
        return self.x.shape[0] == 0


def build_route(
    x, gate, *, bias=None, bias_vl=None, image=None, table=None, token_ids=None, topk=6, scale=1.5, eps=1e-20
) -> RouteProblem:
    """Check the arguments of dsv4.moe_route and return them as a problem."""
    checks.tensor("x", x, ("T", "H"), checks.FLOATS)
    like = ("x", x)
    checks.tensor("gate", gate, ("E", x.shape[1]), checks.FLOATS, like=like)
    t, e = x.shape[0], gate.shape[0]
    if topk > e:
        checks.fail("topk", topk, f"at most {e}, the experts")
    for name, one in (("bias", bias), ("bias_vl", bias_vl)):
        if one is not None:
            checks.tensor(name, one, (e,), (torch.float32,), like=like)
    if (bias_vl is None) != (image is None):
        checks.fail("bias_vl, image", "one of them", "both or neither")
    if image is not None:
        checks.tensor("image", image, (t,), (torch.bool,), like=like)
    if (table is None) != (token_ids is None):
        checks.fail("table, token_ids", "one of them", "both or neither")
    if table is not None:
        checks.tensor("table", table, ("vocabulary", topk), INTEGERS, like=like)
        checks.tensor("token_ids", token_ids, (t,), INTEGERS, like=like)
        if bias is not None:
            checks.fail("bias", checks.describe(bias), "None with table (a hash layer has no bias)")
    return RouteProblem(x, gate, bias, bias_vl, image, table, token_ids, topk, scale, eps)


def check_route_values(p: RouteProblem) -> None:
    """Check that token ids and the table are in range."""
    if p.table is not None and p.token_ids is not None:
        checks.in_range("token_ids", p.token_ids, 0, p.table.shape[0] - 1)
        checks.in_range("table", p.table, 0, p.gate.shape[0] - 1)
