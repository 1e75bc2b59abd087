"""moe with gradients, for activations that are not rounded to FP8.

Per row of an expert, with g = W1 x, u = W3 x, G = min(g, limit), U = clamp(u), S = silu(G), h = w S U, y = W2 h::

    dh  = W2^T dy            dW2 += dy h^T          dw = dh . (S U)
    dg  = w dh U silu'(G)    where g <= limit       du = w dh S    where |u| <= limit
    dx += W1^T dg + W3^T du  dW1 += dg x^T          dW3 += du x^T

The code is torch, for any device, one expert at a time, in fp32; only the inputs are saved. Rounding to the dtype of x
has gradient 1. FP4 weights are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from dsv4.moe import cpu
from dsv4.moe.api import MOE
from dsv4.moe.options import MoeOptions
from dsv4.moe.problem import MoeProblem
from dsv4.runtime import calls, checks, gradients, operators
from dsv4.runtime.calls import Operation
from dsv4.runtime.options import schema

DIFFERENTIABLE = ("x", "w13", "w2", "weights", "shared_w13", "shared_w2")
PLACES = tuple(MOE.tensors.index(name) for name in DIFFERENTIABLE)
COUNT = len(MOE.tensors)
ARGUMENTS = ", ".join(
    [f"Tensor {x}" if n < MOE.required else f"Tensor? {x}" for n, x in enumerate(MOE.tensors)]
    + list(schema(MoeOptions, defaults=False).values())
    + ["str backend"]
)


def call(op: Operation, tensors: Sequence, options: MoeOptions, backend: str, plain: bool) -> tuple[Tensor, Tensor]:
    if options.activations != "bf16":
        got = f"{options.activations!r} with an input that requires grad"
        checks.fail("activations", got, "'bf16' for a gradient, or a call under torch.no_grad()")
    return gradients.training("moe", plain, *tensors, *options, backend)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    given = calls.Given(inputs[:COUNT], MoeOptions(*inputs[COUNT:-1]), (True, True), (None, None))
    with torch.no_grad():
        return tuple(calls.run(MOE, given, inputs[-1]))  # type: ignore[arg-type]


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    arguments = MOE.named(inputs[:COUNT], MoeOptions(*inputs[COUNT:-1]))
    MOE.build(**arguments)
    return tuple(MOE.empty(arguments, (True, True)))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:COUNT])
    ctx.options = inputs[COUNT:]


def _gradients(ctx: Any, dout: Tensor | None, dslots: Tensor | None) -> tuple:
    found: list[Tensor | None] = [None] * (COUNT + len(ctx.options))
    if dout is not None or dslots is not None:
        asked = [ctx.needs_input_grad[n] for n in PLACES]
        made = torch.ops.dsv4.moe_backward(dout, dslots, *ctx.saved_tensors, *ctx.options, asked)
        for n, x, want in zip(PLACES, made, asked):
            found[n] = gradients.or_none(x, want)
    return tuple(found)


def _backward(dout: Tensor | None, dslots: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    tensors, options, asked = rest[:COUNT], MoeOptions(*rest[COUNT:-2]), rest[-1]
    p = MOE.build(**MOE.named(tensors, options))
    into = {
        name: torch.zeros(tensors[n].shape, dtype=torch.float32, device=p.x.device)
        for name, n, want in zip(DIFFERENTIABLE, PLACES, asked)
        if want
    }
    ids, x = p.ids.long(), p.x.float()
    for e in range(p.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        dy = torch.zeros(len(token), p.hidden, dtype=torch.float32, device=p.x.device)
        for given, place in ((dout, token), (dslots, (token, slot))):
            if given is not None:
                dy += given[place].float()
        weight = p.weights[token, slot, None]
        dx, dw, dw1, dw3, dw2 = _row_gradients(x[token], *cpu.numbers_of(p, e), weight, dy, p.limit)
        made = {"w13": torch.cat([dw1, dw3]), "w2": dw2}
        for name, one in made.items():
            if name in into:
                into[name][e] = one
        if "x" in into:
            into["x"].index_add_(0, token, dx)
        if "weights" in into:
            into["weights"][token, slot] = dw
    if p.shared_w13 is not None and p.shared_w2 is not None and dout is not None:
        _shared_gradients(p, x, dout.float(), into)
    return tuple(
        into[name].to(tensors[n].dtype) if name in into else gradients.gradient_like(tensors[n], False)
        for name, n in zip(DIFFERENTIABLE, PLACES)
    )


def _shared_gradients(p: MoeProblem, x: Tensor, dout: Tensor, into: dict[str, Tensor]) -> None:
    assert p.shared_w13 is not None and p.shared_w2 is not None
    one = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    gate, up = p.shared_w13.float().chunk(2)
    dx, _, dw1, dw3, dw2 = _row_gradients(x, gate, up, p.shared_w2.float(), one, dout, p.limit)
    for name, made in (("x", dx), ("shared_w13", torch.cat([dw1, dw3])), ("shared_w2", dw2)):
        if name in into:
            into[name] += made


def _row_gradients(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weight: Tensor, dy: Tensor, limit: float
) -> tuple[Tensor, ...]:
    """Return (dx [n, H], dw [n], dW1, dW3, dW2) of rows x [n, H]."""
    g, u = x @ gate.T, x @ up.T
    top, bounded = g.clamp(max=limit), u.clamp(-limit, limit)
    sigmoid, s = top.sigmoid(), silu(top)
    dh = dy @ down
    dw = (dh * s * bounded).sum(-1)
    dh = dh * weight
    dg = dh * bounded * (sigmoid * (1 + top * (1 - sigmoid))) * (g <= limit)
    du = dh * s * (u.abs() <= limit)
    return dg @ gate + du @ up, dw, dg.T @ x, du.T @ x, dy.T @ (s * bounded * weight)


def _fake_backward(dout: Tensor | None, dslots: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(gradients.gradient_like(rest[n], want) for n, want in zip(PLACES, rest[-1]))


gradients.define(
    "moe",
    ARGUMENTS,
    "(Tensor, Tensor)",
    (_forward, _fake_forward),
    f"Tensor? dout, Tensor? dslots, {ARGUMENTS}, bool[] asked",
    f"({', '.join(['Tensor'] * len(DIFFERENTIABLE))})",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
operators.TRAINING["moe"] = operators.Training(PLACES, call)
