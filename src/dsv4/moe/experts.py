"""The FP4 weights of the experts of a layer, from a checkpoint's tensors byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.moe import formats
from dsv4.runtime import checks

BYTES = (torch.int8, torch.uint8)
E8M0 = (torch.float8_e8m0fnu, torch.uint8)
E4M3 = (torch.float8_e4m3fn,)
NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODES = "int8 or uint8 with two E2M1 codes to a byte"


class Spread(NamedTuple):
    """Difference between the greatest and the least exponent of a row's scales, over groups that are not all zeros."""

    rows: int
    greatest: int
    over_11: int  # rows that do not fit into e4m3 as normal numbers with one factor
    over_14: int  # nor as subnormal numbers

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, exponents spread by up to {self.greatest}; "
            f"{self.over_11} rows by more than 11, {self.over_14} by more than 14"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Fp4Experts:
    """Weights of E experts in MXFP4 or NVFP4, in the tiles that the kernels read (formats.py). Nothing is rounded:
    :meth:`unpack` returns the bytes of the checkpoint. Make one with :meth:`pack` or
    :meth:`from_checkpoint`.

    w13, w2                   uint8 [E, tiles of rows, tiles of columns, 256, 64]: gate and up, down
    w13_scales, w2_scales     uint8 [..., 256, 4] (E8M0) or float8_e4m3fn [..., 256, 8]
    w13_factors, w2_factors   fp32 [E, rows], the factor of each row: for MXFP4 a power of two that follows from its
                              scales, for NVFP4 the tensor's fp32 scale

    In w13 a tile has 128 rows of w1, then the same 128 of w3. layout: the order of rows and bytes in a tile, by the
    kernels that read them: "sm90" (Hopper) or "sm100" (Blackwell). A CPU reads both.
    """

    w13: Tensor
    w2: Tensor
    w13_scales: Tensor
    w2_scales: Tensor
    w13_factors: Tensor
    w2_factors: Tensor
    format: str
    spread: Spread
    layout: str = "sm90"

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13.shape[2] * formats.TILE_COLUMNS

    @property
    def intermediate(self) -> int:
        return self.w2.shape[2] * formats.TILE_COLUMNS

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def __repr__(self) -> str:
        sizes = f"{self.experts} experts, hidden {self.hidden}, intermediate {self.intermediate}"
        return f"Fp4Experts({self.format}, {sizes}, layout {self.layout}, {self.nbytes} bytes on {self.w13.device})"

    def to(self, device: torch.device | str) -> Fp4Experts:
        """Copy the bytes to another device."""
        device = checks.device("device", device)
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)[:6]})

    @classmethod
    def pack(
        cls,
        w1: Tensor,
        w1_scale: Tensor,
        w3: Tensor,
        w3_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        w1_global: Tensor | None = None,
        w3_global: Tensor | None = None,
        w2_global: Tensor | None = None,
        layout: str | None = None,
    ) -> Fp4Experts:
        """Make experts from the stacked tensors of a checkpoint.

        Args:
            w1, w3: gate and up, int8 or uint8 [E, I, H / 2]; w2: down, [E, H, I / 2]. A byte has two E2M1 codes, the
                low one first. I is a multiple of 128, H of 256.
            w1_scale, w3_scale, w2_scale: MXFP4: float8_e8m0fnu or uint8, one for 32 columns. NVFP4: float8_e4m3fn, one
                for 16 columns.
            w1_global, w3_global, w2_global: NVFP4 only: fp32 [E], the scale of a tensor ("weight_scale_2").
            layout: "sm90" or "sm100"; None means that of the weights' GPU, or "sm90".

        An E8M0 byte of 255, which is NaN, is rejected.
        """
        if layout is not None:
            checks.one_of("layout", layout, formats.LAYOUTS)
        if not checks.is_tensor(w1) or w1.ndim != 3:
            checks.fail("w1", checks.describe(w1), f"a tensor [E, I, H / 2], {CODES}")
        e, i, h = w1.shape[0], w1.shape[1], 2 * w1.shape[2]
        if not e or not i or not h or i % 128 or h % 256:
            checks.fail("w1", f"shape {list(w1.shape)}", "[E, I, H / 2], I a multiple of 128, H of 256")
        layout = layout or layout_for(w1.device)
        nvfp4 = checks.is_tensor(w1_scale) and w1_scale.dtype == torch.float8_e4m3fn
        group, dtypes = (16, E4M3) if nvfp4 else (32, E8M0)
        given: dict[str, tuple[Any, Any, Any, int, int]] = {
            "w1": (w1, w1_scale, w1_global, i, h),
            "w3": (w3, w3_scale, w3_global, i, h),
            "w2": (w2, w2_scale, w2_global, h, i),
        }
        packed: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (codes, scales, whole, rows, columns) in given.items():
            checks.tensor(name, codes, (e, rows, columns // 2), BYTES, like=("w1", w1), unit_last=False)
            shape = (e, rows, columns // group)
            checks.tensor(f"{name}_scale", scales, shape, dtypes, like=("w1", w1), unit_last=False)
            if nvfp4:
                checks.tensor(f"{name}_global", whole, (e,), (torch.float32,), like=("w1", w1), unit_last=False)
            elif whole is not None:
                checks.fail(f"{name}_global", checks.describe(whole), "None with E8M0 scales")
            packed[name] = codes.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)
            if not nvfp4 and checks.values_checked(scales) and bool((packed[name][1] == 255).any()):
                checks.fail(f"{name}_scale", "a byte of 255, which is NaN", "bytes from 0 to 254")
        gate_up = [formats.interleaved(a, b, layout) for a, b in zip(packed["w1"], packed["w3"])]
        each = formats.TILE_COLUMNS // group
        tiles = []
        spreads = []
        down = [formats.down(x, layout) for x in packed["w2"]]
        for (codes, scales), names in ((gate_up, ("w1", "w3")), (down, ("w2",))):
            if nvfp4:
                scales_of = [given[name][2][:, None].expand(e, given[name][3]) for name in names]
                factors = scales_of[0]
                if len(names) == 2:
                    gate, up = (x[..., None] for x in scales_of)
                    factors = formats.interleaved(gate, up, layout)[..., 0]
            else:
                factors, spread = formats.row_factors(codes, scales)
                spreads.append(spread)
            made = formats.scales_to_tiles(scales, each, layout)
            made = made.view(torch.float8_e4m3fn) if nvfp4 else made
            tiles.append((formats.to_tiles(codes, layout), made, factors.contiguous()))
        (w13, w13_scales, w13_factors), (w2_tiles, w2_scales, w2_factors) = tiles
        report = _report(torch.cat([x.flatten() for x in spreads])) if spreads else Spread(e * (2 * i + h), 0, 0, 0)
        form = "nvfp4" if nvfp4 else "mxfp4"
        return cls(w13, w2_tiles, w13_scales, w2_scales, w13_factors, w2_factors, form, report, layout)

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, Tensor], prefix: str = "", layout: str | None = None) -> Fp4Experts:
        """Make the MXFP4 experts of a layer from tensors with the names of DeepSeek's checkpoints.

        Args:
            tensors: by name, as safetensors loads them: ``{prefix}{e}.w1.weight``, ``{prefix}{e}.w1.scale``, the same
                for w3 and w2, for e = 0, 1, ...; others are ignored.
            prefix: such as "layers.3.ffn.experts.".
            layout: as in :meth:`pack`.
        """
        if not isinstance(prefix, str):
            checks.fail("prefix", checks.describe(prefix), "a str")
        if not isinstance(tensors, Mapping):
            checks.fail("tensors", checks.describe(tensors), "a mapping from names to tensors")
        count = 0
        while f"{prefix}{count}.w1.weight" in tensors:
            count += 1
        if not count:
            checks.fail("tensors", f"no {prefix}0.w1.weight", "the tensors of a layer's experts by name")
        stacked = []
        for name in ("w1", "w3", "w2"):
            for part in ("weight", "scale"):
                names = [f"{prefix}{e}.{name}.{part}" for e in range(count)]
                missing = next((x for x in names if not checks.is_tensor(tensors.get(x))), None)
                if missing is not None:
                    checks.fail("tensors", f"no {missing}", "weight and scale of w1, w3 and w2 of every expert")
                first = tensors[names[0]]
                for x in names:
                    given, accepted = f"tensors[{x!r}]", BYTES if part == "weight" else E8M0
                    shape = tuple(first.shape) if first.ndim == 2 else ("rows", "bytes")
                    checks.tensor(given, tensors[x], shape, accepted, like=("the others", first), unit_last=False)
                stacked.append(torch.stack([tensors[x].view(torch.uint8) for x in names]))
        return cls.pack(*stacked, layout=layout)

    def unpack(self) -> dict[str, Tensor]:
        """Return the arguments of :meth:`pack` by name: uint8 and (NVFP4) float8_e4m3fn and fp32."""
        made: dict[str, Tensor] = {}
        layout = self.layout
        codes = formats.from_tiles(self.w13, layout)
        scales = formats.scales_from_tiles(self.w13_scales.view(torch.uint8), layout)
        made["w1"], made["w3"] = formats.apart(codes, layout)
        made["w1_scale"], made["w3_scale"] = formats.apart(scales, layout)
        made["w2"] = formats.down(formats.from_tiles(self.w2, layout), layout, back=True)
        scales = formats.scales_from_tiles(self.w2_scales.view(torch.uint8), layout)
        made["w2_scale"] = formats.down(scales, layout, back=True)
        if self.format == "nvfp4":
            for name in ("w1", "w3", "w2"):
                made[f"{name}_scale"] = made[f"{name}_scale"].contiguous().view(torch.float8_e4m3fn)
            made["w1_global"], made["w3_global"] = (
                x[:, 0, 0] for x in formats.apart(self.w13_factors[..., None], layout)
            )
            made["w2_global"] = self.w2_factors[:, 0]
        return made

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return (w1 above w3 [E, 2 I, H], w2 [E, H, I]) as numbers; fp64 and, for MXFP4 in range, bf16 are exact."""
        checks.dtype("dtype", dtype, NUMBERS)
        w13 = formats.dequantize(self.w13, self.w13_scales, self.w13_factors, dtype, self.layout)
        w2 = formats.dequantize(self.w2, self.w2_scales, self.w2_factors, dtype, self.layout)
        return torch.cat(formats.apart(w13, self.layout), -2), formats.down(w2, self.layout, back=True)


def layout_for(device: torch.device) -> str:
    """Return the layout that the kernels for a device read."""
    return "sm100" if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10 else "sm90"


def _report(spread: Tensor) -> Spread:
    numbers = (spread.max(), (spread > 11).sum(), (spread > 14).sum())
    return Spread(spread.numel(), *(int(x) for x in numbers))
