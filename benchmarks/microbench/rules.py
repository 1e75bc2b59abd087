"""What a Hopper GPU does where PTX asks for more than published kernels write, or says nothing.

    python benchmarks/microbench/rules.py --json FILE      # on a GPU: the answers of the hardware
    python benchmarks/microbench/rules.py                  # in softsm: the same kernels, small

Two kinds of rows. `adds` and `ends` are answers: how many reductions 32 lanes of one instruction make, and whether a
phase ends that expects the bytes of 1 or of 32 copies (of 1: two runs on an H200 answered differently). `wrong` counts
results that a missing fence or wait made wrong; 0 says that no counterexample occurred among `tried`, not more: none
occurs behind plain stores without a fence either.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from softsm.museum import text as t

TILE = 2048  # bytes of A in a product of 64 x 8 x 16
ROUND = 128  # values of A, in turn
BOX = 4096  # bytes of a copy: 32 rows of 128
SHARED = """.shared .align 1024 .b8 a[32768]; .shared .align 1024 .b8 b[256];
.shared .align 8 .b64 full; .shared .align 8 .b64 empty;"""


def kernel(body: str, parameters: str = "x out map!") -> str:
    return t.kernel(body, parameters, shared=SHARED, target="sm_90a", version="8.6")


# How the bytes of A come to shared memory, and how their arrival is told.
ARRIVALS = {
    "cp.async, its arrival": "cp.async.mbarrier.arrive.noinc.shared.b64 [full];\n",
    "cp.async, its arrival, fence": "cp.async.mbarrier.arrive.noinc.shared.b64 [full];\n",
    "cp.async, wait, arrive": "cp.async.wait_all;\n" + t.arrive("full"),
    "st.shared, arrive": t.arrive("full"),
    "st.shared, fence, arrive": "fence.proxy.async.shared::cta;\n" + t.arrive("full"),
}


def product(how: str, rounds: int) -> str:
    """A warpgroup fills A, in `rounds` rounds with another value each; another multiplies it by ones as soon as it has
    arrived, and counts wrong sums."""
    address = "and.b32 %r13, %r12, 127;\nmad.wide.u32 %rd10, %r13, 2048, %rd1;\nmad.wide.u32 %rd10, %r0, 16, %rd10;\n"
    if how.startswith("cp"):
        bring = "cp.async.cg.shared.global [%r11], [%rd10], 16;\n"
    else:
        bring = f"ld.global.v4.b32 {t.names(20, 4)}, [%rd10];\nst.shared.v4.b32 [%r11], {t.names(20, 4)};\n"
    produce = "mov.u32 %r90, a;\nmad.lo.u32 %r11, %r0, 16, %r90;\n"
    produce += rounds_of(
        "P", "xor.b32 %r15, %r14, 1;\n" + t.wait("empty", "%r15") + address + bring + ARRIVALS[how], rounds
    )
    fence = "fence.proxy.async.shared::cta;\n" if how.endswith("arrival, fence") else ""
    use = t.wait("full", "%r14") + fence + "wgmma.fence.sync.aligned;\n" + PRODUCT_OF_16
    use += "and.b32 %r13, %r12, 127;\ncvt.rn.f32.u32 %f4, %r13;\nmul.f32 %f4, %f4, 0f41800000;\n" + check_sums()
    consume = t.descriptor("%rd11", "a", blackwell=False) + t.descriptor("%rd12", "b", blackwell=False)
    consume += "mov.u32 %r16, 0;\n" + rounds_of("C", use + t.arrive("empty"), rounds)
    consume += "mov.u32 %r17, %ctaid.x;\nmad.lo.u32 %r17, %r17, 128, %r0;\nsub.u32 %r17, %r17, 128;\n" + t.out(
        "%r16", "%rd2", "%r17"
    )
    body = t.init(("full", 128), ("empty", 128)) + t.fill("b", 256) + "fence.proxy.async;\nbar.sync 0;\n"
    body += "setp.lt.u32 %p6, %r0, 128;\nsetp.ge.u32 %p7, %r0, 128;\n"
    return kernel(body + t.only("%p6", produce) + t.only("%p7", consume))


PRODUCT_OF_16 = """\
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd11, %rd12, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""


def check_sums() -> str:
    """Those of the product that are not %f4 are counted in %r16."""
    return "".join(f"setp.neu.f32 %p5, %f{i}, %f4;\n@%p5 add.u32 %r16, %r16, 1;\n" for i in range(4))


def rounds_of(name: str, body: str, count: int) -> str:
    """%r12 counts; %r14 is its parity."""
    return (
        f"mov.u32 %r12, 0;\n{name}:\nand.b32 %r14, %r12, 1;\n{body}add.u32 %r12, %r12, 1;\n"
        f"setp.lt.u32 %p4, %r12, {count};\n@%p4 bra {name};\n"
    )


def late(fence: bool, rounds: int) -> str:
    """In turn, one warp of a warpgroup comes 1 us later than the others, and writes B before its product; all four
    count wrong sums of theirs. Is the product of one warp behind what another has written?"""
    turn = "and.b32 %r13, %r12, 3;\nsetp.eq.u32 %p5, %r13, %r1;\nand.b32 %r13, %r12, 127;\nadd.u32 %r13, %r13, 1;\n"
    turn += "cvt.rn.f32.u32 %f4, %r13;\ncvt.rn.bf16x2.f32 %r15, %f4, %f4;\nmul.f32 %f4, %f4, 0f41800000;\n"
    write = "mov.u64 %rd13, %globaltimer;\nadd.u64 %rd13, %rd13, 1000;\n"
    write += "SPIN:\nmov.u64 %rd14, %globaltimer;\nsetp.lt.u64 %p4, %rd14, %rd13;\n@%p4 bra SPIN;\n"
    write += "st.shared.v2.b32 [%r11], {%r15, %r15};\nfence.proxy.async.shared::cta;\n"
    use = ("wgmma.fence.sync.aligned;\n" if fence else "") + PRODUCT_OF_16 + check_sums()
    body = "mov.u32 %r90, b;\nmad.lo.u32 %r11, %r2, 8, %r90;\nmov.u32 %r16, 0;\n" + t.fill("a", TILE)
    body += "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(4)) + "fence.proxy.async;\n"
    body += t.descriptor("%rd11", "a", blackwell=False) + t.descriptor("%rd12", "b", blackwell=False)
    body += "wgmma.fence.sync.aligned;\n" + rounds_of("C", "bar.sync 0;\n" + turn + t.only("%p5", write) + use, rounds)
    return kernel(body + "mov.u32 %r17, %ctaid.x;\nmad.lo.u32 %r17, %r17, 128, %r0;\n" + t.out("%r16", "%rd2", "%r17"))


def grid_before(early: bool) -> str:
    """Every thread adds one to its word; CTAs come to it one after the other. `early`: the next grid may begin."""
    body = "griddepcontrol.launch_dependents;\n" if early else ""
    body += "mov.u32 %r10, %ctaid.x;\nrem.u32 %r11, %r10, 7;\nmul.wide.u32 %rd12, %r11, 500;\n"
    body += "mov.u64 %rd13, %globaltimer;\nadd.u64 %rd13, %rd13, %rd12;\n"
    body += "SPIN:\nmov.u64 %rd14, %globaltimer;\nsetp.lt.u64 %p4, %rd14, %rd13;\n@%p4 bra SPIN;\n"
    body += "mad.lo.u32 %r12, %r10, 256, %r0;\nmul.wide.u32 %rd10, %r12, 4;\nadd.u64 %rd10, %rd10, %rd2;\n"
    return kernel(
        body + "ld.global.u32 %r13, [%rd10];\nadd.u32 %r13, %r13, 1;\nst.global.u32 [%rd10], %r13;\n", "x out"
    )


def grid_behind(waits: bool) -> str:
    """Every thread reads a word of another CTA, and counts how often it has not as many as there were grids: words of
    x are its counters of grids and of wrong words."""
    body = "griddepcontrol.wait;\n" if waits else ""
    body += "mov.u32 %r10, %ctaid.x;\nmov.u32 %r11, %nctaid.x;\nmad.lo.u32 %r12, %r10, 7919, 13;\n"
    body += "rem.u32 %r12, %r12, %r11;\nmad.lo.u32 %r12, %r12, 256, %r0;\nmul.wide.u32 %rd10, %r12, 4;\n"
    body += "add.u64 %rd10, %rd10, %rd2;\nld.global.u32 %r13, [%rd10];\n"
    body += "mad.lo.u32 %r14, %r10, 256, %r0;\nmul.wide.u32 %rd11, %r14, 8;\nadd.u64 %rd11, %rd11, %rd1;\n"
    body += "ld.global.v2.u32 {%r15, %r16}, [%rd11];\nadd.u32 %r15, %r15, 1;\nsetp.ne.u32 %p5, %r13, %r15;\n"
    return kernel(body + "@%p5 add.u32 %r16, %r16, 1;\nst.global.v2.u32 [%rd11], {%r15, %r16};\n", "x out")


def leaving(waits: bool) -> str:
    """Every CTA fills 32 KB with its number, stores them to its place by one copy, and ends."""
    number = "mov.u32 %r10, %ctaid.x;\nadd.u32 %r11, %r10, 1;\nmov.u32 %r90, a;\nmad.lo.u32 %r12, %r0, 16, %r90;\n"
    fill = "".join(f"st.shared.v4.b32 [%r12+{at}], {{%r11, %r11, %r11, %r11}};\n" for at in range(0, 32768, 4096))
    store = "mad.wide.u32 %rd10, %r10, 32768, %rd2;\ncp.async.bulk.global.shared::cta.bulk_group [%rd10], [a], 32768;\n"
    store += "cp.async.bulk.commit_group;\n" + ("cp.async.bulk.wait_group.read 0;\n" if waits else "")
    return kernel(number + fill + "fence.proxy.async;\nbar.sync 0;\n" + t.only("%p0", store))


COPIES = {
    "bulk": ("[a], [%rd1], 4096, [full]", "[%rd2], [a], 4096"),
    "tensor": ("[a], [%rd3, {0, 0}], [full]", "[%rd3, {0, 0}], [a]"),
}


def loads(how: str, expected: int) -> str:
    """32 lanes issue one load; the phase expects the bytes of `expected` of them. out[0]: whether it ended."""
    name = "cp.async.bulk.tensor.2d" if how == "tensor" else "cp.async.bulk"
    tile = ".tile" if how == "tensor" else ""
    issue = f"{name}.shared::cluster.global{tile}.mbarrier::complete_tx::bytes {COPIES[how][0]};\n"
    spin = "mov.u32 %r12, 0;\nmov.u32 %r13, 0;\nSPIN:\nmbarrier.try_wait.parity.shared::cta.b64 %p5, [full], 0;\n"
    spin += "@%p5 mov.u32 %r13, 1;\n@%p5 bra OVER;\nadd.u32 %r12, %r12, 1;\n"
    spin += "setp.lt.u32 %p4, %r12, 2000;\n@%p4 bra SPIN;\nOVER:\n"
    body = t.init("full") + t.only("%p0", t.expect("full", BOX * expected)) + "bar.warp.sync 0xffffffff;\n" + issue
    return kernel(body + spin + t.only("%p0", t.out("%r13", "%rd2")))


def adds(how: str) -> str:
    """32 lanes issue one reduction of a tile of ones; its target becomes their number."""
    name = "cp.reduce.async.bulk.tensor.2d" if how == "tensor" else "cp.reduce.async.bulk"
    kind = ".add.tile.bulk_group" if how == "tensor" else ".bulk_group.add.noftz.bf16"
    issue = (
        f"{name}.global.shared::cta{kind} {COPIES[how][1]};\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
    )
    return kernel(t.fill("a", BOX, threads=32) + "fence.proxy.async;\nbar.warp.sync 0xffffffff;\n" + issue)


class Machine:
    """A GPU, or softsm with small problems."""

    def __init__(self, gpu=None) -> None:
        self.gpu = gpu

    def run(self, text: str, grid: int, threads: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Tensor maps are of `out`, as 32 rows of 64 bf16."""
        return self.on_gpu(text, grid, threads, x, out) if self.gpu else self.in_softsm(text, grid, threads, x, out)

    def in_softsm(self, text: str, grid: int, threads: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        import softsm
        from softsm.memory import tensor_map_image

        source, target = aligned(x), aligned(out)
        tensor = tensor_map_image.encode_tiled(
            data_type=9, rank=2, global_address=target.ctypes.data, global_dim=[64, 32], global_strides=[128],
            box_dim=[64, 32], swizzle=0)  # fmt: skip
        softsm.load(text).launch(grid, threads, [source, target, tensor], sms=4)
        return target

    def run_pairs(self, first: str, second: str, grid: int, pairs: int) -> int:
        """Launches of `first`, each followed by a dependent launch of `second`; how many words those found wrong."""
        counters, words = np.zeros((grid * 256, 2), np.uint32), np.zeros(grid * 256, np.uint32)
        if self.gpu is None:
            import softsm

            one, other = softsm.load(first), softsm.load(second)
            for _ in range(pairs):
                one.launch(grid, 256, [counters, words], sms=4)
                other.launch(grid, 256, [counters, words], sms=4, dependent=True)
            return int(counters[:, 1].sum())
        torch = self.gpu.torch
        memory = [torch.from_numpy(a.view(np.uint8)).cuda() for a in (counters, words)]
        values = [ctypes.c_uint64(a.data_ptr()) for a in memory]
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
        serial = (ctypes.c_uint32 * 18)(6, 0, 1)  # programmatic stream serialization
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(pairs):
            for text, attributes in ((first, 0), (second, 1)):
                launch = (ctypes.c_uint64 * 7)(
                    *(grid | 1 << 32, 1 | 256 << 32, 1 | 1 << 32, 0),
                    *(stream.cuda_stream, ctypes.addressof(serial), attributes),
                )
                self.gpu.call("cuLaunchKernelEx", ctypes.byref(launch), self.gpu.function(text, 0), pointers, None)
        torch.cuda.synchronize()
        return int(memory[0].cpu().numpy().view(np.uint32).reshape(-1, 2)[:, 1].sum())

    def on_gpu(self, text: str, grid: int, threads: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        gpu = self.gpu
        torch = gpu.torch
        source, target = (torch.from_numpy(a.view(np.uint8).copy()).cuda() for a in (x, out))
        tensor = (ctypes.c_uint8 * 192)()
        at = (ctypes.c_uint8 * 128).from_buffer(tensor, -ctypes.addressof(tensor) % 64)
        gpu.call("cuTensorMapEncodeTiled", ctypes.byref(at), 9, 2, ctypes.c_void_p(target.data_ptr()),
                 (ctypes.c_uint64 * 2)(64, 32), (ctypes.c_uint64 * 1)(128), (ctypes.c_uint32 * 2)(64, 32),
                 (ctypes.c_uint32 * 2)(1, 1), 0, 0, 0, 0)  # fmt: skip
        values = [ctypes.c_uint64(source.data_ptr()), ctypes.c_uint64(target.data_ptr()), at]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
        gpu.call("cuLaunchKernel", gpu.function(text, 0), grid, 1, 1, threads, 1, 1, 0, None, pointers, None)
        torch.cuda.synchronize()
        return target.cpu().numpy().view(out.dtype)


def aligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    view = raw[start : start + array.nbytes].view(array.dtype)
    view[...] = array
    return view


def rows(machine: Machine) -> Iterator[dict]:
    on = machine.gpu is not None
    ones = np.full(BOX // 4, t.ONES, np.uint32)
    for how in COPIES:
        found = machine.run(adds(how), 1, 32, ones, np.zeros(BOX // 4, np.uint32))
        value = float((found[:1] & 0xFFFF0000).view(np.float32)[0])
        yield {"name": f"32 lanes, one {how} reduction", "adds": int(value), "alike": bool((found == found[0]).all())}
    for how in COPIES:
        answers = [int(machine.run(loads(how, n), 1, 32, ones, np.zeros(BOX // 4, np.uint32))[0]) for n in (1, 32)]
        yield {"name": f"32 lanes, one {how} load", "ends": answers}
    ctas, rounds = (264, 20_000) if on else (2, 6)
    bits = np.arange(ROUND, dtype=np.float32).view(np.uint32) >> 16
    values = np.repeat((bits | bits << 16).astype(np.uint32), TILE // 4)
    for how in ARRIVALS:
        wrong = machine.run(product(how, rounds), ctas, 256, values, np.full(ctas * 128, 1 << 30, np.uint32))
        yield {"name": f"wgmma reads: {how}", "wrong": int(wrong.sum()), "tried": ctas * rounds * 512}
    ctas, rounds = (132, 5_000) if on else (2, 6)
    for fence in (True, False):
        wrong = machine.run(late(fence, rounds), ctas, 128, values, np.full(ctas * 128, 1 << 30, np.uint32))
        name = "wgmma reads: st.shared of another warp" + (", wgmma.fence" if fence else "")
        yield {"name": name, "wrong": int(wrong.sum()), "tried": ctas * rounds * 512}
    pairs, grids = (1000, (132, 1056)) if on else (2, (2,))
    for early, waits in ((False, False), (True, True), (True, False)):
        wrong = sum(machine.run_pairs(grid_before(early), grid_behind(waits), grid, pairs) for grid in grids)
        name = f"a dependent grid {'waits' if waits else 'does not wait'} for one that "
        name += "launches dependents" if early else "does not"
        yield {"name": name, "wrong": wrong, "tried": sum(grids) * 256 * pairs}
    ctas, launches = (132 * 32, 8) if on else (6, 1)
    right = np.repeat(np.arange(1, ctas + 1, dtype=np.uint32), 8192)
    for waits in (False, True):
        wrong = 0
        for _ in range(launches):
            wrong += int((machine.run(leaving(waits), ctas, 256, ones, np.zeros_like(right)) != right).sum())
        name = "a CTA ends " + ("after its store has read" if waits else "with its store in flight")
        yield {"name": name, "wrong": wrong, "tried": launches * right.size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="run on this machine's GPU and write the rows here")
    options = parser.parse_args()
    gpu = None
    if options.json:
        import device

        gpu = device.Gpu()
    found = []
    for row in rows(Machine(gpu)):
        print(json.dumps(row), flush=True)
        found.append(row)
    if options.json:
        options.json.write_text(json.dumps({"device": gpu.device, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
