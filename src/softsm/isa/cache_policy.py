"""createpolicy: 64-bit words that loads, stores and copies accept as .L2::cache_hint. They change no value.

The manual calls the words opaque. `fractional` makes the same words as an H200, since programs also pass them as
constants: the priority is in the top bits, then the sixteenths of the accesses that get it.
"""

from __future__ import annotations

import numpy as np

from softsm.isa.operands import lanes
from softsm.isa.registry import lowers
from softsm.ptx.ast import Imm

PRIMARY = {"L2::evict_first": 0x12, "L2::evict_last": 0x14, "L2::evict_normal": 0x16, "L2::evict_unchanged": 0x10}
SECONDARY = ("L2::evict_first", "L2::evict_unchanged")


@lowers("createpolicy")
def createpolicy(asm, ins):
    kind, *rest = ins.modifiers or ("",)
    if kind == "cvt" and rest == ["L2", "b64"]:
        return asm.emit("mov.b64", asm.dst(ins.operands[0], "q"), asm.src(ins.operands[1], "q"))
    if kind == "range" and rest[:1] == ["global"]:
        rest = rest[1:]
    known = kind in ("fractional", "range") and rest[-1:] == ["b64"] and 2 <= len(rest) <= 3
    if not known or rest[0] not in PRIMARY or any(m not in SECONDARY for m in rest[1:-1]):
        asm.refuse(
            ins,
            "expected createpolicy.{fractional,range}.L2::priority{.L2::evict_first,.L2::evict_unchanged}"
            ".b64 or createpolicy.cvt.L2.b64",
        )
    priority, share, to = PRIMARY[rest[0]], 16, asm.dst(ins.operands[0], "q")
    if kind == "fractional" and len(ins.operands) > 1:
        fraction = ins.operands[1]
        if not isinstance(fraction, Imm):
            return asm.macro(do_fractional, ins, to=to, fraction=asm.src(fraction, "f"), priority=priority)
        if not 0 < float(fraction.value) <= 1:
            raise asm.error("the fraction must be above 0 and at most 1")
        share = sixteenths(float(fraction.value))
    asm.emit("mov.b64", to, asm.const(word_of(priority, share), "q"))


def sixteenths(fraction: float) -> int:
    return min(max(1, round(16 * fraction)), 16)


def word_of(priority: int, share: int) -> int:
    return priority << 56 | share - 1 << 52


def do_fractional(w, mask, o):
    """Makes the policy from a fraction in a register."""
    for lane in lanes(mask):
        fraction = np.nan_to_num(w.R[o.fraction, lane : lane + 1].view(np.float32), posinf=1.0)
        w.Q[o.to, lane] = word_of(o.priority, sixteenths(float(fraction[0])))
