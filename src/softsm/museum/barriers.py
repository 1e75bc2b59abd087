"""Exhibits about barriers: counts, bytes, phases, cycles; and the parser's error on labels."""

from __future__ import annotations

import numpy as np

from softsm.memory.tensor_map import DataType
from softsm.memory.tensor_map_image import encode_tiled
from softsm.museum import text as t
from softsm.museum.exhibits import Program, exhibit

SHARED = """.shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 full; .shared .align 8 .b64 p_ready;
.shared .align 8 .b64 pv_done;
.shared .align 8 .b64 half;"""
X = np.arange(4096, dtype=np.uint32)
FULL = "mov.u32 %r40, a;\nshl.b32 %r41, %r0, 2;\nadd.u32 %r40, %r40, %r41;\nld.shared.u32 %r42, [%r40];\n"


def tensor(arrays):
    """x as [128 rows, 32 columns] of u32, boxes of 32 rows."""
    return encode_tiled(DataType.UINT32, 2, arrays[0].ctypes.data, (32, 128), (128,), (32, 32))


def kernel(body: str, **options) -> str:
    return t.kernel(body, "x out map!", shared=SHARED, target="sm_90a", version="8.6", **options)


def program(body: str, right=None, **launch) -> Program:
    return Program(kernel(body), [X, np.zeros(1024, np.uint32), tensor], right=right, **launch)


def loaded(arrays) -> bool:
    return bool((arrays[1][:128] == np.arange(128)).all())


COPY = t.tma_load("a", "%rd3", "0, 0", "full")


@exhibit(
    15,
    "four idle warps added: participant counts no longer match",
    counted=("deadlock", "barrier-count"),
    old_number=("race",),
)
def idle_warps(bug: str) -> Program:
    """Warps 0 to 3 store rows and arrive; warp 8, which was warp 4, reads them; warps 4 to 7 are new and idle.
    counted: the barrier counts the idle threads too and never completes. old_number: warp 4 still waits, but warp 8
    reads, so there is garbage instead of a deadlock."""
    place = "mov.u32 %r40, a;\nshl.b32 %r41, {};\nadd.u32 %r40, %r40, %r41;\n"
    work = place.format("%r0, 2") + "st.shared.u32 [%r40], %r0;\n" + t.arrive("half")
    read = place.format("%r2, 2")
    for i in range(4):
        read += f"ld.shared.u32 %r42, [%r40+{128 * i}];\n" + t.out("%r42", "%rd2", "%r2", offset=128 * i)
    body = t.init(("half", 256 if bug == "counted" else 128))
    body += "setp.lt.u32 %p4, %r0, 128;\n" + t.only("%p4", work)
    body += t.only("warp 4" if bug == "old_number" else "warp 8", t.wait("half", 0)) + t.only("warp 8", read)
    return program(body, None if bug else loaded, block=288)


@exhibit(16, "softmax waits for pv_done at kt = 0, which nothing signals yet", "deadlock")
def first_iteration(bug: str) -> Program:
    """Warp 0 runs softmax: it waits until the previous PV is done, stores P and arrives. Warp 1 waits for P, runs PV
    and arrives."""
    softmax = values = ""
    for kt in range(3):
        softmax += t.wait("pv_done", kt % 2 if bug else (kt + 1) % 2) + "@%p4 " + t.arrive("p_ready")
        values += t.wait("p_ready", kt % 2) + "@%p4 " + t.arrive("pv_done")
    lead = "setp.eq.u32 %p4, %r2, 0;\n"
    return program(t.init("p_ready", "pv_done") + lead + t.only("warp 0", softmax) + t.only("warp 1", values), block=64)


@exhibit(19, "mbarrier initialised with the byte count as arrival count", "barrier-count")
def bytes_as_count(bug: str) -> Program:
    body = t.init(("full", 4096 if bug else 1)) + t.only("%p0", t.expect("full", 4096) + COPY)
    return program(body + t.wait("full", 0) + FULL + t.out("%r42", "%rd2"), loaded)


@exhibit(
    20,
    "TMA issued without expect_tx, or with the wrong number of bytes",
    forgotten=("barrier-tx", "race"),
    too_many=("barrier-tx",),
    too_few=("barrier-tx", "race"),
)
def wrong_bytes(bug: str) -> Program:
    """forgotten: a plain arrival ends the phase before the bytes arrive; too_few: so does the last announced byte."""
    announced = {"forgotten": 0, "too_many": 4096 + 16, "too_few": 2048, "": 4096}[bug]
    arrival = t.expect("full", announced) if announced else t.arrive("full")
    body = t.init("full") + t.only("%p0", arrival + COPY)
    return program(body + t.wait("full", 0) + FULL + t.out("%r42", "%rd2"), None if bug else loaded)


@exhibit(21, "wait with a constant parity 0", "barrier-phase", "race", "deadlock")
def constant_parity(bug: str) -> Program:
    body = t.init("full")
    for i in range(3):
        body += t.only("%p0", t.expect("full", 4096) + t.tma_load("a", "%rd3", f"0, {32 * i}", "full"))
        body += t.wait("full", 0 if bug else i % 2) + FULL + t.out("%r42", "%rd2", offset=512 * i) + "bar.sync 0;\n"
    right = np.concatenate([X[1024 * i : 1024 * i + 128] for i in range(3)])
    return program(body, lambda arrays: bool((arrays[1][:384] == right).all()))


@exhibit(23, "spin wait emitted twice with its label in the same scope", "parse")
def same_label(bug: str) -> Program:
    spin = "WAIT_LOOP:\nmbarrier.try_wait.parity.shared::cta.b64 %p11, [full], 0;\n@!%p11 bra WAIT_LOOP;\n"
    body = t.init("full") + "@%p0 " + t.arrive("full") + (spin + spin if bug else f"{{\n{spin}}}\n{{\n{spin}}}\n")
    return program(body)


@exhibit(28, "expect_tx of both CTAs' bytes where each CTA receives its own", "deadlock")
def pair_bytes(bug: str) -> Program:
    """Two CTAs of a cluster load one half each and wait on their own barrier: each receives 2048 bytes, not 4096."""
    half = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd1], 2048, [full];\n"
    body = t.init("full") + t.only("%p0", t.expect("full", 4096 if bug else 2048) + half) + t.wait("full", 0) + FULL
    return program(body + t.out("%r42", "%rd2"), loaded, grid=2, cluster=2)
