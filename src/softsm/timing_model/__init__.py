"""A timing model, calibrated on microbenchmarks: predicts how long a kernel runs on a GPU and what it waits for."""
