"""compress on sm_100a: the kernels that every architecture shares."""

from dsv4.compress.kernels.prepare import run, supports

__all__ = ["run", "supports"]
