"""DeepSeek-V4.1 as a model of transformers. The names of its parameters are those of the checkpoint.

attn_implementation "eager" runs caches, indexer, attention and experts by eager.py, "dsv4" by packed.py. What is the
same for both is here: projections, norms, RoPE, the residual streams. It is for inference, of text, and of sequences of
one length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dsv4.moe.experts import Fp4Experts
from dsv4.reference import rope_table
from dsv4.runtime import checks

from .configuration import DeepseekV41Config
from .eager import Eager
from .engram import Engram, NGrams, Table
from .packed import Packed
from .weights import Fp4Linear, Fp8Linear, RMSNorm, product, wide

STEPS: dict[str, type[Eager]] = {"eager": Eager, "dsv4": Packed}


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32), requires_grad=False)


def _plain(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False).requires_grad_(False)


class Compressor(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.wkv, self.wgate = _plain(config.hidden_size, config.head_dim), None
        if config.compress_ratios[layer] > 1:
            self.wgate = _plain(config.hidden_size, config.head_dim)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, steps: Eager) -> Tensor:
        """Return the rows that these tokens finish, before RoPE. With a gate, projections are fp32 until they are
        summed.
        """
        if self.wgate is None:
            return steps.compress(self.layer, product(x, self.wkv.weight), None, self.norm, x.dtype)
        y = x.to(wide(x.dtype))
        kv, gate = product(y, self.wkv.weight), product(y, self.wgate.weight)
        return steps.compress(self.layer, kv, gate, self.norm, x.dtype)


class Indexer(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        heads, width = config.index_n_heads, config.index_head_dim
        self.shape, self.scale = (heads, width), width**-0.5 * heads**-0.5
        self.wq_b = Fp8Linear(config.q_lora_rank, heads * width)
        self.weights_proj = _plain(config.hidden_size, heads)
        if layer in config.kv_source_layer_ids:
            self.wk, self.k_norm = _plain(config.head_dim, width), RMSNorm(width, config.rms_norm_eps)

    def keys(self, latent: Tensor) -> Tensor:
        return self.k_norm(product(latent, self.wk.weight))


class Attention(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer, eps = config, layer, config.rms_norm_eps
        d, h, width = config.hidden_size, config.num_attention_heads, config.head_dim
        self.wq_a, self.q_norm = Fp8Linear(d, config.q_lora_rank), RMSNorm(config.q_lora_rank, eps)
        self.wq_b = Fp8Linear(config.q_lora_rank, h * width)
        self.wkv, self.kv_norm = Fp8Linear(d, width), RMSNorm(width, eps)
        self.wo_a = Fp8Linear(h * width // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = Fp8Linear(config.o_groups * config.o_lora_rank, d)
        self.attn_sink = _parameter(h)
        self.compressor = Compressor(config, layer) if layer in config.kv_source_layer_ids else None
        self.indexer = Indexer(config, layer) if layer in config.index_source_layer_ids else None

    def forward(self, x: Tensor, steps: Eager, cos_sin: Tensor) -> Tensor:
        c, ratio = self.config, self.config.compress_ratios[self.layer]
        now = torch.arange(steps.tokens, steps.tokens + x.shape[1], device=x.device)
        q_rank = self.q_norm(self.wq_a(x))
        q = _turned(self.wq_b(q_rank).unflatten(-1, (-1, c.head_dim)), cos_sin[now])
        steps.add_window(self.layer, _turned(self.kv_norm(self.wkv(x)), cos_sin[now]))
        if self.compressor is not None:
            assert self.indexer is not None
            latent = self.compressor(x, steps)
            first = (torch.arange(latent.shape[1], device=x.device) + steps.tokens // ratio) * ratio
            keys = _turned(self.indexer.keys(latent), cos_sin[first])
            steps.add_rows(self.layer, _turned(latent, cos_sin[first]), keys)
        if self.indexer is not None:
            queries = _turned(self.indexer.wq_b(q_rank).unflatten(-1, self.indexer.shape), cos_sin[now])
            steps.choose(self.layer, queries, product(x, self.indexer.weights_proj.weight) * self.indexer.scale)
        out = _turned(steps.attend(self.layer, q, self.attn_sink), cos_sin[now], back=True)
        groups = out.flatten(2).unflatten(-1, (c.o_groups, -1)).to(wide(x.dtype))  # [B, T, groups, width]
        weight = self.wo_a.numbers(groups.dtype).unflatten(0, (c.o_groups, -1))
        return self.wo_b(torch.einsum("btgd,grd->btgr", groups, weight).to(x.dtype).flatten(2))


class Gate(nn.Module):
    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.weight = _plain(config.hidden_size, config.n_routed_experts).weight
        self.bias = _parameter(config.n_routed_experts)


class Expert(nn.Module):
    def __init__(self, config: DeepseekV41Config, linear: type[Fp4Linear] | type[Fp8Linear]) -> None:
        super().__init__()
        d, width = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = linear(d, width), linear(width, d), linear(d, width)


class Experts(nn.Module):
    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Expert(config, Fp4Linear) for _ in range(config.n_routed_experts))
        self.shared_experts = Expert(config, Fp8Linear)
        self._packed: tuple[int, Fp4Experts] | None = None

    def packed(self) -> Fp4Experts:
        """Return the experts in the tiles of dsv4's kernels; made again when weights were loaded since."""
        version = sum(p._version for p in self.experts.parameters())
        if self._packed is None or self._packed[0] != version:
            self._packed = version, Fp4Experts.from_checkpoint(self.experts.state_dict(), "")
        return self._packed[1]


class Layer(nn.Module):
    """Attention and experts between four residual streams. What a block learns from the streams about how to read them
    ("pre") is for the block after it; how its output enters them ("post", "comb") is for itself."""

    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.attn, self.ffn = Attention(config, layer), Experts(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.engram = Engram(config, layer) if layer in config.engram_layer_ids else None
        s = config.hc_mult
        for block in ("attn", "ffn"):
            for name, shape in (
                ("fn", (2 * s + s * s, s * config.hidden_size)),
                ("base", (2 * s + s * s,)),
                ("scale", (3,)),
            ):
                setattr(self, f"hc_{block}_{name}", _parameter(*shape))

    def forward(self, streams: Tensor, pre: Tensor, steps: Eager, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        now, post, comb = self._mixes(streams, "attn")
        y = self.attn(self.attn_norm(read(streams, pre)), steps, cos_sin)
        streams = _written(streams, y, post, comb)
        after, post, comb = self._mixes(streams, "ffn")
        x = self.ffn_norm(read(streams, now))
        y = steps.experts(self.ffn, x.flatten(0, 1)).view_as(x)
        return _written(streams, y, post, comb), after

    def _mixes(self, streams: Tensor, block: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre [B, T, s], post [B, T, s], comb [B, T, s, s], whose rows and columns sum to 1, nearly."""
        c, s = self.config, self.config.hc_mult
        fn, base, scale = (getattr(self, f"hc_{block}_{name}") for name in ("fn", "base", "scale"))
        x = streams.flatten(2).to(wide(streams.dtype))
        mixed = x @ fn.to(x.dtype).T * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        parts = mixed.split([s, s, s * s], -1)
        pre, post, comb = (m * w + b for m, w, b in zip(parts, scale, base.split([s, s, s * s])))
        comb = comb.unflatten(-1, (s, s)).softmax(-1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return pre.sigmoid() + c.hc_eps, 2 * post.sigmoid(), comb


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """Collapse streams [B, T, s, D] to the input of a block [B, T, D]."""
    return (pre[..., None] * streams.to(pre.dtype)).sum(2).to(streams.dtype)


def _written(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    old = torch.einsum("btij,btid->btjd", comb, streams.to(comb.dtype))
    return (post[..., None] * y.to(post.dtype)[:, :, None] + old).to(streams.dtype)


def _turned(x: Tensor, cos_sin: Tensor, back: bool = False) -> Tensor:
    """Return the last dims of x [B, T, ..., D] rotated, by cos_sin [T, r]."""
    r = cos_sin.shape[-1]
    table = cos_sin.view(-1, *(1,) * (x.ndim - 3), r).to(wide(x.dtype))
    cos, sin = table.chunk(2, -1)
    even, odd = x[..., -r:].to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    sin = -sin if back else sin
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], pairs.to(x.dtype)], -1)


class DeepseekV41ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DeepseekV41Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ["Layer"]
    # Drafts, images, and the experts' bias for images
    _keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"^vision\.", r"^aligner\.", r"^image_", r"gate\.bias_vl$"]

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__(config)
        self.config: DeepseekV41Config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = _plain(config.hidden_size, config.vocab_size)
        self.ngrams = NGrams(config) if config.engram_layer_ids else None
        self._tables: dict[bool, Tensor] = {}  # RoPE; key: whether a layer has compressed rows
        self.post_init()

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Eager | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits fp32 [B, T, vocabulary] of the tokens that follow those in past_key_values."""
        if attention_mask is not None and not bool(attention_mask.all()):
            checks.fail("attention_mask", "padding", "None or all ones: sequences of one length")
        if bool((input_ids == self.config.image_token_id).any()):
            checks.fail("input_ids", "a token of an image", "text")
        steps = past_key_values
        if steps is None:
            steps = STEPS[self.config._attn_implementation](self.config, input_ids.shape[0], input_ids.device)
        hashes = None if self.ngrams is None else self.ngrams(input_ids, steps)
        streams = self.embed(input_ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        pre = torch.zeros(streams.shape[:3], dtype=wide(streams.dtype), device=streams.device)
        pre[..., 0] = 1
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if layer.engram is not None and hashes is not None:
                streams = layer.engram(streams, hashes[n])
            cos_sin = self._table(
                bool(self.config.compress_ratios[n]), steps.tokens + input_ids.shape[1], streams.device
            )
            streams, pre = layer(streams, pre, steps, cos_sin)
        steps.tokens += input_ids.shape[1]
        x = self.norm(read(streams, pre))[:, -logits_to_keep:]
        logits = product(x.to(wide(x.dtype)), self.head.weight)
        return CausalLMOutputWithPast(logits=logits, past_key_values=steps if use_cache else None)  # type: ignore[arg-type]

    def _table(self, compressed: bool, positions: int, device: torch.device) -> Tensor:
        c, table = self.config, self._tables.get(compressed)
        if table is None or len(table) < positions or table.device != device:
            size, yarn = max(1024, 2 * positions), c.rope_parameters or {}
            if compressed and yarn.get("factor", 1.0) != 1.0:
                options = dict(
                    factor=yarn["factor"],
                    original_positions=yarn["original_max_position_embeddings"],
                    beta_fast=yarn["beta_fast"],
                    beta_slow=yarn["beta_slow"],
                )
            else:
                options = {}
            theta = c.compress_rope_theta if compressed else c.rope_theta
            table = rope_table(size, c.qk_rope_head_dim, theta, device=device, **options)
            self._tables[compressed] = table
        return table

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any = None, **given: Any
    ) -> dict[str, Any]:
        seen = 0 if past_key_values is None else past_key_values.tokens
        return {
            "input_ids": input_ids[:, seen:],
            "past_key_values": past_key_values,
            "attention_mask": given.get("attention_mask"),
            "use_cache": given.get("use_cache"),
            "logits_to_keep": 1,
        }

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # accept a key of STEPS

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill weights at random, for a model without a checkpoint. Those that were loaded stay."""
        given = [p for p in module.parameters(recurse=False) if getattr(p, "_is_hf_initialized", False)]
        if given:
            return
        std = self.config.initializer_range
        if isinstance(module, (Fp8Linear, Fp4Linear, Table)):
            module.fill(std)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype.itemsize > 1:
                    parameter.normal_(0, 1.0 if name in ("attn_sink", "bias") else std)
