"""How long a kernel takes on a GPU, and what it waits for: a model, calibrated on microbenchmarks."""
