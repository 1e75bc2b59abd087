"""A format of rows that is not in the package: 512 int8, one ue8m0 for every 32, each row's scales behind its data.

One class and its unpack function: no kernel knows it.
"""

import torch
from torch import Tensor

from dsv4.caches.formats import RowFormat, ceil_log2
from dsv4.caches.kernels.unpack import panel_scales
from dsv4.kernels.compat import gl, gluon


@gluon.jit
def byte_of(x, s, I: gl.constexpr):
    """Return the bits, in bf16, of byte I of each word, an int8, times its scale."""
    value = ((x << (24 - 8 * I)) >> 24).to(gl.float32) * s
    return value.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF


@gluon.jit
def unpack_toy(x, scales, FIRST: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout)))[None, None, :]
    exponent = (panel_scales(x, scales, FIRST, FORMAT) >> (word // 8 * 8)) & 255  # 8 words of 4 to a scale
    x, s = gl.broadcast(x, (exponent << 23).to(gl.float32, bitcast=True))
    a = byte_of(x, s, 0) | (byte_of(x, s, 1) << 16)
    b = byte_of(x, s, 2) | (byte_of(x, s, 3) << 16)
    return gl.join(a, b).reshape([x.shape[0], x.shape[1], 32])


class ToyRows(RowFormat):
    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.float().view(len(rows), self.groups, self.group)
        exponent = ceil_log2(groups.abs().amax(-1).clamp_min(1e-4) / 127)
        codes = torch.ldexp(groups, -exponent[..., None]).round()
        return codes.to(torch.int8).view(torch.uint8).flatten(1), (exponent + 127).to(torch.uint8)

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        codes = data.contiguous().view(torch.int8).float().unflatten(1, (self.groups, self.group))
        return torch.ldexp(codes, scales.int()[..., None] - 127).flatten(1).to(dtype)

    @property
    def unpack(self):
        return unpack_toy


TOY = ToyRows("toy", values=512, coded=512, code_bits=8, group=32, scale_bytes=16, stride_unit=16, interleaved=True)
