"""Inductor's benchmarks run each candidate once while softsm is in use."""

import subprocess
import sys

import pytest

import softsm

pytest.importorskip("triton")

PROGRAM = """
import sys, softsm
with softsm.use("sm_90a"):
    assert "torch._inductor.runtime.benchmarking" not in sys.modules
    from torch._inductor.runtime.benchmarking import InductorBenchmarker
    calls = []
    assert 0 < InductorBenchmarker().benchmark_gpu(lambda: calls.append(1), warmup=25, rep=100) < 1
    assert len(calls) == 1
assert "softsm" not in InductorBenchmarker.benchmark_gpu.__module__
"""


def test_a_module_that_is_imported_later():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_that_is_there_already():
    from torch._inductor.runtime.benchmarking import InductorBenchmarker

    calls = []
    with softsm.use("sm_90a"):
        InductorBenchmarker().benchmark_gpu(lambda: calls.append(1))
    assert len(calls) == 1 and "softsm" not in InductorBenchmarker.benchmark_gpu.__module__
