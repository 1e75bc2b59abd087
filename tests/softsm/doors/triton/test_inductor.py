"""Inductor's benchmarks run each candidate once while softsm is in use."""

import importlib
import sys

import pytest

import softsm

pytest.importorskip("triton")


def test_a_module_that_is_imported_later(monkeypatch):
    """The process seems not to have imported it yet; the module is restored afterwards."""
    from torch._inductor import runtime
    from torch._inductor.runtime import benchmarking

    monkeypatch.setattr(runtime, "benchmarking", benchmarking)
    monkeypatch.delitem(sys.modules, benchmarking.__name__)
    calls = []
    with softsm.use("sm_90a"):
        later = importlib.import_module(benchmarking.__name__).InductorBenchmarker
        assert later is not benchmarking.InductorBenchmarker
        assert 0 < later().benchmark_gpu(lambda: calls.append(1), warmup=25, rep=100) < 1
    assert len(calls) == 1 and "softsm" not in later.benchmark_gpu.__module__


def test_a_module_that_is_there_already():
    from torch._inductor.runtime.benchmarking import InductorBenchmarker

    calls = []
    with softsm.use("sm_90a"):
        InductorBenchmarker().benchmark_gpu(lambda: calls.append(1))
    assert len(calls) == 1 and "softsm" not in InductorBenchmarker.benchmark_gpu.__module__
