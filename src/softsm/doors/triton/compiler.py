"""Triton imports this module while it looks for backends, and requires exactly one concrete BaseBackend in it.

Without SOFTSM in the environment that is a class which supports no target: nothing heavy is imported, nothing patched.
"""

import os

if os.environ.get("SOFTSM"):
    from softsm.doors.triton import backend, environment

    environment.enter()
    SoftsmBackend = backend.SoftsmBackend
else:
    from triton.backends.compiler import BaseBackend

    class SoftsmBackend(BaseBackend):  # type: ignore[no-redef]
        """Asleep: `softsm.use()` puts the real one in its place."""

        supports_target = staticmethod(lambda target: False)

    SoftsmBackend.__abstractmethods__ = frozenset()  # concrete, whatever a later Triton adds to the interface
