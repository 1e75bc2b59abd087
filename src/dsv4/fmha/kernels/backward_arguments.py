"""Arguments of FMHA's gradient kernels, grouped as kernels pass them to their roles."""

from typing import NamedTuple

from dsv4.kernels.compat import Value, aggregate


@aggregate
class Operands:
    """TMA descriptors."""

    q_desc: Value
    k_desc: Value
    dout_desc: Value
    v_desc: Value


@aggregate
class Sizes:
    """Sizes of one sequence and KV head."""

    rows: Value  # packed query rows: tokens times group
    tokens: Value
    keys: Value
    group: Value
    left: Value  # left side of the window
    right: Value


@aggregate
class GradientTile:
    """Work of one CTA: 128 packed rows, or keys, of one sequence and KV head, from `own` on."""

    batch: Value
    head: Value  # head of the rows, a pack of query heads
    kv_head: Value
    own: Value
    first_row: Value  # first row of the sequence in the tensors: 0 in a dense batch
    first_key: Value


@aggregate
class Terms:
    """Terms of the packed rows: the exponent to subtract and delta (backward_rows.py)."""

    lse2_ptr: Value
    delta_ptr: Value


class GradientTensors(NamedTuple):
    """Terms of the packed rows of all sequences (the exponent to subtract and delta), and the starts of the sequences
    of a varlen batch."""

    any_alignment = ("cu_q_ptr", "cu_k_ptr")

    lse2_ptr: Value
    delta_ptr: Value
    cu_q_ptr: Value
    cu_k_ptr: Value


class GradientSizes(NamedTuple):
    """Sizes of a sequence and KV head, or of all sequences (varlen)."""

    rows: Value  # packed query rows: tokens times group
    tokens: Value
    keys: Value
    group: Value
    left: Value  # left side of the window
    right: Value
    heads: Value  # packs of query heads
    sequences: Value


class GradientScales(NamedTuple):
    """Factors of S before 2^S is computed, of P and dS before they are rounded (fp16 only), of dQ and dK."""

    s: Value
    p: Value
    gradient: Value
    ds_ptr: Value  # fp32 [1]


class KeyParts(NamedTuple):
    """Where work tiles that share keys write dK and dV (sm90/gradient_sums.py)."""

    dk_block: Value  # first blocks of the sums that they add to, in the memory of dQ's
    dv_block: Value
    ptr: Value  # deterministic: parts of all of dK, then those of dV


class Gradient(NamedTuple):
    """A gradient with the strides of its sequences, heads and rows, in elements or, on sm_90a, in units of 8."""

    ptr: Value
    batch: Value
    head: Value
    row: Value
