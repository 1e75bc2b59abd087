"""Kernels in PTX: softsm.load_ptx, and the commands of docs/ptx.md."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import softsm
from softsm.cli import app
from softsm.museum import text as t

PAGE = (Path(__file__).parents[3] / "docs" / "ptx.md").read_text()
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
SQUARE = t.kernel(
    "mad.wide.u32 %rd10, %r0, 4, %rd1;\nld.global.u32 %r10, [%rd10];\nmul.lo.u32 %r10, %r10, %r10;\n"
    "st.global.u32 [%rd10], %r10;\n",
    "x",
    target="sm_90",
)


def test_commands_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r'^```ptx title="(.*?)"\n(.*?)^```$', PAGE, re.M | re.S):
        Path(name).write_text(code)
    assert len(COMMANDS) >= 5
    for line in COMMANDS:
        words, _, comment = line.partition("  # ")
        done = CliRunner().invoke(app, shlex.split(words)[1:])
        expected, _, text = comment.removeprefix("exits ").partition(": ")
        assert done.exit_code == int(expected or 0), (line, done.output)
        assert text in done.output
    assert np.load("out.npy")[0] == 127 and np.isnan(np.load("out.npy")[511])  # wrong: the barrier is missing


def test_a_launch_by_index(tmp_path):
    (tmp_path / "square.ptx").write_text(SQUARE)
    kernel = softsm.load_ptx(tmp_path / "square.ptx", arch="sm_100a")
    assert softsm.load_ptx(str(tmp_path / "square.ptx"), arch="sm_100a").arch == kernel.arch
    assert kernel.name == "k" and kernel.parameters == ("x",) and "sm_100a" in repr(kernel)
    for shape in ((1, 64), ((1, 1), (64,)), (1, 64, 1)):
        x = np.arange(64, dtype=np.uint32)
        kernel[shape](x, order="latest")
        assert np.array_equal(x, np.arange(64) ** 2)


@pytest.mark.parametrize(
    ("target", "arch", "fits"),
    [
        ("sm_90", "sm_90a", True),
        ("sm_90", "sm_100a", True),
        ("sm_90a", "sm_90a", True),
        ("sm_90a", "sm_100a", False),
        ("sm_100a", "sm_90a", False),
        ("sm_100f", "sm_100a", True),
        ("sm_90", "sm_80", False),
    ],
)
def test_the_machine_must_run_the_target(target, arch, fits):
    text = SQUARE.replace("sm_90", target)
    if fits:
        assert softsm.load_ptx(text, arch=arch).arch == arch
    else:
        with pytest.raises(ValueError, match=f"^arch: got '{arch}'; accepted"):
            softsm.load_ptx(text, arch=arch)


def test_what_is_no_launch_is_refused():
    with pytest.raises(ValueError, match="^ptx: got 5; accepted"):
        softsm.load_ptx(5)
    with pytest.raises(ValueError, match="^launch: got 4; accepted"):
        softsm.load_ptx(SQUARE)[4]
    clusters = SQUARE.replace("\n{", ".reqnctapercluster 2, 1, 1\n{", 1)
    with pytest.raises(ValueError, match=r"^cluster: got 4; accepted: \(2, 1, 1\)"):
        softsm.load_ptx(clusters)[4, 32, 4]


def test_an_array_in_read_only_memory_may_be_read_and_not_written(tmp_path):
    """A store to a file that is mapped to be read would end the process."""
    np.save(tmp_path / "x.npy", np.arange(32, dtype=np.uint32))
    x, out = np.load(tmp_path / "x.npy", mmap_mode="r"), np.zeros(32, np.uint32)
    load = "mad.wide.u32 %rd10, %r0, 4, %rd1;\nld.global.u32 %r10, [%rd10];\n"
    store = "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.u32 [%rd10], %r10;\n"
    softsm.load_ptx(t.kernel(load + store, "x out", target="sm_90"))[1, 32](x, out)
    assert np.array_equal(out, np.arange(32))
    with pytest.raises(ValueError, match="^args: parameter x: got a read-only array, which the kernel writes"):
        softsm.load_ptx(SQUARE)[1, 32](x)
    assert np.array_equal(x, np.arange(32))
