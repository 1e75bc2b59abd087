// Decoding with multi-head latent attention by CUTLASS's example 77: one query of 128 heads per request, rows of 512 and
// 64 fp16 numbers, by two CTAs; arguments: rows, requests, splits.   -DSCHEDULER=Sm100MlaPersistentTileScheduler
#include "field.h"
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/kernel_hardware_info.h>
#include "device/sm100_mla.hpp"
#include "kernel/sm100_mla_tile_scheduler.hpp"

using namespace cute;
using namespace cutlass::fmha::kernel;
using f16 = cutlass::half_t;
constexpr int H = 128, LATENT = 512, D = 576;
using Dims = Shape<_512, _64>;
using Kernel = Sm100FmhaMlaKernelTmaWarpspecialized<Shape<_128, _128, Dims>, f16, float, f16, float, SCHEDULER>;
using Operation = cutlass::fmha::device::MLA<Kernel>;

int main(int, char **words) {
    const int keys = atoi(words[1]), batch = atoi(words[2]), splits = atoi(words[3]);
    Array<f16> q(size_t(batch) * H * D), c(size_t(batch) * keys * D), out(size_t(batch) * H * LATENT);
    Array<float> lse(size_t(batch) * H);
    for (auto *x : {&q, &c})
        for (auto &y : x->host) y = f16(normal());
    const double scale = 1 / std::sqrt(192.0);
    auto at_q = make_stride(int64_t(D), _1{}, int64_t(H * D)), at_c = make_stride(int64_t(D), _1{}, int64_t(keys) * D);
    auto at_out = make_stride(int64_t(LATENT), _1{}, int64_t(H * LATENT));
    q.upload(), c.upload();
    typename Operation::Arguments arguments{
        make_tuple(_128{}, keys, Dims{}, batch),
        {float(scale), q.device, at_q, q.device + LATENT, at_q, c.device, at_c, c.device + LATENT, at_c, nullptr, nullptr,
         make_stride(_1{}, 0), 0, 0},
        {out.upload(), at_out, lse.upload(), make_stride(_1{}, H)},
        cutlass::KernelHardwareInfo{0, 4}, splits, nullptr, false};
    Operation operation;
    Array<uint8_t> workspace(Operation::get_workspace_size(arguments) + 1);
    if (operation.can_implement(arguments) != cutlass::Status::kSuccess ||
        operation.initialize(arguments, workspace.device) != cutlass::Status::kSuccess ||
        operation.run() != cutlass::Status::kSuccess)
        return printf("refused\n"), 1;
    check(cudaDeviceSynchronize(), "the kernels");
    out.download(), lse.download();

    Agreement values, sums;
    for (int b = 0; b < batch; b++)
        for (int h = 0; h < H; h += 3) {  // a sample
            std::vector<double> e(keys), o(LATENT, 0.0);
            double total = 0;
            for (int j = 0; j < keys; j++) {
                double s = 0;
                for (int d = 0; d < D; d++)
                    s += double(float(q[(size_t(b) * H + h) * D + d])) * float(c[(size_t(b) * keys + j) * D + d]);
                total += e[j] = exp(s * scale);
                for (int d = 0; d < LATENT; d++) o[d] += e[j] * float(c[(size_t(b) * keys + j) * D + d]);
            }
            sums.add(lse[size_t(b) * H + h], log(total));
            for (int d = 0; d < LATENT; d++) values.add(float(out[(size_t(b) * H + h) * LATENT + d]), o[d] / total);
        }
    return values.verdict("out", 1.0 / 512) | sums.verdict("lse", 1e-5);
}
