"""`softsm explain` shows what a diagnostic means and draws layouts: who holds which cell, where a tile lies.

    softsm explain race                                     a code: what it means, how to fix it
    softsm explain tcgen05.ld.16x256b.x2                    an instruction: lanes x columns, thread and register in each
    softsm explain descriptor 0x4000404000010040 --rows 16  a matrix descriptor: fields, and the bytes a tile covers
    softsm explain idesc 0x08400490 --kind f16              an instruction descriptor of tcgen05.mma

All pictures come from the tables that the emulator itself uses.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from softsm import accepted
from softsm.errors import Fault
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.report.codes import CODES

# Eight colours that differ on light and dark terminals; a thread, row or register keeps its colour.
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_blue")
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "e2m3": 8, "e3m2": 8, "e2m1": 4, "s8": 8, "u8": 8}
MOST_ROWS, MOST_K = 256, 4096  # the largest tile of any product
MAX_ROWS = 32  # rows of a picture; words describe the others
WIDE = 8  # cells across: fits a terminal of 80 columns
EXAMPLES = (
    "tcgen05.ld.16x256b.x2",
    "tcgen05.st.32x32b.x8",
    "tcgen05.cp.32x128b.warpx4",
    "tcgen05.mma",
    "wgmma.mma_async.m64n16k16",
    "mma.sync.m16n8k16.bf16",
    "ldmatrix.x4",
    "ldmatrix.x2.trans",
    "descriptor 0x4000404000010040 --arch sm_100a --dtype bf16 --major k --rows 16 --k 64",
    "idesc 0x08400490 --kind f16",
)


@dataclass(frozen=True)
class Tile:
    """The operand that a matrix descriptor belongs to, which decides how to read it."""

    arch: str = "sm_100a"
    dtype: str = "bf16"
    major: str = "k"
    rows: int = 16
    k: int = 16
    kind: str = "f16"


def explain(topic: str, value: str = "", tile: Tile | None = None) -> RenderableType:
    """Returns what to print; raises ValueError if the topic is unknown."""
    tile = tile or Tile()
    if not topic:
        return overview()
    if topic == "descriptor" and value:
        return descriptor(number(value, "descriptor"), tile)
    if topic == "idesc" and value:
        return instruction_descriptor(number(value, "idesc"), tile)
    if topic in CODES:
        return code(topic)
    return instruction(topic)


def number(text: str, name: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; accepted: a number such as 0x4000404000010040") from None


def overview() -> RenderableType:
    codes = Table("code", "what it says", title="diagnostics: softsm explain CODE", title_justify="left")
    for name, (sentence, _) in CODES.items():
        codes.add_row(name, sentence)
    layouts = Table("softsm explain ...", title="layouts", title_justify="left")
    for example in EXAMPLES:
        layouts.add_row(example)
    return Group(codes, layouts)


def code(name: str) -> RenderableType:
    sentence, advice = CODES[name]
    return Group(Text(name, style="bold"), Text(f"  what  {sentence}"), Text(f"  fix  {advice}"))


# ---- instructions ------------------------------------------------------------------------------------------------


def instruction(name: str) -> RenderableType:
    parts = name.split(".")
    if parts[0] == "tcgen05" and len(parts) > 1:
        if parts[1] in ("ld", "st"):
            return tensor_move(parts)
        if parts[1] == "cp":
            return tensor_copy(parts)
        if parts[1] == "mma":
            return accumulators()
    if parts[0] == "wgmma" or parts[:2] == ["mma", "sync"]:
        return fragments(parts)
    if parts[0] in ("ldmatrix", "stmatrix"):
        return matrix_move(parts)
    return chapter(name, parts)


def chapter(name: str, parts: list[str]) -> RenderableType:
    """Describes an instruction without a picture: whether softsm runs it, and in which module."""
    from softsm.engine.assemble import load_chapters
    from softsm.isa.registry import LOWERERS

    load_chapters()
    function = LOWERERS.get(parts[0])
    if function is None:
        known = [*CODES, *LOWERERS]
        near = difflib.get_close_matches(name, known, 3, 0.5) or difflib.get_close_matches(parts[0], known, 3, 0.5)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(
            f"topic: got {name!r}; accepted: a diagnostic code, an instruction, descriptor and idesc{hint}"
        )
    module = __import__(function.__module__, fromlist=["__doc__"])
    return Group(
        Text(parts[0], style="bold"), Text((module.__doc__ or "").strip()), Text(f"\nin {function.__module__}")
    )


def tensor_move(parts: list[str]) -> RenderableType:
    shape = next((p for p in parts if p in tm.REGISTERS), None)
    if shape is None:
        raise ValueError(f"shape: got {'.'.join(parts)}; accepted: {', '.join(tm.REGISTERS)}")
    repeat = next((int(p[1:]) for p in parts if re.fullmatch(r"x\d+", p)), 1)
    if repeat not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"repeat: got x{repeat}; accepted: x1, x2, x4, ... x128")
    packed = any(p in ("pack::16b", "unpack::16b") for p in parts)
    column, lane = tm.register_map(shape, repeat)
    registers = column.shape[0]
    shown = min(tm.WIDTHS[shape] * repeat, WIDE)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for r in range(registers):
        for t in range(32):
            cells.setdefault((int(lane[r, t]), int(column[r, t])), (t, r))
    lanes = 32 if shape == "32x32b" else 16
    table = Table(
        title=f"tcgen05.{parts[1]}.{shape}.x{repeat}: thread.register of each cell",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("lane", justify="right", style="dim")
    for c in range(shown):
        table.add_column(f"{2 * c}-{2 * c + 1}" if packed else f"{c}", justify="right", no_wrap=True)
    for row in range(lanes):
        names = [cells.get((row, c)) for c in range(shown)]
        table.add_row(str(row), *(Text(f"t{x[0]}.r{x[1]}", style=COLOURS[x[0] % 8]) if x else "" for x in names))
    words = [
        f"Each thread has {registers} register(s); a warp covers {lanes} lanes x "
        f"{tm.span(shape, repeat, packed)} columns of 32 bits."
    ]
    if tm.WIDTHS[shape] * repeat > shown:
        words.append(f"The first {shown} columns are drawn; the pattern continues.")
    if packed:
        words.append("16-bit packing: a register holds the low halves of two neighbouring cells.")
    words.append(
        "Warp w of the CTA may touch lanes 32*(w%4) to 32*(w%4)+31 only; the address is lane << 16 | column"
        f", its lane 32*(w%4){'' if lanes == 32 else ' or 16 more'}, its column a multiple of {tm.ALIGNMENT[shape]}."
    )
    if shape == "16x32bx2":
        words.append("Threads 16 to 31 access the second half, at the distance of the immediate operand.")
    words.append(
        "Asynchronous: registers hold the data after tcgen05.wait::ld."
        if parts[1] == "ld"
        else "Asynchronous: the cells hold the data after tcgen05.wait::st."
    )
    return Group(table, Text("\n".join(words)))


def tensor_copy(parts: list[str]) -> RenderableType:
    shape = next((p for p in parts if p in tm.COPY_SHAPES), None)
    if shape is None:
        raise ValueError(f"shape: got {'.'.join(parts)}; accepted: {', '.join(tm.COPY_SHAPES)}")
    multicast = next((p for p in parts if p.startswith("warpx")), "")
    rows, chunks = tm.COPY_SHAPES[shape]
    lanes = tm.copy_lanes(shape, multicast)
    table = Table(
        "rows of the tile",
        "lanes that receive them",
        title=f"tcgen05.cp.{shape}" + (f".{multicast}" if multicast else ""),
        title_justify="left",
    )
    step = 32 if rows > 32 else rows if shape != "4x256b" else 1
    for first in range(0, rows, step):
        part = lanes[:, first : first + step]
        to = ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in part.tolist())
        table.add_row(f"{first}" if step == 1 else f"{first}-{first + step - 1}", to)
    return Group(
        table, Text(f"Each row is {16 * chunks} bytes, {4 * chunks} columns; read through a matrix descriptor.")
    )


def accumulators() -> RenderableType:
    cases = (
        ("M = 128, one CTA (D); M = 256, a pair (A)", 128, False),
        ("M = 64, one CTA (F); M = 128, sparse A, a pair (C)", 64, False),
        ("M = 64, .ws (E); M = 128, dense A, a pair (B)", 64, True),
        ("M = 32, .ws (G)", 32, True),
    )
    table = Table(
        "accumulator",
        "rows of this CTA",
        "columns of D",
        "lanes",
        "columns from the address",
        title="tcgen05.mma: where D lies in tensor memory (N columns, 32 bits each)",
        title_justify="left",
    )
    n = 256
    share = {n: "N", n // 2: "N/2", n // 4: "N/4"}
    for title, m, folded in cases:
        for i, b in enumerate(tm.accumulator_blocks(m, n, folded)):
            part = b.n // b.columns
            of = "0 .. N-1" if b.columns == n else f"{part}*{share[b.columns]} .. {part + 1}*{share[b.columns]}-1"
            table.add_row(
                title if not i else "",
                f"{b.m}-{b.m + b.rows - 1}",
                of,
                Text(f"{b.lane}-{b.lane + b.rows - 1}", style=COLOURS[i]),
                f"{b.column} .. {share[b.columns]}-1",
                end_section=False,
            )
        table.add_section()
    return Group(
        table,
        Text(
            "A from tensor memory lies the same way, two 16-bit elements in a cell.\n"
            "Asynchronous: D is there after tcgen05.commit and a wait on its mbarrier, and "
            "tcgen05.fence::after_thread_sync."
        ),
    )


def fragments(parts: list[str]) -> RenderableType:
    """Draws the registers of mma.sync and wgmma by running the functions of isa/fragments.py on numbered registers."""
    from softsm.isa import fragments as fr

    text = ".".join(parts)
    shape = re.search(r"m(\d+)n(\d+)k(\d+)", text)
    m, n, k = map(int, shape.groups()) if shape else (16, 8, 16)
    dtype = next((p for p in parts if p in fr.PER_REGISTER), "bf16")
    c = fr.PER_REGISTER[dtype]
    rows = 16 if m >= 16 else 8
    count = rows // 8 * 2 * (n // 8)
    numbered = (np.arange(count)[:, None] * 32 + np.arange(32)[None, :]).astype(np.uint32)
    d = fr.accumulator(numbered, "f32", rows).T  # [rows, n]
    out: list[RenderableType] = [_held(f"C, D: {rows} x {n} (32-bit elements)", d, rows, min(n, WIDE))]
    if m == 64:
        if n > WIDE:
            out.append(Text(f"The first {WIDE} columns are drawn; each 8 columns more take the next 4 registers."))
        out.append(
            Text(
                "wgmma: warp w of the warpgroup holds rows 16*w to 16*w+15. The accumulator is there after "
                "wgmma.wait_group; wgmma.fence comes before the first use of registers."
            )
        )
    per = max(1, k // (4 * c)) * (rows // 8)
    values = np.repeat((np.arange(per)[:, None] * 32 + np.arange(32)[None, :])[..., None], c, axis=2)
    out.append(_held(f"A: {rows} x {k} ({dtype}, {c} in a register)", fr.left_values(values, rows), rows, k, c))
    if m != 64:
        per = max(1, k // (4 * c))
        values = np.repeat((np.arange(per)[:, None] * 32 + np.arange(32)[None, :])[..., None], c, axis=2)
        out.append(_held(f"B: {k} x 8, drawn as its columns", fr.right_values(values), 8, k, c, "column"))
    return Group(*out)


def _held(title: str, matrix: np.ndarray, rows: int, columns: int, step: int = 1, name: str = "row") -> Table:
    """Draws a matrix of 32 * register + thread; neighbours in one register form one cell."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(name, justify="right", style="dim")
    for c in range(0, columns, step):
        table.add_column(f"{c}" if step == 1 else f"{c}-{c + step - 1}", justify="right", no_wrap=True)
    for r in range(rows):
        table.add_row(
            str(r), *(Text(f"t{v % 32}.r{v // 32}", style=COLOURS[v % 8]) for v in map(int, matrix[r, :columns:step]))
        )
    return table


def matrix_move(parts: list[str]) -> RenderableType:
    from softsm.isa.matrix_moves import words

    count = next((int(p[1:]) for p in parts if re.fullmatch(r"x[124]", p)), 1)
    # 16-bit element (row, column) of the 8x8 matrix, as row * 8 + column
    tile = np.arange(64, dtype=np.uint16).reshape(1, 8, 8)
    held = words(tile, "trans" in parts)[0]
    table = Table("thread", "elements in its register", "address it gives", title=".".join(parts), title_justify="left")
    for t in range(32):
        pair = (int(held[t]) & 0xFFFF, int(held[t]) >> 16)
        gives = f"row {t % 8} of matrix {t // 8}" if t < 8 * count else "-"
        both = ", ".join(f"({p // 8}, {p % 8})" for p in pair)
        table.add_row(str(t), Text(both, style=COLOURS[t // 4]), gives)
    return Group(
        table,
        Text(
            f"{count} matrix(es) of 8 x 8 16-bit elements: register i of each thread belongs to "
            "matrix i. "
            "Row addresses are multiples of 16 bytes."
        ),
    )


# ---- descriptors -------------------------------------------------------------------------------------------------


def descriptor(raw: int, tile: Tile) -> RenderableType:
    accepted.one_of("arch", tile.arch, ("sm_100a", "sm_90a"))
    accepted.one_of("dtype", tile.dtype, tuple(BITS))
    accepted.one_of("major", tile.major, ("k", "mn"))
    accepted.whole("rows", tile.rows, 1, MOST_ROWS)
    accepted.whole("k", tile.k, 1, MOST_K)
    if not 0 <= raw < 1 << 64:
        raise ValueError(f"descriptor: got {raw:#x}; accepted: numbers of up to 64 bits")
    blackwell = not tile.arch.startswith("sm_90")
    fields = Table("bits", "field", "value", title=f"descriptor 0x{raw:016x} on {tile.arch}", title_justify="left")
    fields.add_row("0-13", "start address", f"0x{(raw & 0x3FFF) << 4:x}")
    fields.add_row("16-29", "leading byte offset (LBO)", f"{(raw >> 16 & 0x3FFF) << 4}")
    fields.add_row("32-45", "stride byte offset (SBO)", f"{(raw >> 32 & 0x3FFF) << 4}")
    if blackwell:
        fields.add_row("46-48", "fixed 0b001", f"{raw >> 46 & 7:03b}")
    fields.add_row("49-51", "base offset", f"{raw >> 49 & 7}")
    mode = raw >> 61 & (7 if blackwell else 6)
    fields.add_row(
        "61-63" if blackwell else "62-63", "swizzle", f"{mode}: {swizzle.MODE_NAMES.get(mode, 'does not exist')}"
    )
    try:
        d = swizzle.decode(raw, blackwell)
    except Fault as problem:
        return Group(fields, Text(str(problem), style="bold red"))
    per = 16 * 8 // BITS[tile.dtype]  # elements in a 16-byte chunk
    k_major = tile.major == "k"
    lines, along = (tile.rows, tile.k) if k_major else (tile.k, tile.rows)
    if lines < 1 or along < per:
        name, least = ("k", per) if k_major else ("rows", per)
        raise ValueError(
            f"{name}: got rows {tile.rows}, k {tile.k}; a 16-byte chunk holds {least} {tile.dtype} of {name}"
        )
    count = -(-along // per)
    where = swizzle.addresses(d, k_major, lines, count)
    out: list[RenderableType] = [fields, _memory(where, per, k_major)]
    low, high = swizzle.footprint(d, k_major, lines, count)
    notes = [
        f"The tile ({tile.rows} x {tile.k} {tile.dtype}, {tile.major.upper()}-major) covers "
        f"{np.unique(where).size * 16} bytes of 0x{low:x} to 0x{high - 1:x}."
    ]
    doubled = where.size - np.unique(where).size
    out.append(Text("\n".join(notes)))
    if doubled:
        out.append(
            Text(f"{doubled} chunks lie on top of others: LBO or SBO is too small for this tile.", style="bold red")
        )
    if d.mode not in (swizzle.NONE,) and d.start & 127 == 0 and d.start & 1023 and not d.base_offset:
        out.append(
            Text(
                "The start is not a multiple of 1024: the swizzle XORs absolute address bits, so the pattern "
                f"begins at line {d.start >> 7 & 7}; that is right only if the writer did the same.",
                style="yellow",
            )
        )
    return Group(*out)


def _memory(where: np.ndarray, per: int, k_major: bool) -> Table:
    """Draws shared memory as lines of 128 bytes, with the part of the tile that each 16-byte chunk holds."""
    held: dict[int, list[tuple[int, int]]] = {}
    for line in range(where.shape[0]):
        for chunk in range(where.shape[1]):
            held.setdefault(int(where[line, chunk]), []).append((line, chunk))
    names = ("row", "k") if k_major else ("k", "row")
    table = Table(
        title=f"shared memory, 128 bytes a line; a cell: {names[0]}, first of its {per} {names[1]}s",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("address", style="dim")
    for c in range(8):
        table.add_column(f"+{16 * c}", no_wrap=True)
    lines = sorted({a & ~127 for a in held})
    short = {"row": "r", "k": "k"}
    for at in lines[:MAX_ROWS]:
        cells = []
        for c in range(8):
            found = held.get(at + 16 * c)
            if found is None:
                cells.append(Text("·", style="dim"))
                continue
            line, chunk = found[0]
            text = f"{short[names[0]]}{line} {short[names[1]]}{chunk * per}" + ("!" if len(found) > 1 else "")
            cells.append(Text(text, style="bold red" if len(found) > 1 else COLOURS[chunk % 8]))
        table.add_row(f"0x{at:05x}", *cells)
    if len(lines) > MAX_ROWS:
        table.caption = f"the first {MAX_ROWS} of {len(lines)} lines"
    return table


def instruction_descriptor(raw: int, tile: Tile) -> RenderableType:
    from softsm.isa import instruction_descriptor as idesc

    if tile.kind not in idesc.K_OF_KIND:
        raise ValueError(f"kind: got {tile.kind!r}; accepted: {', '.join(idesc.K_OF_KIND)}")
    sparse = bool(raw >> 2 & 1)
    try:
        d = idesc.decode(raw, tile.kind, 1, False, sparse)
    except Fault as one:
        try:
            d = idesc.decode(raw, tile.kind, 2, False, sparse)
        except Fault:
            return Text(str(one), style="bold red")
    table = Table("field", "value", title=f"idesc 0x{raw:08x}, kind::{tile.kind}", title_justify="left", min_width=32)
    for name in d._fields:
        table.add_row(name, str(getattr(d, name)))
    return table


def show(topic: str, value: str, tile: Tile, width: int | None = None) -> None:
    Console(width=width).print(explain(topic, value, tile))
