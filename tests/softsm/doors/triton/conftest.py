"""Launches recorded instead of run: the driver is tested without the engine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is unset


class RecordedKernel:
    """Stands in for the engine's kernel: checks the parameters against the PTX and keeps the launch."""

    launches: list = []  # of the class: Triton keeps a compiled kernel from one test to the next

    def __init__(self, ptx: str, name: str):
        from softsm.ptx import parse

        self.function = parse(ptx).functions[name]

    def launch(self, grid, block, args, *, shared, cluster, memory, sms, dependent=False):
        wanted = [p.size for p in self.function.params]
        assert [len(a) for a in args] == wanted, "packed parameters and the PTX disagree"
        assert self.function.directives["reqntid"][0] == block[0]
        self.launches.append(SimpleNamespace(
            name=self.function.name, grid=grid, block=block, args=args, shared=shared, cluster=cluster,
            memory=memory, sms=sms, dependent=dependent))  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    from softsm.doors.triton import runtime

    monkeypatch.setattr(runtime, "load", RecordedKernel)
    RecordedKernel.launches.clear()
    return RecordedKernel.launches
