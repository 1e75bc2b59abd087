"""Register rows, lanes and memory: how 32-lane values are loaded, stored, moved between lanes and gathered."""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from softsm.engine.vec_types import (
    _I1,
    _I32,
    _I64,
    _Q_IR,
    _U_IR,
    LANES,
    XU,
    D,
    F,
    I,
    L,
    MaskType,
    Q,
    U,
    V,
    X,
    _base,
    _constant,
    _declare,
    _function,
    _row,
    _select,
    _suffix,
    _to_i32,
)

# ---------------------------------------------------------------- register rows


def _make_load(vector: V):
    @intrinsic
    def load(typingctx, file, row):
        def codegen(context, b, sig, args):
            return b.load(_row(context, b, sig.args[0], args[0], args[1], vector), align=8)

        return vector(file, types.unliteral(row)), codegen

    return load


ldU, ldI, ldF, ldQ, ldL, ldD = (_make_load(v) for v in (U, I, F, Q, L, D))


def _masked_store(b, bits_ir: ir.VectorType):
    """store_masked(pointer, mask, value): the path for partly active warps, out of line."""

    def body(k, arguments):
        p, m, value = arguments
        k.store(_select(k, m, types.uint32, value, k.load(p, align=8)), p, align=8)
        k.ret_void()

    return _function(b, f"softsm_store_{_suffix(bits_ir)}", ir.VoidType(), [bits_ir.as_pointer(), _I32, bits_ir], body)


@intrinsic
def vst(typingctx, file, row, m, v):
    """Write the lanes of mask m (uint32) of one register row. The full mask is a plain store."""
    assert isinstance(v, V), f"vst of {v}"

    def codegen(context, b, sig, args):
        file_ty = sig.args[0]
        m, value = args[2], args[3]
        bits_ir = _Q_IR if v.ir in (Q.ir, D.ir, X.ir, XU.ir) else _U_IR
        value = b.bitcast(value, bits_ir)
        p = _row(context, b, file_ty, args[0], args[1], Q if bits_ir is _Q_IR else U)
        with b.if_else(b.icmp_unsigned("==", m, _I32(0xFFFFFFFF)), likely=True) as (full, partial):
            with full:
                b.store(value, p, align=8)
            with partial:
                b.call(_masked_store(b, bits_ir), [p, m, value])
        return context.get_dummy_value()

    return types.void(file, types.unliteral(row), types.uint32, v), codegen


@intrinsic
def pld(typingctx, file, row):
    """A predicate register: uint32."""

    def codegen(context, b, sig, args):
        row = b.zext(args[1], _I64) if args[1].type.width < 64 else args[1]
        return b.load(b.gep(_base(context, b, sig.args[0], args[0], _I32), [row], inbounds=True), align=4)

    return types.uint32(file, types.unliteral(row)), codegen


@intrinsic
def pst(typingctx, file, row, m, value):
    """Write the lanes of mask m of a predicate register; value is M or uint32."""

    def codegen(context, b, sig, args):
        row = b.zext(args[1], _I64) if args[1].type.width < 64 else args[1]
        p = b.gep(_base(context, b, sig.args[0], args[0], _I32), [row], inbounds=True)
        m, new = args[2], _to_i32(b, args[3], sig.args[3])
        old = b.load(p, align=4)
        b.store(b.xor(old, b.and_(b.xor(old, new), m)), p, align=4)
        return context.get_dummy_value()

    value_ty = value if isinstance(value, MaskType) else types.uint32
    return types.void(file, types.unliteral(row), types.uint32, value_ty), codegen


# ---------------------------------------------------------------- lanes


@intrinsic
def lanes(typingctx):
    """0, 1, .. 31 as U."""
    return U(), lambda context, b, sig, args: ir.Constant(_U_IR, list(range(LANES)))


@intrinsic
def lane_get(typingctx, x, i):
    """Element i (any integer) of a vector, as a scalar."""

    def codegen(context, b, sig, args):
        i = args[1]
        i = b.trunc(i, _I32) if i.type.width > 32 else i
        return b.extract_element(args[0], b.and_(i, i.type(x.count - 1)))

    return x.element(x, types.unliteral(i)), codegen


@intrinsic(prefer_literal=True)
def xor_lanes(typingctx, x, k):
    """Lane i gets lane i^k; k a literal. A fixed exchange: much cheaper than permute."""
    step = k.literal_value

    def codegen(context, b, sig, args):
        order = ir.Constant(_U_IR, [i ^ step for i in range(LANES)])
        return b.shuffle_vector(args[0], ir.Constant(x.ir, ir.Undefined), order)

    return x(x, k), codegen


@intrinsic
def permute(typingctx, x, index):
    """Lane i gets lane index[i] & 31."""
    bits = _Q_IR if x.element.bitwidth == 64 else _U_IR

    def body(k, arguments):
        source, out, index = arguments
        index = k.and_(index, _constant(U, 31))
        result = ir.Constant(bits, ir.Undefined)
        for i in range(LANES):
            element = k.load(k.gep(source, [k.zext(k.extract_element(index, _I32(i)), _I64)], inbounds=True))
            result = k.insert_element(result, element, _I32(i))
        k.store(result, out, align=8)
        k.ret_void()

    def codegen(context, b, sig, args):
        source, out = cgutils.alloca_once(b, bits), cgutils.alloca_once(b, bits)
        b.store(b.bitcast(args[0], bits), source, align=8)
        fn = _function(b, f"softsm_permute_{_suffix(bits)}", ir.VoidType(),
                       [bits.element.as_pointer(), bits.as_pointer(), _U_IR], body)
        b.call(fn, [b.bitcast(source, bits.element.as_pointer()), out, args[1]])
        return b.bitcast(b.load(out, align=8), x.ir)

    return x(x, U), codegen


@intrinsic(prefer_literal=True)
def strided_load(typingctx, address, n, k):
    """Every n-th uint32 from a raw address on, starting with the k-th, as U; n and k are literals."""
    step, first = n.literal_value, k.literal_value
    whole = ir.VectorType(_I32, step * LANES)

    def codegen(context, b, sig, args):
        v = b.load(b.inttoptr(args[0], whole.as_pointer()), align=4)
        order = ir.Constant(_U_IR, [first + step * i for i in range(LANES)])
        return b.shuffle_vector(v, ir.Constant(whole, ir.Undefined), order)

    return U(types.int64, n, k), codegen


@intrinsic(prefer_literal=True)
def strided_store(typingctx, address, x, y, z, w, n):
    """Two or four (n, a literal) U written lane by lane, one after the other, to a raw address."""
    parts = n.literal_value

    def codegen(context, b, sig, args):
        values = list(args[1 : 1 + parts])
        while len(values) > 1:  # join neighbours until one vector is left: x y z w, 32 lanes each
            values = [_joined(b, values[i], values[i + 1]) for i in range(0, len(values), 2)]
        order = [part * LANES + lane for lane in range(LANES) for part in range(parts)]
        whole = values[0].type
        v = b.shuffle_vector(values[0], ir.Constant(whole, ir.Undefined),
                             ir.Constant(ir.VectorType(_I32, len(order)), order))
        b.store(v, b.inttoptr(args[0], whole.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, U, U, U, U, n), codegen


def _joined(b, x, y):
    n = x.type.count
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, 2 * n), list(range(2 * n))))


# ---------------------------------------------------------------- memory by address


def _lane_loop(k, mask, touch):
    """Call touch(builder, lane number) for every set bit of mask, lowest first."""
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
    """touch(builder, lane) for the lanes of mask: unrolled when all are active."""
    full, partial = k.append_basic_block("full"), k.append_basic_block("partial")
    k.cbranch(k.icmp_unsigned("==", mask, _I32(0xFFFFFFFF)), full, partial)
    k.position_at_end(full)
    for i in range(LANES):
        touch(k, _I64(i))
    k.ret_void()
    k.position_at_end(partial)
    _lane_loop(k, mask, touch)
    k.ret_void()


def _at(k, addresses, i):
    """Pointer to the word lane i names."""
    return k.inttoptr(k.load(k.gep(addresses, [i], inbounds=True)), _I32.as_pointer())


def _by_address(b, name: str, touch, address, mask, values) -> None:
    """Call the out-of-line function `name`: touch(builder, lane, addresses, values) for every active lane."""
    where = cgutils.alloca_once(b, _Q_IR)
    b.store(address, where, align=8)

    def body(k, arguments):
        addresses, m, words = arguments
        _each_lane(k, m, lambda k, i: touch(k, i, addresses, words))

    fn = _function(b, name, ir.VoidType(), [_I64.as_pointer(), _I32, _I32.as_pointer()], body)
    b.call(fn, [b.bitcast(where, _I64.as_pointer()), mask, b.bitcast(values, _I32.as_pointer())])


@intrinsic
def gather32(typingctx, address, m):
    """Words at raw addresses (Q) for the lanes of m (uint32); inactive lanes give 0."""

    def touch(k, i, addresses, words):
        k.store(k.load(_at(k, addresses, i), align=1), k.gep(words, [i], inbounds=True))

    def codegen(context, b, sig, args):
        out = cgutils.alloca_once(b, _U_IR)
        b.store(ir.Constant(_U_IR, None), out, align=8)
        _by_address(b, "softsm_gather32", touch, args[0], args[1], out)
        return b.load(out, align=8)

    return U(Q, types.uint32), codegen


@intrinsic
def scatter32(typingctx, address, m, v):
    """Words of v (U) to raw addresses (Q); lanes in rising order, so the highest lane wins a collision."""

    def touch(k, i, addresses, words):
        k.store(k.load(k.gep(words, [i], inbounds=True)), _at(k, addresses, i), align=1)

    def codegen(context, b, sig, args):
        source = cgutils.alloca_once(b, _U_IR)
        b.store(args[2], source, align=8)
        _by_address(b, "softsm_scatter32", touch, args[0], args[1], source)
        return context.get_dummy_value()

    return types.void(Q, types.uint32, U), codegen


@functools.cache
def external_bank(symbol: str):
    """For Numba code: call a bank (see engine/build.py) by its symbol. Seven uint32 and three addresses."""
    arguments = [types.uint32] * 7 + [types.int64] * 3

    def codegen(context, b, sig, args):
        b.call(_declare(b, symbol, ir.VoidType(), [_I32] * 7 + [_I64] * 3), args)
        return context.get_dummy_value()

    @intrinsic
    def call(typingctx, op, rd, ra, rb, rc, rx, m, R, Q, P):
        return types.void(*arguments), codegen

    return call


@intrinsic
def call_lane_operation(typingctx, function, op, rd, ra, rb, rc, rx, m, S, pc):
    """Call the native function at an address: seven uint32, the state vector and pc; it returns an int64."""
    arguments = [types.uint32] * 7 + [types.int64] * 2

    def codegen(context, b, sig, args):
        native = ir.FunctionType(_I64, [_I32] * 7 + [_I64] * 2).as_pointer()
        return b.call(b.inttoptr(args[0], native), args[1:])

    return types.int64(types.int64, *arguments), codegen
