"""Triton's NVIDIA compiler, cut off behind the PTX: no ptxas, the PTX text itself is the binary."""

from __future__ import annotations

# The module, not the class: Triton takes every concrete backend class it finds in an entry-point module.
import triton.backends.nvidia.compiler as nvidia

EXTENSION = (
    "softsm"  # not "ptx": that file would be read back as bytes, and programs expect asm["ptx"] to be text
)
VERSION = 1  # part of the key of Triton's cache on disk


class SoftsmBackend(nvidia.CUDABackend):
    def __init__(self, target):
        super().__init__(target)
        self.binary_ext = EXTENSION

    @staticmethod
    def supports_target(target) -> bool:
        return target.backend == "cuda"

    def add_stages(self, stages, options, language):
        super().add_stages(stages, options, language)
        stages.pop("cubin")
        stages[EXTENSION] = lambda ptx, metadata: ptx.encode()

    def hash(self) -> str:
        """Part of the cache key: differs from the stock compiler's, so that their results never mix."""
        return f"softsm-{VERSION}-{super().hash()}"
