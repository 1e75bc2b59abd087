// DeepGEMM's mega MoE, one rank: dispatch, both products with SwiGLU between them, and the sum, in one kernel of four
// CTAs. 12 tokens of 512, two of four experts each (one token has one, one has none). In bf16; -DFP4: tokens in e4m3,
// weights in e2m1, scales of 32 (UE8M0), and the hidden values are rounded to e4m3 with scales between the products.
#include "field.h"
#include "maps.h"
#ifdef FP4
#include <deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh>
#else
#include <deep_gemm/impls/sm100_bf16_mega_moe.cuh>
#endif

using namespace deep_gemm;
using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
constexpr int most = layout::kLCMCandidateBlockM, hidden = 512, experts = 4, topk = 2, ring = 3 * most;
constexpr int rows = 16, columns = 128, part = 8, stages = 4, ctas = 4, tokens = 12, threads = 512;
constexpr float unlimited = std::numeric_limits<float>::infinity();
#ifdef FP4
using input = e4m3;
constexpr int middle = 512, depth = 256, scale_ring = ring / 8 * 128, box = 128;
constexpr auto type = BYTES;
constexpr auto kernel =
    &sm100_fp8_fp4_mega_moe_impl<most, hidden, middle, experts, topk, experts, rows, columns, depth, part, 128, 128, ring,
                                 scale_ring, stages, hidden, 128, 128, 256, ctas, 1, unlimited, false>;
#else
using input = bf16;
constexpr int middle = 256, depth = 128, scale_ring = 0, box = 64;
constexpr auto type = HALVES;
constexpr auto kernel =
    &sm100_bf16_mega_moe_impl<most, hidden, middle, experts, topk, experts, rows, columns, depth, part, ring, stages,
                              2 * hidden, 128, 128, 256, ctas, 1, unlimited, false>;
#endif
constexpr int wide = sizeof(input), scales = hidden / 32, middle_scales = middle / 32;

// Weights of all experts: what is multiplied, and what the kernel gets of it.
struct Weights {
    int count, depth;  // rows of an expert and their length
    std::vector<double> values;
    Array<bf16> halves;
    Array<uint8_t> fours;
    Array<uint32_t> exponents;  // of 128 columns, four each; rows are innermost, 4 x 32 of them as tcgen05.cp takes them
    Weights(int count, int depth, float size)
        : count(count), depth(depth), values(size_t(experts) * count * depth), halves(values.size()),
          fours(values.size() / 2), exponents(values.size() / 128) {
        for (auto &x : exponents.host)
            for (int k = 0; k < 4; k++) x |= uint32_t(121 + below(4)) << 8 * k;
        for (size_t i = 0; i < values.size(); i++) {
#ifdef FP4
            int code = below(16), row = i / depth % count, place = row / 128 * 128 + row % 32 * 4 + row % 128 / 32;
            size_t word = (i / depth / count * (depth / 128) + i % depth / 128) * count + place;
            fours[i / 2] |= code << 4 * (i % 2);
            values[i] = e2m1(code) * exp2(double(exponents[word] >> 8 * (i % 128 / 32) & 255) - 127);
#else
            values[i] = float(halves[i] = bf16(size * normal()));
#endif
        }
        halves.upload(), fours.upload(), exponents.upload();
    }
    CUtensorMap at() {
#ifdef FP4
        return map(fours.device, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B, depth / 2, experts * count, depth, box, columns);
#else
        return map(halves.device, type, 2 * depth, experts * count, depth, box, columns);
#endif
    }
    CUtensorMap scales_at() {
        return map(exponents.device, WORDS, 4 * count, experts * depth / 128, count, columns, 2, PLAIN);
    }
};

int main() {
    // The symmetric buffer: workspace, tokens, experts and weights of each, inputs of both products, outputs of slots
    using layout::Buffer, layout::Data;
    layout::Workspace counters(nullptr, 1, experts, most, topk, ring);
    Buffer x(Data(wide * hidden), 1, most, counters.get_end_ptr());
    Buffer x_scales(Data(scales), 1, scale_ring ? most : 0, x.get_end_ptr());
    Buffer ids(Data(8 * topk, false), 1, most, x_scales.get_end_ptr());
    Buffer weights(Data(4 * topk, false), 1, most, ids.get_end_ptr());
    Buffer first(Data(wide * hidden), 1, ring, weights.get_end_ptr());
    Buffer first_scales(Data(scales), 1, scale_ring, first.get_end_ptr());
    Buffer first_weights(Data(4, false), 1, ring, first_scales.get_end_ptr());
    Buffer second(Data(wide * middle), 1, ring, first_weights.get_end_ptr());
    Buffer second_scales(Data(middle_scales, scale_ring > 0), 1, scale_ring, second.get_end_ptr());
    Buffer slots(Data(2 * hidden), topk, most, second_scales.get_end_ptr());
    Array<uint8_t> memory(reinterpret_cast<size_t>(slots.get_end_ptr()));
    auto at = [&](const Buffer &b) { return &memory[reinterpret_cast<size_t>(b.base)]; };
    auto on_device = [&](const Buffer &b) { return memory.device + reinterpret_cast<size_t>(b.base); };

    auto *in = reinterpret_cast<input *>(at(x));
    auto *chosen = reinterpret_cast<int64_t *>(at(ids));
    auto *factor = reinterpret_cast<float *>(at(weights));
    std::vector<double> token(tokens * hidden);
    for (int i = 0; i < tokens * hidden; i++) {
        token[i] = float(in[i] = input(normal()));
#ifdef FP4
        auto *exponents = at(x_scales);
        if (i % 32 == 0) exponents[i / 32] = 125 + below(4);
        token[i] *= exp2(exponents[i / 32] - 127.0);
#endif
    }
    for (int t = 0; t < tokens; t++) {
        int one = below(experts);
        chosen[2 * t] = one, chosen[2 * t + 1] = (one + 1 + below(experts - 1)) % experts;
        for (int j = 0; j < topk; j++) factor[2 * t + j] = 0.2f + 0.05f * below(10);
    }
    chosen[5] = chosen[14] = chosen[15] = -1;
    Weights up(2 * middle, hidden, 0.05f), down(hidden, middle, 0.1f);
    Array<bf16> y(tokens * hidden);
    memory.upload(), y.upload();

    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448), "attribute");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = 232448;
    config.attrs = &cluster, config.numAttrs = 1;
    layout::SymBuffer<1> peers(std::vector<int64_t>{reinterpret_cast<int64_t>(memory.device)}, 0);
    auto map_first = map(on_device(first), type, wide * hidden, ring, hidden, box, rows / 2);
    auto map_second = map(on_device(second), type, wide * middle, ring, middle, box, rows / 2);
#ifdef FP4
    auto map_out = map(on_device(second), type, middle, ring, middle, 64, part, CU_TENSOR_MAP_SWIZZLE_64B);
    auto status = cudaLaunchKernelEx(
        &config, kernel, static_cast<void *>(y.device), static_cast<int *>(nullptr), uint32_t(tokens), peers, map_first,
        map(on_device(first_scales), WORDS, 4 * scale_ring, hidden / 128, scale_ring, 128, 2, PLAIN), up.at(),
        up.scales_at(), map_out, map_second,
        map(on_device(second_scales), WORDS, 4 * scale_ring, middle / 128, scale_ring, 128, 2, PLAIN), down.at(),
        down.scales_at());
#else
    auto map_out = map(on_device(second), type, wide * middle, ring, middle, box, part);
    auto status =
        cudaLaunchKernelEx(&config, kernel, static_cast<void *>(y.device), static_cast<int *>(nullptr), uint32_t(tokens),
                           peers, map_first, up.at(), map_out, map_second, down.at());
#endif
    check(status, "launch");
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
                for (int k = 0; k < 2; k++) {
                    const double *w = &up.values[(size_t(e) * 2 * middle + i / 8 * 16 + k * 8 + i % 8) * hidden];
                    for (int d = 0; d < hidden; d++) both[k] += token[t * hidden + d] * w[d];
                    both[k] = float(bf16(float(both[k])));
                }
                h[i] = both[0] / (1 + exp(-both[0])) * both[1] * factor[2 * t + j];
            }
#ifdef FP4
            for (int i = 0; i < middle; i += 32) {
                double top = 0;
                for (int k = i; k < i + 32; k++) top = fmax(top, fabs(h[k]));
                double scale = exp2(ceil(log2(top / 448)));
                for (int k = i; k < i + 32; k++) h[k] = float(e4m3(float(h[k] / scale))) * scale;
            }
#endif
            for (int d = 0; d < hidden; d++)
                for (int i = 0; i < middle; i++) sum[d] += h[i] * down.values[(size_t(e) * hidden + d) * middle + i];
        }
        for (int d = 0; d < hidden; d++) values.add(float(y[t * hidden + d]), sum[d]);
    }
    // outputs of slots are rounded to bf16, hidden values to it or, where the last bit decides, to another e4m3
    return values.verdict("y", 1.0 / 64);
}
