// DeepGEMM's GEMMs, 256 x 256 by four SMs. For sm_100: -DCTAS=1 or 2, with -DFP8 in e4m3 with scales of 128 (UE8M0),
// with -DFP8 -DFP4 B in e2m1 with scales of 32; for sm_90a: -DHOPPER, bf16.
#include "field.h"
#include "maps.h"
#ifdef HOPPER
#define CTAS 1
#include <deep_gemm/impls/sm90_bf16_gemm.cuh>
#elif defined(FP8)
#include <deep_gemm/impls/sm100_fp8_fp4_gemm_1d1d.cuh>
#else
#include <deep_gemm/impls/sm100_bf16_gemm.cuh>
#endif

using namespace deep_gemm;
using bf16 = cutlass::bfloat16_t;
constexpr int n = 256, shared = 200 * 1024;
constexpr auto K = cute::UMMA::Major::K;
#ifdef FP8
using input = cutlass::float_e4m3_t;
constexpr int depth = 512, box = 128;
constexpr auto type = BYTES;
#ifdef FP4
using other = cutlass::detail::float_e2m1_unpacksmem_t;
constexpr int grain = 32;
#else
using other = input;
constexpr int grain = 128;
#endif
constexpr auto kernel =
    &sm100_fp8_fp4_gemm_1d1d_impl<K, K, 128, grain, 128, 0, n, depth, 128, 128, 128, 1, 128, 128, 128, 4, 128, 128, CTAS,
                                  false, 4, false, false, GemmType::Normal, false, input, other, bf16,
                                  epilogue::transform::EpilogueIdentity>;
#else
using input = bf16;
constexpr int depth = 256, box = 64;
constexpr auto type = HALVES;
#ifdef HOPPER
constexpr auto kernel = &sm90_bf16_gemm_impl<K, K, 0, n, depth, 1, 128, 128, 64, 128, 128, 128, 4, 128, 256, 1, false, 4,
                                             GemmType::Normal, false, bf16>;
#else
constexpr auto kernel = &sm100_bf16_gemm_impl<K, K, 0, n, depth, 128, 128, 64, 1, 128, 128, 128, 4, 128, 128, CTAS, false,
                                              4, 64, false, false, GemmType::Normal, false, bf16, 100>;
#endif
#endif
#ifdef HOPPER
constexpr int threads = 384;
#else
constexpr int threads = 256;
#endif

int main() {
    Array<input> a(n * depth), b(n * depth);
    Array<uint8_t> packed(n * depth / 2);
    Array<bf16> d(n * n);
    std::vector<double> left(n * depth), right(n * depth);
    Array<uint32_t> scale_a(n), scale_b(4 * n);  // four exponents each; of B with -DFP4: a word for 128 columns
    for (auto *scales : {&scale_a, &scale_b})
        for (auto &x : scales->host)
            for (int k = 0; k < 4; k++) x |= uint32_t(124 + below(6)) << 8 * k;
    for (int i = 0; i < n * depth; i++) {
        a[i] = input(normal()), b[i] = input(normal());
        left[i] = float(a[i]), right[i] = float(b[i]);
#ifdef FP8
        int row = i / depth, part = i % depth / 128;
        left[i] *= exp2(double(scale_a[row] >> 8 * part & 255) - 127);
#ifdef FP4
        int code = below(16);
        packed[i / 2] |= code << 4 * (i % 2);
        right[i] = e2m1(code) * exp2(double(scale_b[part * n + row] >> 8 * (i % 128 / 32) & 255) - 127);
#else
        right[i] *= exp2(double(scale_b[row] >> 8 * part & 255) - 127);
#endif
#endif
    }
    packed.upload(), a.upload(), b.upload(), d.upload(), scale_a.upload(), scale_b.upload();
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attribute");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CTAS, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = 4, config.blockDim = threads, config.dynamicSmemBytes = shared, config.attrs = &cluster;
    config.numAttrs = 1;
    auto map_a = map(a.device, type, depth * sizeof(input), n, depth, box, 128);
#ifdef FP4
    auto map_b = map(packed.device, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B, depth / 2, n, depth, box, 128 / CTAS);
#else
    auto map_b = map(b.device, type, depth * sizeof(input), n, depth, box, 128 / CTAS);
#endif
    auto map_d = map(d.device, HALVES, n * 2, n, n, 64, 128);
#ifdef FP8
    auto map_sa = map(scale_a.device, WORDS, n * 4, 1, n, 128, 1, PLAIN);
    auto map_sb = map(scale_b.device, WORDS, n * 4, 128 / grain, n, 128, 1, PLAIN);
    auto status = cudaLaunchKernelEx(&config, kernel, (int *)nullptr, uint32_t(n), uint32_t(n), uint32_t(depth), map_a,
                                     map_b, map_sa, map_sb, map_d);
#else
    auto status = cudaLaunchKernelEx(&config, kernel, (int *)nullptr, uint32_t(n), uint32_t(n), uint32_t(depth), map_a,
                                     map_b, map_d);
#endif
    check(status, "launch");
    check(cudaDeviceSynchronize(), "the kernel");
    d.download();
    Agreement values;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int k = 0; k < depth; k++) s += left[i * depth + k] * right[j * depth + k];
            values.add(float(d[i * n + j]), s);
        }
    return values.verdict("d", 1.0 / 256);  // half a unit of bf16's last place
}
