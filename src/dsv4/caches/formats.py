"""Row formats: the bytes of a row, their meaning, how they are written and read. One class per format.

A packed row is a data row and a scale row. The first `coded` of its values are codes of `code_bits` bits, one scale for
every `group` of them; the others are bf16. A page of R rows has them in one of two orders:

    planar        [ R data rows | R scale rows | padding ]
    interleaved   [ R x (data row, scale row) | padding ]

Kernels receive a format as a constexpr. Kernels read its sizes and call its functions, so a new format is a new
class and, if kernels are to read it, an `unpack` function; no kernel names one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

PANEL = 64  # values that kernels unpack at a time
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0 to 7; codes 8 to 15 are their negatives


@dataclass(frozen=True, eq=False)
class RowFormat:
    """Sizes of a row. There is one object per name: it is compared and hashed as such."""

    name: str
    values: int  # values of a row
    coded: int  # the first values, which are codes with scales; the others are bf16
    code_bits: int
    group: int  # codes that share a scale
    scale_bytes: int  # bytes of the scales of a row, with padding
    stride_unit: int  # the default page stride is a multiple of this
    interleaved: bool = False
    unpacks_smaller: ClassVar[bool] = False  # whether unpack accepts the SPEED of that name

    def __post_init__(self) -> None:
        if FORMATS.setdefault(self.name, self) is not self:
            raise ValueError(f"name: got {self.name!r}; accepted: a name that no other format has")

    # ------------------------------------------------------------------------------------------------ sizes

    @property
    def code_bytes(self) -> int:
        return self.coded * self.code_bits // 8

    @property
    def data_bytes(self) -> int:
        return self.code_bytes + 2 * (self.values - self.coded)

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def data_step(self) -> int:
        """Bytes from the data of a row to the data of the next."""
        return self.row_bytes if self.interleaved else self.data_bytes

    @property
    def scale_step(self) -> int:
        """Bytes from the scales of a row to the scales of the next."""
        return self.row_bytes if self.interleaved else self.scale_bytes

    def scales_begin(self, rows_per_page: int) -> int:
        """Return the first byte of a page's scales."""
        return self.data_bytes * (1 if self.interleaved else rows_per_page)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.coded // self.group

    @property
    def coded_panels(self) -> int:
        return self.coded // PANEL

    @property
    def panel_words(self) -> int:
        """Words of 4 bytes that hold the codes of a panel."""
        return PANEL * self.code_bits // 32

    def default_stride(self, rows_per_page: int) -> int:
        """Return the default bytes from one page to the next."""
        return -(-rows_per_page * self.row_bytes // self.stride_unit) * self.stride_unit

    # ------------------------------------------------------------------------------------------------ torch

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows [n, values] of any float dtype -> uint8 (data [n, data_bytes], scales [n, scale_bytes])."""
        raise NotImplementedError

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Dequantise uint8 (data [n, data_bytes], scales [n, scale_bytes]) -> rows [n, values]."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ kernels

    # Functions for kernels: name -> module and name in dsv4.caches.kernels. They are imported when a kernel is
    # compiled: a CPU needs no Triton.
    KERNELS: ClassVar[dict[str, str]] = {}

    @property
    def unpack(self) -> Any:
        """Gluon: (words of codes [rows, panels, panel_words], scales of the rows, FIRST panel, SPEED) -> bf16 in pairs,
        int32 [rows, panels, 32]. caches/kernels/unpack.py defines scales and SPEED."""
        return self._kernel("unpack")

    @property
    def unpack_bytes(self) -> Any:
        """Gluon: (bytes of the codes of a panel [..., 64 codes], int32: the panel's scales of each row, FORMAT) -> bf16
        [..., 64]."""
        return self._kernel("unpack_bytes")

    @property
    def store(self) -> Any:
        """Triton: fp32 rows to their places in pages, as `quantize` makes them. caches/kernels/pack.py has the
        signature. None: torch code writes rows."""
        return self._kernel("store") if "store" in self.KERNELS else None

    def _kernel(self, name: str) -> Any:
        if name not in self.KERNELS:
            raise NotImplementedError(f"{self.name} has no function `{name}` for kernels")
        module, _, function = self.KERNELS[name].partition(".")
        return getattr(importlib.import_module(f"dsv4.caches.kernels.{module}"), function)

    @property
    def cache_key(self) -> str:
        """The key for Triton's cache of compiled kernels: the sizes, and the sources of the functions."""
        functions = (getattr(self, name) for name in ("unpack", "unpack_bytes", "store") if self.has(name))
        return " ".join([repr(self), *(f.cache_key for f in functions if f is not None)])

    def has(self, name: str) -> bool:
        """Return whether the format has this function for kernels."""
        return name in self.KERNELS or getattr(type(self), name) is not getattr(RowFormat, name)


FORMATS: dict[str, RowFormat] = {}


class PlainRows(RowFormat):
    """Rows of a tensor, in its own dtype."""


class Fp8Rows(RowFormat):
    """KV rows of DeepSeek-V4: 448 e4m3, one scale for every 64, and 64 bf16, which have RoPE applied.

    448 x e4m3   values / scale                                        448 B  \\ data row, 576 B
     64 x bf16   the RoPE part, not quantised                          128 B  /
      7 x ue8m0  scale = 2 ** ceil(log2(max(amax / 448, 1e-4)))          7 B  \\ scale row, 8 B
      1 x 0      padding                                                 1 B  /
    """

    KERNELS = {"unpack": "unpack.unpack_e4m3", "unpack_bytes": "unpack.e4m3_bytes", "store": "pack.store_fp8_row"}
    MIN_SCALE = 1e-4  # an all-zero group still gets a scale

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows; a group that holds a NaN or an infinity gets the ue8m0 NaN (255) as its scale and reads
        back as NaN.
        """
        n = rows.shape[0]
        groups = rows[:, : self.coded].float().reshape(n, self.groups, self.group)
        target = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(self.MIN_SCALE)  # [n, groups]
        exponent = ceil_log2(target)
        scale_bytes = torch.where(torch.isfinite(target), exponent + 127, 255).to(torch.uint8)
        scale = scale_bytes.view(torch.float8_e8m0fnu).float()
        codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)  # |value| <= 448: never out of range
        plain = rows[:, self.coded :].to(torch.bfloat16).contiguous()
        data = torch.cat([codes.view(torch.uint8).reshape(n, self.coded), plain.view(torch.uint8)], dim=1)
        scales = torch.cat([scale_bytes, scale_bytes.new_zeros(n, self.scale_bytes - self.groups)], dim=1)
        return data, scales

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Dequantise rows; e4m3 times a power of two is exact in bf16."""
        rows = torch.empty(data.shape[0], self.values, dtype=dtype, device=data.device)
        groups = rows[:, : self.coded].unflatten(1, (self.groups, self.group))
        groups.copy_(data[:, : self.coded].contiguous().view(torch.float8_e4m3fn).view(groups.shape))
        groups *= scales[:, : self.groups].contiguous().view(torch.float8_e8m0fnu).to(dtype)[..., None]
        # copy even a single row, which is contiguous as it is: it may lie at an odd address
        rows[:, self.coded :] = data[:, self.coded :].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        return rows


class Mxfp8Rows(RowFormat):
    """KV rows of DeepSeek-V4.1's window: 512 e4m3, RoPE applied to the last 64 of them, one scale for every 32.

    512 x e4m3   values / scale                                        512 B   data row
     16 x ue8m0  scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))         16 B   scale row

    Rows of V3.2 without RoPE have 528 bytes, too, with another meaning: 4 scales in fp32. Hopper's kernels accept
    scales up to 2 ** 15; rows with greater ones, of values beyond 448 * 2 ** 15, become inf or NaN there.
    """

    KERNELS = {"unpack": "unpack.unpack_e4m3", "unpack_bytes": "unpack.e4m3_bytes", "store": "pack.store_mxfp8_row"}
    unpacks_smaller = True
    LEAST = 1e-4  # an all-zero group still gets a scale

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows; a group that holds a NaN or an infinity gets the ue8m0 NaN (255) as its scale and reads
        back as NaN.
        """
        groups = rows.float().unflatten(1, (self.groups, self.group))
        target = groups.abs().amax(-1).clamp_min(self.LEAST) / E4M3_MAX
        scales = torch.where(torch.isfinite(target), ceil_log2(target) + 127, 255).to(torch.uint8)
        codes = (groups / scales.view(torch.float8_e8m0fnu).float()[..., None]).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).flatten(1), scales

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Dequantise rows; e4m3 times a power of two is exact in bf16."""
        codes = data.contiguous().view(torch.float8_e4m3fn).to(dtype).unflatten(1, (self.groups, self.group))
        return (codes * scales.contiguous().view(torch.float8_e8m0fnu).to(dtype)[..., None]).flatten(1)


class Nvfp4Rows(RowFormat):
    """Compressed KV rows of DeepSeek-V4.1: 512 e2m1, RoPE applied to the last 64 of them, one scale for every 16.

    512 x e2m1   values / scale, two to a byte, the first in its low bits          256 B   data row
     32 x e4m3   scale = amax / 6, between 2 ** -9 and 448                          32 B   scale row

    There is no tensor scale. Values beyond 6 * 448 become 6 * 448.
    """

    KERNELS = {"unpack": "unpack.unpack_e2m1", "unpack_bytes": "unpack.e2m1_bytes", "store": "pack.store_nvfp4_row"}
    unpacks_smaller = True
    LEAST = 2.0**-9  # the smallest e4m3; a group of zeros also has it

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows; a group that holds a NaN or an infinity gets the e4m3 NaN (127) as its scale and reads
        back as NaN.
        """
        groups = rows.float().unflatten(1, (self.groups, self.group))
        target = groups.abs().amax(-1) / E2M1_MAX
        scales = target.clamp(self.LEAST, E4M3_MAX).where(torch.isfinite(target), torch.nan).to(torch.float8_e4m3fn)
        return encode_e2m1((groups / scales.float()[..., None]).flatten(1)), scales.view(torch.uint8)

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Dequantise rows; the product has 6 significant bits, so it is exact in bf16 and in fp16."""
        groups = decode_e2m1(data).to(dtype).unflatten(1, (self.groups, self.group))
        return (groups * scales.contiguous().view(torch.float8_e4m3fn).to(dtype)[..., None]).flatten(1)


class Fp8Keys(RowFormat):
    """Keys of the lightning indexer: 128 e4m3 and one scale. Readers accept any positive scale, not only powers of two.

    128 x e4m3   values / scale                                          128 B   data row
      1 x fp32   scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))            4 B   scale
    """

    KERNELS = {"store": "pack.store_fp8_key"}
    LEAST = 1e-4  # a key of zeros still gets a scale

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = self.codes(rows)
        return codes.view(torch.uint8), scales.contiguous().view(torch.uint8).view(-1, self.scale_bytes)

    def codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows [..., 128] of any float dtype -> (e4m3 [..., 128], scales fp32 [...]), scales powers of two.

        A row that holds a NaN or an infinity gets a NaN as its scale and reads back as NaN.
        """
        values = rows.float()
        target = values.abs().amax(-1).clamp_min(self.LEAST) / E4M3_MAX
        scale = torch.ldexp(torch.ones_like(target), ceil_log2(target))
        scale = torch.where(torch.isfinite(target), scale, torch.nan)
        return (values / scale[..., None]).to(torch.float8_e4m3fn), scale

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        codes = data.contiguous().view(torch.float8_e4m3fn)
        return (codes.float() * scales.contiguous().view(torch.float32)).to(dtype)


def ceil_log2(x: Tensor) -> Tensor:
    """Return the exact ceiling, read from the bits: torch.log2 rounds, and wrongly so next to a power of two."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def encode_e2m1(x: Tensor) -> Tensor:
    """Encode fp32 [..., 2 n] -> uint8 [..., n], two to a byte, the first in its low bits. It rounds to the nearest,
    ties to the even code; values beyond 6 become 6; the sign of zero is kept; NaN becomes 0."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):  # the middle between codes i and i + 1
        code += size >= middle if i % 2 else size > middle
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_e2m1(data: Tensor) -> Tensor:
    """Decode uint8 [..., n] -> fp32 [..., 2 n]."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=data.device)
    return table[torch.stack([data & 15, data >> 4], -1).flatten(-2).int()]


def interleaved(planar: RowFormat) -> RowFormat:
    """Return the format with each row's scales after the row; pages follow each other without padding."""
    return replace(planar, name=f"{planar.name}_interleaved", stride_unit=1, interleaved=True)


PLAIN = PlainRows("plain", values=512, coded=0, code_bits=0, group=PANEL, scale_bytes=0, stride_unit=1)
# Pages begin at multiples of 576 bytes because the tensor maps of the Blackwell kernels need that.
FP8_584 = Fp8Rows("fp8_584", values=512, coded=448, code_bits=8, group=64, scale_bytes=8, stride_unit=576)
MXFP8_528 = Mxfp8Rows("mxfp8_528", values=512, coded=512, code_bits=8, group=32, scale_bytes=16, stride_unit=512)
NVFP4_288 = Nvfp4Rows("nvfp4_288", values=512, coded=512, code_bits=4, group=16, scale_bytes=32, stride_unit=256)
MXFP8_528_INTERLEAVED = interleaved(MXFP8_528)
NVFP4_288_INTERLEAVED = interleaved(NVFP4_288)
INDEX_132 = Fp8Keys("index_132", values=128, coded=128, code_bits=8, group=128, scale_bytes=4, stride_unit=16)


def format_of(pool: Any) -> RowFormat:
    """Return the format of a pool: its own for packed pages, PLAIN for a tensor (or its slot in a program)."""
    return getattr(pool, "format", PLAIN)
