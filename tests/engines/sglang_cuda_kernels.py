"""SGLang's CUDA kernels for DeepSeek-V4, in torch, so that its engine runs the model on a CPU.

SGLang compiles those kernels when they are first needed, all through one function, `load_jit`, which is replaced here;
the package `flash_mla` is a stand-in too. Triton kernels run in softsm. Scheduler, radix cache, memory pools, model,
attention backend and its metadata are SGLang's. Written from what SGLang passes to each kernel and expects of it; its
rows are dsv4's, so a run without the plug-in is the plug-in's oracle.
"""

import os
import sys
import types
from collections import Counter
from dataclasses import dataclass

import index_values
import torch

from dsv4 import Fp8Cache, reference
from dsv4.caches.index_keys import IndexCache

counts: Counter = Counter()  # of this process
# Choices that SGLang has, for those of its kernels that are in TileLang and DeepGEMM.
CHOICES = dict.fromkeys(
    ("SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_USE_TILELANG_MHC_POST", "SGLANG_OPT_DEEPGEMM_HC_PRENORM",
     "SGLANG_OPT_FP8_WO_A_GEMM"), "0"
) | {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}  # fmt: skip


def prepare() -> None:
    """Runs in each process, before SGLang is imported."""
    import triton.backends

    os.environ |= CHOICES
    triton.backends.backends["cpu"] = triton.backends.backends["nvidia"]
    torch.empty = without_pinning(torch.empty)
    torch._C._cuda_getCurrentRawStream = None  # SGLang imports the name, with kernels that are not called
    from sglang.kernels.jit import utils

    utils.load_jit, utils.is_arch_support_pdl = module, lambda *_: False
    flash_mla()

    from sglang.kernels.ops.layernorm import mhc
    from sglang.srt.layers.attention import deepseek_v4_backend as backend
    from sglang.srt.layers.attention.dsv4 import indexer
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models import deepseek_v4 as model

    mhc.hc_split_sinkhorn = mhc._hc_split_sinkhorn_triton  # SGLang's own, in place of TileLang
    indexer.fp8_paged_mqa_logits_torch = index_scores  # SGLang's goes through bf16, DeepGEMM's does not
    factory.get_rope_cpu = lambda *_, **__: None  # rejects the model; the layer keeps it for ROCm alone
    backend.is_cuda = lambda: True
    in_softsm(backend.DeepseekV4AttnBackend)
    # Weights that SGLang keeps in bf16 whatever the model is.
    UnquantizedLinearMethod.apply = lambda self, layer, x, bias=None: torch.nn.functional.linear(
        x, layer.weight.to(x.dtype), bias
    )
    model._apply_wo_a_bf16_matmul = grouped


def without_pinning(empty):
    return lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)


def in_softsm(backend: type) -> None:
    """Uses softsm from the start of the attention backend on: earlier, modules of SGLang would take it for a GPU."""
    import softsm

    start = backend.__init__

    def init(self, *arguments, **options):
        in_softsm.use = softsm.use("sm_90a", sms=1)
        in_softsm.use.__enter__()
        start(self, *arguments, **options)

    backend.__init__ = init


def grouped(o, weight, **_):
    """Rounded as by the kernel for bf16 models, whatever the model is."""
    made = torch.einsum("tgd,grd->tgr", o.bfloat16().float(), weight.float())
    return made.bfloat16().to(o.dtype)


def index_scores(q, pages, weights, lengths, table, schedule, longest, clean):
    """fp32 [queries, longest] of e4m3 queries [n, 1, heads, 128] and keys in pages of 64."""
    counts["index_scores"] += 1
    n, page = len(q), pages.shape[1]
    cache = IndexCache.from_pages(pages[:, :, 0])
    keys = cache.data_view().view(torch.float8_e4m3fn).float() * cache.scale_view().view(torch.float32)
    out = q.new_zeros(n, longest, dtype=torch.float32)
    for i, count in enumerate(lengths.view(-1).tolist()):
        some = keys[table[i, : -(-count // page)].long()].flatten(0, 1)[:count]
        out[i, :count] = weights[i].float() @ (q[i, 0].float() @ some.T).relu()
    return out


def module(name: str, *arguments: str, cuda_wrappers=(), **_):
    """What SGLang compiles a module to: functions by the names of its wrappers."""
    made = types.SimpleNamespace()
    for wrapper, _ in cuda_wrappers:
        made.__dict__[wrapper] = counted(f"{name.removeprefix('dpsk_v4_')}.{wrapper}", arguments)
    return made


def counted(name: str, arguments: tuple[str, ...]):
    def call(*given):
        counts[name] += 1
        if name not in KERNELS:
            raise NotImplementedError(f"{name} of SGLang {arguments}: {[getattr(x, 'shape', x) for x in given]}")
        return KERNELS[name](arguments, *given)

    return call


KERNELS = {}


def kernel(name: str):
    def add(f):
        KERNELS[name] = f
        return f

    return add


@kernel("fused_rope.forward")
def rope_in_place(_, q, k, freqs, positions, inverse):
    for x in (q, k):
        if x is not None:
            x.copy_(turned(x.float(), freqs, positions, inverse))


@kernel("main_q_norm_rope.forward")
def queries(_, q, out, freqs, positions, eps):
    normed = q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps)
    out.copy_(turned(normed, freqs, positions))


@kernel("main_k_norm_rope_flashmla.forward")
def rows(arguments, kv, weight, freqs, positions, slots, pages, eps):
    made = turned(norm(kv, weight, eps), freqs, positions)
    pool(pages, int(arguments[3])).write(slots.long(), made)


@kernel("main_q_indexer_rope_hadamard_quant.forward")
def index_queries(_, q, out, weights, weights_out, scale, freqs, positions):
    values, scales = index_values.sglang(turned(q.float(), freqs, positions))
    out.copy_(values)
    weights_out.copy_((weights.float() * scale * scales)[..., None])


@kernel("fused_norm_rope_v2.forward")
def compressed_rows(arguments, kv, plan, weight, eps, freqs, slots, pages, decode, ratio):
    """One row for each entry of the plan that ends a group; in prefill the slot is that of the entry's token."""
    seen, ragged, _, _ = fields(plan, decode)
    last = (seen % ratio == 0) & (seen > 0)
    made = turned(norm(kv[last], weight, eps), freqs, seen[last] - ratio)
    to, page = (slots if decode else slots[ragged])[last].long(), int(arguments[3])
    if kv.shape[-1] == 512:
        pool(pages, page).write(to, made)
        return
    values, scales = index_values.sglang(made)
    cache = IndexCache.from_pages(pages.view(-1, page, 132))
    cache.data_view()[to // page, to % page] = values.view(torch.uint8)
    cache.scale_view()[to // page, to % page] = scales[:, None].view(torch.uint8)


@kernel("silu_and_mul_clamp.run")
def swiglu(_, x, out, limit):
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit))


@kernel("compress_plan.plan_decode")
def plan_decode(_, requests, places, to_window, lengths, ratio, window_page, ring, by_request):
    last = lengths - 1
    at = [
        state_slot(requests, p, places, to_window, ratio, window_page, ring, by_request)
        for p in (last, (last - ratio).clamp_min(0))
    ]
    return torch.stack([lengths, at[0], at[1] // ratio, at[0] // ratio], 1).int().view(torch.uint8)


@kernel("compress_plan.plan_prefill")
def plan_prefill(
    _, requests, places, to_window, lengths, extends, pinned, count, ratio, window_page, ring, by_request, graph
):
    """(16 bytes for each group that ends in the step, 8 for each token whose state is kept)."""
    assert not graph
    new = [torch.arange(int(n - e), int(n)) for n, e in zip(lengths, extends)]
    position, request = torch.cat(new), requests.repeat_interleave(extends)
    offset = torch.cat([torch.arange(len(x)) for x in new])
    token, end = torch.arange(count), lengths.repeat_interleave(extends)
    width = 2 * ratio if ratio == 4 else ratio
    ends = (position + 1) % ratio == 0
    where = [
        state_slot(request, p, places, to_window, ratio, window_page, ring, by_request)
        for p in (position, (position - ratio).clamp_min(0))
    ]
    from_states = width - (offset + 1).clamp_max(width)  # tokens of the group that earlier steps brought
    packed = token + (from_states << 16)
    plan = torch.stack([position + 1, packed, where[1] // ratio, where[0] // ratio], 1)[ends]
    rolled_back = ring - width + 2 if ring > width else 0  # by speculative decoding, at most
    kept = position >= torch.minimum(end // ratio * ratio - (width - ratio), end - rolled_back)
    if ratio == 4 and not by_request:  # a page of the window may be all that the prefix cache keeps
        kept |= position % window_page >= window_page - ratio
    writes = torch.stack([token, where[0]], 1)[kept]
    return plan.int().view(torch.uint8), writes.int().view(torch.uint8)


def state_slot(requests, positions, places, to_window, ratio, window_page, ring, by_request):
    """Return the place of the state of a request's token: in a ring of the request, or next to its window row."""
    if ratio == 128 or by_request:
        return requests * ring + positions % ring
    row = to_window[places[requests, positions].long()]
    return row // window_page * ring + row % ring


def fields(plan, decode):
    """(tokens seen, token of the step, how many are in the states, pages of states [n, 2])."""
    x = plan.view(torch.int32).long()
    packed = x[:, 1]
    pages = x[:, 2:]
    return (x[:, 0], packed, None, pages) if decode else (x[:, 0], packed & 0xFFFF, packed >> 16, pages)


def compress_decode(_, states, given, out, bias, plan):
    seen, write, _, pages = fields(plan, True)
    states.view(-1, states.shape[-1])[write] = given.to(states.dtype)
    ratio = states.shape[1]
    last = (seen % ratio == 0).nonzero()[:, 0]
    old = group(states[pages[last]].float(), ratio, out.shape[1])
    out[last] = pooled(old, seen[last], ratio, bias).to(out.dtype)


def compress_prefill(_, states, given, out, bias, plan, writes):
    seen, token, from_states, pages = fields(plan, False)
    ratio, d = states.shape[1], out.shape[1]
    width = 2 * ratio if ratio == 4 else ratio
    if len(seen):
        back = (token[:, None] - torch.arange(width - 1, -1, -1)).clamp_min(0)
        fresh = given[back].float()  # [n, width, columns]
        if ratio == 4:
            fresh = fresh.view(len(seen), 2, ratio, -1)
        new = group(fresh if ratio == 4 else torch.stack([fresh, fresh], 1), ratio, d)
        old = group(states[pages].float(), ratio, d)
        kept = (torch.arange(width) < from_states[:, None])[..., None]
        out.copy_(pooled([torch.where(kept, a, b) for a, b in zip(old, new)], seen, ratio, bias))
    at = writes.view(torch.int32).long()
    states.view(-1, states.shape[-1])[at[:, 1]] = given[at[:, 0]].to(states.dtype)


for ratio in (4, 128):
    KERNELS[f"compress_{ratio}_v2.decode"] = compress_decode
    KERNELS[f"compress_{ratio}_v2.prefill"] = compress_prefill


def group(pages, ratio, d):
    """Two pages of states [n, 2, ratio, columns] -> values and scores of a group [n, 8 or 128, d] each. CSA takes the
    first halves of the group before and the second halves of its own."""
    if ratio == 128:
        return list(pages[:, 1].split(d, -1))
    before, own = pages[:, 0], pages[:, 1]
    return [torch.cat([before[..., n : n + d], own[..., n + d : n + 2 * d]], 1) for n in (0, 2 * d)]


def pooled(parts, seen, ratio, bias):
    values, scores = parts[0], parts[1] + bias.float()
    if ratio == 4:
        absent = (torch.arange(8) < 4) & (seen[:, None] <= 4)
        scores = scores.masked_fill(absent[..., None], float("-inf"))
        values = values.masked_fill(absent[..., None], 0)
    return (values * scores.softmax(1)).sum(1)


def norm(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def turned(x, freqs, positions, inverse=False):
    """Pairs (0, 1), (2, 3), .. of the last 64 columns; freqs [positions, 64]: cosine, sine, cosine, .."""
    angle = torch.view_as_complex(freqs[positions.long()].float().unflatten(-1, (-1, 2)))
    angle = angle.conj() if inverse else angle
    tail = torch.view_as_complex(x[..., -64:].contiguous().unflatten(-1, (-1, 2)))
    angle = angle.view(len(x), *[1] * (x.ndim - 2), 32)
    return torch.cat([x[..., :-64], torch.view_as_real(tail * angle).flatten(-2)], -1)


def pool(pages, rows):
    """[pages, bytes], 584 bytes for each row and then padding."""
    return Fp8Cache.from_pages(pages[:, : rows * 584].unflatten(1, (rows, 584)))


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: object = None
    num_splits: object = None


def flash_mla() -> None:
    """The package of that name, of which SGLang calls two functions for DeepSeek-V4."""
    package, interface = types.ModuleType("flash_mla"), types.ModuleType("flash_mla.flash_mla_interface")
    interface.FlashMLASchedMeta = FlashMLASchedMeta
    package.flash_mla_interface, package.fused_norm_rope_attn_rope_cast = interface, None
    package.get_mla_metadata = lambda *_: (FlashMLASchedMeta(), None)
    package.flash_mla_with_kvcache, package.flash_mla_sparse_fwd = decode, prefill
    package.__path__ = []
    sys.modules |= {"flash_mla": package, "flash_mla.flash_mla_interface": interface}


def decode(*, q, k_cache, indices, topk_length, attn_sink, softmax_scale, extra_k_cache, extra_indices_in_kvcache,
           extra_topk_length, **_):  # fmt: skip
    counts["flash_mla_with_kvcache"] += 1
    more = {}
    if extra_k_cache is not None:
        more = dict(
            compressed=Fp8Cache.from_pages(extra_k_cache[:, :, 0]),
            compressed_indices=extra_indices_in_kvcache[:, 0],
            compressed_lengths=extra_topk_length,
        )
    out, lse = reference.v4_attention(
        q[:, 0], Fp8Cache.from_pages(k_cache[:, :, 0]), indices[:, 0], window_lengths=topk_length, sink=attn_sink,
        softmax_scale=softmax_scale, compute=torch.float32, **more,
    )  # fmt: skip
    return out[:, None].to(q.dtype), lse


def prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, **_):
    counts["flash_mla_sparse_fwd"] += 1
    out, lse = reference.v4_attention(
        q,
        kv.view(-1, 512).to(q.dtype),
        indices[:, 0],
        window_lengths=topk_length,
        sink=attn_sink,
        softmax_scale=sm_scale,
        compute=torch.float32,
    )
    return out.to(q.dtype), None, lse
