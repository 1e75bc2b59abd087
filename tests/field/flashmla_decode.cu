// FlashMLA's decode kernels on FP8 rows, of 584 bytes (V4) or with -DROWS_656 of 656 (V3.2): one query, 192 listed rows of
// 256, with a sink.
//   -DHEADS=64 -DKERNEL=sm100::decode::head64::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1> -DSOURCE="..."
#include "field.h"
#include SOURCE

#include <cutlass/float8.h>

int main() {
#ifdef ROWS_656
    constexpr int dim = 576, plain = 512, tile = 128, bytes = 656, stride = 64 * bytes;
    constexpr auto model = ModelType::V32;
#else
    constexpr int dim = 512, plain = 448, tile = 64, bytes = 584, stride = (64 * bytes + 575) / 576 * 576;
    constexpr auto model = ModelType::MODEL1;
#endif
    constexpr int value = 512, pages = 4, page = 64, topk = 192;
    const float scale = 1 / std::sqrt(float(dim));
    using bf16 = cutlass::bfloat16_t;
    using e4m3 = cutlass::float_e4m3_t;
    Array<bf16> q(HEADS * dim), out(HEADS * value);
    Array<uint8_t> kv(size_t(pages) * stride);
    std::vector<double> row(size_t(pages) * page * dim);
    for (auto &x : q.host) x = bf16(normal());
    for (int i = 0; i < pages * page; i++) {
        uint8_t *at = &kv[size_t(i / page) * stride], *values = at + i % page * (model == ModelType::V32 ? bytes : 576);
        int power = 0;
        for (int d = 0; d < plain; d++) {
            if (d % tile == 0) {
                power = below(4) - 4;
                if (model == ModelType::V32)
                    reinterpret_cast<float *>(values + plain)[d / tile] = exp2f(float(power));
                else
                    at[page * 576 + 8 * (i % page) + d / tile] = uint8_t(127 + power);
            }
            e4m3 x(2 * normal());
            values[d] = x.storage;
            row[size_t(i) * dim + d] = float(x) * exp2(double(power));
        }
        for (int d = plain; d < dim; d++) {
            bf16 x(normal());
            reinterpret_cast<bf16 *>(values + plain + (model == ModelType::V32 ? 16 : 0))[d - plain] = x;
            row[size_t(i) * dim + d] = float(x);
        }
    }
    Array<int> indices(topk), splits(2);
    for (int j = 0; j < topk; j++) indices[j] = j >= topk - 10 ? -1 : j * 5 % (pages * page);
    splits[1] = 1;
    Array<float> sink(HEADS), lse(HEADS), lse_parts(4 * HEADS), out_parts(size_t(4) * HEADS * value);
    for (auto &x : sink.host) x = normal();
    Array<DecodingSchedMeta> schedule(1);
    schedule[0].end_block_idx = topk / 64;

    SparseAttnDecodeParams p{};
    p.b = p.s_q = p.h_kv = 1, p.h_q = HEADS, p.d_qk = dim, p.d_v = value;
    p.sm_scale = scale, p.sm_scale_div_log2 = scale * float(M_LOG2E);
    p.num_blocks = pages, p.page_block_size = page, p.topk = topk, p.model_type = model;
    p.q = q.upload(), p.kv = reinterpret_cast<bf16 *>(kv.upload()), p.indices = indices.upload();
    p.attn_sink = sink.upload(), p.lse = lse.upload(), p.out = out.upload();
    p.stride_q_b = p.stride_q_s_q = HEADS * dim, p.stride_q_h_q = dim, p.stride_kv_block = stride, p.stride_kv_row = bytes;
    p.stride_indices_b = p.stride_indices_s_q = topk, p.stride_lse_b = p.stride_lse_s_q = HEADS;
    p.stride_o_b = p.stride_o_s_q = HEADS * value, p.stride_o_h_q = value;
    p.lse_accum = lse_parts.upload(), p.o_accum = out_parts.upload();
    p.stride_lse_accum_split = p.stride_lse_accum_s_q = HEADS;
    p.stride_o_accum_split = p.stride_o_accum_s_q = HEADS * value, p.stride_o_accum_h_q = value;
    p.tile_scheduler_metadata_ptr = schedule.upload(), p.num_splits_ptr = splits.upload(), p.num_sm_parts = 1;
    KERNEL(p);
    check(cudaDeviceSynchronize(), "the kernel");
    out.download(), lse.download();

    Agreement values, sums;
    for (int h = 0; h < HEADS; h++) {
        std::vector<double> score(topk, -INFINITY), o(value, 0.0);
        double top = -INFINITY, total = 0;
        for (int j = 0; j < topk; j++) {
            if (indices[j] < 0) continue;
            double s = 0;
            for (int d = 0; d < dim; d++) s += double(float(q[h * dim + d])) * row[size_t(indices[j]) * dim + d];
            score[j] = s * scale, top = fmax(top, score[j]);
        }
        for (int j = 0; j < topk; j++) {
            double e = exp(score[j] - top);
            total += e;
            for (int d = 0; d < value && e > 0; d++) o[d] += e * row[size_t(indices[j]) * dim + d];
        }
        sums.add(lse[h], log(total) + top);
        for (int d = 0; d < value; d++) values.add(float(out[h * value + d]), o[d] / (total + exp(sink[h] - top)));
    }
    return values.verdict("out", 1.0 / 64) | sums.verdict("lse", 1e-5);
}
