"""softsm as a Triton driver: `kernel[grid](cpu_tensor, ...)` compiles with Triton's NVIDIA backend and runs here.

`compiler` and `driver` are what Triton's entry point imports; they are dormant unless SOFTSM is set. Everything else is
imported by `softsm.use`.
"""
