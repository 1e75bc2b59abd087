"""What the compiler cannot see through."""

from dsv4.kernels.compat import gl, gluon


@gluon.jit
def zero(x):
    """Return 0 for any integer, which the compiler cannot know."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def behind(loaded, bit):
    """Return zeros in the shape of `loaded`, int32 numbers, once these have arrived: a load whose address is computed
    from the zeros waits for them. bit: 0 or 1, which neither compiler nor assembler knows."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 none; shr.u32 none, $2, 1; and.b32 $0, $1, none; }",
        "=r,r,r",
        [loaded, bit],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
