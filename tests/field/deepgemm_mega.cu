// DeepGEMM's mega MoE: dispatch, both products with SwiGLU between them, and the sum, in one kernel of four CTAs. 12
// tokens of 512, two of four experts each (one token has one, one has none). -DRANKS=4: on four devices, each with two
// experts and with fewer tokens than the one before. In bf16; -DFP4: tokens in e4m3, weights in e2m1, scales of 32
// (UE8M0), and the hidden values are rounded to e4m3 with scales between the products. -DLAYERS=2: twice in a row, with
// tokens that a kernel copies into the symmetric buffer before each, as an engine does; the host waits at the end only.
#include "field.h"
#include "maps.h"
#ifdef FP4
#include <deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh>
#else
#include <deep_gemm/impls/sm100_bf16_mega_moe.cuh>
#endif

#ifndef RANKS
#define RANKS 1
#endif
#ifndef LAYERS
#define LAYERS 1
#endif

using namespace deep_gemm;
using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
constexpr int most = layout::kLCMCandidateBlockM, hidden = 512, topk = 2, ring = 3 * most;
constexpr int rows = 16, columns = 128, part = 8, stages = 4, ctas = 4, threads = 512;
constexpr int own = RANKS == 1 ? 4 : 2, experts = own * RANKS;  // of a rank, of all
constexpr float unlimited = std::numeric_limits<float>::infinity();
#ifdef FP4
using input = e4m3;
constexpr int middle = 512, depth = 256, scale_ring = ring / 8 * 128, box = 128;
constexpr auto type = BYTES;
constexpr auto kernel =
    &sm100_fp8_fp4_mega_moe_impl<most, hidden, middle, experts, topk, own, rows, columns, depth, part, 128, 128, ring,
                                 scale_ring, stages, hidden, 128, 128, 256, ctas, RANKS, unlimited, false>;
#else
using input = bf16;
constexpr int middle = 256, depth = 128, scale_ring = 0, box = 64;
constexpr auto type = HALVES;
constexpr auto kernel =
    &sm100_bf16_mega_moe_impl<most, hidden, middle, experts, topk, own, rows, columns, depth, part, ring, stages,
                              2 * hidden, 128, 128, 256, ctas, RANKS, unlimited, false>;
#endif
constexpr int wide = sizeof(input), scales = hidden / 32, middle_scales = middle / 32;

// Weights of the experts of a rank: what is multiplied, and what the kernel gets of it.
struct Weights {
    int count, depth;  // rows of an expert and their length
    std::vector<double> values;
    Array<bf16> halves;
    Array<uint8_t> fours;
    Array<uint32_t> exponents;  // of 128 columns, four each; rows are innermost, 4 x 32 of them as tcgen05.cp takes them
    Weights(int count, int depth, float size)
        : count(count), depth(depth), values(size_t(own) * count * depth), halves(values.size()),
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
        return map(fours.device, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B, depth / 2, own * count, depth, box, columns);
#else
        return map(halves.device, type, 2 * depth, own * count, depth, box, columns);
#endif
    }
    CUtensorMap scales_at() {
        return map(exponents.device, WORDS, 4 * count, own * depth / 128, count, columns, 2, PLAIN);
    }
};

// The symmetric buffer: workspace, tokens, experts and weights of each, inputs of both products, outputs of slots
using layout::Buffer, layout::Data;
const layout::Workspace counters(nullptr, RANKS, experts, most, topk, ring);
const Buffer x(Data(wide * hidden), 1, most, counters.get_end_ptr());
const Buffer x_scales(Data(scales), 1, scale_ring ? most : 0, x.get_end_ptr());
const Buffer ids(Data(8 * topk, false), 1, most, x_scales.get_end_ptr());
const Buffer weights(Data(4 * topk, false), 1, most, ids.get_end_ptr());
const Buffer first(Data(wide * hidden), 1, ring, weights.get_end_ptr());
const Buffer first_scales(Data(scales), 1, scale_ring, first.get_end_ptr());
const Buffer first_weights(Data(4, false), 1, ring, first_scales.get_end_ptr());
const Buffer second(Data(wide * middle), 1, ring, first_weights.get_end_ptr());
const Buffer second_scales(Data(middle_scales, scale_ring > 0), 1, scale_ring, second.get_end_ptr());
const Buffer slots(Data(2 * hidden), topk, most, second_scales.get_end_ptr());

__global__ void refill(uint4 *to, const uint4 *from, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}

struct Rank {
    int tokens;
    Array<uint8_t> memory, given;
    int64_t *chosen;
    float *factor;
    std::vector<double> token;
    Weights up, down;
    Array<bf16> y;

    template <class T> T *at(const Buffer &b) { return reinterpret_cast<T *>(&memory[reinterpret_cast<size_t>(b.base)]); }
    uint8_t *on_device(const Buffer &b) { return memory.device + reinterpret_cast<size_t>(b.base); }

    explicit Rank(int rank)
        : tokens(12 - 3 * rank), memory(reinterpret_cast<size_t>(slots.get_end_ptr())),
          given(tokens * wide * hidden), chosen(at<int64_t>(ids)),
          factor(at<float>(weights)), token(tokens * hidden), up(2 * middle, hidden, 0.05f), down(hidden, middle, 0.1f),
          y(tokens * hidden) {
        auto *in = at<input>(x);
        for (int i = 0; i < tokens * hidden; i++) {
            token[i] = float(in[i] = input(normal()));
#ifdef FP4
            auto *exponents = at<uint8_t>(x_scales);
            if (i % 32 == 0) exponents[i / 32] = 125 + below(4);
            token[i] *= exp2(exponents[i / 32] - 127.0);
#endif
        }
        for (int t = 0; t < tokens; t++) {
            int one = below(experts);
            chosen[2 * t] = one, chosen[2 * t + 1] = (one + 1 + below(experts - 1)) % experts;
            for (int j = 0; j < topk; j++) factor[2 * t + j] = 0.2f + 0.05f * below(10);
        }
        chosen[5] = -1;
        if (tokens > 7) chosen[14] = chosen[15] = -1;
        std::copy_n(at<uint8_t>(x), given.host.size(), given.host.begin());
        memory.upload(), given.upload(), y.upload();
    }

    void refill_tokens() {
        int count = int(given.host.size() / sizeof(uint4));
        refill<<<2, 128>>>(reinterpret_cast<uint4 *>(on_device(x)), reinterpret_cast<uint4 *>(given.device), count);
    }

    cudaError_t launch(int rank, const std::vector<int64_t> &memories) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448), "attribute");
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = 232448;
        config.attrs = &cluster, config.numAttrs = 1;
        layout::SymBuffer<RANKS> peers(memories, rank);
        auto map_first = map(on_device(first), type, wide * hidden, ring, hidden, box, rows / 2);
        auto map_second = map(on_device(second), type, wide * middle, ring, middle, box, rows / 2);
#ifdef FP4
        auto map_out = map(on_device(second), type, middle, ring, middle, 64, part, CU_TENSOR_MAP_SWIZZLE_64B);
        return cudaLaunchKernelEx(
            &config, kernel, static_cast<void *>(y.device), static_cast<int *>(nullptr), uint32_t(tokens), peers,
            map_first, map(on_device(first_scales), WORDS, 4 * scale_ring, hidden / 128, scale_ring, 128, 2, PLAIN),
            up.at(), up.scales_at(), map_out, map_second,
            map(on_device(second_scales), WORDS, 4 * scale_ring, middle / 128, scale_ring, 128, 2, PLAIN), down.at(),
            down.scales_at());
#else
        auto map_out = map(on_device(second), type, wide * middle, ring, middle, box, part);
        return cudaLaunchKernelEx(&config, kernel, static_cast<void *>(y.device), static_cast<int *>(nullptr),
                                  uint32_t(tokens), peers, map_first, up.at(), map_out, map_second, down.at());
#endif
    }
};

int main() {
    std::vector<Rank> all;
    std::vector<int64_t> memories;
    all.reserve(RANKS);
    for (int r = 0; r < RANKS; r++) {
        check(cudaSetDevice(r), "device");
        memories.push_back(reinterpret_cast<int64_t>(all.emplace_back(r).memory.device));
    }
    for (int r = 0; r < LAYERS * RANKS; r++) {
        check(cudaSetDevice(r % RANKS), "device");
        if (LAYERS > 1) all[r % RANKS].refill_tokens();
        check(all[r % RANKS].launch(r % RANKS, memories), "launch");
    }
    for (int r = 0; r < RANKS; r++) {
        check(cudaSetDevice(r), "device");
        check(cudaDeviceSynchronize(), "the kernel");
        all[r].y.download();
    }

    Agreement values;
    for (Rank &mine : all) {
        for (int t = 0; t < mine.tokens; t++) {
            std::vector<double> sum(hidden, 0.0);
            for (int j = 0; j < topk; j++) {
                int e = int(mine.chosen[2 * t + j]);
                if (e < 0) continue;
                const Weights &up = all[e / own].up, &down = all[e / own].down;
                e %= own;
                std::vector<double> h(middle);
                for (int i = 0; i < middle; i++) {
                    double both[2] = {0, 0};  // rows of eight by turns: gate, up
                    for (int k = 0; k < 2; k++) {
                        const double *w = &up.values[(size_t(e) * 2 * middle + i / 8 * 16 + k * 8 + i % 8) * hidden];
                        for (int d = 0; d < hidden; d++) both[k] += mine.token[t * hidden + d] * w[d];
                        both[k] = float(bf16(float(both[k])));
                    }
                    h[i] = both[0] / (1 + exp(-both[0])) * both[1] * mine.factor[2 * t + j];
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
            for (int d = 0; d < hidden; d++) values.add(float(mine.y[t * hidden + d]), sum[d]);
        }
    }
    // outputs of slots are rounded to bf16, hidden values to it or, where the last bit decides, to another e4m3
    return values.verdict("y", 1.0 / 64);
}
