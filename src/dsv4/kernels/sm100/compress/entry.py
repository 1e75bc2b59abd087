"""compress and rows into Fp8Cache pages on sm_100a: the kernels that every architecture shares."""

from dsv4.kernels.shared.compress.prepare import forward, supports, write

__all__ = ["forward", "supports", "write"]
