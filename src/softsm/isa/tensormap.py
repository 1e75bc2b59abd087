"""tensormap.replace and tensormap.cp_fenceproxy: tensor maps made and changed by the kernel itself."""

from __future__ import annotations

from softsm.isa.operands import lanes, located, shared_address, shared_bytes, shared_operand
from softsm.isa.registry import lowers
from softsm.isa.typed import needs_target
from softsm.memory.tensor_map_image import ALIGNMENT, NBYTES, replace_field
from softsm.ptx.ast import Imm

_FENCEPROXY = ("cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release")
_INDEXED = ("box_dim", "global_dim", "global_stride", "element_stride")
_WIDE = ("global_address", "global_stride")
_PLAIN = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")


@lowers("tensormap")
def tensormap(asm, ins):
    if ins.modifiers[:2] == ("replace", "tile"):
        return _replace(asm, ins, list(ins.modifiers[2:]))
    if ins.modifiers[:5] == _FENCEPROXY and ins.modifiers[6:] == ("sync", "aligned"):
        if ins.modifiers[5] not in ("cta", "cluster", "gpu", "sys") or int(ins.operands[2].value) != NBYTES:
            asm.refuse(ins, "expected a scope, and 128 bytes")
        target, source, _ = ins.operands
        return asm.macro(do_cp_fenceproxy, ins, dst=asm.address_row(target, "q"), src=asm.address_row(source, "u"))
    return asm.refuse(ins, "expected tensormap.replace.tile or tensormap.cp_fenceproxy")


def _replace(asm, ins, mods):
    field, *rest = mods
    space = rest[0] if rest[0] in ("global", "shared::cta") else None
    kind = "b64" if field in _WIDE else "b32"
    if field not in _INDEXED + _PLAIN or rest[1 if space else 0 :] != ["b1024", kind]:
        asm.refuse(ins, f"expected a field and {{.global, .shared::cta}}.b1024.{kind}")
    if field == "swizzle_atomicity":
        needs_target(asm, ins, 100)
    address, *operands = ins.operands
    ordinal = 0
    if field in _INDEXED:
        if len(operands) != 2 or not isinstance(operands[0], Imm):
            asm.refuse(ins, f".{field} needs a constant ordinal and a value")
        ordinal = int(operands.pop(0).value)
    if len(operands) != 1:
        asm.refuse(ins, f"{len(ins.operands)} operands")
    wide = kind == "b64"
    asm.macro(
        do_replace,
        ins,
        at=shared_operand(asm, address, space) if space == "shared::cta" else asm.address_row(address, "q"),
        shared=space == "shared::cta",
        field=field,
        ordinal=ordinal,
        value=asm.src(operands[0], "q" if wide else "u"),
        wide=wide,
    )


def do_replace(w, mask, o):
    for lane in lanes(mask):
        if o.shared:
            cta, offset = shared_bytes(w, shared_address(w, o.at, lane), NBYTES, "tensormap.replace", ALIGNMENT)
            if w.machine.observer is not None:
                w.machine.observer.accessed_shared(w, cta, offset, offset + NBYTES, True)
            image = cta.shared[offset : offset + NBYTES]
        else:
            image = _global(w, int(w.Q[o.at, lane]))
            if w.machine.observer is not None:
                w.machine.observer.map_written(w, int(w.Q[o.at, lane]), released=False)
        try:
            replace_field(image, o.field, o.ordinal, int((w.Q if o.wide else w.R)[o.value, lane]))
        except ValueError as error:
            raise w.fault("tensor-map", f"tensormap.replace: {error}") from None
    w.machine.writes += 1


def _global(w, address: int):
    if address % ALIGNMENT:
        raise w.fault("misaligned", f"the tensor map at {address:#x} is not aligned to {ALIGNMENT} bytes")
    return located(w, w.machine.global_memory.view, address, NBYTES, "tensor map")


def do_cp_fenceproxy(w, mask, o):
    """Copies one 128-byte map from shared to global memory and publishes it, as one operation of the warp."""
    lane = lanes(mask)[0]
    cta, offset = shared_bytes(w, int(w.R[o.src, lane]), NBYTES, "tensormap.cp_fenceproxy", ALIGNMENT)
    if w.machine.observer is not None:
        w.machine.observer.accessed_shared(w, cta, offset, offset + NBYTES, False)
        w.machine.observer.map_written(w, int(w.Q[o.dst, lane]), released=True)
    _global(w, int(w.Q[o.dst, lane]))[:] = cta.shared[offset : offset + NBYTES]
    w.machine.writes += 1
