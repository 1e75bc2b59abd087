"""The Blackwell kernel of V4 attention with DeepSeek-V4.1's rows of 528 and 288 bytes, on a CPU through softsm."""

import launches
import pytest
import torch
import v41_problem
from agreement import assert_agrees

import dsv4
from dsv4 import reference
from dsv4.caches.formats import FP8_584, MXFP8_528, MXFP8_528_INTERLEAVED, NVFP4_288, NVFP4_288_INTERLEAVED
from dsv4.runtime import calls
from dsv4.v4.kernels import unpack_pools

pytestmark = pytest.mark.slow


def check(monkeypatch, arguments: dict, order: str = "latest", first: str = "v4_sparse") -> None:
    names = launches.launched(monkeypatch)
    monkeypatch.setattr(unpack_pools, "pays", lambda p: first == "v4_unpack")
    calls.forget()
    out = torch.full_like(arguments["q"], float("nan"))
    with launches.race_free("sm_100a", order=order, seed=5):
        got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
    assert names[0] == first
    assert_agrees(got, reference.v4_attention, **arguments)


@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_window_and_compressed_rows(order, monkeypatch):
    check(monkeypatch, v41_problem.problem(MXFP8_528, NVFP4_288, 12), order)


@pytest.mark.parametrize(
    "formats",
    [(NVFP4_288_INTERLEAVED, MXFP8_528_INTERLEAVED), (FP8_584, NVFP4_288), (MXFP8_528, None)],
    ids=lambda x: "-".join(f.name if f else "plain" for f in x),
)
def test_other_pairs_of_formats(formats, monkeypatch):
    check(monkeypatch, v41_problem.problem(*formats, 12, table=formats[1] is NVFP4_288))


def test_pages_at_odd_addresses(monkeypatch):
    check(monkeypatch, v41_problem.problem(MXFP8_528, NVFP4_288, 12, more=3))


def test_128_heads(monkeypatch):
    """Whole pairs of 64 heads; the kernel for pairs of CTAs does not take rows that are codes alone."""
    check(monkeypatch, v41_problem.problem(MXFP8_528, NVFP4_288, 128))


def test_unpacked_first(monkeypatch):
    check(monkeypatch, v41_problem.problem(MXFP8_528, NVFP4_288, 128), first="v4_unpack")
