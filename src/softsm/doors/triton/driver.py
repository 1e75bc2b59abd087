"""Triton imports this module while it looks for drivers, and requires exactly one concrete DriverBase in it.

Without SOFTSM in the environment that is a class which is never active: nothing heavy is imported, nothing patched.
"""

import os

if os.environ.get("SOFTSM"):
    from softsm.doors.triton import environment, runtime

    environment.enter()
    SoftsmDriver = runtime.SoftsmDriver
else:
    from triton.backends.driver import DriverBase

    class SoftsmDriver(DriverBase):  # type: ignore[no-redef]
        """Asleep: `softsm.use()` sets the real one as the active driver."""

        is_active = staticmethod(lambda: False)

    SoftsmDriver.__abstractmethods__ = frozenset()
