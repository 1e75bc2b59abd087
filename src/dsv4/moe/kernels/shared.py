"""Two Triton kernels of the shared expert around its two products, which torch computes: rounding of x, and SwiGLU with
the rounding of hidden values. Numbers are the recipe's, in bf16, which holds them."""

import triton
import triton.language as tl


@triton.jit
def as_rounded(values, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Round fp32 [COLUMNS] as e4m3 with one power of two per GROUP columns does (formats.quantize)."""
    groups = tl.reshape(values, [COLUMNS // GROUP, GROUP])
    bits = (tl.maximum(tl.max(tl.abs(groups), 1), 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = (groups * inverse[:, None]).to(tl.float8e4nv).to(tl.float32)
    return tl.reshape(codes * (exponent << 23).to(tl.float32, bitcast=True)[:, None], [COLUMNS])


@triton.jit
def moe_shared_rows(x, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Round COLUMNS of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = x.width * 8
    there = column < width
    values = tl.load(x.ptr + token * (x.line * 8) + column, mask=there, other=0.0).to(tl.float32)
    tl.store(x.to_ptr + token * width + column, as_rounded(values, COLUMNS, GROUP).to(tl.bfloat16), mask=there)


@triton.jit
def moe_shared_hidden(h, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Compute and round COLUMNS of hidden values, from gate and up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = h.width * 8
    there = column < width
    line = h.ptr + token * 2 * width + column
    gate = tl.minimum(tl.load(line, mask=there, other=0.0).to(tl.float32), h.limit)
    up = tl.load(line + width, mask=there, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -h.limit), h.limit)
    hidden = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16).to(tl.float32)
    tl.store(h.to_ptr + token * width + column, as_rounded(hidden, COLUMNS, GROUP).to(tl.bfloat16), mask=there)
