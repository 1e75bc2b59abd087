"""Addresses and the windows of the generic space: mapa, getctarank, isspacep."""

from __future__ import annotations

import numpy as np

from softsm.engine import program as pg
from softsm.isa.registry import lowers
from softsm.ptx.ast import Address


@lowers("mapa")
def mapa(asm, ins):
    """Maps an address of the CTA's own shared memory to the same place in the CTA of the given rank."""
    mods = set(ins.modifiers) - {"u32", "u64", "shared::cluster"}
    if mods:
        asm.refuse(ins, f"unknown modifiers {sorted(mods)}")
    wide = "u64" in ins.modifiers
    kind = "q" if wide else "u"
    source = ins.operands[1]
    a = asm.address_row(source, kind) if isinstance(source, Address) else asm.src(source, kind)
    asm.macro(do_mapa, ins, dst=asm.dst(ins.operands[0], kind), a=a, rank=asm.src(ins.operands[2], "u"), wide=wide)


def do_mapa(w, mask, o):
    keep = (1 << pg.RANK_SHIFT) - 1
    bank = w.Q if o.wide else w.R
    on = [lane for lane in range(32) if mask >> lane & 1]
    ranks = w.R[o.rank, on].astype(bank.dtype)
    # A rank outside the cluster is a fault only where the address is used; a lane that does not use it may name any.
    ranks = np.minimum(ranks, bank.dtype.type(0xFF))
    window = bank[o.a, on] & bank.dtype.type((0xFFFFFFFF << 32 if o.wide else 0) & 0xFFFFFFFFFFFFFFFF)
    bank[o.dst, on] = window | (bank[o.a, on] & bank.dtype.type(keep)) | ranks << bank.dtype.type(pg.RANK_SHIFT)


@lowers("getctarank")
def getctarank(asm, ins):
    wide = "u64" in ins.modifiers
    source = ins.operands[1]
    kind = "q" if wide else "u"
    a = asm.address_row(source, kind) if isinstance(source, Address) else asm.src(source, kind)
    asm.macro(do_getctarank, ins, dst=asm.dst(ins.operands[0], "u"), a=a, wide=wide)


def do_getctarank(w, mask, o):
    on = [lane for lane in range(32) if mask >> lane & 1]
    a = (w.Q if o.wide else w.R)[o.a, on]
    w.R[o.dst, on] = (a.astype(np.uint64) & np.uint64(pg.ALL)) >> np.uint64(pg.RANK_SHIFT)


@lowers("isspacep")
def isspacep(asm, ins):
    space = ins.modifiers[0]
    if space not in ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"):
        asm.refuse(ins, f"unknown space .{space}")
    asm.macro(do_isspacep, ins, dst=asm.dst(ins.operands[0], "p"), a=asm.src(ins.operands[1], "q"), space=space)


def do_isspacep(w, mask, o):
    a = w.Q[o.a]
    shared = (a >= pg.SHARED_WINDOW) & (a < pg.LOCAL_WINDOW)
    own = shared & ((a & np.uint64(0xFF << pg.RANK_SHIFT)) >> np.uint64(pg.RANK_SHIFT) == w.cta.rank)
    answer = {
        "shared::cluster": shared,
        "shared": own,
        "shared::cta": own,
        "local": a >= pg.LOCAL_WINDOW,
        "global": a < pg.SHARED_WINDOW,
    }.get(o.space, np.zeros(32, bool))
    bits = sum(1 << i for i in range(32) if answer[i])
    w.P[o.dst] = (int(w.P[o.dst]) & ~mask) | (bits & mask)
