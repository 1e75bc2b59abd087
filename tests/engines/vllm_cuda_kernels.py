"""Stand-ins, in torch, for the CUDA kernels that vLLM's own layers of DeepSeek-V4.1 call: FlashMLA, DeepGEMM's scores,
the choice of rows, and the writing of the window. They are the oracle and torch, on rows of 584 bytes and keys of 132.
"""

from collections import Counter
from types import SimpleNamespace

import torch
import vllm_cpu_operators

from dsv4 import Fp8Cache, reference


def prepare() -> Counter:
    """Put them where vLLM looks them up -> how often each was called."""
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.models.deepseek_v41.nvidia import flashmla
    from vllm.v1.attention.backends.mla import sparse_swa

    counts: Counter = Counter()

    def counted(f):
        def call(*arguments, **options):
            counts[f.__name__] += 1
            return f(*arguments, **options)

        return call

    flashmla.flash_mla_with_kvcache = counted(flash_mla_with_kvcache)
    flashmla.flash_mla_sparse_fwd = counted(flash_mla_sparse_fwd)
    sparse_swa.get_mla_metadata = lambda: ("a schedule", None)
    indexer.fp8_fp4_mqa_logits = counted(prompt_scores)
    indexer.fp8_fp4_paged_mqa_logits = counted(decode_scores)
    indexer.get_indexer_topk = lambda backend: choose_in_decode
    indexer.ops = SimpleNamespace(cp_gather_indexer_k_quant_cache=gather_keys, top_k_per_row_prefill=choose_in_prefill)
    indexer.SparseAttnIndexer.forward_cpu = indexer.SparseAttnIndexer.forward_cuda
    library = prepare.library = torch.library.Library("_C", "FRAGMENT")  # an operator lives as long as its library
    library.define(
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor q, Tensor kv, Tensor(a!) pages, Tensor slots, "
        "Tensor positions, Tensor cos_sin, int heads, float eps, int rows, bool norm, bool mxfp8, bool rope, "
        "bool interleaved) -> Tensor"
    )
    library.impl("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", counted(insert), "CPU")
    return counts


def flash_mla_with_kvcache(
    q, k_cache, *, indices, topk_length, softmax_scale, attn_sink, extra_k_cache, extra_indices_in_kvcache,
    extra_topk_length, out, **_,
):  # fmt: skip
    more = {}
    if extra_k_cache is not None:
        more = dict(compressed=Fp8Cache.from_pages(extra_k_cache[:, :, 0]), compressed_lengths=extra_topk_length)
        more["compressed_indices"] = extra_indices_in_kvcache[:, 0]
    window, lists = Fp8Cache.from_pages(k_cache[:, :, 0]), indices[: len(q), 0]
    lengths = topk_length[: len(q)]
    options = dict(window_lengths=lengths, sink=attn_sink, softmax_scale=softmax_scale, **more)
    out.copy_(reference.v4_attention(q[:, 0], window, lists, **options)[0][:, None])
    return out, None


def flash_mla_sparse_fwd(*, q, kv, indices, sm_scale, attn_sink, topk_length, out):
    seen = torch.arange(indices.shape[-1]) < topk_length[:, None]
    lists = indices[:, 0].masked_fill(~seen, -1)
    out.copy_(reference.v4_attention(q, kv[:, 0], lists, sink=attn_sink, softmax_scale=sm_scale)[0])


class OnCuda(torch.Tensor):
    """What vLLM's Triton kernels for the two levels want to see; they run in softsm."""

    is_cuda = True


def scores(q, keys, weights):
    """[n, m] of e4m3 queries [n, heads, 128] and keys [m, 128]."""
    return ((q.float() @ keys.T).relu() * weights.float()[..., None]).sum(1)


def prompt_scores(q, k, weights, starts, ends, clean_logits):
    return scores(q[0], k[0].float() * k[1].float()[:, None], weights).as_subclass(OnCuda)


def decode_scores(q, pages, weights, lengths, table, schedule, max_model_len, clean_logits, indices):
    rows = pages.shape[1]
    data, factors = vllm_cpu_operators.index_pages(pages.flatten(1), rows)
    out = weights.new_zeros(q[0].shape[0] * q[0].shape[1], max_model_len)
    for n, count in enumerate(lengths.reshape(-1).tolist()):
        some = table[n // q[0].shape[1], : -(-count // rows)].long()
        keys = data[some].contiguous().view(torch.float8_e4m3fn).float()
        keys = (keys * factors[some].contiguous().view(torch.float32)).flatten(0, 1)[:count]
        out[n, :count] = scores(q[0].flatten(0, 1)[n : n + 1], keys, weights[n : n + 1])[0]
    return out.as_subclass(OnCuda)


def gather_keys(cache, keys, factors, table, starts):
    rows = cache.shape[1]
    data, scales = vllm_cpu_operators.index_pages(cache.flatten(1), rows)
    for r, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        at = torch.arange(end - begin)
        page, row = table[r, at // rows].long(), at % rows
        keys.view(torch.uint8)[begin:end] = data[page, row]
        factors[begin:end] = scales[page, row]


def choose_in_prefill(logits, starts, ends, out, count, *_):
    for n, (begin, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        best(logits[n, begin:end], out[n])


def choose_in_decode(logits, lengths, next_n, out, topk, longest):
    for n, count in enumerate(lengths.reshape(-1).tolist()):
        best(logits[n, :count], out[n])


def best(row, out) -> None:
    """The places of the greatest scores; never where one is -inf, which is how vLLM hides what no block has."""
    order = row.sort(descending=True, stable=True).indices
    chosen = order[row[order] > -torch.inf][: len(out)]
    out[: len(chosen)], out[len(chosen) :] = chosen.int(), -1


def insert(q, kv, pages, slots, positions, cos_sin, heads, eps, rows, norm, mxfp8, turn, interleaved):
    assert turn and not (norm or mxfp8 or interleaved)
    n = len(slots)
    new = vllm_cpu_operators.rope(kv[:n].float(), cos_sin, positions[:n]).bfloat16()
    vllm_cpu_operators.pages(pages, rows).write(slots, new)
    out = q.new_zeros(len(q), heads, q.shape[2])
    out[:, : q.shape[1]] = vllm_cpu_operators.rope(q.float(), cos_sin, positions)
    return out
