"""M10, M11, M19 to M21: barriers, mbarriers between warps, launches, waves of CTAs, code that is not in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from ptx import frame, init_barriers, loop, wait


def barrier(warps: int) -> str:
    return frame(32 * warps, loop("  bar.sync 1;\n" * 16))


def ring_of_groups(groups: int) -> str:
    """Warpgroup g waits on named barrier 1 + g and lets the next one go: a hop is bar.arrive to bar.sync."""
    threads = 128 * groups
    body = "  shr.u32 %r1, %thread, 7; add.u32 %r2, %r1, 1; add.u32 %r3, %r1, 2;\n"
    body += f"  setp.eq.u32 %p4, %r1, {groups - 1}; selp.u32 %r3, 1, %r3, %p4; setp.eq.u32 %p5, %r1, 0;\n"
    body += f"  setp.ne.u32 %p6, %r1, {groups - 1}; @%p6 bra GO; bar.arrive 1, 256;\nGO:\n"
    inner = "  bar.sync %r2, 256; bar.arrive %r3, 256;\n"
    # The last arrival on barrier 1 stays without a partner: group 0 takes it after the loop.
    body += loop(inner) + "  @!%p5 bra FINISH; bar.sync 1, 256;\n"
    return frame(threads, body)


def handshake(consumers: int) -> str:
    """Lane 0 of warp 0 arrives on `full`, waits for `empty`; a lane of each of the others does the reverse."""
    text_p = "  mbarrier.arrive.shared::cta.b64 _, [%sm];\n" + wait("%r5", "%r6", "WP") + "  xor.b32 %r6, %r6, 1;"
    text_c = wait("%r4", "%r6", "WC") + "  mbarrier.arrive.shared::cta.b64 _, [%sm+8];\n  xor.b32 %r6, %r6, 1;"
    body = f"""  setp.ne.u32 %p3, %lane, 0; @%p3 bra FINISH;
  mov.u32 %r4, %sm; add.u32 %r5, %sm, 8; mov.u32 %r6, 0;
  setp.ne.u32 %p3, %warp, 0; @%p3 bra CONSUMER;
{loop(text_p, "LP")}  bra.uni FINISH;
CONSUMER:
{loop(text_c, "LC")}"""
    setup = init_barriers(0, 1, 1).replace("READY:", f"  mbarrier.init.shared::cta.b64 [%sm+8], {consumers};\nREADY:")
    return frame(32 * (consumers + 1), body, setup)


def polling() -> str:
    """try_wait of a phase that is over, each after the answer of the one before."""
    one = (
        "  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], %r6; selp.u32 %r7, 0, 8, %p2; add.u32 %r4, %r4, %r7;\n"
    )
    return frame(
        32,
        "  mov.u32 %r4, %sm; mov.u32 %r6, 1;\n" + loop(one * 16) + "  xor.b32 %acc, %acc, %r4;\n",
        init_barriers(0, 1),
    )


def arriving() -> str:
    one = "  mbarrier.arrive.shared::cta.b64 _, [%sm];\n"
    body = "  setp.ne.u32 %p3, %lane, 0; @%p3 bra FINISH;\n" + loop(one * 16)
    return frame(32, body, init_barriers(0, 1))


def spin() -> str:
    """A CTA that lasts %n cycles."""
    return frame(
        32,
        """  cvt.u64.u32 %d2, %n; add.u64 %d2, %d2, %t0;
SPIN: mov.u64 %d3, %clock64; setp.lt.u64 %p2, %d3, %d2; @%p2 bra SPIN;
""",
    )


def empty() -> str:
    return frame(128, "")


def straight(instructions: int) -> str:
    """Code without a loop inside: run twice, first cold and then warm. %m is 1 in the measured round."""
    text = "".join(f"  fma.rn.f32 %f{i % 8}, %f{i % 8}, %f300, %f301;\n" for i in range(instructions))
    start = (
        "".join(f"  mov.b32 %f{i}, %thread;\n" for i in range(8)) + "  mov.b32 %f300, %thread; mov.b32 %f301, %lane;\n"
    )
    return frame(128, loop(text) + "".join(f"  xor.b32 %acc, %acc, %f{i};\n" for i in range(8)), start)


class Synchronisation(Bench):
    group = "synchronisation"
    CODE = (512, 2048, 8192)

    def kernels(self) -> Iterator[tuple[str, str]]:
        for warps in (1, 4, 8, 12, 16):
            yield f"bar.sync {warps}", barrier(warps)
        for groups in (2, 3):
            yield f"ring {groups}", ring_of_groups(groups)
        for c in (1, 4, 8):
            yield f"handshake {c}", handshake(c)
        yield "polling", polling()
        yield "arriving", arriving()
        yield "spin", spin()
        yield "empty", empty()
        for c in self.CODE:
            yield f"code {c}", straight(c)

    def rows(self, run) -> Iterator[Row]:
        for warps in (1, 4, 8, 12, 16):
            with self.point(f"bar.sync, {warps} warps") as report:
                stamps = run(barrier(warps), 1, 32 * warps, n=200)
                yield report(stamps.cycles() / 3200, "cycles", stamps)
        for groups in (2, 3):
            with self.point(f"hop of bar.arrive to bar.sync, {groups} warpgroups") as report:
                stamps = run(ring_of_groups(groups), 1, 128 * groups, n=1000)
                yield report(stamps.cycles() / (1000 * groups), "cycles", stamps)
        for c in (1, 4, 8):
            with self.point(f"mbarrier round trip, {c} consumers") as report:
                stamps = run(handshake(c), 1, 32 * (c + 1), 64, n=1000)
                yield report(stamps.cycles() / 1000, "cycles", stamps)
        with self.point("try_wait of a phase that is over") as report:
            stamps = run(polling(), 1, 32, 64, n=200)
            yield report(stamps.cycles() / 3200, "cycles", stamps)
        with self.point("mbarrier.arrive, one after another") as report:
            stamps = run(arriving(), 1, 32, 64, n=200)
            yield report(stamps.cycles() / 3200, "cycles", stamps)
        for c in self.CODE:
            for n in (1, 2, 9):
                with self.point(f"code of {16 * c} bytes, {n} rounds") as report:
                    self.device.flush()
                    text = straight(c)
                    if n > 1:
                        run(text, 132, 128, n=1)
                    stamps = run(text, 132, 128, n=n)
                    yield report(stamps.cycles() / n / c, "cycles an instruction", stamps)
        for grid in (1, 132, 1056, 4224):
            with self.point(f"spread of the first {grid} CTAs") as report:
                stamps = run(empty(), grid, 128, n=1)
                yield report(stamps.ramp_ns(), "ns", stamps, span=stamps.span_ns())
        if self.device.name != "gpu":
            return
        device = self.device
        device.flush()

        def launching(text: str, grid: int, threads: int, shared: int = 0, n: int = 1):
            return lambda: device.launch(text, grid, threads, shared, 0, n, 0, b"")

        for grid in (1, 132, 1056, 4224):
            with self.point(f"empty grid of {grid} in a graph") as report:
                yield report(device.graph_us([launching(empty(), grid, 128)]), "us")
        with self.point("two empty grids in a graph") as report:
            yield report(device.graph_us([launching(empty(), 132, 128)] * 2), "us")
        with self.point("five empty grids in a graph") as report:
            yield report(device.graph_us([launching(empty(), 132, 128)] * 5), "us")
        for waves in (1, 2, 4, 8):
            for shared in (0, 200 << 10):
                with self.point(f"{waves} waves of 10000 cycles, {shared} bytes of shared memory") as report:
                    grid = 132 * waves * (1 if shared else 16)
                    us = (
                        device.graph_us([launching(spin(), grid, 32 if shared else 128, shared, 10000)])
                        if shared
                        else (
                            device.graph_us(
                                [launching(spin().replace(".reqntid 32", ".reqntid 128"), grid, 128, 0, 10000)]
                            )
                        )
                    )
                    yield report(us, "us")
