// DeepGEMM's scores of an indexer: logits[i, k] = scale[k] sum_h weight[i, h] max(q[i, h] . kv[k], 0) for start <= k < end.
// e4m3 keys for sm_100; -DFP4: e2m1 keys and queries with a scale (UE8M0) of 32 each; -DHOPPER: e4m3 on sm_90a.
#include "field.h"
#include "maps.h"
#include <cutlass/float8.h>
#ifdef HOPPER
#include <deep_gemm/impls/sm90_fp8_mqa_logits.cuh>
#else
#include <deep_gemm/impls/sm100_mqa_logits.cuh>
#endif

using namespace deep_gemm;
constexpr int heads = 32, dim = 128, block = 4, queries = 10, keys = 600, sms = 4, columns = 768, split = 256;
#ifdef HOPPER
constexpr int threads = 128 + 512, shared = 200 * 1024;
constexpr auto kernel = &sm90_fp8_mqa_logits<heads, dim, false, block, split, 3, 3, sms, 128, 512, float>;
#else
#ifdef FP4
constexpr bool fp4 = true;
#else
constexpr bool fp4 = false;
#endif
constexpr int stages = fp4 ? 10 : 5, threads = 384;
constexpr int shared = sizeof(layout::MQALogitsSharedStorage<fp4, heads, dim, block, split, 3, stages, 3>);
constexpr auto kernel = &sm100_mqa_logits<fp4, heads, dim, false, block, split, 3, stages, sms, 128, 256, float, float>;
#endif

// Random numbers of a row each, as bytes and as values; the scales (of FP4) are four exponents a row.
struct Rows {
    Array<uint8_t> bytes;
    Array<uint32_t> scales;
    std::vector<double> values;
    explicit Rows(int n) : bytes(size_t(n) * dim), scales(n), values(size_t(n) * dim) {
        for (int i = 0; i < n * dim; i++) {
#ifdef FP4
            if (i % 32 == 0) scales[i / dim] |= uint32_t(124 + below(4)) << 8 * (i % dim / 32);
            int code = below(16);
            bytes[i / 2] |= code << 4 * (i % 2);
            values[i] = e2m1(code) * exp2(double(scales[i / dim] >> 8 * (i % dim / 32) & 255) - 127);
#else
            cutlass::float_e4m3_t x(normal());
            bytes[i] = x.storage, values[i] = float(x);
#endif
        }
        bytes.upload(), scales.upload();
    }
};

int main() {
    Rows q(queries * heads), kv(keys);
    Array<float> weights(queries * heads), scale(keys + 8), logits((queries + block) * columns);
    Array<uint32_t> starts(queries), ends(queries);
    for (auto &x : weights.host) x = normal();
    for (auto &x : scale.host) x = std::exp2(float(below(5) - 2));
    for (int i = 0; i < queries; i++) starts[i] = i / 2 * 16, ends[i] = keys - below(100);
    weights.upload(), scale.upload(), logits.upload(), starts.upload(), ends.upload();
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attribute");
    cudaLaunchConfig_t config{};
    config.gridDim = sms, config.blockDim = threads, config.dynamicSmemBytes = shared;
    auto map_weights = map(weights.device, FLOATS, heads * 4, queries, heads, heads, block, PLAIN);
#ifdef FP4
    constexpr auto packed = CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B;
    auto map_q = map(q.bytes.device, packed, dim / 2, queries * heads, dim, dim, block * heads, CU_TENSOR_MAP_SWIZZLE_64B);
    auto map_kv = map(kv.bytes.device, packed, dim / 2, keys, dim, dim, split, CU_TENSOR_MAP_SWIZZLE_64B);
    auto map_sq = map(q.scales.device, WORDS, heads * 4, queries, heads, heads, block, PLAIN);
    auto map_sk = map(kv.scales.device, WORDS, keys * 4, 1, keys, split, 1, PLAIN);
#else
    auto map_q = map(q.bytes.device, BYTES, dim, queries * heads, dim, dim, block * heads);
    auto map_kv = map(kv.bytes.device, BYTES, dim, keys, dim, dim, split);
    auto map_sk = map(scale.device, FLOATS, keys * 4, 1, keys, split, 1, PLAIN), map_sq = map_sk;
#endif
#ifdef HOPPER
    auto status = cudaLaunchKernelEx(&config, kernel, uint32_t(queries), uint32_t(keys), 0u, uint32_t(columns),
                                     starts.device, ends.device, logits.device, map_q, map_kv, map_sk, map_weights);
#else
    auto status = cudaLaunchKernelEx(&config, kernel, uint32_t(queries), uint32_t(keys), uint32_t(columns), starts.device,
                                     ends.device, logits.device, map_q, map_sq, map_kv, map_sk, map_weights);
#endif
    check(status, "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    logits.download();
    Agreement values;
    for (int i = 0; i < queries; i++)
        for (int k = starts[i]; k < int(ends[i]); k++) {
            double sum = 0;
            for (int h = 0; h < heads; h++) {
                double s = 0;
                for (int d = 0; d < dim; d++) s += q.values[(i * heads + h) * dim + d] * kv.values[k * dim + d];
                sum += weights[i * heads + h] * fmax(s, 0);
            }
#ifndef FP4
            sum *= scale[k];
#endif
            values.add(logits[i * columns + k], sum);
        }
#ifdef HOPPER
    return values.verdict("logits", 1e-3);  // Hopper's products of e4m3 keep 13 bits behind the point
#else
    return values.verdict("logits", 1e-5);
#endif
}
