"""torch operators in the namespace ``dsv4``: what torch.compile, export and dispatch modes see.

For each public attention function X there are two operators::

    torch.ops.dsv4.X(...) -> (Tensor out, Tensor lse)          lse has size 0 when return_lse is False
    torch.ops.dsv4.X_out(..., scratch, num_splits, out, lse)   writes out, and lse unless its size is 0

Forward only: an input that requires grad raises under grad mode.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.fmha import problem
from dsv4.runtime import checks, dispatch, repeat
from dsv4.runtime.plan import Plan

LIBRARY = torch.library.Library("dsv4", "DEF")


def define(schema: str, kernel: Callable, fake: Callable) -> None:
    """Register one operator of this namespace: real kernel, fake kernel, refusal of grad.

    Autograd falls through to the kernel, which sees grad mode and requires_grad as the caller left them; one step
    through the dispatcher less than an autograd kernel of our own.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    arguments = [a.name for a in getattr(torch.ops.dsv4, name).default._schema.arguments]

    def forward_only(function: Callable) -> Callable:
        def checked(*args, **kwargs):
            if checks.derivatives():
                checks.forward_only(**dict(zip(arguments, args)), **kwargs)
            return function(*args, **kwargs)

        return checked

    LIBRARY.impl(name, forward_only(kernel), "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"dsv4::{name}", forward_only(fake), lib=LIBRARY)


def define_attention(
    name: str,
    arguments: str,
    build: Callable[..., Any],
    check_values: Callable[[Any], None],
) -> None:
    """Both operators of one attention function.

    arguments: their schema but for the outputs. build(*tensors, **options) -> a problem for dispatch.run.
    """

    def allocate(p: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
        out = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
        lse = torch.empty(p.lse_shape if return_lse else (0,), dtype=torch.float32, device=p.q.device)
        return out, lse

    def run(p: Any, backend: str) -> None:
        if checks.values_checked(p.q):
            check_values(p)
        dispatch.run(p, backend)

    def kernel(*tensors, return_lse=False, backend="auto", **options):
        p = build(*tensors, **options)
        out, lse = allocate(p, return_lse)
        run(replace(p, out=out, lse=lse if return_lse else None), backend)
        return out, lse

    def fake(*tensors, return_lse=False, backend="auto", **options):
        return allocate(build(*tensors, **options), return_lse)

    def build_out(*tensors, out, lse, scratch=None, num_splits=0, **options):
        p = build(*tensors, **options)
        checks.output("out", out, p.q.shape, p.q.dtype, {"q": p.q})
        want_lse = lse.shape != (0,)
        if want_lse:
            checks.output("lse", lse, p.lse_shape, torch.float32, {"q": p.q})
        if scratch is not None:
            checks.tensor("scratch", scratch, ("n",), (torch.float32,), like=("q", p.q))
        return replace(p, out=out, lse=lse if want_lse else None, scratch=scratch, num_splits=num_splits)

    def kernel_out(*tensors, backend="auto", **options):
        p = build_out(*tensors, **options)
        given = dict(zip(names, tensors)) | options
        inputs = {key: x for key, x in given.items() if key in names and isinstance(x, Tensor)}
        checks.apart("out", p.out, inputs)
        if p.lse is not None:
            checks.apart("lse", p.lse, inputs | {"out": p.out})
        run(p, backend)

    def fake_out(*tensors, backend="auto", **options):
        build_out(*tensors, **options)

    define(f"{name}({arguments}, bool return_lse=False) -> (Tensor, Tensor)", kernel, fake)
    names = [a.name for a in getattr(torch.ops.dsv4, name).default._schema.arguments]  # of inputs
    scratch = "Tensor(c!)? scratch=None, SymInt num_splits=0"
    define(f"{name}_out({arguments}, {scratch}, Tensor(a!) out, Tensor(b!) lse) -> ()", kernel_out, fake_out)


def call(
    name: str,
    arguments: dict[str, Any],
    build: Callable[[], Any],
    return_lse: bool,
    out: Tensor | None,
    plan: Plan | None,
    key: tuple | None = None,
    tensors: tuple = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """`_call`, and the next call with this key makes its launches again (see repeat.py). tensors: all of the call."""
    if key is None or repeat.known(key):
        return _call(name, arguments, build, return_lse, out, plan)
    with repeat.watching() as watch:
        result = _call(name, arguments, build, return_lse, out, plan)
    repeat.remember(key, tensors, watch, *(result if isinstance(result, tuple) else (result, None)))
    return result


def _call(
    name: str,
    arguments: dict[str, Any],
    build: Callable[[], Any],
    return_lse: bool,
    out: Tensor | None,
    plan: Plan | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The public function behind its checks: one of the two operators, and lse only if asked for.

    build() gives the problem, whose shapes the outputs and the plan must have.
    """
    if out is None and plan is None:
        out, lse = getattr(torch.ops.dsv4, name)(**arguments, return_lse=return_lse)
        return (out, lse) if return_lse else out
    p = build()
    if out is not None:  # here as well: the dispatcher would answer a wrong one in its own words
        checks.output("out", out, p.q.shape, p.q.dtype, {"q": p.q})
    if plan is not None:
        if not isinstance(plan, Plan):
            checks.fail("plan", checks.describe(plan), "None or a Plan from dsv4.plan")
        plan.check(name, p)
        arguments = arguments | dict(scratch=plan.scratch, num_splits=plan.num_splits)
    if out is None:
        out = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    lse = torch.empty(p.lse_shape if return_lse else (0,), dtype=torch.float32, device=p.q.device)
    getattr(torch.ops.dsv4, f"{name}_out")(**arguments, out=out, lse=lse)
    return (out, lse) if return_lse else out


OPTIONS = (
    "*, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, Tensor? sink=None, "
    "float? softmax_scale=None, bool deterministic=False, str backend='auto'"
)
TENSORS = {
    "fmha": "Tensor q, Tensor k, Tensor v",
    "fmha_varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None",
    "fmha_paged": "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths",
}
BUILDERS: dict[str, Callable[..., problem.FmhaProblem]] = {
    "fmha": problem.dense,
    "fmha_varlen": problem.varlen,
    "fmha_paged": problem.paged,
}


def _define_fmha(name: str) -> None:
    def build(
        *tensors, window_left=-1, window_right=-1, deterministic=False, **options
    ) -> problem.FmhaProblem:
        p = BUILDERS[name](*tensors, window=(window_left, window_right), **options)
        return replace(p, deterministic=deterministic)

    define_attention(name, f"{TENSORS[name]}, {OPTIONS}", build, problem.check_values)


for _name in TENSORS:
    _define_fmha(_name)
