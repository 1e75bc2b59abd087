"""The attention of DeepSeek-V4 layers: window rows and compressed rows in one softmax, with a sink."""

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.runtime import checks, operators
from dsv4.runtime.calls import Operation, Shapes
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan
from dsv4.v4 import plan as plans
from dsv4.v4 import problem
from dsv4.v4.options import V4Options

Both = tuple[Tensor, Tensor]  # out, lse


class Keywords(TypedDict, total=False):
    """What type checkers see: the return type depends on return_lse alone."""

    window_lengths: Tensor | None
    compressed_lengths: Tensor | None
    compressed_block_table: Tensor | None
    request_starts: Tensor | None
    inverse_rope: tuple[Tensor, Tensor] | None
    sink: Tensor | None
    softmax_scale: float | None
    out: Tensor | None
    plan: Plan | None
    deterministic: bool
    backend: Backend


@overload
def v4_attention(
    q: Tensor,
    window: Pool,
    window_indices: Tensor,
    compressed: Pool | None = ...,
    compressed_indices: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **_: Unpack[Keywords],
) -> Tensor: ...
@overload
def v4_attention(
    q: Tensor,
    window: Pool,
    window_indices: Tensor,
    compressed: Pool | None = ...,
    compressed_indices: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **_: Unpack[Keywords],
) -> Both: ...
@overload
def v4_attention(
    q: Tensor,
    window: Pool,
    window_indices: Tensor,
    compressed: Pool | None = ...,
    compressed_indices: Tensor | None = ...,
    *,
    return_lse: bool,
    **_: Unpack[Keywords],
) -> Tensor | Both: ...
def v4_attention(
    q: Tensor,
    window: Pool,
    window_indices: Tensor,
    compressed: Pool | None = None,
    compressed_indices: Tensor | None = None,
    *,
    window_lengths: Tensor | None = None,
    compressed_lengths: Tensor | None = None,
    compressed_block_table: Tensor | None = None,
    request_starts: Tensor | None = None,
    inverse_rope: tuple[Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: Plan | None = None,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor | Both:
    """Compute attention of q [N, H, 512] to listed rows of one or two pools -> out [N, H, 512], lse [N, H].

    Every row is both key and value (MQA with K = V). For each query n and head h, over the rows k_i that n lists::

        s_i = softmax_scale * (q_nh . k_i)                          softmax_scale defaults to 512 ** -0.5
        out = sum_i e^(s_i) k_i / (sum_i e^(s_i) + e^sink_h)        ONE softmax over window and compressed rows
        lse = log(sum_i e^(s_i))                                    natural log, without the sink

    One operation covers the three kinds of layer:

        SWA   v4_attention(q, window, window_indices)
        CSA   v4_attention(q, window, window_indices, compressed, compressed_indices)     indices from dsv4.index_topk
        HCA   v4_attention(q, window, window_indices, compressed, compressed_block_table=..., compressed_lengths=...)

    Args:
        window, compressed: a pool of rows: a tensor [rows, 512] of q's dtype, a tensor [pages, page, 512], or packed
            rows: a :class:`dsv4.Fp8Cache` (V4), a :class:`dsv4.Mxfp8Cache` or a :class:`dsv4.Nvfp4Cache` (V4.1). Each
            pool may have its own kind. Row number r is row ``r % page`` of page ``r // page``.
        window_indices, compressed_indices: int32 [N, K] of row numbers in any order, -1 = nothing there. A row
            listed twice counts twice.
        window_lengths, compressed_lengths: int32 [N], how many entries of each list are used; later ones are
            ignored.
        compressed_block_table: int32 [R, pages], instead of compressed_indices: query n of request r sees the
            rows 0 .. compressed_lengths[n] - 1 of r; row j is row ``j % page`` of page ``table[r, j // page]``
            (a plain [rows, 512] tensor has pages of one row). Entries past the lengths are not read.
        request_starts: int32 [R + 1], starting at 0, non-decreasing: queries starts[r] .. starts[r+1] - 1 belong to
            request r. Queries past the last request see no compressed rows. Default: every query is its own request.
        inverse_rope: (cos_sin fp32 [positions, r], positions int32 or int64 [N]): rotate the interleaved pairs of
            the last r dims of out by -position; V4 needs this because V has RoPE applied. cos_sin is r/2 cosines, then
            r/2 sines (dsv4.reference.rope_table).
        sink: fp32 [H], the logit of a key whose value is 0, not scaled; -inf = none, +inf = out 0.
        return_lse: return ``(out, lse)``, lse in fp32.
        out: tensor to write to and return; its last stride is 1, and it overlaps no input. Its dtype is q's,
            or fp32 for partial results that are merged (dsv4.merge_states) and rounded once.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with preallocated buffers (CUDA graphs).
        deterministic: a query gives the same bits in every run and every batch, and on a CPU with any number of threads
            (it uses one).
        backend: "auto" (by the device of q), "cuda", "softsm" (the GPU kernels, emulated), "cpu".

    Rules:
        bfloat16 and float16 everywhere. Only on the cpu backend: float32, head dims 64, 128 and 256, and packed rows
        with a q that is not bfloat16. The last dimension has stride 1; all other strides are arbitrary. out has q's
        dtype, unless out= is fp32.
        For a query that lists no row, out is 0 and lse is -inf, with or without a sink.
        Rows that no query lists may contain NaN or inf; rows that are listed must be finite.
        Scores may have any size, but the kernels' gradients of a row are NaN if its lse exceeds 1.8e8 in size.
        Gradients exist with respect to q, the rows of both pools (not of packed rows), sink and lse (first order,
        reverse mode). With out= or plan=, an input that requires grad raises an error under grad mode.

    Raises:
        ValueError: names the argument, the value it got and what is accepted. Checks of tensor values always run
            on a CPU, and on a GPU with DSV4_CHECK=1 in the environment; without them a bad row number counts as -1.
    """
    checks.flag("return_lse", return_lse)
    cos_sin, positions = None, None
    if isinstance(inverse_rope, (tuple, list)) and len(inverse_rope) == 2:
        cos_sin, positions = inverse_rope
    if inverse_rope is not None and (cos_sin is None or positions is None):
        checks.fail("inverse_rope", checks.describe(inverse_rope), "None or (cos_sin, positions)")
    rows, *paging = caches.parts_of(window)
    more_rows, *more_paging = caches.parts_of(compressed)
    tensors = (
        q, rows, window_indices, more_rows, compressed_indices, window_lengths, compressed_lengths,
        compressed_block_table, request_starts, cos_sin, positions, sink,
    )  # fmt: skip
    options = V4Options.checked(paging, more_paging, softmax_scale, deterministic)
    return operators.call(V4_ATTENTION, tensors, options, return_lse, out, plan, checks.backend(backend))


def _build(
    q, window, window_indices, compressed=None, compressed_indices=None, *, cos_sin=None, positions=None, **others
) -> problem.V4Problem:
    options = V4Options(**{name: others[name] for name in V4Options._fields if name in others})
    return problem.build(
        q,
        caches.from_parts(window, *options.window_pages),
        window_indices,
        caches.from_parts(compressed, *options.compressed_pages),
        compressed_indices,
        inverse_rope=None if cos_sin is None and positions is None else (cos_sin, positions),
        **others,
    )


def _outputs(arguments: dict[str, Any]) -> Shapes:
    q = arguments["q"]
    return (q.shape, q.dtype), ((q.shape[0], q.shape[1]), torch.float32)


V4_ATTENTION = Operation(
    "v4_attention",
    "v4",
    (
        "q", "window", "window_indices", "compressed", "compressed_indices", "window_lengths", "compressed_lengths",
        "compressed_block_table", "request_starts", "cos_sin", "positions", "sink",
    ),
    3,
    V4Options,
    ("out", "lse"),
    _outputs,
    _build,
    problem.check_values,
    (3,),
    (("same_pools", "window", "compressed"),),
    plans.reserved,
    plans.warmup_calls,
    positional=("compressed", "compressed_indices"),
)  # fmt: skip
operators.define_operation(V4_ATTENTION)
