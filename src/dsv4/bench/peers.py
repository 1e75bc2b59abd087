"""The peers of dsv4, where they can be imported.

Nothing of theirs is part of this package. To bring one to a GPU machine, unpack its wheel into a folder on PYTHONPATH:

    pip download --no-deps --only-binary=:all: --platform manylinux2014_x86_64 --python-version 312 sgl-flash-mla
    python -m zipfile -e sgl_flash_mla-*.whl peers/
    PYTHONPATH=src:peers python -m dsv4 bench --suite v4

| peer | wheel on PyPI | module | what it computes |
|---|---|---|---|
| FlashMLA | sgl-flash-mla (abi3), or its own build | flash_mla | V4 attention, sparse decode and prefill; Hopper |
| DeepGEMM | sgl-deep-gemm 0.1.4, apache-tvm-ffi (compiles at run time) | deep_gemm | index scores of FP8 keys |
| FFPA | ffpa-attn, quack-kernels, nvidia-cutlass-dsl[cu13], apache-tvm-ffi, einops | ffpa_attn | dense, head dim 512 |
| flash-attn | flash-attn, flash-attn-3 (built) | flash_attn, flash_attn_interface | dense, head dims to 256 |
| FlashAttention-4 | flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.6.2 and its -libs-base, -libs-core, -libs-cu13, | | |
| | quack-kernels 0.6.4, apache-tvm-ffi 0.1.15, einops | flash_attn.cute | dense, head dims to 256 |
| Humming | humming-kernels 0.1.19, cuda-bindings (compiles at run time: humming.py) | humming.layer | FP4 experts |
| cuDNN frontend | nvidia-cudnn-frontend 1.32.0, nvidia-cutlass-dsl 4.8.1 and its libs, | | |
| | apache-tvm-ffi, cuda-bindings | cudnn | gradients of V4 attention; no inverse RoPE |

The modules of nvidia-cutlass-dsl are two folders down: PYTHONPATH needs peers/nvidia_cutlass_dsl/dsl_packages, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# name -> modules, of which the first that can be imported is used; distributions, for the version
PEERS = {
    "FlashMLA": (("flash_mla", "sgl_flash_mla"), ("sgl-flash-mla", "flash-mla")),
    "DeepGEMM": (("deep_gemm",), ("sgl-deep-gemm", "deep-gemm")),
    "FFPA": (("ffpa_attn",), ("ffpa-attn",)),
    "flash-attn 3": (("flash_attn_interface",), ("flash-attn-3", "flash_attn_3")),
    "flash-attn": (("flash_attn",), ("flash-attn",)),
    "FlashAttention-4": (("flash_attn.cute",), ("flash-attn-4",)),
    "Humming": (("humming.layer",), ("humming-kernels",)),
    "cuDNN frontend": (("cudnn.deepseek_sparse_attention",), ("nvidia-cudnn-frontend",)),
}
TORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Calls = Iterator[tuple[str, Callable[[], Any]]]


def module(name: str) -> Any | None:
    """Return a peer's module; None where it cannot be imported."""
    for candidate in PEERS[name][0]:
        try:
            return importlib.import_module(candidate)
        except (ImportError, OSError, RuntimeError):  # a library that is there, but does not fit this torch
            continue
    return None


def here() -> dict[str, str]:
    """Return every peer: its version, or why it is not here."""
    return {"torch": torch.__version__} | {name: _version(name) for name in PEERS}


def _version(name: str) -> str:
    why = "not installed"
    for candidate in PEERS[name][0]:
        try:
            found = importlib.import_module(candidate)
        except ModuleNotFoundError as missing:
            if missing.name != candidate:
                why = f"not usable: {missing}"
        except (ImportError, OSError, RuntimeError) as problem:
            why = f"not usable: {problem}".splitlines()[0][:160]
        else:
            return str(getattr(found, "__version__", None) or _distribution(name) or "unknown version")
    return why


def _distribution(name: str) -> str | None:
    for distribution in PEERS[name][1]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Calls:
    """Return calls with q [B, T, Hq, D] and k, v [B, S, Hkv, D], contiguous; each gives [B, T, Hq, D]."""
    (batch, queries, q_heads, d), kv_heads = q.shape, k.shape[2]
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, tokens, D]
    grouped = q_heads != kv_heads

    def sdpa(backend: SDPBackend, q: Tensor, gqa: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, kh, vh, is_causal=causal, enable_gqa=gqa)

    def whole(backend: SDPBackend) -> Tensor:
        return sdpa(backend, qh, grouped).transpose(1, 2)

    rows = qh.reshape(batch, kv_heads, -1, d) if queries == 1 else None

    def as_rows(backend: SDPBackend) -> Tensor:  # the heads of a KV head as the rows of one query tile
        return sdpa(backend, rows, False).view(batch, q_heads, 1, d).transpose(1, 2)

    def products() -> Tensor:
        out = torch.softmax(rows @ kh.mT * d**-0.5, -1) @ vh
        return out.view(batch, q_heads, 1, d).transpose(1, 2)

    for name, backend in TORCH.items():
        yield f"torch {name}", lambda backend=backend: whole(backend)
        if grouped and queries == 1:
            yield f"torch {name}, heads as rows", lambda backend=backend: as_rows(backend)
    if queries == 1:
        yield "torch bmm", products
    ffpa = module("FFPA")
    if ffpa is not None and d > 256 and queries > 1:
        mine = [x.contiguous() for x in (qh, kh, vh)]  # the peer's layout, made beforehand
        for backend in ("cutedsl", "triton"):
            yield (
                f"FFPA {backend}",
                lambda backend=backend: ffpa.ffpa_attn_func(
                    *mine, is_causal=causal, enable_gqa=grouped, forward_backend=backend
                ).transpose(1, 2),
            )
    for name, flash in flash_attentions(d):
        yield name, lambda flash=flash: first(flash(q, k, v, causal=causal))


def flash_attentions(d: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return flash_attn_func of every flash-attn that is here; a folder of that name alone is none."""
    for name in ("flash-attn 3", "flash-attn", "FlashAttention-4"):
        function = getattr(module(name), "flash_attn_func", None)
        if function is not None and d <= 256:
            yield name, function


def varlen(starts: Tensor, longest: int, causal: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return functions of q, k, v [tokens, H, D], the sequences of which begin at `starts`."""
    for name in ("flash-attn 3", "flash-attn", "FlashAttention-4"):
        function = getattr(module(name), "flash_attn_varlen_func", None)
        if function is not None:
            bounds = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
            yield name, partial(function, **bounds, causal=causal)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return
    window = (-1, 0) if causal else (-1, -1)

    def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Any:
        gqa = {} if q.shape[1] == k.shape[1] else dict(enable_gqa=True)
        return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window, **gqa)

    yield "torch varlen", of_torch


def gradients(
    forward: Callable[..., Any], inputs: tuple[Tensor, ...], dout: Tensor, heads_first: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call that gives the gradients of a forward pass, which is run once, by the first call. heads_first:
    inputs and dout are [B, H, tokens, D], the gradients are shown as [B, tokens, H, D]."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    done: list[Tensor] = []

    def call() -> tuple[Tensor, ...]:
        if not done:
            done.append(first(forward(*leaves)))
        found = torch.autograd.grad(done[0], leaves, dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in found) if heads_first else found

    return call


def dense_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Calls:
    """Return the gradients of the calls of dense(), those that have any; each gives dq, dk, dv as q, k, v are."""
    grouped, d = q.shape[2] != k.shape[2], q.shape[3]
    views = tuple(x.transpose(1, 2) for x in (q, k, v))
    for name, backend in TORCH.items():

        def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        yield f"torch {name}", gradients(sdpa, views, dout.transpose(1, 2), heads_first=True)
    ffpa = module("FFPA")
    if ffpa is not None and d > 256:
        for name in ("cutedsl", "triton"):
            # Make the layout of the peer's kernels beforehand: tokens first for CuTe, though the shape is heads first.
            mine = [x if name == "cutedsl" else x.contiguous() for x in (*views, dout.transpose(1, 2))]
            yield (
                f"FFPA {name}",
                gradients(
                    lambda q, k, v, name=name: ffpa.ffpa_attn_func(
                        q, k, v, is_causal=causal, enable_gqa=grouped, backend=name
                    ),
                    tuple(mine[:3]),
                    mine[3],
                    heads_first=True,
                ),
            )
    for name, flash in flash_attentions(d):
        yield name, gradients(lambda q, k, v, flash=flash: flash(q, k, v, causal=causal), (q, k, v), dout)


def v4_backward(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Calls:
    """Return calls for gradients of V4 attention: q, out, dout [N, H, 512], kv [rows, 512], indices [N, K], lse [N,
    H] without the sink
    -> dq, dsink, dkv. The peer expects a finished forward pass, not autograd's."""
    cudnn = module("cuDNN frontend")
    if cudnn is None:
        return

    def call() -> tuple[Tensor, Tensor, Tensor]:
        found = cudnn.sparse_attention_backward_wrapper(
            q, kv, out, dout, lse, sink, indices, softmax_scale=q.shape[-1] ** -0.5
        )
        return found["dq"], found["d_sink"], found["dkv"]

    yield "cuDNN frontend", call


def first(x: Any) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


class FlashMLA:
    """FlashMLA's two sparse calls, by its own name or that of the wheel, where Hopper's kernels are the `legacy`
    ones.
    """

    def __init__(self) -> None:
        self.module = module("FlashMLA")

    def __bool__(self) -> bool:
        return self.module is not None

    def _legacy(self, function: Callable) -> dict[str, bool]:
        old = torch.cuda.get_device_capability()[0] == 9
        return {"use_legacy": True} if old and "use_legacy" in inspect.signature(function).parameters else {}

    def prefill(self, q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Callable[[], Tensor]:
        """Return a call: q [N, H, 512], kv bf16 [rows, 512], indices [N, K] -> out [N, H, 512]."""
        function = self.module.flash_mla_sparse_fwd
        more = self._legacy(function)
        lists = indices[:, None]
        return lambda: function(q, kv[:, None], lists, 512**-0.5, 512, attn_sink=sink, **more)[0]

    def decode(
        self,
        q: Tensor,
        window: Tensor,
        window_indices: Tensor,
        compressed: Tensor | None,
        compressed_indices: Tensor | None,
        sink: Tensor,
    ) -> Callable[[], Tensor]:
        """Return a call: q [N, H, 512], pages uint8 [pages, rows, 1, 584], lists [N, K] -> out [N, H, 512]. Heads
        are padded to 64 or 128 beforehand; the first call makes the schedule, which the others use again."""
        function = self.module.flash_mla_with_kvcache
        more = self._legacy(function)
        heads = q.shape[1]
        padded = 64 if heads <= 64 else 128
        wide = F.pad(q, (0, 0, 0, padded - heads))[:, None].contiguous()
        sinks = F.pad(sink, (0, padded - heads), value=float("-inf"))
        schedule = self.module.get_mla_metadata()[0]
        extra = (
            {}
            if compressed is None
            else dict(extra_k_cache=compressed, extra_indices_in_kvcache=compressed_indices[:, None])
        )

        def call() -> Tensor:
            out, _ = function(
                wide,
                window,
                None,
                None,
                512,
                schedule,
                softmax_scale=512**-0.5,
                is_fp8_kvcache=True,
                indices=window_indices[:, None],
                attn_sink=sinks,
                **extra,
                **more,
            )
            return out[:, 0, :heads]

        return call


class DeepGEMM:
    """DeepGEMM's index scores of FP8 keys."""

    def __init__(self) -> None:
        self.module = module("DeepGEMM")

    def __bool__(self) -> bool:
        return self.module is not None

    def paged(self, q: Tensor, pages: Tensor, weights: Tensor, lengths: Tensor, table: Tensor) -> Callable[[], Tensor]:
        """Return a call: q e4m3 [requests, queries, H, 128], pages uint8 [pages, 64, 132], weights fp32 [N, H],
        lengths int32 [requests, queries] -> scores fp32 [N, table width * 64]; what is not seen is left as it was."""
        longest, lib = table.shape[1] * 64, self.module
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        schedule = lib.get_paged_mqa_logits_metadata(lengths, 64, num_sms)
        cache = pages.view(pages.shape[0], 64, 1, 132)
        return lambda: lib.fp8_paged_mqa_logits(q, cache, weights, lengths, table, schedule, longest)

    def contiguous(
        self, q: Tensor, k: Tensor, k_scales: Tensor, weights: Tensor, lengths: Tensor
    ) -> Callable[[], Tensor]:
        """Return a call: q e4m3 [N, H, 128], k e4m3 [S, 128], scales fp32 [S] -> scores fp32 [N, S]."""
        starts, lib = torch.zeros_like(lengths), self.module
        return lambda: lib.fp8_mqa_logits(q, (k, k_scales), weights, starts, lengths)
