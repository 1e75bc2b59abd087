"""Attention for PyTorch: FMHA for head dims 64 to 512 and the hybrid attention of DeepSeek-V4."""
