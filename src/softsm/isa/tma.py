"""cp.async.bulk.tensor: boxes of a tensor between global and shared memory, by tensor map.

Loads complete on an mbarrier by the bytes of the whole box, elements outside the tensor included; stores and
reductions complete by bulk group. What a box is (traversal, bounds, fill, swizzle) is `softsm.memory.box_copy`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from softsm.isa.bulk_copy import COMPLETE_TX, INTEGER_OPS, destinations, store_in_two
from softsm.isa.copying import start
from softsm.isa.operands import Issuer, lanes, shared_bytes, shared_operand
from softsm.isa.typed import needs_target
from softsm.memory import box_copy
from softsm.memory.tensor_map import DataType, Swizzle, TensorMap, Wide
from softsm.memory.tensor_map_image import ALIGNMENT, NBYTES, from_image
from softsm.ptx.ast import Address, Vector

_LOAD_MODES = ("tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128")
_STORE_MODES = ("tile", "tile::scatter4", "im2col_no_offs")
_FOUR = ("tile::gather4", "tile::scatter4")
_MADE_FOR = {Wide.NO: "im2col", Wide.W: "im2col::w", Wide.W128: "im2col::w::128"}
_WIDE = {"im2col::w": (Wide.W, 512), "im2col::w::128": (Wide.W128, 32)}  # the map it needs, and the bound of its halo


def lower(asm, ins, reduction: bool, mods: list[str]):
    """Lowers cp.async.bulk.tensor; `mods` are the modifiers after .bulk, without .tensor."""
    prefetch = mods[0] == "prefetch"
    mods = mods[1:] if prefetch else mods
    if mods[0] not in ("1d", "2d", "3d", "4d", "5d"):
        asm.refuse(ins, "the dimension (1d to 5d) must follow .tensor")
    rank, flags = int(mods[0][0]), mods[1:]
    spaces = [m for m in flags if m in ("global", "shared::cta", "shared::cluster", "L2")]
    flags = [m for m in flags if m not in spaces]
    mode = next((m for m in flags if m in _LOAD_MODES + _STORE_MODES), "tile")
    if mode in _FOUR or mode in _WIDE or "cta_group::1" in flags or "cta_group::2" in flags:
        needs_target(asm, ins, 100)
    hint = "L2::cache_hint" in flags
    left = set(flags) - {mode, "L2::cache_hint"}
    operands = list(ins.operands)
    if hint:
        asm.src(operands.pop(), "q")
    if prefetch:
        if spaces != ["L2", "global"] or left or mode not in _LOAD_MODES:
            asm.refuse(ins, "expected cp.async.bulk.prefetch.tensor.Nd.L2.global")
        return asm.macro(do_prefetch, ins, **_tensor(asm, ins, operands[0], rank, mode))
    if spaces == ["global", "shared::cta"]:
        redop = next((m for m in flags if m in INTEGER_OPS), "") if reduction else ""
        if left - {redop, "bulk_group"} or "bulk_group" not in left or (reduction and not redop):
            asm.refuse(ins, f"unknown or missing modifiers: {', '.join(sorted(left)) or 'none'}")
        if mode not in _STORE_MODES or len(operands) != 2:
            asm.refuse(ins, f"no such store mode or operands (.{mode})")
        source = asm.address_row(operands[1], "u")
        return asm.macro(do_store, ins, src=source, redop=redop, **_tensor(asm, ins, operands[0], rank, mode))
    if spaces not in (["shared::cluster", "global"], ["shared::cta", "global"]) or reduction:
        asm.refuse(ins, f"no tensor copy to {' from '.join(spaces) or 'nowhere'}")
    known = {COMPLETE_TX, "multicast::cluster", "cta_group::1", "cta_group::2"}
    if left - known or COMPLETE_TX not in left or mode not in _LOAD_MODES:
        asm.refuse(ins, f"unknown or missing modifiers: {', '.join(sorted(left - known)) or COMPLETE_TX}")
    if "multicast::cluster" in left and spaces[0] == "shared::cta":
        asm.refuse(ins, ".multicast::cluster needs a destination in .shared::cluster")
    target, tensor, barrier, *more = operands
    offsets: list[int] = []
    if mode.startswith("im2col"):
        offsets = asm.vector_rows(more.pop(0), "u") if more and isinstance(more[0], Vector) else []
        if mode in _WIDE and len(offsets) != 2:
            asm.refuse(ins, f".{mode} accepts {{wHalo, wOffset}}")
        if mode == "im2col" and len(offsets) != rank - 2:
            asm.refuse(ins, f"im2col of a {rank}-D tensor needs {rank - 2} offsets")
    cta_mask = asm.src(more.pop(0), "u") if "multicast::cluster" in left else None
    if more:
        asm.refuse(ins, f"{len(ins.operands)} operands")
    return asm.macro(
        do_load,
        ins,
        dst=asm.address_row(target, "u"),
        barrier=shared_operand(asm, barrier, "shared"),
        cta_mask=cta_mask,
        pair="cta_group::2" in left,
        offsets=offsets,
        **_tensor(asm, ins, tensor, rank, mode),
    )


def _tensor(asm, ins, operand, rank: int, mode: str) -> dict:
    """Returns the operands of `[map, {coordinates}]`."""
    wanted = 5 if mode in _FOUR else rank
    if not isinstance(operand, Address) or len(operand.coords) != wanted or (mode in _FOUR and rank != 2):
        asm.refuse(ins, f"expected [map, {{{wanted} coordinates}}] for .{rank}d.{mode}")
    if mode.startswith("im2col") and rank < 3:
        asm.refuse(ins, "im2col needs a tensor of 3 to 5 dimensions")
    return dict(
        map=asm.address_row(operand, "q"), coords=[asm.src(c, "i") for c in operand.coords], rank=rank, mode=mode
    )


# -- at run time -------------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """One copy with its map and coordinates, and its bytes of shared memory and of data."""

    map: TensorMap
    coords: tuple[int, ...]
    rows: tuple | None  # byte offsets for gather, scatter, im2col and interleaved tensors; None for other tiles
    footprint: int
    nbytes: int

    def load(self, view, shared, offset: int) -> int:
        if self.rows is None:
            return box_copy.load_tile(self.map, self.coords, view, shared, offset)
        return box_copy.load_rows(self.map, self.coords[0], self.rows, view, shared, offset)

    def take(self, shared, offset: int):
        if self.rows is None:
            return box_copy.take_tile(self.map, shared, offset)
        return box_copy.take_rows(self.map, len(self.rows), shared, offset)

    def store(self, view, box, redop: str) -> int:
        if self.rows is None:
            return box_copy.store_tile(self.map, self.coords, view, box, redop)
        return box_copy.store_rows(self.map, self.coords[0], self.rows, view, box, redop)


def tensor_map_at(w, address: int) -> TensorMap:
    if address % ALIGNMENT:
        raise w.fault("tensor-map", f"the tensor map at {address:#x} is not aligned to {ALIGNMENT} bytes")
    try:
        return from_image(w.machine.global_memory.view(address, NBYTES, "tensor map").tobytes())
    except ValueError as error:
        raise w.fault("tensor-map", f"the tensor map at {address:#x} is unusable: {error}") from None


def box_of(w, o, lane: int, offsets: tuple[int, ...] = ()) -> Box:
    if w.machine.observer is not None:
        w.machine.observer.map_used(w, int(w.Q[o.map, lane]))
    m = tensor_map_at(w, int(w.Q[o.map, lane]))
    words = [w.R.item(row, lane) for row in o.coords]
    coords = tuple(x - (x >> 31 << 32) for x in words)  # signed
    if m.rank != o.rank:
        raise w.fault("tensor-map", f"a {o.rank}-D copy with a map of {m.rank} dimensions: {m.describe()}")
    made_for = _MADE_FOR[m.im2col.wide] if m.im2col else "tile"
    if o.mode.partition("_")[0] != made_for and not (o.mode in _FOUR and made_for == "tile"):
        raise w.fault("tensor-map", f".{o.mode} with a map made for {made_for}")
    if o.mode == "tile" and not m.interleave:
        return Box(m, coords, None, box_copy.footprint(m.rows, m.packed_shape[-1], m), m.box_bytes)
    if o.mode == "tile":
        rows = tuple(box_copy.interleaved_rows(m, coords))
    elif o.mode in _FOUR:
        if m.box[1] != 1:
            raise w.fault("tensor-map", f".{o.mode} needs box_dim[1] = 1, the map has {m.box[1]}")
        rows = tuple(box_copy.gather_rows(m, coords[1:]))
    elif o.mode in _WIDE:
        halo, shift = offsets or (0, 0)
        check_wide(w, o.mode, m, coords, halo, shift)
        rows = tuple(box_copy.im2col_wide_rows(m, coords, halo, shift))
    else:
        rows = tuple(box_copy.im2col_rows(m, coords, offsets or (0,) * (m.rank - 2)))
    row_bytes = box_copy.row_bytes(m)
    return Box(m, coords, rows, box_copy.footprint(len(rows), row_bytes, m), len(rows) * row_bytes)


def check_wide(w, mode: str, m: TensorMap, coords: tuple[int, ...], halo: int, shift: int) -> None:
    end = m.dims[1] + m.im2col.upper[0]  # type: ignore[union-attr]
    if halo >= _WIDE[mode][1] or shift >= 32:
        raise w.fault(
            "coordinate", f".{mode} with wHalo {halo} and wOffset {shift}; below {_WIDE[mode][1]} and 32 are accepted"
        )
    if coords[1] >= end:
        raise w.fault("coordinate", f".{mode} at W = {coords[1]}; the bounding box ends before {end}")


def do_prefetch(w, mask, o):
    for lane in lanes(mask):
        box_of(w, o, lane)


def hopper(w) -> bool:
    return w.machine.arch.startswith("sm_90")


def do_load(w, mask, o):
    for lane in lanes(mask):
        offsets = tuple(int(x) & 0xFFFF for x in w.R[o.offsets, lane]) if o.offsets else ()
        box = box_of(w, o, lane, offsets)
        start_bits = box.coords[0] * box.map.unit_bits
        if o.mode == "tile" and start_bits % 128 and hopper(w):  # an H200: illegal instruction
            raise w.fault(
                "coordinate",
                f"a TMA load at inner coordinate {box.coords[0]}, {start_bits // 8} bytes into "
                "the row; sm_90 accepts multiples of 16 bytes",
            )
        if box.map.data_type is DataType.U6_ALIGN16B and box.map.swizzle is Swizzle.B128_ATOM_64B:
            raise w.fault("tensor-map", "U6_ALIGN16B with swizzle B128_ATOM_64B can be stored, not loaded")
        if w.machine.observer is not None:
            w.machine.observer.box_loaded(w, box)
        cta_mask = None if o.cta_mask is None else int(w.R[o.cta_mask, lane]) & 0xFFFF
        targets = destinations(
            w,
            int(w.R[o.dst, lane]),
            box.footprint,
            o.barrier,
            lane,
            cta_mask,
            "TMA load",
            box_copy.SHARED_ALIGNMENT,
            o.pair,
        )
        start(
            w,
            lane,
            "TMA load",
            functools.partial(_land, w.machine.global_memory, box, targets, Issuer(w, "the TMA load")),
            signals=tuple(barrier for _, _, barrier in targets),
            reads=(("tensor", box),),
            writes=tuple(("shared", cta, at, at + box.footprint) for cta, at, _ in targets),
            nbytes=box.nbytes,
        )


def _land(memory, box: Box, targets, who) -> None:
    for cta, offset, barrier in targets:
        box.load(memory.view, cta.shared, offset)
        barrier.complete_tx(box.nbytes, who)


def copies(w, mask, o) -> list[int]:
    """Returns the lanes that each make a copy. Lanes of a warp that store the same box make one copy together.
    Reductions do not: what hardware adds for 32 equal lanes has not been measured."""
    if o.redop or mask & mask - 1 == 0:
        return lanes(mask)
    seen: dict[tuple[int, ...], int] = {}
    for lane in lanes(mask):
        operands = w.Q.item(o.map, lane), w.R.item(o.src, lane), *(w.R.item(row, lane) for row in o.coords)
        seen.setdefault(operands, lane)
    return list(seen.values())


def do_store(w, mask, o):
    for lane in copies(w, mask, o):
        box = box_of(w, o, lane)
        if box.map.data_type is DataType.U4_ALIGN16B:
            raise w.fault("tensor-map", f"{box.map.data_type.name} can be loaded, not stored")
        if min(box.coords) < 0 and hopper(w):  # an H200: illegal instruction
            raise w.fault("coordinate", f"a TMA store at {box.coords}; sm_90 stores no box that begins before it")
        cta, offset = shared_bytes(w, int(w.R[o.src, lane]), box.footprint, "TMA store", box_copy.SHARED_ALIGNMENT)
        store_in_two(
            w,
            lane,
            "TMA reduction" if o.redop else "TMA store",
            functools.partial(box.take, cta.shared, offset),
            functools.partial(_leave, w.machine.global_memory, box, o.redop),
            (("shared", cta, offset, offset + box.footprint),),
            (("tensor", box),),
        )


def _leave(memory, box: Box, redop: str, data) -> None:
    box.store(memory.view, data, redop)
