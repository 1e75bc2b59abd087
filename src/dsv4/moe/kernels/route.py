"""The router as two Triton kernels for every architecture: logits, then the choice.

A logit is the sum of CHUNKS partial sums over K / CHUNKS columns each, in order. For few tokens, programs share
the chunks; for many, a program has all of them. Products have 16 or 32 tokens, so that the tensor core adds in
the same order, and a token has the same bits in every batch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from dsv4.moe.kernels.rows import wait_on_prior_grid

CHUNKS = tl.constexpr(8)
STEP = tl.constexpr(64)  # columns per product


@triton.jit
def moe_logits(x, SHARED: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, UNIT: tl.constexpr):
    """Compute TOKENS by EXPERTS logits; SHARED: one chunk of them, else all. Lines and width are in units of UNIT, so
    that the compiler can read eights at once."""
    gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, STEP)
    rows = x.ptr + token.to(tl.int64)[:, None] * (x.line * UNIT) + column[None, :]
    gates = x.gate_ptr + expert.to(tl.int64)[None, :] * (x.gate_line * UNIT) + column[:, None]
    columns = x.width * UNIT
    width = tl.cdiv(tl.cdiv(columns, CHUNKS), STEP) * STEP
    total = tl.zeros([TOKENS, EXPERTS], tl.float32)
    first = tl.program_id(2) if SHARED else 0
    for chunk in range(first, first + 1 if SHARED else CHUNKS):
        part = tl.zeros([TOKENS, EXPERTS], tl.float32)
        for at in range(chunk * width, min((chunk + 1) * width, columns), STEP):
            inside = column < columns - at
            a = tl.load(rows + at, mask=(token < x.tokens)[:, None] & inside[None, :], other=0.0)
            b = tl.load(gates + at, mask=(expert < x.experts)[None, :] & inside[:, None], other=0.0)
            part = tl.dot(a, b, part)
        total += part
    to = x.logits_ptr + (first.to(tl.int64) * x.tokens if SHARED else 0) * x.experts
    place = token.to(tl.int64)[:, None] * x.experts + expert[None, :]
    tl.store(to + place, total, mask=(token < x.tokens)[:, None] & (expert < x.experts)[None, :])


@triton.jit
def moe_choose(
    x,
    choice,
    SHARED: tl.constexpr,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BIAS: tl.constexpr,
    IMAGE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Choose the experts of a token, one program each; EXPERTS is a power of two."""
    gdc_launch_dependents()
    wait_on_prior_grid()
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    there = expert < x.experts
    logit = tl.zeros([EXPERTS], tl.float32)
    for chunk in range(CHUNKS if SHARED else 1):
        place = (chunk.to(tl.int64) * x.tokens + token) * x.experts + expert
        logit += tl.load(x.logits_ptr + place, mask=there, other=0.0)
    small = tl.exp(-tl.abs(logit))
    # log(1 + small); where 1 + small would round, use the series
    series = small * (1.0 - small * (0.5 - small * (0.3333333333 - small * 0.25)))
    score = tl.sqrt(tl.maximum(logit, 0.0) + tl.where(small < 0.03, series, tl.log(1.0 + small)))
    wanted = score
    if BIAS:
        wanted += tl.load(choice.bias_ptr + expert, mask=there, other=0.0)
    image = 0 > 1
    if IMAGE:
        image = tl.load(choice.image_ptr + token) != 0
        wanted = tl.where(image, score + tl.load(choice.bias_vl_ptr + expert, mask=there, other=0.0), wanted)
    wanted = tl.where(there & (wanted == wanted), wanted, -float("inf"))
    if TABLE:
        line = tl.load(choice.token_ids_ptr + token).to(tl.int64)
        line = tl.where((line >= 0) & (line < choice.vocabulary), line, 0) * TOPK
    weights = ()
    total = 0.0
    for j in tl.static_range(TOPK):
        top = tl.max(wanted, 0)
        id = tl.min(tl.where(wanted == top, expert, EXPERTS), 0)
        wanted = tl.where(expert == id, -float("inf"), wanted)
        if TABLE:
            given = tl.load(choice.table_ptr + line + j).to(tl.int32)
            id = tl.where(image, id, tl.where((given >= 0) & (given < x.experts), given, 0))
        weight = tl.sum(tl.where(expert == id, score, 0.0), 0)
        tl.store(choice.ids_ptr + token * TOPK + j, id)
        weights = weights + (weight,)
        total += weight
    for j in tl.static_range(TOPK):
        tl.store(choice.weights_ptr + token * TOPK + j, weights[j] / (total + choice.eps) * choice.scale)
