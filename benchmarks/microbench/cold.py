# ruff: noqa: E501  PTX text
"""What a short kernel pays that a long one does not notice: code that is issued once and comes from where a pass over 256 MB
has left it, the first loads, and the launch itself, between events as for any measured kernel."""

from __future__ import annotations

from collections.abc import Iterator

from bench import Bench, Row
from everyday import straight
from ptx import frame


def loads(chain: int) -> str:
    """So many loads that depend on each other, one line each."""
    body = "".join(
        "  ld.global.b32 %r1, [%d3]; and.b32 %r1, %r1, 0; cvt.u64.u32 %d4, %r1; add.u64 %d3, %d3, %d4; add.u64 %d3, %d3, 65536;\n"
        for _ in range(chain)
    )
    setup = "  mad.lo.u32 %r2, %cta, 1024, %thread; mul.wide.u32 %d3, %r2, 4; add.u64 %d3, %d3, %src;\n"
    return frame(128, body + "  xor.b32 %acc, %acc, %r1;\n" if chain else "", setup, sync=False)


class Cold(Bench):
    group = "cold"
    CODE = tuple((n, w) for n in (64, 256, 512, 1024, 2048, 4096) for w in (1, 4, 8))

    def kernels(self) -> Iterator[tuple[str, str]]:
        for n, w in self.CODE:
            yield f"straight {n} {w}", straight(n, w, False)
        for chain in (0, 1, 2, 4):
            yield f"loads {chain}", loads(chain)

    def rows(self, run) -> Iterator[Row]:
        for n, w in self.CODE:
            for grid in (16, 132, 528):
                for cold in (True, False):
                    with self.point(
                        f"{n} FFMA once, {w} warps, {grid} CTAs, {'L2 emptied' if cold else 'again'}"
                    ) as report:
                        run(straight(n, w, False), grid, 32 * w, n=1)
                        found = [
                            run(straight(n, w, False), grid, 32 * w, n=1, before=self.device.flush if cold else None)
                            for _ in range(5)
                        ]
                        stamps = sorted(found, key=lambda s: s.cycles())[2]
                        yield report(stamps.cycles(), "cycles", stamps)
        if self.device.name != "gpu":
            for chain in (0, 1, 2, 4):
                run(loads(chain), 1, 128, source=self.device.memory(1 << 22))
            return
        buffer = self.device.memory(1 << 28)
        kinds = [(f"{chain} loads, one after another", loads(chain), 128) for chain in (0, 1, 2, 4)]
        kinds += [
            (f"{n} FFMA, {w} warps", straight(n, w, False), 32 * w) for n, w in self.CODE if n in (64, 1024, 4096)
        ]
        for name, text, threads in kinds:
            for grid in (1, 132, 528, 2112):
                with self.point(f"a launch of {grid} CTAs: {name}") as report:

                    def call(text=text, grid=grid, threads=threads) -> None:
                        self.device.launch(text, grid, threads, 0, buffer, 1, 0, b"")

                    took = self.device.graph_behind_us([call])
                    found = self.device.stamps[: grid * 128].cpu().numpy().reshape(-1, 32, 4)[:, : threads // 32]
                    span = found[..., 3].max() - found[..., 1].min()
                    yield report(took, "us", span_ns=int(span))
