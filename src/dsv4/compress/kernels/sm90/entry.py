"""compress and rows into Fp8Cache pages on sm_90a: the kernels that every architecture shares."""

from dsv4.compress.kernels.prepare import run, supports, write

__all__ = ["run", "supports", "write"]
