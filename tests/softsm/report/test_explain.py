"""`softsm explain`: every code and every kind of picture; the pictures agree with PTX's own figures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import softsm
from softsm.cli import app
from softsm.memory import swizzle
from softsm.report.codes import CODES

RUN = CliRunner()


def say(*words: str, code: int = 0) -> str:
    result = RUN.invoke(app, ["explain", *words], prog_name="softsm", env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def cells(text: str, row: str) -> list[str]:
    """The words of the line of a picture that begins with `row`."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [row])[1:]


def test_every_code_has_a_sentence_and_a_fix() -> None:
    for code in CODES:
        text = say(code)
        assert text.startswith(code) and "fix" in text and len(text.split()) > 6


@pytest.mark.parametrize("wrong", ["--rows 0", "--rows 1000000000", "--k 99999", "--arch sm_80", "--major q"])
def test_a_tile_that_no_product_has_is_refused(wrong: str) -> None:
    option, value = wrong.split()
    text = say("descriptor", "0x4000404000010040", option, value, code=2)
    assert text.startswith(f"softsm explain: {option}: got ") and "accepted:" in text


def test_every_code_that_is_raised_is_explained() -> None:
    """The first argument of Fault, w.fault and Diagnostic is a code; the museum's own two are not findings of a
    kernel."""
    files = [path for path in Path(softsm.__file__).parent.rglob("*.py") if "museum" not in path.parts]
    raised = set(re.findall(r'\b(?:Fault|fault|Diagnostic)\(\s*"([^"]*)"', "\n".join(x.read_text() for x in files)))
    assert len(raised) > 40 and raised <= set(CODES), raised - set(CODES)


def test_overview_lists_all() -> None:
    text = say()
    assert all(code in text for code in CODES)


@pytest.mark.parametrize(("name", "lane", "expected"), [
    ("tcgen05.ld.16x256b.x1", "1", "t4.r0 t4.r1 t5.r0 t5.r1 t6.r0 t6.r1 t7.r0 t7.r1"),  # PTX 9.4, figure of .16x256b
    ("tcgen05.ld.16x256b.x1", "8", "t0.r2 t0.r3 t1.r2 t1.r3 t2.r2 t2.r3 t3.r2 t3.r3"),
    ("tcgen05.ld.32x32b.x4", "31", "t31.r0 t31.r1 t31.r2 t31.r3"),
    ("tcgen05.st.16x128b.x1", "8", "t0.r1 t1.r1 t2.r1 t3.r1"),
])  # fmt: skip
def test_tensor_memory_maps(name: str, lane: str, expected: str) -> None:
    assert cells(say(name), lane) == expected.split()


def test_fragments_follow_the_ptx_figures() -> None:
    text = say("mma.sync.m16n8k16.bf16")
    assert cells(text, "9")[:3] == ["t4.r2", "t4.r3", "t5.r2"]
    assert "t0.r2" in text and "A: 16 x 16" in text and "B: 16 x 8" in text
    assert "wait_group" in say("wgmma.mma_async.m64n64k16")


def test_others_have_a_picture_or_their_chapter() -> None:
    assert "0-31, 32-63, 64-95, 96-127" in say("tcgen05.cp.32x128b.warpx4")
    assert "96-127" in say("tcgen05.mma") and "row 0 of matrix 1" in say("ldmatrix.x2.trans")
    assert "softsm.isa.barriers" in say("fence.proxy.async")


def test_descriptor_draws_the_swizzle() -> None:
    raw = swizzle.encode(0x400, 16, 1024, swizzle.SWIZZLE128, blackwell=True)
    text = say("descriptor", hex(raw), "--rows", "16", "--k", "64")
    line = cells(text, "0x00480")  # row 1: neighbouring chunks change places
    assert line[:4] == ["r1", "k8", "r1", "k0"]
    assert "2048 bytes" in text and "128B swizzle" in text
    where = swizzle.addresses(swizzle.decode(raw, True), True, 16, 8)
    assert np.unique(where).size == 128
    transposed = say("descriptor", hex(raw), "--rows", "64", "--k", "16", "--major", "mn")
    assert cells(transposed, "0x00480")[:4] == ["k1", "r8", "k1", "r0"]


def test_descriptor_says_what_is_wrong() -> None:
    hopper = swizzle.encode(0x400, 16, 1024, swizzle.SWIZZLE128, blackwell=False)
    assert "requires 001" in say("descriptor", hex(hopper))
    assert "requires 001" not in say("descriptor", hex(hopper), "--arch", "sm_90a")
    overlapping = swizzle.encode(0x400, 0, 0, swizzle.NONE, blackwell=True)
    assert "on top of others" in say("descriptor", hex(overlapping))


def test_instruction_descriptor() -> None:
    from softsm.isa import instruction_descriptor as idesc

    text = say("idesc", hex(idesc.encode("f16", 128, 256, "bf16", "bf16")))
    assert "bf16" in text and "256" in text
    sparse = say("idesc", hex(idesc.encode("f16", 128, 256, "bf16", "bf16", sparse=True, selector=1)))
    assert "sparse" in sparse and "True" in sparse and "32" in sparse
    assert "M = 16" in say("idesc", hex(idesc.encode("f16", 16, 256, "bf16", "bf16")))


@pytest.mark.parametrize("words", [
    ("no-such-thing",), ("descriptor", "abc"),
    ("descriptor", "1", "--dtype", "f3"), ("descriptor", "1", "--major", "x"),
    ("tcgen05.ld.7x7b",), ("tcgen05.ld.32x32b.x3",), ("idesc", "1", "--kind", "f3"),
])  # fmt: skip
def test_what_is_not_known_is_named(words) -> None:
    text = say(*words, code=2)
    assert "got" in text and "accepted" in text
