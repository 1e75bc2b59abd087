"""The Blackwell kernel of V4 attention on a CPU, through softsm: one problem per part of the code; the suite is slow.

Compiling a variant takes longer than running it: the quick tests share one, but for that of FP8 rows.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from launches import num_sms
from v4_on_blackwell import NAN, compare, fp8, in_fp16, numbers, plain, rows, run

import dsv4
import softsm
from dsv4 import reference, suites
from dsv4.runtime import checks, dispatch

if dispatch.triton_version() < (3, 9):
    pytest.skip("the Blackwell kernels need triton >= 3.9", allow_module_level=True)

from dsv4.commands import kernels

pytestmark = pytest.mark.compile

SEED = 11
WHERE = suites.Where("softsm", "sm_100a")
PAGE = Path(__file__).parents[5] / "docs" / "kernels.md"
ORDERS = ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))]


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(SEED)


@pytest.mark.parametrize("order", ORDERS)
def test_two_lists_of_plain_rows_whenever_copies_complete(order):
    """With five blocks each place of the ring is used again. There are two head tiles, the second only partly
    filled."""
    compare(*run(order, **plain()))


@pytest.mark.slow  # a variant of its own, which differs by the type alone; sm90/test_v4.py has a quick one
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_fp16(order):
    compare(*run(order, **in_fp16(plain(window=130, compressed=3))))


@pytest.mark.parametrize("order", ORDERS)
def test_a_cta_takes_one_item_after_the_other(order, monkeypatch):
    """Four queries in two CTAs; one has no rows, the last an odd number of blocks, so that the ring goes on in its
    middle."""
    num_sms(monkeypatch, 2)
    problem = plain(4, heads=8)
    problem["window_lengths"] = torch.tensor([70, 3, 0, 64], dtype=torch.int32)
    problem["compressed_lengths"] = torch.tensor([0, 65, 0, 100], dtype=torch.int32)
    compare(*run(order, **problem))


@pytest.mark.parametrize("order", ORDERS)
def test_a_cta_takes_one_query_of_fp8_rows_after_the_other(order, monkeypatch):
    """Queries with three blocks, the last in part; with none; with one: the ring goes on in its middle."""
    num_sms(monkeypatch, 1)
    cache = dsv4.Fp8Cache.pack(rows(60), rows_per_page=4)
    compare(*run(
        order, q=torch.randn(3, 8, 512).bfloat16(), window=cache, window_indices=numbers(3, 140, of=60),
        window_lengths=torch.tensor([140, 0, 7], dtype=torch.int32), sink=torch.randn(8),
    ))  # fmt: skip


@pytest.mark.slow  # a variant of its own, which differs by the table
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_fp8_rows_by_block_table_and_requests(order):
    compare(*run(order, **fp8()))


def test_splits_are_merged_whatever_is_in_the_buffers():
    """Six splits have five blocks, so the last has no rows. RoPE is inverted before the merge."""
    plan = dsv4.plan(dsv4.v4_attention, batch=1, q_heads=8, kv_heads=1, head_dim=512, max_seqlen_k=330, device="cpu")
    plan = dataclasses.replace(plan, num_splits=6, scratch=torch.full((6 * 8 * 513,), NAN))
    problem = plain(heads=8) | dict(inverse_rope=(reference.rope_table(9, 128), torch.tensor([8], dtype=torch.int32)))
    compare(*run(**problem, plan=plan, softmax_scale=-0.1))


def test_a_growing_maximum_rescales_what_is_there():
    """Scores that rise from block to block by more than 2^8, fall, and rise again, in some rows only."""
    problem = plain(heads=8, compressed=200)
    problem |= dict(window_indices=torch.arange(64, dtype=torch.int32)[None], sink=None)
    for pool, name in ((problem["window"], "window"), (problem["compressed"], "compressed")):
        problem[name] = pool * 0.1
    q = problem["q"]
    for i, push in enumerate((3.0, 20.0, 9.0)):
        problem["compressed"][i] = q[0, 2 * i] * (push / 22)
        problem["compressed_indices"][0, i * 64 : i * 64 + 64] = i
    compare(*run("latest", **problem))


def test_bad_numbers_count_as_nothing(monkeypatch):
    """Values are not checked, as on a GPU: nothing is read out of bounds, and such rows have no weight."""
    monkeypatch.setattr(checks, "values_checked", lambda q: False)
    window = rows(64)
    listed = numbers(1, 64, of=64)
    arguments = dict(q=torch.randn(1, 8, 512).bfloat16(), window=window, compressed=rows(30))
    bad = listed.clone()
    bad[0, 10:20] = torch.tensor([64, 1 << 30, -2, -(1 << 31), 65, 99, 1 << 24, -5, 77, 1000], dtype=torch.int32)
    listed[0, 10:20] = -1
    with softsm.use("sm_100a"):
        out, lse = dsv4.v4_attention(
            **arguments,
            window_indices=bad,
            compressed_indices=numbers(1, 4, of=30) * 0 + 30,
            return_lse=True,
            window_lengths=torch.tensor([1 << 20], dtype=torch.int32),
            backend="softsm",
        )
    compare((out, lse), dict(q=arguments["q"], window=window, window_indices=listed))


@pytest.mark.slow
@pytest.mark.parametrize("empty", ["window", "compressed"])
def test_a_pool_without_rows(empty):
    problem = plain(heads=8)
    problem[empty] = rows(0)
    problem[f"{empty}_indices"].fill_(-1)
    compare(*run("latest", **problem))


def test_what_it_does_not_take_is_refused_by_name():
    q = torch.randn(1, 2, 128).bfloat16()
    with softsm.use("sm_100a"), pytest.raises(ValueError, match="head dim 128; the GPU kernels accept 512"):
        dsv4.v4_attention(q, q[:, 0], torch.zeros(1, 1, dtype=torch.int32), backend="softsm")


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, 512, 640])
def test_pages_of_plain_rows_wherever_they_lie(gap):
    """Rows are named by a list or a block table. Pages end to end and a row apart come by TMA, others by cp.async."""
    pages = torch.full((20, 3 * 512 + gap), NAN).bfloat16()
    pages = pages[:, : 3 * 512].view(20, 3, 512)
    pages[:15] = rows(45).view(15, 3, 512)
    common = dict(q=torch.randn(2, 8, 512).bfloat16(), window=pages, window_indices=numbers(2, 70, of=45))
    compare(*run("latest", **common, compressed=pages, compressed_indices=numbers(2, 70, of=45)))
    compare(
        *run(
            "random",
            **common,
            compressed=pages,
            compressed_block_table=torch.randint(0, 15, (2, 30), dtype=torch.int32),
            compressed_lengths=torch.tensor([90, 67], dtype=torch.int32),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [8, 2, 1])
def test_fp8_pages_at_any_address(more):
    """Pages that start at multiples of 8 bytes, of 2, and at odd addresses: a row's last values are bf16."""
    cache = dsv4.Fp8Cache(torch.zeros(20 * (3 * 584 + more), dtype=torch.uint8), 3, 3 * 584 + more)
    cache.write(torch.arange(60), rows(60))
    listed = numbers(2, 100, of=60)
    compare(*run("latest", q=torch.randn(2, 8, 512).bfloat16(), window=cache, window_indices=listed))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kind", "named"), kernels.V4_VARIANTS)
def test_no_role_spills_and_the_page_of_figures_says_so(heads, kind, named):
    """A pair has 16 warps, whose threads have 80 registers until their roles part: what they know of their place is
    stored there, once, and read again by the roles."""
    line = kernels.v4_line(heads, kind, named)
    shared, spills, in_loops = (line.split(" | ")[i] for i in (6, 9, 10))
    stored = int(spills.split(" / ")[0])
    assert int(shared) <= 232_448, line
    assert stored <= (112 if heads == 128 else 0), line
    assert int(in_loops) <= (16 if heads == 128 else 0), line
    assert line in PAGE.read_text(), f"run dsv4 kernels --write docs/kernels.md: {line}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [plain, fp8])
def test_whatever_order_things_complete_in(make, seed):
    compare(*run("random", seed, **make()))


@pytest.mark.slow
@pytest.mark.parametrize("case", suites.v4(), ids=str)
def test_the_suite(case):
    result = suites.run_case(case, WHERE, SEED)
    assert result.ok, result.why()
