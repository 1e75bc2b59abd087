"""V4 attention on sm_100a: the host's arguments for the kernels in sparse.py and sparse_pair.py."""

from dsv4.caches.formats import PLAIN, format_of
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.v4.kernels import prepare as shared
from dsv4.v4.kernels import unpack_pools
from dsv4.v4.kernels.prepare import comes_by_tma, lacks, prepare_sparse
from dsv4.v4.kernels.sm100.sparse import v4_sparse
from dsv4.v4.problem import V4Problem

__all__ = ["prepare", "supports"]

STEP = 64  # rows per step: one block
PAIR_STEP = 128
REGISTERS = dict(GATHER_REGS=128, WARP_REGS=120)
PAIR_REGISTERS = dict(GATHER_REGS=136, STORE_REGS=112, WARP_REGS=96)


def supports(p: V4Problem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    return shared.supports(p) or lacks(p, "unpack_bytes")


def prepare(p: V4Problem, target: Target, program: Program) -> None:
    if p.q_heads % 128 == 0 and unpack_pools.pays(p):  # one CTA converts 64 rows as fast as its products go
        p = unpack_pools.unpacked(p, program)
    many_rows = p.batch * p.q_heads  # merging two results of 256 x 128 heads is predicted to take 52 of 306 us
    if fits_pair(p):
        # Its layouts need Triton 3.9; code that imports this module only for `supports` may have another version.
        from dsv4.v4.kernels.sm100.sparse_pair import v4_sparse_pair

        options = dict(num_ctas=2, **PAIR_REGISTERS)
        prepare_sparse(p, target, program, v4_sparse_pair, PAIR_STEP, options, many_rows=many_rows)
    else:
        prepare_sparse(p, target, program, v4_sparse, STEP, REGISTERS, many_rows=many_rows)


def fits_pair(p: V4Problem) -> bool:
    """Return whether there are whole pairs of 64 heads, and rows of one format: plain and equally spaced, or packed
    with bf16 as the last panel."""
    pools = [pool for pool in (p.window, p.compressed) if pool is not None]
    formats = {format_of(pool) for pool in pools}
    if p.q_heads % 128 or len(formats) > 1:
        return False
    return all(comes_by_tma(pool) for pool in pools) if formats == {PLAIN} else formats.pop().coded_panels == 7
