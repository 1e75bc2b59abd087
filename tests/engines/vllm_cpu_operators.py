"""Stand-ins, in torch, for operators of vLLM's CPU build that need AMX, so that DeepSeek-V4 runs in vLLM on any CPU.

vLLM 0.32 serves DeepSeek-V4 on x86 CPUs with AMX alone: elsewhere its library lacks the operators below. The plug-in
replaces attention, indexer, compressor and cache insertion among them. They are :mod:`dsv4.reference` and torch here,
in fp32 on the same FP8 rows, so a run without the plug-in is the plug-in's oracle.
"""

from collections import Counter

import index_values
import torch

from dsv4 import Fp8Cache, reference
from dsv4.compress.forward import pooled


def define() -> Counter:
    """Define what is missing, and override what is there: every CPU runs the same -> how often each was called."""
    counts: Counter = Counter()
    library = torch.library.Library("_C", "FRAGMENT")
    define.library = library  # an operator lives as long as its library

    def op(schema):
        name = schema.split("(")[0]

        def decorate(f):
            def counted(*arguments):
                counts[name] += 1
                return f(*arguments)

            if not hasattr(torch.ops._C, name):
                library.define(schema)
            library.impl(name, counted, "CPU", allow_override=True)
            return f

        return decorate

    linear(op)
    hyper_connections(op)
    attention(op)
    compressor(op)
    indexer(op)
    return counts


def linear(op):
    op("convert_weight_packed(Tensor weight) -> Tensor")(lambda weight: weight.clone())

    @op("bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()")
    def bmm(out, a, b, vnni, scale):
        out.copy_(torch.bmm(a.float(), b.mT.float()))

    @op(
        "biased_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, "
        "bool renormalize, str scoring_func, int num_fused_shared_experts, float? routed_scaling_factor, "
        "bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)"
    )
    def route(hidden, logits, bias, k, renormalize, scoring, shared, factor, on_output):
        weight = torch.nn.functional.softplus(logits.float()).sqrt()
        chosen = (weight + bias).topk(k, -1)[1]
        weight = weight.gather(1, chosen)
        return (weight / weight.sum(-1, keepdim=True) * factor).contiguous(), chosen.int()


def hyper_connections(op):
    @op(
        "hc_pre_fused_cpu(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int sinkhorn_iters, "
        "float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
    )
    def pre(x, fn, scale, base, m, iterations, rms_eps, eps):
        from vllm.model_executor.kernels.mhc.torch import mhc_pre_delayed_torch

        # mhc_pre_torch accepts bf16 only; this one leaves the mixing of streams to the caller.
        post, comb, _, mix = mhc_pre_delayed_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iterations)
        y = (mix.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)
        return y, post.squeeze(-1).contiguous(), comb

    @op("hc_post_fused_cpu(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor")
    def post(x, residual, post, comb):
        from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

        return mhc_post_torch(x, residual, post.unsqueeze(-1), comb)

    @op(
        "hc_head_fused_cpu(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, float hc_eps, float norm_eps) "
        "-> Tensor"
    )
    def head(x, fn, scale, base, eps, norm_eps):
        flat = x.flatten(1).float()
        mixed = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        return ((torch.sigmoid(mixed * scale + base) + eps).unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def attention(op):
    op("inverse_gptj_rope_o_proj_cpu(Tensor o, Tensor positions, Tensor cos_sin_cache, int rope_dim) -> Tensor")(
        lambda o, positions, cos_sin, r: rope(o.float(), cos_sin, positions, -1.0)
    )

    @op(
        "fused_qnorm_rope_kv_insert_cpu(Tensor q, Tensor kv, Tensor positions, Tensor(a!) swa_kv_cache_2d, "
        "Tensor slot_mapping, Tensor cos_sin_cache, int q_head_padded, float eps, int cache_block_size) "
        "-> Tensor"
    )
    def insert(q, kv, positions, flat, slots, cos_sin, heads, eps, rows):
        n = len(slots)
        pages(flat, rows).write(slots, rope(kv[:n].float(), cos_sin, positions[:n]).bfloat16())
        normed = q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps)
        out = q.new_zeros(q.shape[0], heads, q.shape[2])
        out[:, : q.shape[1]] = rope(normed, cos_sin, positions).to(q.dtype)
        return out

    @op(
        "flash_mla_with_kvcache_cpu(Tensor(a!) out, Tensor q, Tensor window, Tensor window_slots, int window_rows, "
        "Tensor compressed, Tensor compressed_slots, int compressed_rows, Tensor sink, float scale) -> ()"
    )
    def attend(out, q, window, window_slots, window_rows, compressed, compressed_slots, compressed_rows, sink, scale):
        more = {}
        if compressed_slots.shape[1]:
            more = dict(compressed=pages(compressed, compressed_rows), compressed_indices=compressed_slots)
        result, _ = reference.v4_attention(
            q, pages(window, window_rows), window_slots, sink=sink, softmax_scale=scale, compute=torch.float32, **more
        )
        out.copy_(result)


def compressor(op):
    @op(
        "save_partial_states_cpu(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, "
        "Tensor slot_mapping) -> ()"
    )
    def save(kv, gate, ape, positions, state, slots):
        n, there, page = len(slots), slots >= 0, state.shape[1]
        lines = torch.cat([kv[:n], gate[:n] + ape[positions[:n] % ape.shape[0]]], -1)[there]
        state[slots[there] // page, slots[there] % page] = lines

    store = (
        "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, "
        "Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, "
        "int kv_cache_block_size, int compress_ratio) -> ()"
    )

    def finished(state, gather, positions, weight, eps, cos_sin, m):
        """(which tokens end a group, the row of that group)."""
        page, width, d = state.shape[1], state.shape[2] // 2, weight.shape[0]
        last = ((positions + 1) % m == 0).nonzero()[:, 0]
        slots = gather[last]
        kv, gate = state[slots.clamp_min(0) // page, slots.clamp_min(0) % page].split(width, -1)
        if width == 2 * d:
            kv, gate = (torch.cat([x[:, :m, :d], x[:, m:, d:]], 1) for x in (kv, gate))
        absent = (slots < 0)[..., None]
        kv, gate = kv.masked_fill(absent, 0), gate.masked_fill(absent, float("-inf"))
        return last, pooled(kv, gate, weight, eps, cos_sin.float(), positions[last] // m * m).bfloat16()

    @op("compress_norm_rope_store_cpu" + store)
    def rows(state, gather, positions, slots, weight, eps, cos_sin, flat, rows, m):
        last, made = finished(state, gather, positions[: len(gather)], weight, eps, cos_sin, m)
        if len(last):
            pages(flat, rows).write(slots[last], made)

    @op("compress_norm_rope_store_indexer_cpu" + store)
    def index_rows(state, gather, positions, slots, weight, eps, cos_sin, flat, rows, m):
        last, made = finished(state, gather, positions[: len(gather)], weight, eps, cos_sin, m)
        to, made = slots[last][slots[last] >= 0], made[slots[last] >= 0]
        data, scales = index_pages(flat, rows)
        values, scale = index_values.vllm(made.float())
        data[to // rows, to % rows] = values.view(torch.uint8)
        scales[to // rows, to % rows] = scale[:, None].view(torch.uint8)


def indexer(op):
    @op(
        "fused_indexer_q_rope_quant_cpu(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, "
        "Tensor(a!) index_q_fp8, Tensor index_weights, float index_weights_softmax_scale, "
        "float index_weights_head_scale, Tensor(b!) index_weights_out) -> ()"
    )
    def quantise(positions, q, cos_sin, out, weights, softmax_scale, head_scale, weights_out):
        values, scale = index_values.vllm(rope(q.float(), cos_sin, positions).bfloat16().float())
        out.copy_(values)
        weights_out.copy_(weights * scale * softmax_scale * head_scale)

    @op(
        "fp8_paged_mqa_logits_cpu(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, Tensor page_table, "
        "int block_size, int max_seq_len) -> Tensor"
    )
    def scores(q, flat, weights, lengths, table, rows, longest):
        data, scales = index_pages(flat, rows)
        keys = data.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
        out = q.new_empty(q.shape[0], longest, dtype=torch.float32)
        for n, m in enumerate(lengths.tolist()):
            some = keys[table[n, : -(-m // rows)].long()].flatten(0, 1)[:m]
            out[n, :m] = weights[n].float() @ (q[n].float() @ some.T).relu()
        return out

    @op(
        "topk_transform_512_cpu(Tensor scores, Tensor seq_lens, Tensor page_tables, Tensor(a!) out_page_indices, "
        "int page_size, Tensor(b!)? out_raw_indices) -> ()"
    )
    def choose(scores, seq_lens, tables, out, page, local):
        local.fill_(-1)  # out is not looked at
        for n, m in enumerate(seq_lens.tolist()):
            best = scores[n, :m].sort(descending=True, stable=True).indices[:512]
            local[n, : len(best)] = best.int()


def pages(flat, rows):
    """[blocks, bytes] with any stride between blocks, as a pool of 584-byte rows."""
    return Fp8Cache.from_pages(flat.as_strided((flat.shape[0], rows, 584), (flat.stride(0), 584, 1)))


def index_pages(flat, rows):
    """128 e4m3 of every row, then one fp32 scale of every row."""
    n, stride, start = flat.shape[0], flat.stride(0), flat.storage_offset()
    return (
        flat.as_strided((n, rows, 128), (stride, 128, 1), start),
        flat.as_strided((n, rows, 4), (stride, 4, 1), start + 128 * rows),
    )


def rope(x, cos_sin, positions, sign=1.0):
    """Pairs (0, 1), (2, 3), .. of the last columns turned by the angle of each position."""
    r = cos_sin.shape[1]
    cos, sin = (t.view(-1, *[1] * (x.ndim - 2), r // 2) for t in cos_sin[positions].float().chunk(2, -1))
    even, odd = x[..., -r::2], x[..., x.shape[-1] - r + 1 :: 2]
    turned = torch.stack([even * cos - sign * odd * sin, odd * cos + sign * even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned], -1)
