"""One thread for torch's CPU operations, as deterministic=True needs on a CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()  # the number of threads belongs to the process: one call at a time may change it


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: a BLAS divides a product among its threads, whose number may change the order of its sums."""
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
