"""V4 attention on sm_90a: what the host tells the kernel, which is in listed.py."""

from dsv4 import caches
from dsv4.caches import Fp8Cache
from dsv4.kernels.shared.v4.prepare import prepare_listed, supports
from dsv4.kernels.sm90.v4 import unpack
from dsv4.kernels.sm90.v4.listed import v4_listed
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program
from dsv4.v4.problem import V4Problem

__all__ = ["prepare", "supports"]

STEP = 128  # rows per step: two blocks of 64
# Copies need few registers and threads, the conversion of FP8 rows many threads.
PLAIN = dict(RIGHT_REGS=216, GATHER_REGS=72, GATHER_WARPS=4, RESIDENT=False)
RESIDENT = dict(RIGHT_REGS=216, GATHER_REGS=64, GATHER_WARPS=4, RESIDENT=True)
FP8 = dict(RIGHT_REGS=192, GATHER_REGS=64, GATHER_WARPS=8, RESIDENT=False)
L2_ROWS = 32 << 10  # rows of 1 KB that stay in the L2


def prepare(p: V4Problem, target: Target, program: Program) -> None:
    if unpack.pays(p):
        p = unpack.unpacked(p, program)
    fp8 = isinstance(p.window, Fp8Cache) or isinstance(p.compressed, Fp8Cache)
    prepare_listed(p, target, program, v4_listed, STEP, FP8 if fp8 else RESIDENT if resident(p) else PLAIN)


def resident(p: V4Problem) -> bool:
    """By shapes alone: whether plain rows come from the L2, since it has room for them and they are listed often.
    Deterministic: the other order rounds P differently, and how many queries there are is no property of a query."""
    rows = sum(caches.pool_size(pool) for pool in (p.window, p.compressed) if pool is not None)
    return not p.deterministic and rows <= L2_ROWS and p.batch * p.max_seqlen_k >= 8 * rows
