"""Triton's NVIDIA compiler without its last step: the PTX text itself is the binary. ptxas runs only if a program
reads a kernel's `asm["cubin"]` or `asm["sass"]`."""

from __future__ import annotations

import re

# The module, not the class: Triton uses every concrete backend class that it finds in an entry-point module.
import triton.backends.nvidia.compiler as nvidia

EXTENSION = "softsm"  # not "ptx": that file would be read back as bytes, and programs expect asm["ptx"] to be text
VERSION = 1  # part of the key of Triton's cache on disk


class SoftsmBackend(nvidia.CUDABackend):
    def __init__(self, target):
        super().__init__(target)
        self.binary_ext = EXTENSION

    @staticmethod
    def supports_target(target) -> bool:
        return target.backend == "cuda"

    def parse_options(self, opts):
        """Fuses sums and products as Triton does by default, unless the program decides. Triton 3.9 warns about an open
        choice, and the output of a check should begin with its findings."""
        if opts.get("enable_fp_fusion") is None:
            opts = {**opts, "enable_fp_fusion": nvidia.knobs.language.default_fp_fusion}
        return super().parse_options(opts)

    def add_stages(self, stages, options, language):
        super().add_stages(stages, options, language)
        stages.pop("cubin")
        stages[EXTENSION] = lambda ptx, metadata: ptx.encode()

    def hash(self) -> str:
        """Returns a part of the cache key that differs from the stock compiler's, so that their results never mix."""
        return f"softsm-{VERSION}-{super().hash()}"


def on_demand(missing):
    """Replaces `AsmDict.__missing__`: adds the cubin to what Triton itself makes on demand."""

    def made(asm, key: str):
        if key != "cubin" or EXTENSION not in asm:
            return missing(asm, key)
        from softsm.timing_model.sass import assembled

        target = re.search(r"^\.target (\w+)", asm["ptx"], re.M)
        assert target is not None
        asm[key] = assembled(asm["ptx"], target[1])[0]
        return asm[key]

    return made
