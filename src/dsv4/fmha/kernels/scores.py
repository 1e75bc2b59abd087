"""From q . k to a score in every kernel of fmha: the numbers derived from softmax_scale, and the arithmetic with them.

    forward     score = factor * capped(q . k)        in base 2; masked and exponentiated by the kernels
    backward    P = 2^(score - lse2)    dS = P (dP - delta) * slope       w.r.t. q . k, without softmax_scale

Masks are applied afterwards. A kernel gets a ScoreScale; a member that is None is known at compile time and costs
nothing.
"""

from typing import Any, NamedTuple

import torch

from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.runtime.checks import LARGEST
from dsv4.runtime.program import Null


class ScoreScale(NamedTuple):
    factor: Value  # scale in base 2
    softcap: Value  # None, or the factor of q . k before tanh


class KvScales(NamedTuple):
    """The factors of e4m3 keys and values: pointers to fp32 numbers, null for 1, and strides from one KV head to the
    next."""

    any_alignment = ("k_ptr", "v_ptr")

    k_ptr: Value
    k_step: Value
    v_ptr: Value
    v_step: Value


@aggregate
class HeadScale:
    """A ScoreScale for the keys of one KV head, and the factor of its values, or None."""

    factor: Value
    softcap: Value
    values: Value


def sign_and_scale(scale: float) -> tuple[int, float]:
    """Return (the factor of Q when it is loaded: 1, -1 or 0; a positive scale in base 2): masked scores are -inf, so a
    scale of 0 or less would make them NaN or visible. The gradients mask P instead, and accept any scale."""
    positive = abs(scale) * softmax.LOG2E.value
    if positive < torch.finfo(torch.float32).tiny:
        return 0, 1.0
    return (1 if scale > 0 else -1), positive


def score_scale(p: FmhaProblem, scale: float) -> ScoreScale:
    """Return the ScoreScale of a problem. scale: the factor of q . k, in base 2."""
    softcap: Any = p.options.softcap
    if softcap is None:
        return ScoreScale(scale, None)
    inner = scale / softmax.LOG2E.value / softcap
    return ScoreScale(min(softcap * softmax.LOG2E.value, LARGEST), max(min(inner, LARGEST), -LARGEST))


def kv_scales(p: FmhaProblem) -> KvScales | None:
    if not p.e4m3 and p.k_scale is None and p.v_scale is None:
        return None  # codes have one variant, with scales or without
    found: list[Any] = []
    for x in (p.k_scale, p.v_scale):
        found += [Null(torch.float32), 0] if x is None else [x, x.stride(0) if x.numel() > 1 else 0]
    return KvScales(*found)


@gluon.jit
def head_scale(opts, head):
    """Return the HeadScale of one KV head. opts has a ScoreScale, and KvScales or None."""
    scale, scales = opts.scale, opts.kv_scales
    if scales is None:
        return HeadScale(scale.factor, scale.softcap, None)
    else:
        k_scale = _number(scales.k_ptr, head * scales.k_step)
        v_scale = _number(scales.v_ptr, head * scales.v_step)
        if scale.softcap is None:
            return HeadScale(scale.factor * k_scale, None, v_scale)
        else:
            return HeadScale(scale.factor, scale.softcap * k_scale, v_scale)


@gluon.jit
def _number(ptr, place):
    return gl.load(ptr + place, mask=ptr.to(gl.int64) != 0, other=1.0)


@gluon.jit
def of_values(factor, scale):
    """Return the final factor of O, which includes the scale of the values."""
    if scale.values is not None:
        factor = factor * scale.values
    return factor


@gluon.jit
def capped(s, scale):
    """Return what the factor multiplies: the products q . k, or tanh(s softcap).

    tanh x = 1 - 2 / (e^2x + 1) has the absolute error of fp32, and the series below 1/4 its relative error, which large
    caps need. The error of tanh.approx is 2^-11, which with a cap of 50 would be 2 % of P.
    """
    if scale.softcap is not None:
        x = s * scale.softcap
        y = x * x
        series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * -0.05396825)))
        s = gl.where(y < 0.0625, series, 1.0 - 2.0 / (gl.exp2(x * (2 * softmax.LOG2E)) + 1.0))
    return s


@gluon.jit
def exponents(s, lse2, scale):
    """Return (the logarithm of P in base 2, what score_gradient needs of the scores) of products q . k. lse2 can be
    broadcast to them."""
    s = capped(s, scale)
    return s * scale.factor - lse2, s


@gluon.jit
def probabilities(s, lse2, scale):
    """Return (P, what score_gradient needs of the scores)."""
    x, s = exponents(s, lse2, scale)
    return gl.exp2(x), s


@gluon.jit
def score_gradient(p, dp, delta, s, scale):
    """Return dS."""
    ds = p * (dp - delta)
    if scale.softcap is not None:
        ds = ds * (1.0 - s * s)
    return ds
