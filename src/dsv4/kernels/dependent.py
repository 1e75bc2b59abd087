"""Programmatic dependent launch: a grid that is launched with launch_pdl begins while the grid before it still runs.

The grid before says with `launch_dependents` when CTAs of the next may be placed beside its own; all of its CTAs have
to, or end. `wait_on_prior_grid` returns when that grid has ended and what it wrote can be read. What the next grid
reads or writes earlier must be left alone by the grid before; grids before that one have ended, as it was launched
plainly.
"""

from dsv4.kernels.compat import barrier, gl, gluon


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_on_prior_grid():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()  # which the compiler moves no load across, as it might across the line above
