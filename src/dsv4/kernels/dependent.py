"""Programmatic dependent launch: a grid that is launched with launch_pdl begins while the previous grid still runs.

CTAs of the next grid may start once all CTAs of the previous grid have called `launch_dependents` or ended.
`wait_on_prior_grid` returns when that grid has ended and its writes are visible. The previous grid must not access what
the next grid reads or writes before this wait; grids before it have ended, because it was launched without launch_pdl,
or because all of its CTAs have waited before they called `launch_dependents`.
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
    barrier()  # the compiler moves no load across the barrier, as it might across the line above
