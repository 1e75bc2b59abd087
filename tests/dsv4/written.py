"""What calls would launch, and what `dsv4 compile` writes, by the names of the variants."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import launches
import pytest
import torch

import softsm
from dsv4.commands import variants
from dsv4.runtime import aot, calls, checks, dispatch, launch

SIZES = variants.Sizes(
    hidden=128,
    q_lora=32,
    heads=4,
    index_heads=16,
    fp4_index_heads=16,
    topk=8,
    ratios=(4, 16),
    index_rows=64,
    page_size=4,
)


def name(arch, kernel, arguments, constants):
    return aot.variant(kernel.__name__, aot.argument_types(arguments), constants, arch)


@contextmanager
def recording(arch):
    """{name: kernel} of the launches within. None of them runs: what they would write stays as it is."""
    found: dict[str, str] = {}

    def ready(one, target):
        found[name(arch, one.kernel, one.arguments, one.constants)] = one.kernel.__name__
        step = SimpleNamespace(run=lambda *_: None, slots=lambda: ())
        return step, step

    calls.forget()
    with pytest.MonkeyPatch.context() as patch, softsm.use(arch), torch.no_grad():
        patch.setattr(launch, "ready_launch", ready)
        patch.setattr(checks, "values_checked", lambda x: False)  # rows that nothing has chosen
        launches.num_sms(patch, dispatch.DEFAULT_NUM_SMS)
        yield found
    calls.forget()


def written(kinds, arch, d=512, dtype="bf16", sizes=SIZES):
    return _written(tuple(kinds), arch, d, dtype, sizes)


@cache
def _written(kinds, arch, d, dtype, sizes):
    return set().union(*(of_part(part, arch, sizes) for part in variants.wanted(kinds, [d], [dtype])))


@cache
def of_part(part, arch, sizes=SIZES):
    return {name(arch, one.kernel, one.arguments, one.constants) for one in variants.launches(part, sizes, arch)}
