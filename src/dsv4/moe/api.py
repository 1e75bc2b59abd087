"""The experts of DeepSeek-V4: the choice of experts for each token, and their output."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dsv4.moe import plan as plans
from dsv4.moe import problem
from dsv4.moe.experts import Fp4Experts
from dsv4.moe.options import Activations, MoeOptions, RouteOptions
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan

Both = tuple[Tensor, Tensor]
Weights = Fp4Experts | tuple[Tensor, Tensor]


def moe_route(
    x: Tensor,
    gate: Tensor,
    *,
    bias: Tensor | None = None,
    bias_vl: Tensor | None = None,
    image: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    topk: int = 6,
    scale: float = 1.5,
    eps: float = 1e-20,
    backend: Backend = "auto",
) -> Both:
    """Choose the experts of every token, and their weights -> (ids int32 [T, topk], weights fp32 [T, topk]).

    ::

        s_e     = sqrt(softplus(x . gate_e))                       product and sum in fp32
        ids     = the topk largest of s_e + bias_e                 a learned layer: the bias is for the choice only
                = table[token_ids]                                 a hash layer: no bias, and scores still weigh
        weights = s_ids / (sum of s_ids + eps) * scale

    Learned choices are in descending order of s + bias; among equal ones the lower expert is first.

    Args:
        x: [T, H]; gate: [E, H], both bf16, fp16 or fp32.
        bias: fp32 [E].
        bias_vl, image: fp32 [E] and bool [T] (V4.1): for tokens of images, bias_vl replaces bias and the table.
        table, token_ids: int32 or int64 [vocabulary, topk] and [T].
        scale: "routed_scaling_factor" of the model: 1.5 for V4-Flash and V4.1, 2.5 for V4-Pro.
        backend: "auto" (a kernel if there is one, else torch), "cuda", "softsm", "cpu".

    There is no gradient yet. On a GPU a wrong token id counts as token 0 of the table unless DSV4_CHECK=1.
    """
    options = RouteOptions.checked(topk, scale, eps)
    tensors = (x, gate, bias, bias_vl, image, table, token_ids)
    return operators.call(MOE_ROUTE, tensors, options, True, None, None, checks.backend(backend))


class Keywords(TypedDict, total=False):
    """What type checkers see: the return type depends on return_slots alone."""

    activations: Activations
    limit: float
    shared: tuple[Tensor, Tensor] | None
    out: Tensor | None
    deterministic: bool
    fused: bool
    plan: Plan | None
    backend: Backend


@overload
def moe(
    x: Tensor,
    experts: Weights,
    ids: Tensor,
    weights: Tensor,
    *,
    return_slots: Literal[False] = ...,
    **_: Unpack[Keywords],
) -> Tensor: ...
@overload
def moe(
    x: Tensor, experts: Weights, ids: Tensor, weights: Tensor, *, return_slots: Literal[True], **_: Unpack[Keywords]
) -> Both: ...
@overload
def moe(
    x: Tensor, experts: Weights, ids: Tensor, weights: Tensor, *, return_slots: bool, **_: Unpack[Keywords]
) -> Tensor | Both: ...
def moe(
    x: Tensor,
    experts: Weights,
    ids: Tensor,
    weights: Tensor,
    *,
    activations: Activations = "fp8_128",
    limit: float = 10.0,
    shared: tuple[Tensor, Tensor] | None = None,
    return_slots: bool = False,
    out: Tensor | None = None,
    deterministic: bool = False,
    fused: bool = False,
    plan: Plan | None = None,
    backend: Backend = "auto",
) -> Tensor | Both:
    """Run a mixture of experts: x [T, H] -> [T, H].

    For token t, over its slots j in their order::

        g, u = W1 x_t, W3 x_t                                  of expert ids[t, j]
        h    = silu(min(g, limit)) * clamp(u, -limit, limit) * weights[t, j]
        y_j  = W2 h
        out  = sum_j y_j + shared(x_t)                         shared: the same with its own matrices and weight 1

    Rounding is the model's: x and h to FP8 or FP4 by ``activations``; g, u, h (before that) and y_j to the dtype of x;
    sums in fp32.

    Args:
        x: [T, H], bf16 or fp16 (fp32 on the cpu backend).
        experts: a :class:`dsv4.Fp4Experts`, or (gate above up [E, 2 I, H], down [E, H, I]) of x's dtype.
        ids: int32 or int64 [T, k], -1 = no expert; weights: fp32 [T, k]. dsv4.moe_route makes both.
        activations: "fp8_128" (V4's recipe: e4m3, one power of two for 128 columns), "fp8_32" (V4.1's: for 32),
            "fp8_token" (for a whole row), "nvfp4" (E2M1, one E4M3 scale for 16 columns), "bf16" (x and h stay as they
            are).
        limit: of SwiGLU, "swiglu_limit".
        shared: (gate above up [2 S, H], down [H, S]) of x's dtype. FP8 weights with powers of two as scales are exact
            in bf16.
        return_slots: also return y_j of every slot [T, k, H], before they are summed; 0 where the id is -1.
        out: write here and return it; it has x's dtype and overlaps no input.
        deterministic: a token has the same bits in every batch. The kernels always ensure that, except for the shared
            expert; with it a CPU computes one row at a time.
        fused: on sm_100a, run one persistent kernel from the choice of experts to the sum, with the same bits as the
            separate kernels. On a CPU it has no effect; on sm_90a True is an error.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with memory for everything between the kernels, so that a
            call allocates none.
        backend: "auto" (kernels if they can run the problem, else torch), "cuda" and "softsm" (the kernels), "cpu".

    An expert number out of range is an error where values are checked (DESIGN.md); the kernels treat it as -1, in a
    CUDA graph too, and read nothing out of bounds.

    The kernels accept bf16 x and FP4 weights in the layout of the architecture (Fp4Experts.layout). On sm_90a: MXFP4
    weights whose exponents spread by at most 11 in a row (Fp4Experts.spread), activations "fp8_128". On sm_100a: MXFP4
    weights, activations "fp8_128" or "fp8_32"; NVFP4 weights, activations "nvfp4". Gradients exist with activations
    "bf16", with respect to x, ``weights``, the shared expert and experts in x's dtype; FP4 weights are constants.
    """
    checks.flag("return_slots", return_slots)
    sw13, sw2 = pair("shared", shared) if shared is not None else (None, None)
    tensors: tuple[Tensor | None, ...]
    if isinstance(experts, Fp4Experts):
        e = experts
        format, spread, layout = e.format, e.spread.greatest, e.layout
        tensors = (x, e.w13, e.w2, ids, weights, e.w13_scales, e.w2_scales, e.w13_factors, e.w2_factors, sw13, sw2)
    else:
        w13, w2 = pair("experts", experts)
        format, spread, layout = "bf16", 0, "sm90"
        tensors = (x, w13, w2, ids, weights, None, None, None, None, sw13, sw2)
    options = MoeOptions.checked(activations, limit, format, spread, deterministic, layout, fused)
    return operators.call(MOE, tensors, options, return_slots, out, plan, checks.backend(backend))


def pair(name: str, x: Any) -> tuple[Any, Any]:
    if not isinstance(x, (tuple, list)) or len(x) != 2 or any(one is None for one in x):
        more = "a dsv4.Fp4Experts or " if name == "experts" else "None or "
        checks.fail(name, checks.describe(x), f"{more}(gate above up, down)")
    return x[0], x[1]


def _route_outputs(arguments: dict[str, Any]) -> Shapes:
    shape = (arguments["x"].shape[0], arguments["topk"])
    return (shape, torch.int32), (shape, torch.float32)


def _outputs(arguments: dict[str, Any]) -> Shapes:
    x, ids = arguments["x"], arguments["ids"]
    return (x.shape, x.dtype), ((x.shape[0], ids.shape[1], x.shape[1]), x.dtype)


MOE_ROUTE = Operation(
    "moe_route",
    "moe",
    ("x", "gate", "bias", "bias_vl", "image", "table", "token_ids"),
    2,
    RouteOptions,
    ("ids", "weights"),
    _route_outputs,
    problem.build_route,
    problem.check_route_values,
    (2,),
    falls_back=True,
)
MOE = Operation(
    "moe",
    "moe",
    (
        "x",
        "w13",
        "w2",
        "ids",
        "weights",
        "w13_scales",
        "w2_scales",
        "w13_factors",
        "w2_factors",
        "shared_w13",
        "shared_w2",
    ),
    5,
    MoeOptions,
    ("out", "slots"),
    _outputs,
    problem.build,
    problem.check_values,
    (2,),
    plan=plans.reserved,
    falls_back=True,
)
for _operation in (MOE_ROUTE, MOE):
    operators.define_operation(_operation)
