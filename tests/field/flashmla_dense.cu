// FlashMLA's dense decode kernel for sm_90a with its schedule and its sum of parts: two requests of 64 heads, 200 and
// 70 keys of head dim 576, on three parts.
#define FLASH_MLA_DISABLE_FP16
#include "field.h"
#include "sm90/decode/dense/splitkv_mla.cuh"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu"
#include "smxx/decode/combine/combine.cu"

int main() {
    constexpr int requests = 2, heads = 64, dim = 576, value = 512, page = 64, pages = 6, each = 4, parts = 3;
    constexpr int splits = requests + parts;
    const float scale = 1 / std::sqrt(float(dim));
    using bf16 = cutlass::bfloat16_t;
    Array<bf16> q(requests * heads * dim), kv(size_t(pages) * page * dim), out(requests * heads * value);
    for (auto &x : q.host) x = bf16(normal());
    for (auto &x : kv.host) x = bf16(normal());
    Array<int> lengths(requests), table(requests * each), counts(requests + 1);
    lengths[0] = 200, lengths[1] = 70;
    const int order[] = {3, 0, 5, 1, 4, 2};
    for (int i = 0; i < pages; i++) table[i] = order[i];
    Array<float> lse(requests * heads), lse_parts(splits * heads), out_parts(size_t(splits) * heads * value);
    Array<DecodingSchedMeta> schedule(parts);

    GetDecodeSchedMetaParams plan{};
    plan.b = requests, plan.s_q = 1, plan.block_size_n = page, plan.fixed_overhead_num_blocks = 1;
    plan.topk = plan.extra_topk = -1, plan.seqlens_k_ptr = lengths.upload();
    plan.tile_scheduler_metadata_ptr = schedule.device, plan.num_splits_ptr = counts.device, plan.num_sm_parts = parts;
    smxx::decode::run_get_decoding_sched_meta_kernel(plan);

    DenseAttnDecodeParams p{};
    p.b = requests, p.s_q = 1, p.q_seq_per_hk = p.h_q = p.q_head_per_hk = heads, p.h_k = 1, p.d = dim, p.d_v = value;
    p.num_blocks = pages, p.scale_softmax = scale, p.scale_softmax_log2 = scale * float(M_LOG2E);
    p.q_ptr = q.upload(), p.k_ptr = kv.upload(), p.o_ptr = out.upload(), p.softmax_lse_ptr = lse.upload();
    p.q_batch_stride = heads * dim, p.q_row_stride = p.q_head_stride = dim;
    p.k_batch_stride = page * dim, p.k_row_stride = p.k_head_stride = dim;
    p.o_batch_stride = p.o_head_stride = heads * value, p.o_row_stride = value;
    p.block_table = table.upload(), p.block_table_batch_stride = each, p.page_block_size = page;
    p.seqlens_k_ptr = lengths.device, p.tile_scheduler_metadata_ptr = schedule.device, p.num_sm_parts = parts;
    p.num_splits_ptr = counts.device, p.total_num_splits = splits;
    p.softmax_lseaccum_ptr = lse_parts.upload(), p.oaccum_ptr = out_parts.upload();
    sm90::run_flash_splitkv_mla_kernel<bf16>(p);

    CombineParams sum{};
    sum.b = requests, sum.s_q = 1, sum.h_q = heads, sum.d_v = value, sum.lse = lse.device, sum.out = out.device;
    sum.stride_lse_b = sum.stride_lse_s_q = sum.stride_lse_accum_split = sum.stride_lse_accum_s_q = heads;
    sum.stride_o_b = sum.stride_o_s_q = sum.stride_o_accum_split = sum.stride_o_accum_s_q = heads * value;
    sum.stride_o_h_q = sum.stride_o_accum_h_q = value;
    sum.lse_accum = lse_parts.device, sum.o_accum = out_parts.device;
    sum.tile_scheduler_metadata_ptr = schedule.device, sum.num_splits_ptr = counts.device, sum.num_sm_parts = parts;
    smxx::decode::run_flash_mla_combine_kernel<bf16>(sum);
    check(cudaDeviceSynchronize(), "the kernels");
    out.download(), lse.download(), counts.download();

    Agreement values, sums;
    for (int r = 0; r < requests; r++)
        for (int h = 0; h < heads; h++) {
            std::vector<double> score(lengths[r]), o(value, 0.0);
            double top = -INFINITY, total = 0;
            auto row = [&](int j) { return &kv[(size_t(table[r * each + j / page]) * page + j % page) * dim]; };
            for (int j = 0; j < lengths[r]; j++) {
                double s = 0;
                for (int d = 0; d < dim; d++) s += double(float(q[(r * heads + h) * dim + d])) * float(row(j)[d]);
                score[j] = s * scale, top = fmax(top, score[j]);
            }
            for (int j = 0; j < lengths[r]; j++) {
                double e = exp(score[j] - top);
                total += e;
                for (int d = 0; d < value; d++) o[d] += e * float(row(j)[d]);
            }
            sums.add(lse[r * heads + h], log(total) + top);
            for (int d = 0; d < value; d++) values.add(float(out[(r * heads + h) * value + d]), o[d] / total);
        }
    printf("%d parts\n", counts[requests]);
    // P and the output are bf16; the sum of exponentials is fp32
    return values.verdict("out", 1.0 / 64) | sums.verdict("lse", 1e-5) | (counts[requests] <= requests);
}
