"""FP4 keys of DeepSeek-V4.1's lightning indexer as bytes, and its FP4 queries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.caches.formats import E2M1_MAX, RowFormat, ceil_log2, decode_e2m1, encode_e2m1


class Mxfp4Keys(RowFormat):
    """128 e2m1 and a scale for every 32 of them.

    128 x e2m1   values / scale, two to a byte, the first in its low bits             64 B   data row
      4 x ue8m0  scale = 2 ** ceil(log2(max(amax, 6 * 2 ** -126) / 6))                 4 B   scale row
    """

    KERNELS = {"store": "pack.store_mxfp4_key"}

    LEAST = E2M1_MAX * 2.0**-126  # a group of zeros still gets a scale

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows; a group that holds a NaN or an infinity gets the ue8m0 NaN (255) as its scale and reads
        back as NaN.
        """
        groups = rows.float().unflatten(-1, (self.groups, self.group))
        target = groups.abs().amax(-1).clamp_min(self.LEAST) / E2M1_MAX
        exponent = ceil_log2(target)
        scales = torch.where(torch.isfinite(target), exponent + 127, 255).to(torch.uint8)
        return encode_e2m1(torch.ldexp(groups, -exponent[..., None]).flatten(-2)), scales

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Dequantise rows; e2m1 times a power of two is exact in bf16."""
        groups = decode_e2m1(data).to(dtype).unflatten(-1, (self.groups, self.group))
        return (groups * scales.contiguous().view(torch.float8_e8m0fnu).to(dtype)[..., None]).flatten(-2)


INDEX_68 = Mxfp4Keys("index_68", values=128, coded=128, code_bits=4, group=32, scale_bytes=4, stride_unit=16)
