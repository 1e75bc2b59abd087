"""SOFTSM=sm_100a in the environment: softsm is in use from `import triton` on, for the whole process."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from importlib.abc import MetaPathFinder

from softsm.doors.triton import in_use, install

_entered = False


def enter() -> None:
    """Called by the entry-point modules while Triton is being imported, once for each of them."""
    global _entered
    if _entered:
        return
    _entered = True
    arch = os.environ["SOFTSM"]
    if arch not in in_use.ARCHITECTURES:
        raise ValueError(f"SOFTSM: got {arch!r}; accepted: {', '.join(in_use.ARCHITECTURES)}")
    import torch

    shim = not torch.cuda.is_available()
    if not shim:
        warnings.warn(
            'SOFTSM: CUDA is available here, so device="cuda" stays CUDA; give softsm CPU tensors', stacklevel=2
        )
    # Triton collects its backends right now: it finds ours by itself, and there is no registry to put it into yet
    use = install.Use(arch, cuda_shim=shim, register=False)
    sys.meta_path.insert(0, _AfterTesting(use))


class _AfterTesting(MetaPathFinder):
    """Triton's functions can be replaced only after `triton.testing` is there, at the end of the import."""

    def __init__(self, use: install.Use):
        self.use = use

    def find_spec(self, name, path, target=None):
        if name != "triton.testing":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_patch(module) -> None:
            execute(module)
            self.use.patch_triton(module)

        spec.loader.exec_module = then_patch  # type: ignore[method-assign]
        return spec
