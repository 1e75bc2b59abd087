"""Words in global memory by which the CTAs of a grid, or of several GPUs, work together: tickets and counters.

A CTA gets its work by tickets: the first one gets the lowest number. If an item waits only for items with lower
numbers,
those are done or belong to running CTAs, so some CTA can always continue: a grid needs no more than one resident CTA,
and may have any number of CTAs (a barrier of all CTAs would need all of them resident; sglang#36657).

A counter shows how much is complete. `signal` increments it after everything that the whole CTA, or the role, has
written before; code after `wait_for` can read that. Copies by TMA also need `fence_async` in between: they read through
another proxy than the stores that are waited for (DeepGEMM#389).
"""

from dsv4.kernels.compat import barrier, gl, gluon

ACQUIRE_GPU = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
ACQUIRE_SYS = gl.constexpr("ld.acquire.sys.global.b32 $0, [$1];")
GPU = gl.constexpr("gpu")  # a plain string cannot be a default before Triton 3.9
FENCE_ASYNC = gl.constexpr("fence.proxy.async; mov.b32 $0, 0;")


@gluon.jit
def take(word):
    """Take and return the next ticket."""
    return gl.atomic_add(word, 1, sem="relaxed", scope="gpu")


@gluon.jit
def signal(word, SCOPE: gl.constexpr = GPU):
    barrier()  # the other warps of the role have written
    gl.atomic_add(word, 1, sem="release", scope=SCOPE)


@gluon.jit
def read_acquire(word, SCOPE: gl.constexpr):
    if SCOPE == "sys":
        return gl.inline_asm_elementwise(ACQUIRE_SYS, "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise(ACQUIRE_GPU, "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(word, count, SCOPE: gl.constexpr = GPU):
    """Wait until the word has the value; every thread waits on its own."""
    while read_acquire(word, SCOPE) < count:
        pass
    barrier()  # the compiler moves no load across the barrier


@gluon.jit
def fence_async():
    gl.inline_asm_elementwise(FENCE_ASYNC, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
