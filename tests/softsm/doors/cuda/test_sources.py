"""Published sources that clang rejects: corrected copies, and CUTLASS's macros."""

import json

import pytest

from softsm.doors.cuda import sources

WRONG = 'asm volatile("x" : : "r"(dst_addr)  "l"(src_addr));\n'


def test_a_copy_is_corrected_and_the_file_is_not(tmp_path):
    files = [tmp_path / "cute" / "arch" / name for name in ("copy_sm100.hpp", "copy_sm90.hpp")]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.write_text(WRONG)
    (tmp_path / "made").mkdir()
    flag, overlay = sources.corrected(files, tmp_path / "made")
    assert flag == "-ivfsoverlay" and files[0].read_text() == WRONG
    [entry] = json.loads(open(overlay).read())["roots"]
    assert entry["name"] == str(files[0])
    assert '"r"(dst_addr), "l"(src_addr)' in open(entry["external-contents"]).read()


def test_a_release_that_is_right_is_read_as_it_is(tmp_path):
    file = tmp_path / "cute" / "arch" / "copy_sm100.hpp"
    file.parent.mkdir(parents=True)
    file.write_text(WRONG.replace(")  ", "), "))
    assert sources.corrected([file], tmp_path) == []


def test_vector_atomics_of_clang_stay_where_nobody_uses_what_was_there(tmp_path):
    file = tmp_path / "include" / "__clang_cuda_intrinsics.h"
    file.parent.mkdir()
    file.write_text('__asm__("atom.add.v2.f32 {%0, %1}, [%2], {%3, %4};" : : "f"(__val.x), "f"(__val.y));\n')
    (tmp_path / "made").mkdir()
    sources.corrected([file], tmp_path / "made")
    text = (tmp_path / "made" / f"0-{file.name}").read_text()
    assert text.startswith('__asm__ volatile("atom.add') and text.endswith('"f"(__val.y) : "memory");\n')


@pytest.mark.parametrize(("arch", "macro"), [("sm_100a", "SM100A_ENABLED"), ("sm_103a", "SM103A_ENABLED")])
def test_cutlass_knows_the_architecture(arch, macro):
    assert f"-DCUTLASS_ARCH_MMA_{macro}=1" in sources.macros(arch)
    assert [flag for flag in sources.macros("sm_90a") if "CUTLASS" in flag] == ["-DCUTLASS_GRID_CONSTANT_SUPPORTED"]
