"""Runs a test kernel under every order of completion and demands the same answer each time."""

from dataclasses import dataclass, field

import numpy as np

import softsm.engine.launch as engine
from softsm.memory.tensor_map import encode_im2col, encode_tiled

ORDERS = [("eager", 0), ("latest", 0), ("random", 1), ("random", 2)]


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
    """A spin loop on an mbarrier's phase."""
    return f"""{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p10, [{barrier}], {parity};
@!%p10 bra {label};
"""


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
        if "pixels" in self.options:
            rest = dict(self.options)
            corners = rest.pop("lower"), rest.pop("upper")
            columns = self.box[0], rest.pop("pixels")
            shape = len(self.dims), address, self.dims, self.strides
            return encode_im2col(self.kind, *shape, *corners, *columns, **rest)
        return encode_tiled(
            self.kind, len(self.dims), address, self.dims, self.strides, self.box, **self.options
        )


def run(text, args, *, grid=1, block=32, cluster=1, shared=0, orders=ORDERS):
    """Launch with fresh copies of the arrays under each order; returns the arrays of the first launch."""
    kernel = engine.load(text)
    first = None
    for order, seed in orders:
        mine = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        mine = [a.encode(mine[a.of].ctypes.data) if isinstance(a, Map) else a for a in mine]
        kernel.launch(grid, block, mine, cluster=cluster, shared=shared, order=order, seed=seed)
        arrays = [a for a in mine if isinstance(a, np.ndarray)]
        if first is None:
            first = arrays
        else:
            for got, wanted in zip(arrays, first):
                np.testing.assert_array_equal(got, wanted, err_msg=f"order {order}, seed {seed}")
    return first[0] if len(first) == 1 else first


def words(n, fill=0):
    return np.full(n, fill, np.uint32)
