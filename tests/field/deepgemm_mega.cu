// DeepGEMM's mega MoE in bf16, one rank: dispatch, both products with SwiGLU between them, and the sum, in one kernel of
// four CTAs. 12 tokens of 512, two of four experts each (one token has one, one has none), intermediate size 256.
#include "field.h"
#include "maps.h"
#include <deep_gemm/impls/sm100_bf16_mega_moe.cuh>

using namespace deep_gemm;
using bf16 = cutlass::bfloat16_t;
constexpr int most = layout::kLCMCandidateBlockM, hidden = 512, middle = 256, experts = 4, topk = 2, ring = 3 * most;
constexpr int rows = 16, columns = 128, depth = 128, part = 8, stages = 4, ctas = 4, tokens = 12, threads = 512;
constexpr auto kernel =
    &sm100_bf16_mega_moe_impl<most, hidden, middle, experts, topk, experts, rows, columns, depth, part, ring, stages,
                              2 * hidden, 128, 128, 256, ctas, 1, std::numeric_limits<float>::infinity(), false>;

int main() {
    // The symmetric buffer: workspace, tokens, experts and weights of each, inputs of both products, outputs of slots
    using layout::Buffer, layout::Data;
    layout::Workspace counters(nullptr, 1, experts, most, topk, ring);
    Buffer x(Data(2 * hidden), 1, most, counters.get_end_ptr());
    Buffer ids(Data(8 * topk, false), 1, most, x.get_end_ptr());
    Buffer weights(Data(4 * topk, false), 1, most, ids.get_end_ptr());
    Buffer first(Data(2 * hidden), 1, ring, weights.get_end_ptr());
    Buffer first_weights(Data(4, false), 1, ring, first.get_end_ptr());
    Buffer second(Data(2 * middle), 1, ring, first_weights.get_end_ptr());
    Buffer slots(Data(2 * hidden), topk, most, second.get_end_ptr());
    Array<uint8_t> memory(reinterpret_cast<size_t>(slots.get_end_ptr()));
    auto at = [&](const Buffer &b) { return &memory[reinterpret_cast<size_t>(b.base)]; };
    auto on_device = [&](const Buffer &b) { return memory.device + reinterpret_cast<size_t>(b.base); };

    auto *in = reinterpret_cast<bf16 *>(at(x));
    auto *chosen = reinterpret_cast<int64_t *>(at(ids));
    auto *factor = reinterpret_cast<float *>(at(weights));
    for (int i = 0; i < tokens * hidden; i++) in[i] = bf16(normal());
    for (int t = 0; t < tokens; t++) {
        int one = below(experts);
        chosen[2 * t] = one, chosen[2 * t + 1] = (one + 1 + below(experts - 1)) % experts;
        for (int j = 0; j < topk; j++) factor[2 * t + j] = 0.2f + 0.05f * below(10);
    }
    chosen[5] = chosen[14] = chosen[15] = -1;
    Array<bf16> up(size_t(experts) * 2 * middle * hidden), down(size_t(experts) * hidden * middle), y(tokens * hidden);
    for (auto &w : up.host) w = bf16(0.05f * normal());
    for (auto &w : down.host) w = bf16(0.1f * normal());
    memory.upload(), up.upload(), down.upload(), y.upload();

    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448), "attribute");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = 232448;
    config.attrs = &cluster, config.numAttrs = 1;
    layout::SymBuffer<1> peers(std::vector<int64_t>{reinterpret_cast<int64_t>(memory.device)}, 0);
    check(cudaLaunchKernelEx(&config, kernel, static_cast<void *>(y.device), static_cast<int *>(nullptr), uint32_t(tokens),
                             peers, map(on_device(first), HALVES, 2 * hidden, ring, hidden, 64, rows / 2),
                             map(up.device, HALVES, 2 * hidden, experts * 2 * middle, hidden, 64, columns),
                             map(on_device(second), HALVES, 2 * middle, ring, middle, 64, part),
                             map(on_device(second), HALVES, 2 * middle, ring, middle, 64, rows / 2),
                             map(down.device, HALVES, 2 * middle, experts * hidden, middle, 64, columns)),
          "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    y.download();

    Agreement values;
    for (int t = 0; t < tokens; t++) {
        std::vector<double> sum(hidden, 0.0);
        for (int j = 0; j < topk; j++) {
            int e = int(chosen[2 * t + j]);
            if (e < 0) continue;
            std::vector<double> h(middle);
            for (int i = 0; i < middle; i++) {
                double both[2] = {0, 0};  // rows of eight by turns: gate, up
                for (int k = 0; k < 2; k++)
                    for (int d = 0; d < hidden; d++)
                        both[k] += double(float(in[t * hidden + d])) *
                                   float(up[(size_t(e) * 2 * middle + i / 8 * 16 + k * 8 + i % 8) * hidden + d]);
                h[i] = both[0] / (1 + exp(-both[0])) * both[1] * factor[2 * t + j];
            }
            for (int d = 0; d < hidden; d++)
                for (int i = 0; i < middle; i++) sum[d] += h[i] * float(down[(size_t(e) * hidden + d) * middle + i]);
        }
        for (int d = 0; d < hidden; d++) values.add(float(y[t * hidden + d]), sum[d]);
    }
    // gate, up, hidden values and outputs of slots are rounded to bf16
    return values.verdict("y", 1.0 / 64);
}
