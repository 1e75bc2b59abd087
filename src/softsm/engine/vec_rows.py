"""Register rows, lanes and memory: how 32-lane values are loaded, stored, moved between lanes and gathered.

Register files are raw addresses (i64); a row is 32 elements.
"""

from __future__ import annotations

from llvmlite import ir

from softsm.engine.vec_types import (
    _I1,
    _I32,
    _I64,
    FULL,
    LANES,
    Bits,
    Kind,
    Mask,
    Q,
    U,
    Vector,
    _alloca,
    _concat,
    _declare,
    _function,
    _select_bits,
    _splat,
    _suffix,
    first_lane,
    here,
    width,
)

# ---------------------------------------------------------------- register rows


def _row(file: ir.Value, row: ir.Value, kind: Kind):
    """Returns a pointer to a row, at the first lane of the vectors that are being built."""
    b = here()
    row = b.zext(row, _I64) if row.type.width < 64 else row
    per_row = LANES * kind.bits * kind.per_lane // 8
    at = b.add(file, b.mul(row, _I64(per_row)))
    if first_lane() is not None:
        at = b.add(at, b.mul(first_lane(), _I64(per_row // LANES)))
    return b.inttoptr(at, kind.ir.as_pointer())


def load_row(file: ir.Value, row: ir.Value, kind: Kind) -> Vector:
    return Vector(here().load(_row(file, row, kind), align=8), kind)


def _masked_store(b, bits_ir: ir.VectorType):
    """Returns the out-of-line function (pointer, mask, value) that stores for partly active warps."""

    def body(k, arguments):
        p, m, value = arguments
        k.store(_select_bits(k, m, value, k.load(p, align=8)), p, align=8)
        k.ret_void()

    return _function(b, f"softsm_store_{_suffix(bits_ir)}", ir.VoidType(), [bits_ir.as_pointer(), _I32, bits_ir], body)


def store_row(file: ir.Value, row: ir.Value, m: Bits, v: Vector) -> None:
    """Writes the lanes of mask m of one register row. The full mask is a plain store."""
    b = here()
    kind = Q if v.kind.bits * v.kind.per_lane == 64 else U
    value, p = b.bitcast(v.value, kind.ir), _row(file, row, kind)
    if isinstance(m.value, ir.Constant):
        b.store(value, p, align=8)
        return
    with b.if_else(b.icmp_unsigned("==", m.value, _I32(FULL)), likely=True) as (full, partial):
        with full:
            b.store(value, p, align=8)
        with partial:
            b.call(_masked_store(b, kind.ir), [p, m.value, value])


def _predicate(file: ir.Value, row: ir.Value):
    b = here()
    row = b.zext(row, _I64) if row.type.width < 64 else row
    return b.inttoptr(b.add(file, b.shl(row, _I64(2))), _I32.as_pointer())


def load_predicate(file: ir.Value, row: ir.Value) -> Bits:
    return Bits(here().load(_predicate(file, row), align=4))


def store_predicate(file: ir.Value, row: ir.Value, m: Bits, value) -> None:
    """Writes the lanes of mask m of a predicate register; value is Mask or Bits."""
    b, p = here(), _predicate(file, row)
    new = b.bitcast(value.value, _I32) if isinstance(value, Mask) else value.value
    old = b.load(p, align=4)
    b.store(b.xor(old, b.and_(b.xor(old, new), m.value)), p, align=4)


# ---------------------------------------------------------------- lanes


def lanes() -> Vector:
    """Returns 0, 1, .. 31 as U."""
    numbers = ir.Constant(U.ir, list(range(width())))
    if first_lane() is None:
        return Vector(numbers, U)
    first = _splat(here(), here().trunc(first_lane(), _I32), width())
    return Vector(here().add(numbers, first), U)


def lane_get(x: Vector, i: int) -> ir.Value:
    """Returns element i of a vector, as a scalar."""
    return here().extract_element(x.value, _I32(i))


def xor_lanes(x: Vector, k: int) -> Vector:
    """Gives lane i the value of lane i^k. The exchange is fixed, so it is much cheaper than permute."""
    order = ir.Constant(ir.VectorType(_I32, LANES), [i ^ k for i in range(LANES)])
    return Vector(here().shuffle_vector(x.value, ir.Constant(x.value.type, ir.Undefined), order), x.kind)


def permute(x: Vector, index: Vector) -> Vector:
    """Gives lane i the value of lane index[i] & 31."""
    b = here()
    kind = Q if x.kind.bits == 64 else U
    bits = kind.ir

    def body(k, arguments):
        source, out, index = arguments
        index = k.and_(index, ir.Constant(index.type, [31] * LANES))
        result = ir.Constant(bits, ir.Undefined)
        for i in range(LANES):
            element = k.load(k.gep(source, [k.zext(k.extract_element(index, _I32(i)), _I64)], inbounds=True))
            result = k.insert_element(result, element, _I32(i))
        k.store(result, out, align=8)
        k.ret_void()

    source, out = _alloca(b, bits), _alloca(b, bits)
    b.store(b.bitcast(x.value, bits), source, align=8)
    fn = _function(
        b,
        f"softsm_permute_{_suffix(bits)}",
        ir.VoidType(),
        [bits.element.as_pointer(), bits.as_pointer(), index.value.type],
        body,
    )
    b.call(fn, [b.bitcast(source, bits.element.as_pointer()), out, index.value])
    return Vector(b.bitcast(b.load(out, align=8), x.value.type), x.kind)


# ---------------------------------------------------------------- memory by address


def strided_load(address: ir.Value, step: int, first: int) -> Vector:
    """Loads every step-th uint32 from a raw address on, starting with number `first`."""
    b, whole = here(), ir.VectorType(_I32, step * LANES)
    v = b.load(b.inttoptr(address, whole.as_pointer()), align=4)
    order = ir.Constant(U.ir, [first + step * i for i in range(LANES)])
    return Vector(b.shuffle_vector(v, ir.Constant(whole, ir.Undefined), order), U)


def strided_store(address: ir.Value, parts: list[Vector]) -> None:
    """Writes one, two or four U to a raw address, interleaved by lane."""
    b, n = here(), len(parts)
    values = [part.value for part in parts]
    while len(values) > 1:  # join neighbours until one vector is left: x y z w, 32 lanes each
        values = [_concat(b, values[i], values[i + 1]) for i in range(0, len(values), 2)]
    order = [part * LANES + lane for lane in range(LANES) for part in range(n)]
    whole = values[0].type
    order = ir.Constant(ir.VectorType(_I32, len(order)), order)
    v = b.shuffle_vector(values[0], ir.Constant(whole, ir.Undefined), order)
    b.store(v, b.inttoptr(address, whole.as_pointer()), align=4)


def _lane_loop(k, mask, touch):
    """Calls touch(builder, lane number) for every set bit of mask, lowest first."""
    entry, loop, done = k.block, k.append_basic_block("loop"), k.append_basic_block("done")
    k.cbranch(k.icmp_unsigned("==", mask, _I32(0)), done, loop)
    k.position_at_end(loop)
    left = k.phi(_I32)
    left.add_incoming(mask, entry)
    cttz = _declare(k, "llvm.cttz.i32", _I32, [_I32, _I1])
    touch(k, k.zext(k.call(cttz, [left, _I1(1)]), _I64))
    rest = k.and_(left, k.sub(left, _I32(1)))
    left.add_incoming(rest, k.block)
    k.cbranch(k.icmp_unsigned("==", rest, _I32(0)), done, loop)
    k.position_at_end(done)


def _each_lane(k, mask, touch):
    """Calls touch(builder, lane) for the lanes of mask, unrolled when all are active."""
    full, partial = k.append_basic_block("full"), k.append_basic_block("partial")
    k.cbranch(k.icmp_unsigned("==", mask, _I32(FULL)), full, partial)
    k.position_at_end(full)
    for i in range(LANES):
        touch(k, _I64(i))
    k.ret_void()
    k.position_at_end(partial)
    _lane_loop(k, mask, touch)
    k.ret_void()


def _at(k, addresses, i):
    """Returns a pointer to the word that lane i names."""
    return k.inttoptr(k.load(k.gep(addresses, [i], inbounds=True)), _I32.as_pointer())


def _by_address(b, name: str, touch, address, mask, values) -> None:
    """Calls the out-of-line function `name`: touch(builder, lane, addresses, values) for every active lane."""
    where = _alloca(b, Q.ir)
    b.store(address, where, align=8)

    def body(k, arguments):
        addresses, m, words = arguments
        _each_lane(k, m, lambda k, i: touch(k, i, addresses, words))

    fn = _function(b, name, ir.VoidType(), [_I64.as_pointer(), _I32, _I32.as_pointer()], body)
    b.call(fn, [b.bitcast(where, _I64.as_pointer()), mask, b.bitcast(values, _I32.as_pointer())])


def gather32(addresses: Vector, m: Bits) -> Vector:
    """Loads words at raw addresses (Q) for the lanes of m; inactive lanes give 0."""

    def touch(k, i, addresses, words):
        k.store(k.load(_at(k, addresses, i), align=1), k.gep(words, [i], inbounds=True))

    b = here()
    out = _alloca(b, U.ir)
    b.store(ir.Constant(U.ir, None), out, align=8)
    _by_address(b, "softsm_gather32", touch, addresses.value, m.value, out)
    return Vector(b.load(out, align=8), U)


def scatter32(addresses: Vector, m: Bits, v: Vector) -> None:
    """Stores words of v (U) at raw addresses (Q), in ascending order of lanes, so the highest lane wins a collision."""

    def touch(k, i, addresses, words):
        k.store(k.load(k.gep(words, [i], inbounds=True)), _at(k, addresses, i), align=1)

    b = here()
    source = _alloca(b, U.ir)
    b.store(v.value, source, align=8)
    _by_address(b, "softsm_scatter32", touch, addresses.value, m.value, source)
