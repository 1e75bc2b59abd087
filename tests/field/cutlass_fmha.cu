// CUTLASS's attention for Blackwell (examples/77_blackwell_fmha), and FlashMLA's dense prefill, which is made of it, in
// fp16; arguments: queries, keys, heads, heads of K and V.
//   -DDIM=128 -DMASK=NoMask (ResidualMask, CausalMask<true>); -DFP8 takes e4m3; -DROPE=64: Q and K are longer than V.
#include "field.h"
#include <cutlass/cutlass.h>
#include <cutlass/kernel_hardware_info.h>
#include "device/fmha.hpp"
#include "collective/fmha_fusion.hpp"
#include "collective/sm100_fmha_fwd_mainloop_tma_warpspecialized.hpp"
#include "collective/sm100_fmha_mla_fwd_mainloop_tma_warpspecialized.hpp"
#include "collective/sm100_fmha_fwd_epilogue_tma_warpspecialized.hpp"
#include "kernel/fmha_options.hpp"
#include "kernel/fmha_tile_scheduler.hpp"
#include "kernel/sm100_fmha_fwd_kernel_tma_warpspecialized.hpp"

using namespace cute;
using namespace cutlass::fmha::collective;
using namespace cutlass::fmha::kernel;
#ifdef FP8
using Element = cutlass::float_e4m3_t;
#else
using Element = cutlass::half_t;
#endif
using Heads = tuple<tuple<int, int>, int>;  // of a group, of K and V; batch
using Rows = tuple<int, _1, Heads>;
using Shared = tuple<int, _1, tuple<tuple<_0, int>, int>>;
#ifdef ROPE
constexpr int long_dim = DIM + ROPE;  // of Q and K
using Mainloop = Sm100MlaFwdMainloopTmaWarpspecialized<Element, float, float, Shape<_256, _128, Shape<Int<DIM>, Int<ROPE>>>,
                                                       Rows, Shared, Shared, MASK>;
using Dims = tuple<int, int>;
using Schedule = Sm100MlaFwdCtxKernelWarpspecializedSchedule;
const Dims dims(DIM, ROPE);
#else
constexpr int long_dim = DIM;
using Mainloop = Sm100FmhaFwdMainloopTmaWarpspecialized<Element, float, float, Shape<_256, _128, Int<DIM>>, Rows, Shared,
                                                        Shared, MASK>;
using Dims = int;
using Schedule = Sm100FmhaCtxKernelWarpspecializedSchedule;
const Dims dims = DIM;
#endif
using Epilogue = Sm100FmhaFwdEpilogueTmaWarpspecialized<cutlass::half_t, float, typename Mainloop::TileShapePV, Rows,
                                                        tuple<_1, Heads>>;
using Kernel = Sm100FmhaFwdKernelTmaWarpspecialized<tuple<int, int, Dims, Heads>, Mainloop, Epilogue,
                                                    IndividualTileScheduler, Schedule>;
using Operation = cutlass::fmha::device::FMHA<Kernel>;

int main(int, char **words) {
    const int queries = atoi(words[1]), keys = atoi(words[2]), heads = atoi(words[3]), shared = atoi(words[4]);
    constexpr bool causal = !std::is_same_v<MASK, NoMask> && !std::is_same_v<MASK, ResidualMask>;
    Array<Element> q(size_t(queries) * heads * long_dim), k(size_t(keys) * shared * long_dim), v(size_t(keys) * shared * DIM);
    Array<cutlass::half_t> out(size_t(queries) * heads * DIM);
    Array<float> lse(size_t(queries) * heads);
    for (auto *x : {&q, &k, &v})
        for (auto &y : x->host) y = Element(normal());
    const int group = heads / shared;
    auto rows = [&](int dim) -> Rows {
        return make_stride(heads * dim, _1{}, make_stride(make_stride(dim, group * dim), heads * dim * queries));
    };
    auto places = [&](int dim) -> Shared {
        return make_stride(shared * dim, _1{}, make_stride(make_stride(_0{}, dim), shared * dim * keys));
    };
    const float scale = 1 / std::sqrt(float(long_dim));
    auto sums_at = make_stride(_1{}, make_stride(make_stride(queries, queries * group), queries * heads));
    cutlass::KernelHardwareInfo machine{0, 4};
    typename Operation::Arguments arguments{
        make_tuple(queries, keys, dims, make_tuple(make_tuple(group, shared), 1)),
        {q.upload(), rows(long_dim), k.upload(), places(long_dim), v.upload(), places(DIM), scale},
        {out.upload(), rows(DIM), lse.upload(), sums_at},
        machine};
    Operation operation;
    Array<uint8_t> workspace(Operation::get_workspace_size(arguments) + 1);
    if (operation.can_implement(arguments) != cutlass::Status::kSuccess ||
        operation.initialize(arguments, workspace.device) != cutlass::Status::kSuccess ||
        operation.run() != cutlass::Status::kSuccess)
        return printf("refused\n"), 1;
    check(cudaDeviceSynchronize(), "the kernel");
    out.download(), lse.download();

    Agreement values, sums;
    for (int h = 0; h < heads; h++)
        for (int i = h; i < queries; i += 7) {  // a sample: fp64 takes its time
            std::vector<double> e(keys), o(DIM, 0.0);
            double top = -INFINITY, total = 0;
            for (int j = 0; j < keys; j++) {
                double s = 0;
                for (int d = 0; d < long_dim; d++)
                    s += double(float(q[(size_t(i) * heads + h) * long_dim + d])) *
                         float(k[(size_t(j) * shared + h / group) * long_dim + d]);
                e[j] = causal && j > i ? -INFINITY : s / std::sqrt(double(long_dim)), top = fmax(top, e[j]);
            }
            for (int j = 0; j < keys; j++) {
                total += e[j] = exp(e[j] - top);
                for (int d = 0; d < DIM && e[j] > 0; d++) o[d] += e[j] * float(v[(size_t(j) * shared + h / group) * DIM + d]);
            }
            sums.add(lse[size_t(h) * queries + i], log(total) + top);
            for (int d = 0; d < DIM; d++) values.add(float(out[(size_t(i) * heads + h) * DIM + d]), o[d] / total);
        }
#ifdef FP8
    return values.verdict("out", 1.0 / 16) | sums.verdict("lse", 1e-5);  // P is e4m3
#else
    return values.verdict("out", 1.0 / 512) | sums.verdict("lse", 1e-5);
#endif
}
