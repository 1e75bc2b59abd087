"""Decoders in Hugging Face transformers, running on dsv4.fmha: Gemma, gpt-oss, Llama, ...; head dims up to 512.

    import dsv4.integrations.transformers_dense
    dsv4.integrations.transformers_dense.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dsv4_dense")

No dense mask is made. The mask function evaluates the model's mask rule for some keys of each query, to check that it
is what dsv4 computes: causal, with or without a sliding window. Anything else (packed sequences, bidirectional tokens,
chunks) is rejected, and so are caches that are longer than their contents. Sequences padded to one length are unpadded
and computed as varlen; outputs at padding are 0. Sinks are supported.

For DeepSeek-V4 use dsv4.integrations.transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend

NAME = "dsv4_dense"
ASKED = 4096  # queries for which the model's rule is evaluated; of more, a sample at equal distances
WITNESSES = 4  # keys of each, besides those at the ends of what it sees


@dataclass(frozen=True, eq=False)
class Visible:
    """What stands in for the mask: the window of every query, and which keys are not padding."""

    window: tuple[int, int]
    padding: Tensor | None  # bool [B, keys], False = padding


def register(name: str = NAME, *, backend: Backend = "auto") -> None:
    """Make attn_implementation=name work. It may be called again. backend: as in dsv4.fmha."""
    checks.backend(backend)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ImportError(f"{__name__} needs transformers (pip install 'dsv4[hf]')") from missing
    AttentionInterface.register(name, functools.partial(attention, backend=backend))
    AttentionMaskInterface.register(name, visible)


def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Visible:
    """Check the model's mask rule: only causal attention, with a window of local_size keys or none, is accepted."""
    last_query, last_key = int(q_offset) + q_length, int(kv_offset) + kv_length
    if last_query != last_key:
        came = f"keys up to {last_key} for queries up to {last_query}"
        checks.fail("past_key_values", came, "a cache that grows (DynamicCache): its last key is the last query's")
    if (
        mask_function is None
        or use_vmap
        or not _is_plain(mask_function, batch_size, int(q_offset), q_length, int(kv_offset), kv_length, local_size)
    ):
        accepted = "a causal mask, with a sliding window or without; use attn_implementation='eager'"
        checks.fail(f"attn_implementation={NAME!r}", "a mask of another kind", accepted)
    padding = None
    if attention_mask is not None:  # [B, tokens], False = padding
        padding = attention_mask[:, last_key - kv_length : last_key].bool()
        if not bool((~padding).any()):
            padding = None
        elif local_size is not None and bool((_runs(padding) > 1).any()):
            # If padding is removed, tokens become neighbours, and a window that counts tokens would reach farther than
            # it should.
            checks.fail("attention_mask", "padding between tokens, with a sliding window", "padding at one end")
    return Visible((-1 if local_size is None else local_size - 1, 0), padding)


def attention(
    module: Any,
    query: Tensor,  # [B, Hq, T, D]
    key: Tensor,  # [B, Hkv, S, D]
    value: Tensor,  # [B, Hkv, S, Dv]
    attention_mask: Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,  # [Hq]: the sinks
    backend: Backend = "auto",
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: (out [B, T, Hq, Dv], no weights)."""
    if not isinstance(attention_mask, Visible) or not (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ):
        came = f"{type(module).__name__} with {checks.describe(attention_mask)}"
        checks.fail("attention_mask", came, "causal self-attention, and None or a 2-D padding mask given to the model")
    if sliding_window is not None and attention_mask.window[0] not in (-1, sliding_window - 1):
        checks.fail("sliding_window", sliding_window, f"{attention_mask.window[0] + 1}, as the mask of this layer")
    b, t = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = dict(
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=attention_mask.window,
        softcap=softcap or 0.0,
        learnable_sink=None if s_aux is None else s_aux.float(),
        backend=backend,
    )
    if attention_mask.padding is None:
        out = flash_attn_func(q, k, v, **options)
        assert isinstance(out, Tensor)
        return out.contiguous(), None
    keys = attention_mask.padding.to(query.device)
    queries = keys[:, -t:]  # the last key is the last query's
    part = flash_attn_varlen_func(
        q[queries], k[keys], v[keys], _starts(queries), _starts(keys), t, keys.shape[1], **options
    )
    assert isinstance(part, Tensor)
    out = part.new_zeros(b, t, *part.shape[1:])
    out[queries] = part
    return out, None


def _runs(kept: Tensor) -> Tensor:
    """Return how many runs of True each line [B, n] has."""
    return (torch.nn.functional.pad(kept.int(), (1, 0)).diff(dim=1) == 1).sum(1)


def _starts(kept: Tensor) -> Tensor:
    """Return where each sequence begins when what is kept of it is laid end to end, int32 [B + 1]."""
    return torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()


def _is_plain(
    rule: Callable, batch: int, q_offset: int, t: int, kv_offset: int, s: int, local_size: int | None
) -> bool:
    """Return whether the rule gives the expected answer for the keys around the ends of a query's window and for some
    others.

    On the CPU, so that no GPU is waited for. A rule that needs tensors of a GPU, as packed sequences do, is not plain.
    """
    q = torch.arange(t)[:: max(1, t // ASKED)][:, None] + q_offset  # [n, 1] token numbers
    first = torch.full_like(q, kv_offset) if local_size is None else (q - local_size + 1).clamp_min(kv_offset)
    chance = torch.Generator().manual_seed(0)  # a separate generator: the caller's random numbers stay as they are
    others = torch.randint(kv_offset, kv_offset + max(s, 1), (len(q), WITNESSES), generator=chance)
    k = torch.cat([first - 1, first, q, q + 1, torch.full_like(q, kv_offset), others], 1)
    k = k.clamp(kv_offset, kv_offset + max(s - 1, 0))
    want = (k <= q) & (k >= first)
    try:
        said = rule(torch.arange(batch)[:, None, None], 0, q[None], k[None])
    except RuntimeError:
        return False
    return bool((torch.as_tensor(said) == want).all())
