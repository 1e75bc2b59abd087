"""`softsm trace`: what is recorded, the Perfetto timeline read back, and the report driven in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

import softsm
from softsm.cli import app
from softsm.commands.trace import tracing
from softsm.engine.scheduler import Machine
from softsm.errors import Deadlock
from softsm.report.launch_recorder import recording

# Warp 0 fetches 1 KiB; warp 1 waits for it, sends it through tensor memory and writes it out.
PTX = """
.version 8.7 .target sm_100a .address_size 64
.visible .entry relay(.param .u64 x, .param .u64 y) .reqntid 64
{
    .reg .pred %p<4>; .reg .b32 %r<40>; .reg .b64 %rd<8>;
    .shared .align 128 .b8 tile[1024]; .shared .align 8 .b8 full[8]; .shared .align 4 .b8 place[4];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    mov.u32 %r3, full;
    mov.u32 %r4, place;
    setp.eq.u32 %p1, %r1, 0;
    setp.ge.u32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p2 bra CONSUMER;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r3];
    bra.uni END;
CONSUMER:
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r5, [%r4];
    add.u32 %r5, %r5, 2097152;
    sub.u32 %r6, %r1, 32;
    shl.b32 %r7, %r6, 4;
    add.u32 %r8, %r2, %r7;
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r8];
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r5], {%r10, %r11, %r12, %r13};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r20, %r21, %r22, %r23}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd3, %r6, 16;
    add.s64 %rd4, %rd2, %rd3;
    st.global.v4.b32 [%rd4], {%r20, %r21, %r22, %r23};
    sub.u32 %r5, %r5, 2097152;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
END:
    ret;
}
"""
RACY = re.sub(r"mbarrier.try_wait.*\n.*bra WAIT;", "", PTX)
STUCK = PTX.replace("1024, [%r3];", "512, [%r3];")


def launch(ptx: str = PTX) -> tuple[np.ndarray, np.ndarray, Machine]:
    x = np.arange(256, dtype=np.uint32)
    y = np.zeros(128, np.uint32)
    return x, y, softsm.load(ptx).launch(1, 64, [x, y])


@pytest.mark.parametrize("order", ["eager", "latest"])
def test_recording_changes_nothing_and_knows_what_happened(order: str) -> None:
    from softsm.engine.options import options

    _, plain, machine = launch()
    assert type(machine) is Machine  # not recorded: no other code runs
    with options(order=order), recording() as r:
        x, y, recorded = launch()
    assert np.array_equal(y, plain) and np.array_equal(y, x[:128])
    assert recorded.steps == machine.steps == r.launches[0].steps == sum(c.instructions for c in r.clocks.values())
    (barrier,) = r.barriers
    assert (barrier.count, barrier.phases, barrier.arrivals, barrier.bytes) == (1, 1, 1, 1024)
    assert {t.kind for t in barrier.arrivers} == {"warp", "TMA"} and {t.number for t in barrier.waiters} == {1}
    (copy,) = [s for s in r.slices if s.kind == "copy"]
    (wait,) = [s for s in r.slices if s.name.startswith("wait full")]
    assert copy.details["bytes"] == 1024 and wait.end == copy.end and wait.end - wait.start == barrier.waited > 200
    ends = [(r.slices[a], r.slices[b]) for a, b in r.flows]
    assert (copy, wait) in ends and any(a.name.startswith("issue") and b is copy for a, b in ends)
    (allocation,) = r.allocations
    assert allocation[5:7] == [0, 32] and allocation[3] < allocation[4]
    assert {k for *_, k in r.tensor} == {"tcgen05.st write", "tcgen05.ld read"}


def test_engines_take_the_times_of_the_timing_model() -> None:
    from softsm.timing_model.parameters import GPUS

    with recording() as r:
        launch()
    b200 = GPUS["b200"]
    (copy,) = [s for s in r.slices if s.kind == "copy"]
    assert copy.end - copy.start == round(b200["tma.l2"] * b200.clock) + round(1024 / b200["sm.rate"])
    accesses = [s for s in r.slices if s.kind == "tmem"]
    assert accesses and all(
        s.end - s.start == round(b200["tmem.latency"]) + round(s.details["bytes"] / b200["tmem.rate"]) for s in accesses
    )
    assert "Cycles of a B200" in r.model and r.unit == "cycles"


def test_slices_of_a_track_do_not_overlap() -> None:
    with recording() as r:
        launch()
    for track in {s.track for s in r.slices}:
        mine = sorted((s.start, s.end) for s in r.slices if s.track == track)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:])), (track, mine)


def test_perfetto_timeline_reads_back(tmp_path) -> None:
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed")
    with tracing(tmp_path, title="relay") as made:
        launch()
    trace = pb.Trace()
    trace.ParseFromString((tmp_path / "timeline.perfetto-trace").read_bytes())
    threads = {p.track_descriptor.thread.thread_name for p in trace.packet if p.track_descriptor.HasField("thread")}
    assert {"warp 0 compute", "warp 1 compute", "TMA"} <= threads
    events = [p.track_event for p in trace.packet if p.HasField("track_event")]
    sent = [f for e in events for f in e.flow_ids]
    taken = [f for e in events for f in e.terminating_flow_ids]
    assert sorted(sent) == sorted(taken) and len(sent) == len(made.recorder.flows) > 0
    depth: dict[int, int] = {}
    for e in events:
        if e.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            depth[e.track_uuid] = depth.get(e.track_uuid, 0) + 1
            assert depth[e.track_uuid] == 1 and e.name
        elif e.type == pb.TrackEvent.TYPE_SLICE_END:
            depth[e.track_uuid] -= 1
    assert set(depth.values()) == {0}
    counters = {p.track_descriptor.name for p in trace.packet if p.track_descriptor.HasField("counter")}
    assert {"TMEM columns allocated", "bytes in flight", "instructions of exited warps"} <= counters
    total = max(e.counter_value for e in events if e.type == pb.TrackEvent.TYPE_COUNTER and e.counter_value < 1000)
    assert total == made.recorder.launches[0].steps


def test_findings_and_faults_are_in_the_report(tmp_path) -> None:
    with tracing(tmp_path / "racy") as made:
        launch(RACY)
    assert "race" in made.report.codes()
    data = read(tmp_path / "racy" / "report.html")
    (found,) = [d for d in data["diagnostics"] if d["code"] == "race"][:1]
    hot = [text for p in found["parties"] for n, text in p["ptx"] if n == p["line"]]
    assert any("cp.async.bulk" in t for t in hot) and any("ld.shared.v4" in t for t in hot)
    with pytest.raises(Deadlock), tracing(tmp_path / "stuck"):
        launch(STUCK)
    data = read(tmp_path / "stuck" / "report.html")
    assert data["failure"] == "", "it is a diagnostic already"
    (found,) = [d for d in data["diagnostics"] if d["code"] == "deadlock"]
    assert "\n" not in found["message"] and "512 byte(s)" in found["details"]
    (launched,) = data["launches"]
    forever = [s for s in data["slices"] if data["names"][s[3]].startswith(("waits forever", "polls forever"))]
    assert forever and all(s[2] == launched["end"] and s[2] - s[1] > launched["end"] // 20 for s in forever)


def read(path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)[1].replace("<\\/", "</"))


def test_command(tmp_path) -> None:
    file = tmp_path / "relay.ptx"
    file.write_text(PTX)
    done = CliRunner().invoke(app, ["trace", "-o", str(tmp_path / "out"), str(file), "u32[256]=random", "u32[128]=0"])
    assert done.exit_code == 0, done.output
    assert "0 findings" in done.output and (tmp_path / "out" / "report.html").stat().st_size > 10_000
    file.write_text(RACY)
    done = CliRunner().invoke(app, ["trace", "-o", str(tmp_path / "bad"), str(file), "u32[256]=random", "u32[128]=0"])
    assert done.exit_code == 1 and "wrote" in done.output


DRIVER = """
<script>
const said = { errors: window.seen, ready: document.body.dataset.ready };
const ink = id => { const c = document.getElementById(id), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size; };
const box = document.getElementById("timeline").getBoundingClientRect();
const fire = (type, x, y, more) => document.getElementById("timeline").dispatchEvent(new (type === "wheel" ? WheelEvent : MouseEvent)(type, Object.assign({ clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true }, more)));
said.rows = S.rows.map(r => r.name); said.colours = ["timeline", "tensor", "shared"].map(ink);
const row = S.rows.findIndex(r => r.kind === "TMA"), copy = D.slices[S.rows[row].slices[0]];
const x = xOf((copy[1] + copy[2]) / 2, box.width), y = TOP + row * ROW + ROW / 2;
fire("mousemove", x, y); said.tip = document.getElementById("tip").textContent;
fire("mousedown", x, y); fire("mouseup", x, y); said.detail = document.getElementById("detail").textContent;
const before = S.t1 - S.t0; fire("wheel", x, y, { deltaY: -100 }); said.zoomed = (S.t1 - S.t0) / before;
document.getElementById("fit").click(); said.fitted = S.t1 - S.t0 === before;
document.getElementById("arrows").click();
said.barriers = document.getElementById("barriers").innerText; said.buffers = document.getElementById("buffers").innerText; said.work = document.getElementById("work").innerText;
document.querySelector("#ptx details").open = true; said.findings = document.getElementById("findings").innerText; said.hot = document.querySelectorAll("pre.code div.hot").length;
setTimeout(() => { said.ptx = document.querySelector("#ptx details").innerText.length; const out = document.createElement("output"); out.id = "said"; out.textContent = JSON.stringify(said); document.body.append(out); }, 300);
</script>
"""  # noqa: E501


def browse(page, folder) -> dict:
    """The page with DRIVER at its end, opened in Chromium; what the driver saw."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        if os.environ.get("SOFTSM_NEEDS_CHROMIUM"):
            pytest.fail("SOFTSM_NEEDS_CHROMIUM is set, but there is no Chromium")
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    watch = "<head><script>window.seen = []; onerror = m => seen.push(m);</script>"
    text = page.read_text().replace("<head>", watch, 1)
    driven = folder / "driven.html"
    driven.write_text(text.replace("</body>", DRIVER + "</body>"))
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1360,2400 --virtual-time-budget=8000 --dump-dom"
    )
    command = [chromium, *flags.split(), f"--user-data-dir={folder / 'profile'}", f"file://{driven}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=800).stdout
    found = re.search(r'<output id="said">(.*?)</output>', dom, re.S)
    assert found, dom[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_the_report_in_a_browser(tmp_path) -> None:
    with tracing(tmp_path, title="relay"):
        launch()
    said = browse(tmp_path / "report.html", tmp_path)
    assert said["errors"] == [] and said["ready"] == "1"
    assert said["rows"] == ["warp 0 compute", "warp 1 compute", "TMA"]
    assert min(said["colours"]) >= 3  # something is drawn on every canvas
    assert "1024" in said["tip"] and "cp.async.bulk" in said["tip"]
    assert "-> warp 1 compute: wait" in said["detail"] and "<- warp 0 compute: issue" in said["detail"]
    assert 0.7 < said["zoomed"] < 0.9 and said["fitted"]
    assert "full" in said["barriers"] and "1,024" in said["barriers"] and "1.0 KiB" in said["buffers"]
    assert "tcgen05.ld" in said["work"] and said["ptx"] > 1500 and "Nothing found" in said["findings"]


def test_findings_in_a_browser(tmp_path) -> None:
    with tracing(tmp_path, title="racy"):
        launch(RACY)
    said = browse(tmp_path / "report.html", tmp_path)
    assert said["errors"] == [] and "race: " in said["findings"] and "Fix" in said["findings"]
    assert "cp.async.bulk" in said["findings"] and said["hot"] >= 2
