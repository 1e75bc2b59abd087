"""One thread for torch's CPU operations: what deterministic=True needs on a CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()  # the number of threads belongs to the process: one call at a time may change it


@contextmanager
def one_thread() -> Iterator[None]:
    """A BLAS divides a product among its threads, and with their number the order of its sums may change."""
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
