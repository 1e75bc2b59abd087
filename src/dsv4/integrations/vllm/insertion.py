"""What lies between vLLM's projections and the attention of DeepSeek-V4, on dsv4: norm and RoPE of the queries, RoPE
of the new rows and their way into the window's pages.

vLLM has one kernel for both; here they are two launches of one kernel, which is not measured yet.
"""

from torch import Tensor

from dsv4 import elementwise
from dsv4.caches.kv import Fp8Cache


def insert(
    q: Tensor, kv: Tensor, positions: Tensor, window: Fp8Cache, slots: Tensor, cos_sin: Tensor, eps: float,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """kv [>= n, 512], rotated, to the rows slots int64 [n] of the window (-1: nowhere); q [N, H, 512], each head normed
    without a weight and rotated -> a new tensor of the same shape. positions [N]; cos_sin fp32 [positions, 64]."""
    n = len(slots)
    steps = elementwise.choose(backend, q.device)
    with steps.running():
        if isinstance(steps, elementwise.Kernels):
            steps.normed(kv[:n], rope=(cos_sin, positions[:n]), to=window, slots=slots)
        else:  # rounded as by vLLM's operator for CPUs, whatever the dtype of the model
            window.write(slots, steps.turned(kv[:n, None], cos_sin, positions[:n])[:, 0].bfloat16())
        return steps.turned(q.contiguous(), cos_sin, positions, eps)
