"""cp.async: one rule per test, under every order."""

import numpy as np
import pytest
from copy_texts import DATA, THREAD, read_back, source
from launching import ptx, run, store, wait, words


@pytest.mark.parametrize("size, cache", [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
@pytest.mark.parametrize("hint", ["", ".L2::128B"])
def test_each_lane_copies(size, cache, hint):
    body = THREAD.format(size=size) + f"cp.async.{cache}.shared.global{hint} [%r3], [%rd4], {size};\n"
    text = ptx(body + "cp.async.wait_all;\nbar.warp.sync -1;\n" + read_back(8 * size), "out src", shared=DATA)
    data = source()
    np.testing.assert_array_equal(run(text, [words(8 * size), data])[0], data[: 8 * size])


def test_short_source_is_padded_with_zeros():
    body = THREAD.format(size=16) + "rem.u32 %r5, %r1, 17;\ncp.async.cg.shared.global [%r3], [%rd4], 16, %r5;\n"
    text = ptx(body + "cp.async.wait_all;\nbar.warp.sync -1;\n" + read_back(128), "out src", shared=DATA)
    data = source()
    got = run(text, [words(128), data])[0].view(np.uint8).reshape(32, 16)
    wanted = data.view(np.uint8)[:512].reshape(32, 16).copy()
    for lane in range(32):
        wanted[lane, lane % 17 :] = 0
    np.testing.assert_array_equal(got, wanted)


def test_nothing_is_read_for_a_source_size_of_zero():
    """Masked lanes may point anywhere."""
    body = (
        THREAD.format(size=16) + "setp.lt.u32 %p2, %r1, 8;\nselp.u32 %r5, 16, 0, %p2;\nselp.b64 %rd4, %rd4, 0, %p2;\n"
    )
    body += "cp.async.cg.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x10, %r5;\ncp.async.wait_all;\nbar.warp.sync -1;\n"
    data = source()
    got = run(ptx(body + read_back(128), "out src", shared=DATA), [words(128), data])[0]
    np.testing.assert_array_equal(got, np.where(np.arange(128) < 32, data[:128], 0))


def test_ignored_source_reads_as_zero():
    body = THREAD.format(size=4) + "and.b32 %r5, %r1, 1;\nsetp.eq.u32 %p2, %r5, 1;\n"
    body += "cp.async.ca.shared.global [%r3], [%rd4], 4, %p2;\ncp.async.wait_all;\nbar.warp.sync -1;\n"
    data = source()
    got = run(ptx(body + read_back(32), "out src", shared=DATA), [words(32), data])[0]
    np.testing.assert_array_equal(got, np.where(np.arange(32) % 2, 0, data[:32]))


def two_groups(newest):
    body = THREAD.format(size=4) + "st.shared.u32 [%r3], 5;\nst.shared.u32 [%r3+128], 6;\n"
    body += "cp.async.ca.shared.global [%r3], [%rd4], 4;\ncp.async.commit_group;\n"
    body += "cp.async.ca.shared.global [%r3+128], [%rd4+128], 4;\ncp.async.commit_group;\n"
    return ptx(body + f"cp.async.wait_group {newest};\nbar.warp.sync -1;\n" + read_back(64), "out src", shared=DATA)


def test_wait_group_waits_for_all_but_the_newest():
    data = source()
    assert (run(two_groups(0), [words(64), data])[0] == data[:64]).all()
    late = run(two_groups(1), [words(64), data], orders=[("latest", 0)])[0]
    np.testing.assert_array_equal(late, np.concatenate([data[:32], np.full(32, 6)]))  # the second is still to come
    late = run(two_groups(2), [words(64), data], orders=[("latest", 0)])[0]
    np.testing.assert_array_equal(late, np.repeat([5, 6], 32))


@pytest.mark.parametrize("noinc, count", [(".noinc", 64), ("", 1)])
def test_copies_arrive_on_an_mbarrier(noinc, count):
    """With .noinc the barrier counts every thread; without it the copies bring their own count along."""
    body = f"""mov.u32 %r20, bar;
@%p1 mbarrier.init.shared.b64 [%r20], {count};
bar.sync 0;
{THREAD.format(size=16)}
cp.async.cg.shared.global [%r3], [%rd4], 16;
cp.async.mbarrier.arrive{noinc}.shared.b64 [%r20];
"""
    if not noinc:
        body += "bar.sync 0;\n@%p1 mbarrier.arrive.shared.b64 _, [%r20];\n"
    body += wait("%r20", 0, "W")
    body += "xor.b32 %r1, %r1, 32;\nmad.lo.u32 %r10, %r1, 16, %r2;\nld.shared.u32 %r11, [%r10+4];\n"
    text = ptx(body + store("%r11"), "out src", shared=DATA)
    data = source()
    np.testing.assert_array_equal(run(text, [words(64), data], block=64)[0], data[1:256:4])
