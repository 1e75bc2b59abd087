"""Matrix descriptors: where the elements of an operand tile lie in shared memory.

A 64-bit descriptor names a start address, two strides and a swizzle mode; wgmma (sm_90) and tcgen05 (sm_100) use the
same bits except that sm_100 wants 0b001 in bits 46-48 and has one more mode. In every layout 16 bytes along the
contiguous dimension stay together, so an operand is read as one gather of 16-byte chunks through a table. Tables are
cached: they depend on the strides and on the start address modulo 1024, because the swizzle XORs absolute address bits.

With T = elements in 16 bytes, w = swizzle width in bytes, W = w/16:

    K-major,  none : (mn%8)*16 + (mn/8)*SBO + (k/T)*LBO                 a core matrix is 8 rows of 16 bytes
    K-major,  w    : (mn%8)*w  + (mn/8)*SBO + k*e                       row pitch is w; past w bytes of k: + LBO
    MN-major, none : (mn/T)*SBO + (k%8)*16 + (k/8)*LBO
    MN-major, w    : (mn%(T*W))*e + (mn/(T*W))*LBO + (k%8)*w + (k/8)*SBO
    MN-major, 128 bytes in 32-byte atoms: as w = 128 with (k%4), (k/4)
    then address ^= ((address>>7) - base_offset & W-1) << 4             (32-byte atoms: (...& 3) << 5)
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from softsm.errors import Fault

NONE, ATOM32, SWIZZLE128, SWIZZLE64, SWIZZLE32 = 0, 1, 2, 4, 6  # values of descriptor bits 61-63
MODE_NAMES = {
    NONE: "no swizzle",
    ATOM32: "128B swizzle with 32B atoms",
    SWIZZLE128: "128B swizzle",
    SWIZZLE64: "64B swizzle",
    SWIZZLE32: "32B swizzle",
}
_WIDTH = {NONE: 16, ATOM32: 128, SWIZZLE128: 128, SWIZZLE64: 64, SWIZZLE32: 32}


class Descriptor(NamedTuple):
    """A decoded matrix descriptor; lengths and addresses in bytes."""

    start: int
    lbo: int
    sbo: int
    base_offset: int
    mode: int
    raw: int

    def __str__(self) -> str:
        text = f"0x{self.raw:016x} (start 0x{self.start:x}, LBO {self.lbo}, SBO {self.sbo}, {MODE_NAMES[self.mode]}"
        return text + (f", base offset {self.base_offset})" if self.base_offset else ")")


@lru_cache(maxsize=65536)
def decode(raw: int, blackwell: bool) -> Descriptor:
    """Decodes the fields of a descriptor; Fault('descriptor') if the bits are invalid."""
    mode = raw >> 61 & 7
    if blackwell:
        if raw >> 46 & 7 != 1:
            raise Fault(
                "descriptor",
                f"shared-memory descriptor 0x{raw:016x}: bits 46-48 are {raw >> 46 & 7:03b}, sm_100 requires 001 "
                "(a descriptor built for sm_90 has 000 there)",
            )
        if raw >> 52 & 1:
            raise Fault(
                "descriptor",
                f"shared-memory descriptor 0x{raw:016x}: bit 52 (absolute leading address) exists on sm_103 only",
            )
    else:
        mode &= 6  # bits 62-63 only
    if mode not in MODE_NAMES:
        raise Fault(
            "descriptor", f"shared-memory descriptor 0x{raw:016x}: swizzle mode {mode} in bits 61-63 does not exist"
        )
    return Descriptor(
        start=(raw & 0x3FFF) << 4,
        lbo=(raw >> 16 & 0x3FFF) << 4,
        sbo=(raw >> 32 & 0x3FFF) << 4,
        base_offset=raw >> 49 & 7,
        mode=mode,
        raw=raw,
    )


def encode(start: int, lbo: int, sbo: int, mode: int, *, blackwell: bool, base_offset: int = 0) -> int:
    """Returns the inverse of `decode`, for tests and for drawing layouts."""
    raw = (start & 0x3FFFF) >> 4 | (lbo >> 4 & 0x3FFF) << 16 | (sbo >> 4 & 0x3FFF) << 32
    return raw | (1 << 46 if blackwell else 0) | (base_offset & 7) << 49 | mode << 61


class Chunks(NamedTuple):
    """Where the 16-byte chunks of a tile are: at[i, j] in chunks from the descriptor's 1024-byte window."""

    at: np.ndarray  # int64 [rows, chunks]: K-major rows = mn; MN-major rows = k
    low: int  # bytes from the window to the first byte touched
    high: int  # one past the last byte


@cache
def _chunks(
    mode: int, k_major: bool, lbo: int, sbo: int, phase: int, base_offset: int, rows: int, count: int
) -> Chunks:
    """Returns rows x count chunks; count runs along the contiguous dimension (k if k_major, else mn)."""
    width = _WIDTH[mode]
    row = np.arange(rows)[:, None]
    chunk = np.arange(count)[None, :]
    if k_major:
        if mode == NONE:
            offset = row % 8 * 16 + row // 8 * sbo + chunk * lbo
        else:
            per = width // 16
            offset = row % 8 * width + row // 8 * sbo + chunk % per * 16 + chunk // per * lbo
    elif mode == NONE:
        offset = chunk * sbo + row % 8 * 16 + row // 8 * lbo
    else:
        group = 4 if mode == ATOM32 else 8
        per = width // 16
        offset = chunk % per * 16 + chunk // per * lbo + row % group * width + row // group * sbo
    address = phase + offset
    line = (address >> 7) - base_offset
    if mode == ATOM32:
        address = address ^ (line & 3) << 5
    elif mode != NONE:
        address = address ^ (line & (width // 16 - 1)) << 4
    index = np.ascontiguousarray(address >> 4, dtype=np.int64)
    return Chunks(index, int(address.min()), int(address.max()) + 16)


def chunks(descriptor: Descriptor, k_major: bool, rows: int, count: int) -> Chunks:
    return _chunks(
        descriptor.mode,
        k_major,
        descriptor.lbo,
        descriptor.sbo,
        descriptor.start & 1023,
        descriptor.base_offset,
        rows,
        count,
    )


def footprint(descriptor: Descriptor, k_major: bool, rows: int, count: int) -> tuple[int, int]:
    """Returns [low, high), the shared addresses between which the tile's bytes lie."""
    window = descriptor.start & ~1023
    tile = chunks(descriptor, k_major, rows, count)
    return window + tile.low, window + tile.high


@lru_cache(maxsize=4096)
def spans(descriptor: Descriptor, k_major: bool, rows: int, count: int, used: int = 16) -> np.ndarray:
    """Returns the bytes a tile really touches, as [low, high) pairs: int64 [n, 2]. used: bytes of a chunk before its
    padding (formats.unpack_padded)."""
    starts = np.unique(addresses(descriptor, k_major, rows, count))
    if used < 16:
        return np.ascontiguousarray(np.stack([starts, starts + used], 1))
    first = np.flatnonzero(np.diff(starts, prepend=-32) != 16)
    last = np.append(first[1:], len(starts)) - 1
    return np.ascontiguousarray(np.stack([starts[first], starts[last] + 16], 1))


def addresses(descriptor: Descriptor, k_major: bool, rows: int, count: int) -> np.ndarray:
    """Returns the shared address of every chunk: int64 [rows, count]."""
    return (chunks(descriptor, k_major, rows, count).at << 4) + (descriptor.start & ~1023)


def check_row(descriptor: Descriptor, k_major: bool, size: int, what: str) -> None:
    """Raises a Fault if `size` bytes of k do not lie in one swizzled row: no field gives the place of the rest."""
    width = _WIDTH[descriptor.mode]
    if k_major and descriptor.mode != NONE and descriptor.start % width + size > width:
        raise Fault(
            "descriptor",
            f"{what}: {size} bytes of k from byte {descriptor.start % width} of a row of {width}; K-major rows of the "
            f"{MODE_NAMES[descriptor.mode]} must hold them whole; descriptor {descriptor}",
        )


def locate(
    shared: np.ndarray, floor: int, descriptor: Descriptor, k_major: bool, rows: int, count: int, what: str
) -> tuple[np.ndarray, int]:
    """Returns (chunk table, first chunk of its window). shared[a] is the byte at shared address a, the CTA's own
    memory begins at `floor`; a tile that leaves it is a Fault."""
    tile = chunks(descriptor, k_major, rows, count)
    window = descriptor.start & ~1023
    if window + tile.low < floor or window + tile.high > shared.size:
        raise Fault(
            "descriptor",
            f"{what} covers shared addresses 0x{window + tile.low:x}..0x{window + tile.high - 1:x}, outside the CTA's "
            f"0x{floor:x}..0x{shared.size - 1:x}; descriptor {descriptor}, {'K' if k_major else 'MN'}-major, "
            f"{rows} rows of {16 * count} bytes",
        )
    return tile.at, window >> 4


def read(
    shared: np.ndarray, floor: int, descriptor: Descriptor, k_major: bool, rows: int, count: int, what: str
) -> np.ndarray:
    """Returns the bytes of a tile, uint8 [rows, 16*count]; checks as `locate`."""
    index, window = locate(shared, floor, descriptor, k_major, rows, count, what)
    lines = shared[window << 4 : shared.size & ~15].view(np.complex128)  # any 16-byte type: only bits are moved
    return lines.take(index).view(np.uint8)
