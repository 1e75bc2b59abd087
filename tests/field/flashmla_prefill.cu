// FlashMLA's sparse prefill kernels: two queries, 256 listed rows of 300, some of them -1, with a sink.
//   -DHEADS=64 -DDIM=512 -DKERNEL=sm100::fwd::head64::run_fwd_phase1_kernel<DIM> -DSOURCE="..."
#include "field.h"
#include SOURCE

int main() {
    constexpr int queries = 2, rows = 300, topk = 256, value = 512;
    const float scale = 1 / std::sqrt(float(DIM));
    using bf16 = cutlass::bfloat16_t;
    Array<bf16> q(size_t(queries) * HEADS * DIM), kv(size_t(rows) * DIM), out(size_t(queries) * HEADS * value);
    Array<int> indices(queries * topk);
    Array<float> sink(HEADS), maxima(queries * HEADS), lse(queries * HEADS);
    for (auto &x : q.host) x = bf16(normal());
    for (auto &x : kv.host) x = bf16(0.3f * normal());
    for (auto &x : sink.host) x = normal();
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < topk; j++) indices[i * topk + j] = i && j >= topk - 30 ? -1 : (j * 7 + i) % rows;

    SparseAttnFwdParams p{};
    p.s_q = queries, p.s_kv = rows, p.h_q = HEADS, p.h_kv = 1, p.d_qk = DIM, p.d_v = value, p.topk = topk;
    p.sm_scale = scale, p.sm_scale_div_log2 = scale * float(M_LOG2E);
    p.q = q.upload(), p.kv = kv.upload(), p.indices = indices.upload(), p.attn_sink = sink.upload();
    p.stride_q_s_q = HEADS * DIM, p.stride_q_h_q = DIM, p.stride_kv_s_kv = p.stride_kv_h_kv = DIM;
    p.stride_indices_s_q = p.stride_indices_h_kv = topk;
    p.out = out.upload(), p.max_logits = maxima.upload(), p.lse = lse.upload(), p.num_sm = 148;
    KERNEL(p);
    check(cudaDeviceSynchronize(), "the kernel");
    out.download(), lse.download();

    Agreement values, sums;
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < HEADS; h++) {
            std::vector<double> score(topk, -INFINITY), o(value, 0.0);
            double top = -INFINITY, total = 0;
            for (int j = 0; j < topk; j++) {
                int row = indices[i * topk + j];
                if (row < 0) continue;
                double s = 0;
                for (int d = 0; d < DIM; d++) s += double(float(q[(i * HEADS + h) * DIM + d])) * float(kv[row * DIM + d]);
                score[j] = s * scale, top = fmax(top, score[j]);
            }
            for (int j = 0; j < topk; j++) {
                double e = exp(score[j] - top);
                total += e;
                for (int d = 0; d < value && e > 0; d++) o[d] += e * float(kv[indices[i * topk + j] * DIM + d]);
            }
            sums.add(lse[i * HEADS + h], log(total) + top);
            for (int d = 0; d < value; d++)
                values.add(float(out[(i * HEADS + h) * value + d]), o[d] / (total + exp(sink[h] - top)));
        }
    // P and the output are bf16; the sum of exponentials is fp32
    return values.verdict("out", 1.0 / 64) | sums.verdict("lse", 1e-5);
}
