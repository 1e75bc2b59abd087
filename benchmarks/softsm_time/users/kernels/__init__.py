"""The kernels of each set."""
