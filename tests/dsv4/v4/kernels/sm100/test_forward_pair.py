"""V4 attention for 128 heads by a pair of CTAs, on a CPU, through softsm.

Compiling a variant takes longer than running it, so one problem is quick and the others are slow.
"""

import dataclasses

import pytest
import torch
from launches import launched, num_sms
from v4_on_blackwell import NAN, compare, fp8, in_fp16, numbers, plain, rows, run

import dsv4
from dsv4 import reference
from dsv4.runtime import calls, dispatch
from dsv4.v4 import problem
from dsv4.v4.kernels import unpack_pools

if dispatch.triton_version() < (3, 9):
    pytest.skip("the Blackwell kernels need triton >= 3.9", allow_module_level=True)

SEED = 12
ORDERS = ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))]
SLOW_ORDERS = [pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "latest", "random")]


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(SEED)


@pytest.fixture
def pairs(monkeypatch):
    """The launches of the pair kernel, which converts FP8 rows itself."""
    monkeypatch.setattr(unpack_pools, "pays", lambda p: False)
    launches = launched(monkeypatch)
    yield launches
    assert set(launches) - {"combine"} == {"v4_sparse_pair"}


def wide(problem: dict, heads: int = 128) -> dict:
    return problem | dict(q=torch.randn(problem["q"].shape[0], heads, 512).bfloat16(), sink=torch.randn(heads))


@pytest.mark.compile
@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_takes_one_query_of_fp8_rows_after_the_other(pairs, order, monkeypatch):
    """Queries with two blocks, the last in part; with none; with one."""
    num_sms(monkeypatch, 3)
    cache = dsv4.Fp8Cache.pack(rows(60), rows_per_page=4)
    compare(*run(
        order, q=torch.randn(3, 128, 512).bfloat16(), window=cache, window_indices=numbers(3, 140, of=60),
        window_lengths=torch.tensor([140, 0, 7], dtype=torch.int32), sink=torch.randn(128),
    ))  # fmt: skip


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_fp16(pairs, order):
    compare(*run(order, **in_fp16(wide(plain(2)))))


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_fp8_rows_by_block_table_and_requests(pairs, order, monkeypatch):
    """One pair takes all four queries, of one or two blocks, the last in part."""
    num_sms(monkeypatch, 3)
    compare(*run(order, **wide(fp8())))


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_a_pair_takes_one_query_after_the_other(pairs, order, monkeypatch):
    """One pair has three queries: with three blocks, the last partly filled; with none; with one."""
    num_sms(monkeypatch, 3)
    problem = plain(3, heads=128)
    problem["window_lengths"] = torch.tensor([70, 0, 64], dtype=torch.int32)
    problem["compressed_lengths"] = torch.tensor([150, 0, 0], dtype=torch.int32)
    compare(*run(order, **problem))


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_many_blocks_and_256_heads(pairs, order):
    compare(*run(order, **plain(2, heads=256, window=130, compressed=900)))


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_items_of_one_and_two_blocks_in_turn(pairs, order, monkeypatch):
    """Places change hands between work tiles while the products of the one before run."""
    num_sms(monkeypatch, 2)
    problem = plain(7, heads=128)
    problem["window_lengths"] = torch.tensor([70, 1, 0, 70, 70, 0, 9], dtype=torch.int32)
    problem["compressed_lengths"] = torch.tensor([0, 0, 0, 65, 0, 150, 1], dtype=torch.int32)
    compare(*run(order, **problem))


@pytest.mark.parametrize("order", SLOW_ORDERS)
def test_fp8_rows_by_two_lists(pairs, order, monkeypatch):
    num_sms(monkeypatch, 2)
    cache = dsv4.Fp8Cache.pack(rows(200), rows_per_page=8)
    compare(*run(
        order, q=torch.randn(3, 128, 512).bfloat16(), window=cache, window_indices=numbers(3, 130, of=200),
        compressed=cache, compressed_indices=numbers(3, 200, of=200),
        window_lengths=torch.tensor([130, 20, 0], dtype=torch.int32),
    ))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [8, 2, 1])
def test_fp8_pages_at_any_address(pairs, more):
    cache = dsv4.Fp8Cache(torch.zeros(20 * (3 * 584 + more), dtype=torch.uint8), 3, 3 * 584 + more)
    cache.write(torch.arange(60), rows(60))
    compare(*run("latest", q=torch.randn(1, 128, 512).bfloat16(), window=cache, window_indices=numbers(1, 140, of=60)))


@pytest.mark.slow
def test_plain_rows_by_block_table(pairs):
    """Pages are one row apart: lines of a descriptor that belong to no page lie between them."""
    pages = torch.full((60, 4 * 512), NAN).bfloat16().view(60, 4, 512)[:, :3]
    pages[:50] = rows(150).view(50, 3, 512)
    compare(*run(
        "random", q=torch.randn(2, 128, 512).bfloat16(), window=pages, window_indices=numbers(2, 70, of=150),
        compressed=pages, compressed_block_table=torch.randint(0, 50, (2, 50), dtype=torch.int32),
        compressed_lengths=torch.tensor([150, 67], dtype=torch.int32),
    ))  # fmt: skip


@pytest.mark.slow
def test_splits_are_merged_whatever_is_in_the_buffers(pairs):
    """Six splits have three blocks, so some have no rows. RoPE is inverted before the merge."""
    plan = dsv4.plan(dsv4.v4_attention, batch=1, q_heads=128, kv_heads=1, head_dim=512, max_seqlen_k=330, device="cpu")
    plan = dataclasses.replace(plan, num_splits=6, scratch=torch.full((6 * 128 * 513,), NAN))
    turned = dict(inverse_rope=(reference.rope_table(9, 320), torch.tensor([8], dtype=torch.int32)))
    compare(*run(**plain(heads=128) | turned, plan=plan, softmax_scale=-0.1))


@pytest.mark.slow
def test_a_query_gives_the_same_bits_whatever_else_is_in_the_call(pairs):
    problem = plain(3, heads=128, compressed=700)
    many = run(**problem, deterministic=True)[0]
    for i in range(3):
        one = {k: x[i : i + 1] if k in ("q", "window_indices", "compressed_indices") else x for k, x in problem.items()}
        table, positions = problem["inverse_rope"]
        alone = run(**one | dict(inverse_rope=(table, positions[i : i + 1])), deterministic=True)[0]
        assert all(torch.equal(a[i], b[0]) for a, b in zip(many, alone))


@pytest.mark.slow
@pytest.mark.parametrize("which", [slice(0, 64, 7), slice(64, 128, 9), slice(5, 128, 31)])
def test_a_growing_maximum_rescales_what_is_there(pairs, which):
    """Scores that rise from block to block by more than 2^8, fall, and rise again, in some rows of one CTA or both."""
    problem = plain(heads=128, compressed=400) | dict(window_indices=torch.arange(64, dtype=torch.int32)[None])
    for name in ("window", "compressed"):
        problem[name] = problem[name] * 0.1
    for i, head in enumerate(range(128)[which]):
        if i < 4:
            problem["compressed"][i] = problem["q"][0, head] * ((3.0, 20.0, 9.0, 30.0)[i] / 22)
            problem["compressed_indices"][0, i * 100 : i * 100 + 100] = i
    compare(*run("latest", **problem))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [plain, fp8])
def test_whatever_order_things_complete_in(pairs, make, seed):
    compare(*run("random", seed, **wide(make())))


def kernels_of(
    heads: int, window, compressed=None, queries: int = 1, listed: int = 9, num_splits: int = 1
) -> list[str]:
    """The kernels of a call with such pools."""
    more = dict(compressed_indices=numbers(queries, listed, of=9)) if compressed is not None else {}
    q = torch.zeros(queries, heads, 512).bfloat16()
    p = problem.build(q, window, numbers(queries, listed, of=9), compressed=compressed, **more)
    p = dataclasses.replace(p, out=torch.empty_like(p.q), num_splits=num_splits)
    target = dispatch.compile_target("sm_100a")._replace(num_sms=148)
    return [x.kernel.__name__ for x in calls.launches_of(p, target)]


def test_fp8_rows_that_are_listed_often_become_bf16_first():
    cache = dsv4.Fp8Cache.empty(1, 64)
    assert kernels_of(128, cache, queries=6, listed=64) == ["v4_unpack", "v4_sparse_pair"]
    assert kernels_of(128, cache, queries=5, listed=64) == ["v4_sparse_pair"]
    assert kernels_of(64, cache, queries=40, listed=64) == ["v4_sparse"]


@pytest.mark.parametrize("heads, name", [(128, "v4_sparse_pair"), (64, "v4_sparse")])
def test_rows_are_not_split_where_merging_all_of_them_takes_longer(heads, name):
    pool = torch.zeros(4096, 512).bfloat16()
    queries = 256 * 128 // heads
    assert kernels_of(heads, pool, queries=queries, listed=2048, num_splits=0) == [name]
    assert kernels_of(heads, pool, queries=8, listed=2048, num_splits=0) == [name, "combine"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_rows_that_became_bf16_first_give_the_same_bits(order, monkeypatch):
    """Scales from 2^-12 to 2^12, a last page in part, two pools."""
    wide_rows = torch.randn(70, 512) * torch.exp2(torch.randint(-12, 13, (70, 1)))
    arguments = dict(
        q=torch.randn(2, 128, 512).bfloat16() / 64,
        window=dsv4.Fp8Cache.pack(wide_rows, rows_per_page=16),
        window_indices=numbers(2, 60, of=70),
        compressed=dsv4.Fp8Cache.pack(rows(30), rows_per_page=2),
        compressed_indices=numbers(2, 150, of=30),
        sink=torch.randn(128),
    )
    found = []
    for first in (True, False):
        monkeypatch.setattr(unpack_pools, "pays", lambda p, first=first: first)
        calls.forget()
        launches = launched(monkeypatch)
        got, asked = run(order, **arguments)
        assert launches == ["v4_unpack"] * (2 * first) + ["v4_sparse_pair"]
        compare(got, asked)
        found.append(got)
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_other_problems_go_to_one_cta():
    """Heads that are not whole pairs, rows that are not equally far apart, an Fp8Cache with plain rows."""
    cache = dsv4.Fp8Cache.empty(2, 64)
    odd = torch.zeros(4, 8 * 512 + 64).bfloat16()[:, : 8 * 512].view(4, 8, 512)
    problems = ((64, rows(9)), (192, rows(9)), (128, odd), (128, cache, odd), (128, rows(9), cache))
    assert [kernel for given in problems for kernel in kernels_of(*given)] == ["v4_sparse"] * 5
