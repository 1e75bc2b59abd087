"""Two grids in a row, the second launched (Triton's launch_pdl) before the first has ended: it waits where it must."""

from dsv4.kernels.compat import gl, gluon


@gluon.jit
def let_next_begin():
    """The next grid may be launched once every CTA of this one has said so, or has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_last():
    """For the end of the grid before; what it wrote is visible then. Launched in the ordinary way: no wait."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
