// Decoding by CUTLASS's example 77 (77_blackwell_fmha_gen): one query per request, grouped heads of dim 128 in e5m2, whose
// new row goes into the cache first; arguments: rows in the cache, requests, KV heads, query heads of each.
#include "field.h"
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/kernel_hardware_info.h>
#include "device/fmha.hpp"
#include "collective/fmha_fusion.hpp"
#include "collective/sm100_fmha_gen_mainloop_warpspecialized.hpp"
#include "collective/sm100_fmha_gen_epilogue_warpspecialized.hpp"
#include "kernel/sm100_fmha_gen_kernel_warpspecialized.hpp"
#include "kernel/fmha_tile_scheduler.hpp"

using namespace cute;
using namespace cutlass::fmha;
using f8 = cutlass::float_e5m2_t;
using f16 = cutlass::half_t;
constexpr int D = 128;
using Problem = Shape<_1, int, int, Shape<Shape<int, int>, int>>;
using AtQ = Stride<_0, _1, Stride<Stride<int, int>, int>>;
using AtNew = Stride<_0, _1, Stride<Stride<_0, int>, int>>;
using AtCache = Stride<int, _1, Stride<Stride<_0, int>, int>>;
using Mainloop = collective::Sm100FmhaGenMainloopWarpspecialized<f8, float, float, f16, Shape<_128, _64, _128>, AtQ, AtNew,
                                                                 AtNew, AtCache, AtCache, AtQ>;
using Epilogue = collective::Sm100FmhaGenEpilogueWarpspecialized<f16, AtQ>;
using Kernel = kernel::Sm100FmhaGenKernelWarpspecialized<Problem, Mainloop, Epilogue, kernel::SCHEDULER>;
using Operation = device::FMHA<Kernel>;

int main(int, char **words) {
    const int keys = atoi(words[1]), batch = atoi(words[2]), heads = atoi(words[3]), group = atoi(words[4]);
    const int all = heads * group, rows = keys + 1, row = heads * D;
    Array<f8> q(size_t(batch) * all * D), new_k(size_t(batch) * row), new_v(size_t(batch) * row);
    Array<f8> k(size_t(batch) * rows * row), v(size_t(batch) * rows * row);
    Array<f16> out(size_t(batch) * all * D);
    Array<int> lengths(batch, keys);
    for (auto *x : {&q, &new_k, &new_v, &k, &v}) {
        for (auto &y : x->host) y = f8(normal());
        x->upload();
    }
    AtQ at_q = make_stride(_0{}, _1{}, make_stride(make_stride(D, D * group), D * all));
    AtNew at_new = make_stride(_0{}, _1{}, make_stride(make_stride(_0{}, D), row));
    AtCache at_cache = make_stride(row, _1{}, make_stride(make_stride(_0{}, D), row * rows));
    typename Operation::Arguments arguments{
        make_shape(_1{}, rows, D, make_shape(make_shape(group, heads), batch)), lengths.upload(), nullptr, q.device, at_q,
        new_k.device, at_new, new_v.device, at_new, k.device, at_cache, v.device, at_cache, out.upload(), at_q,
        cutlass::KernelHardwareInfo{0, 4}};
    Operation operation;
    Array<uint8_t> workspace(Operation::get_workspace_size(arguments) + 1);
    if (operation.can_implement(arguments) != cutlass::Status::kSuccess ||
        operation.initialize(arguments, workspace.device) != cutlass::Status::kSuccess ||
        operation.run() != cutlass::Status::kSuccess)
        return printf("refused\n"), 1;
    check(cudaDeviceSynchronize(), "the kernel");
    out.download(), k.download(), v.download();

    int wrong = 0;  // of the new rows in the cache
    double worst = 0;  // error of an output, in units of the mean of |v|, weighted as v is
    for (int b = 0; b < batch; b++)
        for (int h = 0; h < all; h++) {
            std::vector<double> o(D, 0.0), size(D, 0.0);
            double total = 0;
            for (int j = 0; j < rows; j++) {
                const size_t at = (size_t(b) * rows + j) * row + h / group * D, fresh = size_t(b) * row + h / group * D;
                double s = 0;
                for (int d = 0; d < D; d++) {
                    s += double(float(q[(size_t(b) * all + h) * D + d])) * float(k[at + d]);
                    if (j == keys) wrong += float(k[at + d]) != float(new_k[fresh + d]) || float(v[at + d]) != float(new_v[fresh + d]);
                }
                const double p = exp(s / std::sqrt(double(D)));
                total += p;
                for (int d = 0; d < D; d++) o[d] += p * float(v[at + d]), size[d] += p * fabs(float(v[at + d]));
            }
            for (int d = 0; d < D; d++) {
                const double error = fabs(float(out[(size_t(b) * all + h) * D + d]) - o[d] / total) / (size[d] / total);
                worst = error <= worst ? worst : error;
            }
        }
    printf("out: error %.2g of 0.125; %d elements of the cache are wrong\n", worst, wrong);
    return !(worst <= 0.126) || wrong;  // P is rounded to e5m2, by up to an eighth; the output to fp16
}
