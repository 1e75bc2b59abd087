"""Exhibits about the operands of a product: wrong strides, descriptors, coordinates, swizzles."""

from __future__ import annotations

import numpy as np

from softsm.museum import text as t
from softsm.museum import tiles
from softsm.museum.exhibits import Program, exhibit
from softsm.museum.tiles import ROWS, D

Q, K = tiles.draw(1, 128, D), tiles.draw(2, 2 * ROWS, D)


def expect(**operands):
    def declare() -> None:
        from softsm.checks.checking import expect_mma

        expect_mma("S = Q K^T", **operands)

    return declare


def single(body: str, k: np.ndarray, **more) -> Program:
    """Copies Q and K from global memory into the tiles by `body`, runs one product and writes S out."""
    text = tiles.START + body + tiles.PUBLISH
    text += t.only("%p0", tiles.product("%r3", "%rd10", "%rd11") + t.commit("bar"))
    text += tiles.READ_ACC + tiles.write_out() + t.dealloc(64)
    right = tiles.scores(Q, k[:ROWS])
    return Program(
        t.kernel(text, "q k out", shared=tiles.SHARED),
        [Q, K, np.zeros((128, ROWS), np.float32)],
        right=lambda arrays: tiles.close(arrays[2], right),
        **more,
    )


@exhibit(1, "K tile written with the template head dim as the data stride", "operand")
def data_stride(bug: str) -> Program:
    stride = 256 if bug else 128  # bytes between the rows of K: the template's 128 columns, or the actual 64
    body = tiles.copy_tile("q_tile", "%rd1", 128, 128) + tiles.copy_tile("k_tile", "%rd2", ROWS, stride)
    body += tiles.describe("%rd10", "q_tile") + tiles.describe("%rd11", "k_tile")
    return single(body, K, expect=expect(a=Q, b=K[:ROWS]))


@exhibit(2, "a (128, 64) tile read through descriptors made for a 16-column tile", "operand")
def narrow_descriptor(bug: str) -> Program:
    body = tiles.copy_tile("q_tile", "%rd1", 128, 128) + tiles.copy_tile("k_tile", "%rd2", ROWS, 128)
    if bug:  # row pitch 32 bytes: 16 columns of bf16
        body += t.descriptor("%rd10", "q_tile", lbo=16, sbo=256, swizzle=6)
    else:
        body += tiles.describe("%rd10", "q_tile")
    return single(body + tiles.describe("%rd11", "k_tile"), K, expect=expect(a=Q, b=K[:ROWS]))


@exhibit(18, "P written to shared memory by hand with the wrong swizzle", "operand")
def hand_swizzle(bug: str) -> Program:
    """Uses P in place of Q: the chunk must be XORed with the row modulo 8, not modulo 4."""
    flip = "and.b32 %r96, %r94, 3;" if bug else "and.b32 %r96, %r94, 7;"
    body = tiles.copy_tile("q_tile", "%rd1", 128, 128, flip) + tiles.copy_tile("k_tile", "%rd2", ROWS, 128)
    body += tiles.describe("%rd10", "q_tile") + tiles.describe("%rd11", "k_tile")
    return single(body, K, expect=expect(a=Q, b=K[:ROWS]))


def two_tiles(coordinate: list[int], rows: int = 2 * ROWS, count: int = 2, **more) -> Program:
    """Computes S for `count` tiles of K, which TMA loads from their coordinates, and writes the whole S
    [128, count * 32] out."""
    size = ROWS * 128
    body = tiles.START + tiles.copy_tile("q_tile", "%rd1", 128, 128) + tiles.PUBLISH
    body += tiles.describe("%rd10", "q_tile") + tiles.describe("%rd11", "k_tile")
    for i in range(count):
        bring = t.expect("full", size) + t.tma_load("k_tile", "%rd4", f"0, {coordinate[i]}", "full")
        body += t.only("%p0", bring + t.wait("full", i % 2) + tiles.product("%r3", "%rd10", "%rd11") + t.commit("bar"))
        body += t.wait("bar", i % 2) + t.AFTER + tiles.write_out(offset=i * ROWS, stride=count * ROWS)
        body += t.BEFORE + "bar.sync 0;\n" + t.AFTER
    k = K[:rows]
    right = np.concatenate([tiles.scores(Q, k[i * ROWS : (i + 1) * ROWS]) for i in range(rows // ROWS)], 1)
    args = [Q, k, np.zeros((128, count * ROWS), np.float32), tiles.tensor_of(1, rows)]
    return Program(
        t.kernel(body + t.dealloc(64), "q k out map!", shared=tiles.SHARED),
        args,
        right=lambda arrays: tiles.close(arrays[2][:, : right.shape[1]], right),
        **more,
    )


def expect_tiles():
    return expect(b=K.reshape(2, ROWS, D))


@exhibit(7, "TMA coordinate hard-wired to tile 0", "operand")
def first_tile_only(bug: str) -> Program:
    return two_tiles([0, 0] if bug else [0, ROWS], expect=expect_tiles())


@exhibit(8, "interleaved K/V pipeline count used as the tile index", "operand", "out-of-bounds-fill")
def pipeline_count(bug: str) -> Program:
    """K and V share one ring: K tiles are copies 0 and 2. The bug uses the copy's number as the tile's."""
    return two_tiles([0, 2 * ROWS] if bug else [0, ROWS], expect=expect_tiles())


@exhibit(14, "s_k smaller than n: a later tile is beyond the tensor", "out-of-bounds-fill")
def beyond_the_tensor(bug: str) -> Program:
    return two_tiles([0, ROWS], rows=ROWS, count=2 if bug else 1)
