// Gradients of attention by CUTLASS's example 77: three kernels (sums of O dO, the gradients, dQ rounded), in fp16;
// arguments: queries, keys, heads, heads of K and V.   -DDIM=64 -DMASK=NoMask (CausalForBackwardMask<true>)
#include "field.h"
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/kernel_hardware_info.h>
#include "collective/fmha_fusion.hpp"
#include "device/fmha_device_bwd.hpp"

using namespace cute;
using namespace cutlass::fmha::collective;
using f16 = cutlass::half_t;
using Heads = tuple<tuple<int, int>, int>;  // of a group, of K and V; batch
using Operation = cutlass::fmha::device::Sm100FmhaBwd<tuple<int, int, int, int, Heads>, f16, float,
                                                      Shape<_128, _128, Int<DIM>, Int<DIM>>, false, MASK>;

int main(int, char **words) {
    const int queries = atoi(words[1]), keys = atoi(words[2]), heads = atoi(words[3]), shared = atoi(words[4]);
    const int group = heads / shared;
    constexpr bool causal = !std::is_same_v<MASK, NoMask>;
    const double scale = 1 / std::sqrt(double(DIM));
    const size_t nq = size_t(queries) * heads * DIM, nk = size_t(keys) * shared * DIM;
    Array<f16> q(nq), k(nk), v(nk), out(nq), dout(nq), dq(nq), dk(nk), dv(nk);
    Array<float> lse(size_t(queries) * heads);
    for (auto *x : {&q, &k, &v, &dout})
        for (auto &y : x->host) y = f16(normal());
    auto row = [&](auto &x, int i, int h) { return &x[(size_t(i) * heads + h) * DIM]; };
    auto place = [&](auto &x, int j, int h) { return &x[(size_t(j) * shared + h / group) * DIM]; };
    auto dot = [](const f16 *x, const f16 *y) {
        double sum = 0;
        for (int d = 0; d < DIM; d++) sum += double(float(x[d])) * float(y[d]);
        return sum;
    };

    // fp64, with the output and the sums that the kernels get
    std::vector<double> right_q(nq), right_k(nk), right_v(nk);
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < queries; i++) {
            const int last = causal ? std::min(i + 1, keys) : keys;
            std::vector<double> p(last), o(DIM);
            double total = 0, delta = 0;
            for (int j = 0; j < last; j++) total += p[j] = exp(dot(row(q, i, h), place(k, j, h)) * scale);
            for (int j = 0; j < last; j++)
                for (int d = 0; d < DIM; d++) o[d] += (p[j] / total) * float(place(v, j, h)[d]);
            lse[size_t(h) * queries + i] = log(total);
            for (int d = 0; d < DIM; d++) {
                row(out, i, h)[d] = f16(float(o[d]));
                delta += double(float(row(out, i, h)[d])) * float(row(dout, i, h)[d]);
            }
            for (int j = 0; j < last; j++) {
                const double w = p[j] / total, ds = w * (dot(row(dout, i, h), place(v, j, h)) - delta) * scale;
                for (int d = 0; d < DIM; d++) {
                    right_q[row(q, i, h) - &q[0] + d] += ds * float(place(k, j, h)[d]);
                    right_k[place(k, j, h) - &k[0] + d] += ds * float(row(q, i, h)[d]);
                    right_v[place(v, j, h) - &v[0] + d] += w * float(row(dout, i, h)[d]);
                }
            }
        }

    tuple<int, _1, Heads> rows = make_stride(heads * DIM, _1{}, make_stride(make_stride(DIM, group * DIM), 0));
    tuple<int, _1, tuple<tuple<_0, int>, int>> places =
        make_stride(shared * DIM, _1{}, make_stride(make_stride(_0{}, DIM), 0));
    tuple<_1, Heads> sums = make_stride(_1{}, make_stride(make_stride(queries, queries * group), 0));
    typename Operation::Arguments arguments{
        make_tuple(queries, keys, DIM, DIM, make_tuple(make_tuple(group, shared), 1)),
        q.upload(), rows, k.upload(), places, v.upload(), places, out.upload(), rows, lse.upload(), sums,
        dout.upload(), rows, dq.upload(), rows, dk.upload(), places, dv.upload(), places, float(scale),
        cutlass::KernelHardwareInfo{0, 4}};
    Operation operation;
    Array<uint8_t> workspace(Operation::get_workspace_size(arguments));
    if (operation.can_implement(arguments) != cutlass::Status::kSuccess ||
        operation.initialize(arguments, workspace.device) != cutlass::Status::kSuccess ||
        operation.run() != cutlass::Status::kSuccess)
        return printf("refused\n"), 1;
    check(cudaDeviceSynchronize(), "the kernels");
    dq.download(), dk.download(), dv.download();
    Agreement of_q, of_k, of_v;
    for (size_t i = 0; i < nq; i++) of_q.add(float(dq[i]), right_q[i]);
    for (size_t i = 0; i < nk; i++) of_k.add(float(dk[i]), right_k[i]), of_v.add(float(dv[i]), right_v[i]);
    // P and dS are rounded to fp16, and so are the results
    return of_q.verdict("dq", 1.0 / 512) | of_k.verdict("dk", 1.0 / 512) | of_v.verdict("dv", 1.0 / 512);
}
