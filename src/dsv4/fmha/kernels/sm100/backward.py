"""Gradients of fmha on sm_100a: which kernels, and their launches. Deterministic, without atomics.

head dim    kernels                                              products of the size of the scores, workspace
64, 128     backward_rows, then backward_tiles twice             7, none
256, 512    backward_rows, then the chain (shared/fmha/chain.py) 5, 1 GiB for P and dS
            with backward_scores of this folder
"""

from torch import Tensor, float16

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels.backward import FP16_P_SCALE, Sequences, at_once, descriptor, supports
from dsv4.fmha.kernels.by_sequence import by_sequence
from dsv4.fmha.kernels.chain import Chain
from dsv4.fmha.kernels.sm100.backward_scores import backward_scores
from dsv4.fmha.kernels.sm100.backward_tiles import backward_tiles
from dsv4.fmha.kernels.tiles import NO_BOUND
from dsv4.fmha.problem import FmhaProblem
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime import launch

__all__ = ["backward", "supports"]


def backward(b: FmhaBackward) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    if b.forward.head_dim <= 128:
        at_once(b, tiles)
    else:
        by_sequence(b, chain)


class BlackwellChain(Chain):
    kernel = backward_scores
    stored = [1, 128, 64]
    options = dict(SLOTS=5, SCORE_REGS=208, LOAD_REGS=88)


def chain(p: FmhaProblem, *tensors: Tensor) -> None:
    BlackwellChain(p, *tensors[:7]).run(*tensors[7:])


def tiles(
    p: FmhaProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor, factor: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, sequences: Sequences | None,
) -> None:  # fmt: skip
    """q, dout, dq [B, Hkv, R, D], R packed rows; k, v, dk, dv [B, Hkv, S, D]; lse2, delta [B, Hkv, R]; factor [1], of
    dS in fp16."""
    batch, heads, rows, d = q.shape
    keys, fp16 = k.shape[2], q.dtype == float16
    of_rows, of_keys = [[descriptor(x, [1, 1, 128, 64]) for x in pair] for pair in ((q, dout), (k, v))]
    common = [
        p.softmax_scale * LOG2E.value, p.softmax_scale, FP16_P_SCALE, rows, rows // p.group, keys, p.group,
        NO_BOUND if p.left < 0 else p.left, NO_BOUND if p.right < 0 else p.right, heads,
    ]  # fmt: skip
    terms = [lse2, delta, factor]
    count, starts, of_each = 0, (lse2, lse2), lambda n: -(-n // 128)
    if sequences is not None:
        count, starts, of_each = sequences.count, sequences, lambda n: n // 128 + sequences.count  # as many as may be
    options = dict(D=d, SCALED=fp16, VARLEN=sequences is not None, SCORE_REGS=224, WARP_REGS=56, num_warps=4)
    if dk is not None or dv is not None:
        if dk is None or dv is None:  # both come from one launch
            dk, dv = (k.new_empty(k.shape) if x is None else x for x in (dk, dv))
        grid = (of_each(keys), batch * heads)
        launch.now(backward_tiles, grid, *terms, dk, dv, *starts, *of_keys, *of_rows, *common, *dk.stride()[:3],
                   *dv.stride()[:3], count, KEYS=True, **options)  # fmt: skip
    if dq is not None:
        grid = (of_each(rows), batch * heads)
        launch.now(backward_tiles, grid, *terms, dq, dq, *starts, *of_rows, *of_keys, *common, *dq.stride()[:3],
                   *dq.stride()[:3], count, KEYS=False, **options)  # fmt: skip
