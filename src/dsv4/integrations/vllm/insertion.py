"""What lies between vLLM's projections and the attention of DeepSeek-V4 and V4.1, on dsv4: norm and RoPE of the
queries, RoPE of the new rows and their way into the pages.

vLLM has one kernel for both; here they are two launches of one kernel, which is not measured yet.
"""

from torch import Tensor

from dsv4 import elementwise
from dsv4.caches.pages import PackedRows


def insert(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    window: PackedRows,
    slots: Tensor,
    cos_sin: Tensor,
    eps: float | None,
    backend: str = "auto",
) -> Tensor:
    """Store kv [>= n, 512], rotated, in the rows slots int64 [n] of the window (-1: nowhere); q [N, H, 512], each
    head normed without a weight (not if eps is None: V4.1) and rotated -> a new tensor of the same shape. positions
    [N]; cos_sin fp32 [positions, 64]."""
    write(kv, positions, window, slots, cos_sin, backend)
    steps = elementwise.choose(backend, q.device)
    with steps.running():
        return steps.turned(q.contiguous(), cos_sin, positions, eps)


def write(kv: Tensor, positions: Tensor, to: PackedRows, slots: Tensor, cos_sin: Tensor, backend: str = "auto") -> None:
    """Rotate kv [>= n, 512] at positions [>= n] and store it in rows slots [n] of the pages (-1: nowhere)."""
    n = len(slots)
    steps = elementwise.choose(backend, kv.device)
    with steps.running():
        if isinstance(steps, elementwise.Kernels):
            steps.normed(kv[:n], rope=(cos_sin, positions[:n]), to=to, slots=slots)
        else:  # rounded as by vLLM's operator for CPUs, whatever the dtype of the model
            to.write(slots, steps.turned(kv[:n, None], cos_sin, positions[:n])[:, 0].bfloat16())
