"""The families' kernels, written plainly: a user's, not tuned."""
