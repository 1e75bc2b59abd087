"""A streaming multiprocessor in software: runs PTX on a CPU and says why it is wrong."""
