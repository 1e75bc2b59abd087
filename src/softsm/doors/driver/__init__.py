"""Python programs that load PTX through the CUDA driver interface."""
