"""Writes a recording and a report as one HTML page that needs no server: report/page.html with the data inside."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from softsm.ptx.roles import source_lines
from softsm.report.diagnostics import Report
from softsm.report.recording import Buffer, Recorder

PTX_AROUND = 3
KINDS = ("run", "wait", "arrive", "issue", "copy", "mma", "tmem")


def page(recorder: Recorder, report: Report, title: str, failure: str = "") -> str:
    template = (Path(__file__).parent / "page.html").read_text()
    data = json.dumps(content(recorder, report, title, failure), separators=(",", ":"))
    return template.replace("__TITLE__", _escape(title)).replace("__DATA__", data.replace("</", "<\\/"))


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def content(recorder: Recorder, report: Report, title: str, failure: str) -> dict:
    names: dict[str, int] = {}
    tracks = sorted(
        {s.track for s in recorder.slices}, key=lambda t: (t.launch, t.cta, t.kind != "warp", t.kind, t.number)
    )
    number = {t: i for i, t in enumerate(tracks)}

    def intern(text: str) -> int:
        return names.setdefault(text, len(names))

    slices = []
    for s in recorder.slices:
        details = "\n".join(f"{k}: {v}" for k, v in s.details.items())
        slices.append([number[s.track], s.start, s.end, intern(s.name), KINDS.index(s.kind), intern(details)])
    tensor_kinds: dict[str, int] = {}
    tensor = [
        [launch, cta, start, end, low, high, tensor_kinds.setdefault(what, len(tensor_kinds))]
        for launch, cta, start, end, low, high, what in recorder.tensor
    ]
    return {
        "title": title,
        "failure": "" if any(d.raised for d in report) else failure,  # otherwise it is among the diagnostics
        "model": recorder.model,
        "unit": recorder.unit,
        "kinds": KINDS,
        "launches": [launch_row(x) for x in recorder.launches],
        "tracks": [[t.launch, t.cta, recorder.track_name(t), t.kind] for t in tracks],
        "slices": slices,
        "names": list(names),
        "flows": recorder.flows,
        "tensor": tensor,
        "tensorKinds": list(tensor_kinds),
        "allocations": recorder.allocations,
        "shared": [shared_map(recorder, i) for i in range(len(recorder.launches))],
        "barriers": barriers(recorder),
        "work": work(recorder),
        "diagnostics": [diagnostic(d, recorder, report.again().get(i, 0)) for i, d in enumerate(report)],
        "warnings": [diagnostic(w, recorder, 0) for w in report.warnings],
        "checked": report.launches,
        "dropped": recorder.dropped,
        "ptx": listings(recorder),
    }


def launch_row(x) -> dict:
    facts = {"kernel": x.kernel, "arch": x.arch, "grid": x.grid, "block": x.block, "cluster": x.cluster}
    return facts | {
        "shared": x.shared,
        "order": x.order,
        "start": x.start,
        "end": x.end,
        "steps": x.steps,
        "ctas": x.ctas,
    }


def listings(recorder: Recorder) -> list[dict]:
    """Returns each PTX text once, with the number of times that each line's macro-operation ran."""
    out: dict[str, dict] = {}
    for i, launch in enumerate(recorder.launches):
        found = out.setdefault(launch.source, {"kernel": launch.kernel, "text": launch.source, "counts": {}})
        for (number, line), count in recorder.lines.items():
            if number == i:
                found["counts"][line] = found["counts"].get(line, 0) + count
    return list(out.values())


def work(recorder: Recorder) -> list[dict]:
    """Returns the instructions, operations and bytes of each role, summed over the CTAs of a launch."""
    rows: dict[tuple[int, str], dict] = {}
    for track, clock in recorder.clocks.items():
        row = rows.setdefault(
            (track.launch, recorder.role(track)), {"warps": 0, "instructions": 0, "ops": defaultdict(list)}
        )
        row["warps"] += 1
        row["instructions"] += clock.instructions
    for (track, kind), (count, moved) in recorder.operations.items():
        ops = rows[track.launch, recorder.role(track)]["ops"]
        old = ops.get(kind) or [0, 0]
        ops[kind] = [old[0] + count, old[1] + moved]
    return [{"launch": k[0], "role": k[1], **v} for k, v in sorted(rows.items())]


def barriers(recorder: Recorder) -> list[dict]:
    """Returns one row per barrier of the drawn CTAs; a reinitialised barrier keeps counting."""
    rows = []
    for b in recorder.barriers:
        roles = [sorted({recorder.role(t) for t in who}) for who in (b.arrivers, b.waiters)]
        rows.append(
            {
                "launch": b.launch,
                "cta": b.cta,
                "name": b.name,
                "offset": b.offset,
                "count": b.count,
                "phases": b.phases,
                "arrivals": b.arrivals,
                "bytes": b.bytes,
                "arrivers": roles[0],
                "waiters": roles[1],
                "waited": b.waited,
                "line": b.line,
            }
        )
    return sorted(rows, key=lambda r: (r["launch"], r["cta"], r["offset"]))


def shared_map(recorder: Recorder, launch: int) -> dict:
    """Returns the buffers that copies and products of a launch access, each with the operands that lie in it."""
    mine = sorted((b for k, b in recorder.buffers.items() if k[0] == launch), key=lambda b: (b.low, -b.high))
    areas = _joined([b for b in mine if b.high > b.low])
    starts = [b for b in mine if b.high == b.low]  # descriptors, of which only the start is known
    loose: list[Buffer] = []
    for b in starts:
        home = next((a for a in areas if a.low <= b.low < a.high), None)
        if home is None:
            # Threads wrote this operand: assume that it extends to the next buffer, at most 16 KiB.
            if loose and b.low - loose[-1].low < 16384 and loose[-1].read_by == b.read_by:
                home = loose[-1]
            else:
                ends = [a.low for a in areas if a.low > b.low]
                home = Buffer(b.low, min([b.low + 16384, recorder.launches[launch].shared, *ends]), {"threads"})
                loose.append(home)
        home.read_by |= b.read_by
        home.swizzles |= b.swizzles
    rows = [
        {
            "low": b.low,
            "high": b.high,
            "writers": sorted(b.written_by),
            "readers": sorted(b.read_by),
            "swizzles": sorted(b.swizzles),
            "bytes": b.bytes,
        }
        for b in sorted([*areas, *loose], key=lambda b: b.low)
    ]
    words = sorted({b.offset for b in recorder.barriers if b.launch == launch})
    variables = [[n, at, size] for n, (at, size) in recorder.launches[launch].variables.items()]
    return {"size": recorder.launches[launch].shared, "buffers": rows, "barriers": words, "variables": variables}


def _joined(buffers: list[Buffer]) -> list[Buffer]:
    """Joins small neighbouring pieces of one kind (cp.async), and overlapping ones, into one buffer."""
    out: list[Buffer] = []
    for b in buffers:
        last = out[-1] if out else None
        if last is not None and (
            b.low < last.high or (b.low == last.high and b.high - b.low <= 512 and b.written_by == last.written_by)
        ):
            last.high = max(last.high, b.high)
            last.written_by |= b.written_by
            last.read_by |= b.read_by
            last.swizzles |= b.swizzles
            last.bytes += b.bytes
        else:
            out.append(Buffer(b.low, b.high, set(b.written_by), set(b.read_by), set(b.swizzles), b.bytes))
    return out


def diagnostic(d, recorder: Recorder, again: int) -> dict:
    from softsm.report.codes import fix

    more = f" (and {again} more between the same source lines)" if again else ""
    first, _, rest = d.message.partition("\n")
    return {
        "code": d.code,
        "message": first + more,
        "details": rest,
        "fix": d.fix or fix(d.code),
        "parties": [party(p, recorder) for p in d.parties],
    }


def party(p, recorder: Recorder) -> dict:
    ptx: list = []
    for launch in recorder.launches:
        text = launch.source.splitlines()
        if 0 < p.ptx_line <= len(text) and _same(text[p.ptx_line - 1], p.instruction):
            first = max(1, p.ptx_line - PTX_AROUND)
            ptx = [[n, text[n - 1]] for n in range(first, min(p.ptx_line + PTX_AROUND, len(text)) + 1)]
            break
    found = re.match(r"(.+?):(\d+)", p.source)
    source = source_lines(found[1], int(found[2])) if found else ()
    return {
        "who": p.who,
        "what": p.what,
        "line": p.ptx_line,
        "instruction": p.instruction,
        "source": p.source,
        "ptx": ptx,
        "lines": [list(x) for x in source],
        "sourceLine": int(found[2]) if found else 0,
    }


def _same(line: str, instruction: str) -> bool:
    """Returns whether the instruction is on this line, or begins on it."""
    return not instruction or instruction.split()[0].strip("@;{") in line
