"""v4_attention with gradients: its training operators. backward.py says what a backend receives.

Packed rows have no gradient; q and sink have theirs beside them.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.runtime import gradients, operators
from dsv4.v4.backward import V4Backward
from dsv4.v4.problem import V4Problem

TENSORS = (
    "q", "window", "compressed", "sink", "window_indices", "compressed_indices", "window_lengths",
    "compressed_lengths", "compressed_block_table", "request_starts", "cos_sin", "positions",
)  # fmt: skip
PAGES = {"rows_per_page": ("SymInt", 0), "page_stride": ("SymInt", 0), "format": ("str", "")}  # of a pool
PAGING = {f"{pool}_{name}": x for pool in ("window", "compressed") for name, x in PAGES.items()}
ARGUMENTS = (*TENSORS, *PAGING, "softmax_scale", "deterministic", "backend")
REQUIRED = ("q", "window", "window_indices")
DIFFERENTIABLE = TENSORS[:4]

TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in REQUIRED else '?'} {name}" for name in TENSORS)
OPTION_SCHEMA = ", ".join(f"{kind} {name}" for name, (kind, _) in PAGING.items())
OPTION_SCHEMA += ", float? softmax_scale, bool deterministic, str backend"


def call(given: dict[str, Any], return_lse: bool, plain: bool) -> Any:
    """The public function, its arguments checked, when a gradient will be asked for."""
    arguments = (given.get(name, PAGING[name][1] if name in PAGING else None) for name in ARGUMENTS)
    out, lse = gradients.forward("v4_attention", plain, *arguments)
    return (out, lse) if return_lse else out


def _pools(given: dict[str, Any]) -> tuple[Any, Any]:
    """Tensors of rows, or the caches that travelled as bytes."""

    def pool(name: str) -> Any:
        return caches.from_parts(given[name], *(given[f"{name}_{part}"] for part in PAGES))

    return pool("window"), pool("compressed")


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The real kernel, and the fake one: what it calls has its own."""
    from dsv4.v4.api import v4_attention

    given = dict(zip(ARGUMENTS, arguments))
    window, compressed = _pools(given)
    rope = None if given["cos_sin"] is None else (given["cos_sin"], given["positions"])
    names = (*TENSORS[3:4], *TENSORS[6:10], "softmax_scale", "deterministic", "backend")
    with torch.no_grad():
        return v4_attention(
            given["q"], window, given["window_indices"], compressed, given["compressed_indices"], inverse_rope=rope,
            return_lse=True, **{name: given[name] for name in names},
        )  # fmt: skip


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output)
    ctx.options = inputs[len(TENSORS) :]


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    none = (None,) * len(ARGUMENTS)
    if dout is None and dlse is None:
        return none
    asked = list(ctx.needs_input_grad[: len(DIFFERENTIABLE)])
    *options, deterministic, backend = ctx.options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tensors = (dout, dlse, *ctx.saved_tensors)
    grads = gradients.backward("v4_attention", tensors, *options, deterministic, backend, asked)
    return *(gradients.or_none(x, want) for x, want in zip(grads, asked)), *none[len(asked) :]


def _backward(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    given = dict(zip((*TENSORS, "out", "lse", *ARGUMENTS[len(TENSORS) :], "asked"), rest))
    asked, q, out = given["asked"], given["q"], given["out"]
    window, compressed = _pools(given)
    scale = given["softmax_scale"]
    p = V4Problem(
        q, window, given["window_indices"], q.shape[-1] ** -0.5 if scale is None else scale, given["window_lengths"],
        compressed, given["compressed_indices"], given["compressed_lengths"], given["compressed_block_table"],
        given["request_starts"], given["cos_sin"], given["positions"], given["sink"], out, given["lse"],
    )  # fmt: skip
    made = [gradients.gradient_like(given[name], want) for name, want in zip(DIFFERENTIABLE, asked)]
    dout = torch.zeros_like(out) if dout is None else dout
    if out.numel() == 0 or p.no_keys():
        for x in made:
            x.zero_()
    else:
        dq, dwindow, dcompressed, dsink = (gradients.or_none(x, want) for x, want in zip(made, asked))
        request = V4Backward(p, dout, dlse, dq, dwindow, dcompressed, dsink, given["deterministic"])
        gradients.run(request, q.device, given["backend"], "dsv4.v4.backward_cpu")
    return tuple(made)


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(gradients.gradient_like(x, want) for x, want in zip(rest, rest[-1]))


gradients.define(
    "v4_attention",
    f"{TENSOR_SCHEMA}, {OPTION_SCHEMA}",
    "(Tensor, Tensor)",
    (_forward, _forward),
    f"Tensor? dout, Tensor? dlse, {TENSOR_SCHEMA}, Tensor out, Tensor lse, {OPTION_SCHEMA}, bool[] asked",
    "(Tensor, Tensor, Tensor, Tensor)",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
operators.TRAINING["v4_attention"] = DIFFERENTIABLE, call
