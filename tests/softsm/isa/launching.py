"""Runs a test kernel on softsm, under every order of completion, and on a GPU where one is: all must agree."""

import ctypes
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import silicon

import softsm.engine.launch as engine
from softsm.errors import Fault
from softsm.memory.tensor_map_image import encode_im2col, encode_im2col_wide, encode_tiled

ORDERS = [("eager", 0), ("latest", 0), ("random", 1), ("random", 2)]


# -- PTX -----------------------------------------------------------------------------------------------------------


def ptx(body, params="out", *, target="sm_90a", version="8.0", shared="", directives="", registers=16):
    """A kernel `k` with 64-bit parameters loaded into %rd1, %rd2, ... and lane/thread numbers at hand.

    %r1 = %tid.x, %p1 = (tid == 0). Names in `params` ending in '!' are 128-byte tensor maps: %rdN is their address.
    """
    names = params.split()
    declared, loads = [], []
    for i, name in enumerate(names, 1):
        if name.endswith("!"):
            declared.append(f".param .align 128 .b8 {name[:-1]}[128]")
            loads.append(f"mov.b64 %rd{i}, {name[:-1]};\ncvta.param.u64 %rd{i}, %rd{i};")
        else:
            declared.append(f".param .u64 {name}")
            loads.append(f"ld.param.u64 %rd{i}, [{name}];\ncvta.to.global.u64 %rd{i}, %rd{i};")
    lines = "\n".join(loads)
    return f"""
.version {version}
.target {target}
.address_size 64
.visible .entry k({", ".join(declared)}) {directives}
{{
.reg .b16 %rs<4>; .reg .b32 %r<{registers + 24}>; .reg .b64 %rd<{registers + 16}>; .reg .pred %p<12>;
{shared}
{lines}
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
{body}
ret;
}}
"""


def store(value, index="%r1", out="%rd1", kind="u32"):
    """out[index] = value, through registers kept for this."""
    size = 8 if kind.endswith("64") else 4
    return f"""mul.wide.u32 %rd30, {index}, {size};
add.s64 %rd30, {out}, %rd30;
st.global.{kind} [%rd30], {value};
"""


def wait(barrier, parity, label):
    """A spin loop on an mbarrier's phase. It gives up after a while: a GPU has no deadlock report."""
    return f"""mov.u32 %r39, 0;
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p10, [{barrier}], {parity};
@%p10 bra {label}_OVER;
add.u32 %r39, %r39, 1;
setp.lt.u32 %p11, %r39, 100000;
@%p11 bra {label};
{label}_OVER:
"""


def words(n, fill=0):
    return np.full(n, fill, np.uint32)


# -- arguments -----------------------------------------------------------------------------------------------------


@dataclass
class Map:
    """A tensor-map argument over the array that is argument number `of`: the driver's arguments but for the address."""

    of: int
    kind: int
    dims: tuple
    strides: tuple
    box: tuple
    options: dict = field(default_factory=dict)

    def encode(self, address):
        rest = dict(self.options)
        shape = self.kind, len(self.dims), address, self.dims, self.strides
        if "mode" in rest:
            corners = rest.pop("lower")[0], rest.pop("upper")[0]
            return encode_im2col_wide(*shape, *corners, self.box[0], rest.pop("pixels"), **rest)
        if "pixels" in rest:
            corners = rest.pop("lower"), rest.pop("upper")
            return encode_im2col(*shape, *corners, self.box[0], rest.pop("pixels"), **rest)
        return encode_tiled(*shape, self.box, **rest)

    def encode_by_driver(self, device, address):
        """cuTensorMapEncodeTiled or -Im2col: an aligned ctypes buffer."""
        rank, options = len(self.dims), self.options
        raw = ctypes.create_string_buffer(256)
        image = (ctypes.c_char * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)

        def listed(kind, values):
            return (kind * max(len(values), 1))(*values)

        def enum(name):
            return ctypes.c_int(int(options.get(name, 0)))

        shape = (image, ctypes.c_int(int(self.kind)), ctypes.c_uint32(rank), ctypes.c_void_p(address))
        shape += (listed(ctypes.c_uint64, self.dims), listed(ctypes.c_uint64, self.strides))
        if "pixels" in options:
            corners = listed(ctypes.c_int, options["lower"]), listed(ctypes.c_int, options["upper"])
            extent = (*corners, ctypes.c_uint32(self.box[0]), ctypes.c_uint32(options["pixels"]))
        else:
            extent = (listed(ctypes.c_uint32, self.box),)
        steps = listed(ctypes.c_uint32, options.get("element_strides") or (1,) * rank)
        modes = enum("interleave"), enum("swizzle"), ctypes.c_int(2), enum("oob_fill")
        name = "cuTensorMapEncodeIm2col" if "pixels" in options else "cuTensorMapEncodeTiled"
        device.call(name, *shape, *extent, steps, *modes)
        return image


class Scratch(np.ndarray):
    """An array the kernel may use but whose contents are not part of the answer."""


def scratch(nbytes):
    return np.zeros(nbytes, np.uint8).view(Scratch)


def answers(arrays):
    return [a for a in arrays if isinstance(a, np.ndarray) and not isinstance(a, Scratch)]


def aligned(array):
    """A copy on a 128-byte boundary, as device memory is."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out.view(type(array))


# -- running -------------------------------------------------------------------------------------------------------


def run(text, args, *, grid=1, block=32, cluster=1, shared=0, orders=ORDERS, on_gpu=True):
    """Launch with fresh copies of the arrays under each order, and on the GPU; returns the arrays of one launch."""
    first = None
    if silicon.have_softsm():
        kernel = engine.load(text)
        for order, seed in orders:
            mine = [aligned(a) if isinstance(a, np.ndarray) else a for a in args]
            given = [a.encode(mine[a.of].ctypes.data) if isinstance(a, Map) else a for a in mine]
            kernel.launch(grid, block, given, cluster=cluster, shared=shared, order=order, seed=seed)
            first = same(first, answers(mine), f"order {order}, seed {seed}")
    device = silicon.cuda()
    if on_gpu and orders is ORDERS and device is not None and device.accepts(text):
        got = on_device(device, text, args, grid, block, cluster, shared)
        silicon.RECORD.results += sum(a.size for a in got)
        first = same(first, got, "on the GPU")
    assert first is not None, "neither softsm nor a CUDA device can run this"
    return first[0] if len(first) == 1 else first


def fails(text, code, match=None, *, block=32, cluster=1, grid=1, error=Fault, order="eager"):
    with pytest.raises(error, match=match) as caught:
        engine.load(text).launch(grid, block, [words(64)], cluster=cluster, order=order)
    assert caught.value.code == code
    return str(caught.value)


def same(first, arrays, what):
    for got, wanted in zip(arrays, first or ()):
        np.testing.assert_array_equal(got, wanted, err_msg=what)
    return first or arrays


def on_device(device, text, args, grid, block, cluster, shared):
    if cluster > 1:
        text = re.sub(r"\n\{", f"\n.explicitcluster .reqnctapercluster {cluster}, 1, 1\n{{", text, count=1)
    function, held, params = device.function(text), {}, []
    silicon.RECORD.texts.add(text)
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            held[i] = ctypes.c_uint64()
            device.call("cuMemAlloc_v2", ctypes.byref(held[i]), ctypes.c_size_t(a.nbytes))
            source = np.ascontiguousarray(a)
            device.call("cuMemcpyHtoD_v2", held[i], ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(a.nbytes))
    for i, a in enumerate(args):
        params.append(held[i] if i in held else a.encode_by_driver(device, held[a.of].value))
    addresses = (ctypes.c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
    device.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, addresses, None)
    device.call("cuCtxSynchronize")
    out = []
    for i, pointer in held.items():
        result = np.empty(args[i].shape, args[i].dtype)
        device.call("cuMemcpyDtoH_v2", ctypes.c_void_p(result.ctypes.data), pointer, ctypes.c_size_t(result.nbytes))
        device.call("cuMemFree_v2", pointer)
        out.append(result.view(type(args[i])))
    return answers(out)
