"""DeepSeek-V4 in Hugging Face transformers, running on dsv4.v4_attention.

    import dsv4.integrations.transformers
    dsv4.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dsv4")

transformers passes a dense mask to an attention function. Here there is none: the "mask" is the list of window rows of
each query, made once per forward pass and shared by all layers. The lists of compressed rows come from the model's
indexer (CSA) or from the positions (HCA). The model still computes everything around the attention (projections,
caches, compressor, top-k), so the logits are those of attn_implementation="eager" up to rounding.

An attention function does not get the positions and the indexer's choice as arguments. register() wraps the forward of
some classes of the model to record them; for other attn_implementations the wrappers do nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.integrations.wrapping import wrap
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.v4.api import v4_attention

NAME = "dsv4"
_LAYER = threading.local()  # .now: the Layer whose forward runs in this thread


@dataclass
class Layer:
    """Notes on one call of DeepseekV4Attention.forward."""

    positions: Tensor  # [B or 1, S]
    chosen: Tensor | None = None  # [B, S, k]: what the indexer chose, -1 = nothing


@dataclass(frozen=True, eq=False)
class WindowLists:
    """What stands in for the mask: which window rows each query sees.

    rows [B, S, W]: row j of the keys that the layer passes (window first, compressed rows after), -1 = nothing there.
    Not a tensor on purpose: the model would extend a tensor by its dense mask of the compressed rows.
    """

    rows: Tensor
    window_rows: int  # rows of the window at the front of the keys
    by_device: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> Tensor:
        """Return the lists on the device of a layer (a model may be spread over several)."""
        if device not in self.by_device:
            self.by_device[device] = self.rows.to(device)
        return self.by_device[device]


def register(name: str = NAME, *, backend: Backend = "auto") -> None:
    """Make attn_implementation=name work for DeepSeek-V4. It may be called again. backend: as in dsv4.v4_attention."""
    checks.backend(backend)
    note_layers()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, functools.partial(attention, backend=backend))
    # Without a mask function of its own, transformers passes no mask at all and every query sees every row.
    AttentionMaskInterface.register(name, window_lists)


def note_layers() -> None:
    """Wrap the forward of three classes: they record what the attention function needs, and a cache of dsv4's own may
    bring a layer along. A second call does nothing."""
    try:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model
    except ImportError as missing:
        needed = "dsv4.integrations.transformers needs transformers with DeepSeek-V4 (pip install 'dsv4[hf]')"
        raise ImportError(needed) from missing
    wrap(model.DeepseekV4Attention, "forward", _attention_forward)
    wrap(model.DeepseekV4Indexer, "forward", _indexer_forward)
    wrap(model.DeepseekV4DecoderLayer, "forward", _layer_forward)


def window_lists(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> WindowLists:
    """Evaluate the model's mask rule for the W rows up to each query only, not for all rows."""
    if local_size is None or mask_function is None or use_vmap:
        raise ValueError("attn_implementation='dsv4': got a mask that is not a sliding window; accepted: DeepSeek-V4")
    q = torch.arange(q_length, device=device)[:, None] + q_offset  # [S, 1] token numbers
    width = min(local_size, kv_length)
    k = q - torch.arange(width - 1, -1, -1, device=device)  # [S, W]
    row = k - kv_offset
    inside = (row >= 0) & (row < kv_length)
    k = k.clamp(kv_offset, max(kv_offset + kv_length - 1, kv_offset))  # outside: any token, masked below
    batch = torch.arange(batch_size, device=device)[:, None, None]
    visible = inside & mask_function(batch, 0, q[None], k[None])
    if attention_mask is not None:  # [B, tokens], False = padding
        known = k < attention_mask.shape[1]
        visible = visible & known & attention_mask[batch, k.clamp_max(attention_mask.shape[1] - 1)[None]].bool()
    rows = torch.where(visible, row, -1).int().expand(batch_size, -1, -1)
    return WindowLists(rows, kv_length)


def attention(
    module: Any,
    query: Tensor,  # [B, H, S, D]
    key: Tensor,  # [B, 1, window rows + compressed rows, D]; it is also the value
    value: Tensor,
    attention_mask: WindowLists | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,  # [H]: the sinks
    backend: Backend = "auto",
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: (out [B, S, H, D], no weights)."""
    layer = getattr(_LAYER, "now", None)
    if layer is None:
        raise ValueError(f"attn_implementation='dsv4': got {type(module).__name__}; accepted: DeepseekV4Attention")
    if not isinstance(attention_mask, WindowLists):
        came = checks.describe(attention_mask)
        raise ValueError(f"attention_mask: got {came}; accepted: None or a 2-D padding mask, given to the model")
    if dropout:
        raise ValueError(f"dropout: got {dropout}; accepted: 0 (attention_dropout=0, or model.eval())")
    b, heads, s, d = query.shape
    rows = key.shape[2]
    first = attention_mask.window_rows  # first of the compressed rows
    start = torch.arange(b, device=query.device, dtype=torch.int32) * rows  # row of sequence 0 in the pool below
    window = attention_mask.on(query.device)
    q = _padded(query.transpose(1, 2).reshape(b * s, heads, d))
    pool = _padded(key.reshape(b * rows, d))
    options: dict[str, Any] = {}
    if rows > first:
        options["compressed"] = pool
        if layer.chosen is not None:
            options["compressed_indices"] = _in_pool(layer.chosen.int(), start + first)
        else:
            count = rows - first
            if s == 1:  # one new token sees every row there is
                visible = torch.full((b, 1), count, device=query.device)
            else:
                visible = ((layer.positions + 1) // module.compressor.compress_rate).clamp(0, count).expand(b, s)
            numbers = torch.arange(first, rows, device=query.device, dtype=torch.int32)
            options["compressed_block_table"] = start[:, None] + numbers  # pages of one row
            options["compressed_lengths"] = visible.reshape(-1).int()
            options["request_starts"] = torch.arange(b + 1, device=query.device, dtype=torch.int32) * s
    out = v4_attention(
        q,
        pool,
        _in_pool(window, start),
        sink=None if s_aux is None else s_aux.float(),
        softmax_scale=scaling,
        backend=backend,
        **options,
    )
    return out.view(b, s, heads, -1)[..., :d].contiguous(), None


def _in_pool(rows: Tensor, start: Tensor) -> Tensor:
    """Convert rows [B, S, W] of each sequence to rows [B * S, W] of all sequences packed end to end."""
    return torch.where(rows >= 0, rows + start[:, None, None], -1).flatten(0, 1)


def _padded(x: Tensor) -> Tensor:
    """Return x with zeros up to the next head dim that dsv4 has. They change no score, and stay zeros in the result."""
    d = x.shape[-1]
    if d > checks.HEAD_DIMS[-1]:
        raise ValueError(f"head_dim: got {d}; accepted: at most {checks.HEAD_DIMS[-1]}")
    wider = next(n for n in checks.HEAD_DIMS if n >= d)
    return x if wider == d else torch.nn.functional.pad(x, (0, wider - d))


def _layer_forward(original: Callable) -> Callable:
    def forward(self, hidden_states, *args, **kwargs):
        whole = getattr(kwargs.get("past_key_values"), "dsv4_layer", None)
        if whole is not None:
            return whole(self, hidden_states, kwargs.get("input_ids"))
        return original(self, hidden_states, *args, **kwargs)

    return forward


def _attention_forward(original: Callable) -> Callable:
    def forward(self, hidden_states, position_embeddings, position_ids, *args, **kwargs):
        # A cache of dsv4's own (paged_model.py) replaces the whole layer.
        whole = getattr(kwargs.get("past_key_values"), "dsv4_attention", None)
        if whole is not None:
            return whole(self, hidden_states), None
        before = getattr(_LAYER, "now", None)
        _LAYER.now = Layer(position_ids)
        try:
            return original(self, hidden_states, position_embeddings, position_ids, *args, **kwargs)
        finally:
            _LAYER.now = before

    return forward


def _indexer_forward(original: Callable) -> Callable:
    def forward(self, *args, **kwargs):
        chosen = original(self, *args, **kwargs)
        layer = getattr(_LAYER, "now", None)
        if layer is not None:
            layer.chosen = chosen
        return chosen

    return forward
