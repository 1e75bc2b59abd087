"""What the compiler cannot see through."""

from dsv4.kernels.compat import gl, gluon


@gluon.jit
def zero(x):
    """0 for any integer, but the compiler cannot know."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def behind(loaded, bit):
    """0 when the int32 numbers `loaded` have come, of their shape. What is computed from it, the address of a load,
    waits for them. bit: 0 or 1, which neither compiler nor assembler know of it."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 none; shr.u32 none, $2, 1; and.b32 $0, $1, none; }",
        "=r,r,r", [loaded, bit], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
