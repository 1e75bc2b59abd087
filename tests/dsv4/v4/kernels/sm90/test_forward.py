"""The Hopper kernel of V4 attention on a CPU, through softsm: one problem per part of the code; the suite is slow."""

import dataclasses

import launches
import pytest
import torch
from agreement import assert_agrees
from v41_problem import numbers

import dsv4
import softsm
from dsv4 import reference, suites
from dsv4.fmha.kernels import prepare
from dsv4.runtime import calls, checks, dispatch
from dsv4.runtime.splits import choose_splits, whole_first
from dsv4.v4 import problem
from dsv4.v4.kernels import prepare as listed_prepare
from dsv4.v4.kernels import unpack_pools
from dsv4.v4.kernels.sm90 import entry

SEED = 11
WHERE = suites.Where("softsm", "sm_90a")
NAN = float("nan")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 512).bfloat16()


@pytest.fixture(autouse=True)
def not_few(monkeypatch):
    """Few work tiles take this kernel too, as many do; test_decode_swap_ab.py has the one that they would take."""
    monkeypatch.setattr(entry, "decode_kernel", lambda p, target: None)


def run(order: str = "eager", sms: int | None = None, **arguments):
    """(out, lse) of the kernel, races checked, and what the definition is asked."""
    out = torch.full_like(arguments["q"], NAN)
    few = {} if sms is None else {"sms": sms}
    with launches.race_free("sm_90a", **few, order=order, seed=SEED):
        got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
    return got, {name: x for name, x in arguments.items() if name != "plan"}


def compare(got, arguments) -> None:
    assert_agrees(got, reference.v4_attention, **arguments)


@pytest.mark.compile
@pytest.mark.parametrize("order", ["latest", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unpacked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_lists_of_plain_rows_whenever_copies_complete(unpacked, order, monkeypatch):
    """150 window entries and 70 compressed ones: five blocks, the last of each list in part. Two head tiles. Compressed
    rows are larger, so that maxima grow by more than 8 and O is rescaled in the middle of a list. Quickly, rows that
    the launch before has unpacked: the kernel of the others, which waits for it."""
    monkeypatch.setattr(unpack_pools, "pays", lambda p: unpacked)
    window, compressed = rows(100), torch.full((90, 576), NAN).bfloat16()[:, :512]
    compressed[:60] = 6 * rows(60)
    if unpacked:
        window, compressed = dsv4.Fp8Cache.pack(window), dsv4.Fp8Cache.pack(compressed[:60])
    compared = run(
        order,
        q=torch.randn(2, 80, 512).bfloat16(),
        window=window,
        window_indices=numbers(2, 150, of=100),
        compressed=compressed,
        compressed_indices=numbers(2, 70, of=60),
        sink=torch.randn(80),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49], dtype=torch.int32)),
    )
    compare(*compared)


@pytest.mark.slow  # a variant of its own: the quick tests have fp16 in splits, and a block table with FP8 rows
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_fp16_rows_in_pages_by_block_table(order):
    """Three blocks of the window and one of the compressed rows, in part; more heads than a tile."""
    half = torch.float16
    compared = run(
        order,
        q=torch.randn(2, 65, 512).to(half),
        window=torch.randn(90, 512).to(half),
        window_indices=numbers(2, 130, of=90),
        compressed=torch.randn(5, 3, 512).to(half),
        compressed_block_table=torch.tensor([[4, 0, 2]], dtype=torch.int32),
        compressed_lengths=torch.tensor([8, 0], dtype=torch.int32),
        request_starts=torch.tensor([0, 2], dtype=torch.int32),
        sink=torch.randn(65),
    )
    compare(*compared)


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
@pytest.mark.parametrize("splits", [3, pytest.param(1, marks=pytest.mark.slow)])  # 1: a variant of its own
@pytest.mark.compile
@pytest.mark.parametrize("page", [2, 3])
def test_fp8_rows_by_block_table_and_requests(page, splits, order):
    """Three requests of 1, 0 and 2 queries; the last query belongs to none. Pages of two rows, of which a block is a
    whole number, and of three; NaN in rows that are not there."""
    width, written = 240 // page, 150 // page
    window = dsv4.Fp8Cache.pack(rows(64), rows_per_page=64)
    compressed = dsv4.Fp8Cache.empty(80, page)
    compressed.storage.fill_(255)
    compressed.write(torch.arange(written * page), rows(written * page))
    plan = dsv4.plan(dsv4.v4_attention, batch=4, q_heads=16, kv_heads=1, head_dim=512, max_seqlen_k=300, device="cpu")
    plan = dataclasses.replace(plan, num_splits=splits, scratch=torch.full((splits * 4 * 16 * 513,), NAN))
    compared = run(
        order,
        q=torch.randn(4, 16, 512).bfloat16(),
        window=window,
        window_indices=numbers(4, 60, of=64),
        window_lengths=torch.tensor([60, 0, 7, 33], dtype=torch.int32),
        compressed=compressed,
        compressed_block_table=torch.randint(0, written, (3, width), dtype=torch.int32),
        compressed_lengths=torch.tensor([240, 131, 0, 80], dtype=torch.int32),
        request_starts=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        plan=plan,
    )
    compare(*compared)


@pytest.mark.slow  # a variant of its own: the quick tests have FP8 rows by block table
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
@pytest.mark.parametrize("split_slots", [False, True], ids=["whole slots", "slots in two parts"])
def test_one_cta_takes_lists_of_any_number_of_fp8_blocks(split_slots, order, monkeypatch):
    """Consecutive queries have six blocks, none, one and three: the ring continues where the last one ended.
    Slots in two parts are what Triton 3.6 takes."""
    monkeypatch.setitem(entry.PACKED, "MAY_SPLIT_SLOTS", split_slots)
    window, compressed = dsv4.Fp8Cache.pack(rows(100), rows_per_page=64), dsv4.Fp8Cache.pack(rows(90), rows_per_page=64)
    compared = run(
        order, sms=1, q=torch.randn(4, 64, 512).bfloat16(), window=window, window_indices=numbers(4, 150, of=100),
        compressed=compressed, compressed_indices=numbers(4, 130, of=60), sink=torch.randn(64),
        window_lengths=torch.tensor([150, 0, 9, 150], dtype=torch.int32),
        compressed_lengths=torch.tensor([130, 0, 0, 0], dtype=torch.int32),
    )  # fmt: skip
    compare(*compared)


@pytest.mark.compile
def test_splits_are_merged_whatever_is_in_the_buffers():
    """Four splits have three steps, so the last has no rows. RoPE is inverted before the merge. The call is in fp16."""
    plan = dsv4.plan(dsv4.v4_attention, batch=1, q_heads=8, kv_heads=1, head_dim=512, max_seqlen_k=330, device="cpu")
    plan = dataclasses.replace(plan, num_splits=4, scratch=torch.full((4 * 8 * 513,), NAN))
    compared = run(
        q=torch.randn(1, 8, 512).half(),
        window=rows(40).half(),
        window_indices=numbers(1, 130, of=40),
        compressed=rows(99).half(),
        compressed_indices=numbers(1, 200, of=99),
        plan=plan,
        softmax_scale=-0.1,
        inverse_rope=(reference.rope_table(9, 128), torch.tensor([8], dtype=torch.int32)),
    )
    compare(*compared)


@pytest.mark.compile
def test_what_equal_splits_leave_over_is_shared(monkeypatch):
    """Five steps are two equal splits of two and one more, four are two; four CTAs have an equal split each, one has
    both of what is left: a step of the first query, nothing of the second."""
    monkeypatch.setattr(listed_prepare, "uneven", lambda *_: (3, 4, 5))
    compared = run(
        "latest", sms=5, q=torch.randn(2, 8, 512).half(), window=rows(40).half(), window_indices=numbers(2, 130, of=40),
        compressed=rows(99).half(), compressed_indices=numbers(2, 360, of=99), softmax_scale=-0.1,
        compressed_lengths=torch.tensor([360, 300], dtype=torch.int32),
    )  # fmt: skip
    compare(*compared)


@pytest.mark.slow  # a variant of its own
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("rows_are", ["packed, by list", "packed, by table", "plain"])
def test_whole_tiles_come_first(rows_are, fp16, order, monkeypatch):
    """Five queries of two head tiles for four CTAs: each has two whole tiles, then a step or two of the last query, by
    table in a second launch. The second query has no rows, the last has fewer than its splits have room for."""
    monkeypatch.setattr(prepare, "FP16_PARTIALS_FROM", 0 if fp16 else 1 << 40)
    monkeypatch.setattr(unpack_pools, "pays", lambda p: False)
    names = launches.launched(monkeypatch)
    pool = rows(99) if rows_are == "plain" else dsv4.Fp8Cache.pack(rows(99))
    named = dict(compressed=pool, compressed_indices=numbers(5, 600, of=99))
    if rows_are == "packed, by table":
        pages = torch.stack([torch.randperm(300) for _ in range(3)]).int()
        named = dict(compressed=dsv4.Fp8Cache.pack(rows(600), rows_per_page=2), compressed_block_table=pages)
        named["request_starts"] = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    assert whole_first(5, 2, 4, 6, choose_splits(10, 4, 768), 1) == (4, 2)
    compared = run(
        order, sms=4, q=torch.randn(5, 80, 512).bfloat16(), window=pool, window_indices=numbers(5, 130, of=99),
        sink=torch.randn(80), **named,
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49, 0, 7, 8], dtype=torch.int32)),
        window_lengths=torch.tensor([130, 0, 130, 1, 70], dtype=torch.int32),
        compressed_lengths=torch.tensor([300, 0, 10, 600, 200], dtype=torch.int32),
    )  # fmt: skip
    launched = ["v4_sparse", "v4_sparse"] if rows_are == "packed, by table" else ["v4_sparse"]
    assert names == [*launched, "combine_rows_fp16" if fp16 else "combine"]
    compare(*compared)


@pytest.mark.slow  # a variant of its own
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_many_partial_results_are_in_fp16(order, monkeypatch):
    """80 heads in three splits, one of which has no rows for the second query. The halves of a row have powers of two
    of their own: one is a thousand times larger."""
    monkeypatch.setattr(prepare, "FP16_PARTIALS_FROM", 0)
    names = launches.launched(monkeypatch)
    size = torch.tensor([1024.0, 1.0]).repeat_interleave(256)
    plan = dsv4.plan(dsv4.v4_attention, batch=2, q_heads=80, kv_heads=1, head_dim=512, max_seqlen_k=300, device="cpu")
    plan = dataclasses.replace(plan, num_splits=3, scratch=torch.full((3 * 2 * 80 * 513,), NAN))
    compared = run(
        order,
        q=(torch.randn(2, 80, 512) / size).bfloat16(),
        window=(rows(130) * size).bfloat16(),
        window_indices=numbers(2, 260, of=130),
        window_lengths=torch.tensor([260, 90], dtype=torch.int32),
        sink=torch.randn(80),
        plan=plan,
    )
    assert names == ["v4_sparse", "combine_rows_fp16"]
    compare(*compared)


def test_bad_numbers_count_as_nothing(monkeypatch):
    """Values are not checked, as on a GPU: nothing is read out of bounds, and such rows have no weight. The call is
    fp16 with a negative scale, in splits: the variant of the previous test."""
    monkeypatch.setattr(checks, "values_checked", lambda q: False)
    window = rows(64).half()
    listed = numbers(1, 64, of=64)
    plan = dsv4.plan(dsv4.v4_attention, batch=1, q_heads=8, kv_heads=1, head_dim=512, max_seqlen_k=68, device="cpu")
    rope = (reference.rope_table(9, 64), torch.tensor([8], dtype=torch.int32))
    same = dict(q=torch.randn(1, 8, 512).half(), window=window, inverse_rope=rope, softmax_scale=-0.1)
    bad = listed.clone()
    bad[0, 10:20] = torch.tensor([64, 1 << 30, -2, -(1 << 31), 65, 99, 1 << 24, -5, 77, 1000], dtype=torch.int32)
    listed[0, 10:20] = -1
    with softsm.use("sm_90a"):
        out, lse = dsv4.v4_attention(
            **same,
            window_indices=bad,
            compressed=rows(30).half(),
            compressed_indices=torch.full((1, 4), 30, dtype=torch.int32),
            return_lse=True,
            window_lengths=torch.tensor([1 << 20], dtype=torch.int32),
            plan=dataclasses.replace(plan, num_splits=4),
            backend="softsm",
        )
    compare((out, lse), same | dict(window_indices=listed))


@pytest.mark.slow  # the variant of the test with lists of any number of blocks
def test_what_is_read_in_place_of_rows_that_are_not_there_does_not_count():
    """It is q's beginning, here inf and NaN: the other queries do not see it."""
    q, window = torch.randn(3, 64, 512).bfloat16(), dsv4.Fp8Cache.pack(rows(100), rows_per_page=64)
    q[0, 0, ::2], q[0, 0, 1::2] = float("inf"), NAN
    lists = dict(window_indices=numbers(3, 150, of=3), compressed_indices=torch.full((3, 130), -1, dtype=torch.int32))
    got, given = run("latest", q=q, window=window, compressed=window, **lists)
    assert (lists["window_indices"] == -1).sum(1).min() > 10
    compare(tuple(x[1:] for x in got), given | {name: given[name][1:] for name in ("q", *lists)})


@pytest.mark.slow
def test_fp8_values_come_out_exactly_by_list():
    """Do what the next test does, with FP8 rows at multiples of 16 bytes in both pools."""
    cache, n = all_codes(64, 64 * 584)
    nothing = torch.full((n, 1), -1, dtype=torch.int32)
    (out, _), _ = run("latest", q=torch.zeros(n, 64, 512).bfloat16(), window=cache, window_indices=nothing,
                      compressed=cache, compressed_indices=torch.arange(n, dtype=torch.int32)[:, None])  # fmt: skip
    assert torch.equal(out, cache.unpack()[:n, None].expand(n, 64, 512))


def all_codes(rows_per_page: int, page_stride: int) -> tuple[dsv4.Fp8Cache, int]:
    """A cache, and how many of its rows have all e4m3 codes that are numbers, with scales up to what bf16 holds."""
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8).repeat(2)[:448]
    scales = [20, 100, 127, 134, 135, 180, 240]
    cache = dsv4.Fp8Cache.pack(rows(8), rows_per_page=rows_per_page, page_stride=page_stride)
    for i, scale in enumerate(scales):
        page = cache.storage[i // rows_per_page * cache.page_stride :]
        page[i % rows_per_page * 576 :][:448] = codes.roll(i)
        page[rows_per_page * 576 + i % rows_per_page * 8 :][:7] = scale
    return cache, len(scales)


@pytest.mark.slow
def test_fp8_values_come_out_exactly_beside_plain_rows():
    """One row per query has weight 1; pages whose stride is odd. The window is a plain tensor, so that blocks of both
    kinds meet in one query."""
    cache, n = all_codes(3, 3 * 584 + 1)
    window, nothing = rows(5), torch.full((n, 1), -1, dtype=torch.int32)
    with launches.race_free("sm_90a", order="latest", seed=SEED):
        out = dsv4.v4_attention(torch.zeros(n, 1, 512).bfloat16(), window, nothing, cache,
                                torch.arange(n, dtype=torch.int32)[:, None], backend="softsm")  # fmt: skip
    assert torch.equal(out[:, 0], cache.unpack()[:n])


def test_what_it_does_not_take_is_refused_by_name():
    q = torch.randn(1, 2, 128).bfloat16()
    listed = torch.zeros(1, 1, dtype=torch.int32)
    with softsm.use("sm_90a"), pytest.raises(ValueError, match="head dim 128; the GPU kernels accept 512"):
        dsv4.v4_attention(q, q[:, 0], listed, backend="softsm")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("mixed", [False, True])
def test_an_fp8_cache_beside_fp16_is_refused_by_name(arch, mixed):
    if arch == "sm_100a" and dispatch.triton_version() < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    q, listed = torch.randn(1, 2, 512).half(), torch.zeros(1, 1, dtype=torch.int32)
    cache = dsv4.Fp8Cache.pack(rows(3))
    pools = (q[:, 0], listed, cache, listed) if mixed else (cache, listed)
    with softsm.use(arch), pytest.raises(ValueError, match=r"torch\.float16 with an Fp8Cache; .* q of torch\.bfloat16"):
        dsv4.v4_attention(q, *pools, backend="softsm")
    assert dsv4.v4_attention(q, *pools, backend="cpu").dtype == torch.float16


@pytest.mark.slow
@pytest.mark.parametrize("case", suites.v4(), ids=str)
def test_the_suite(case):
    result = suites.run_case(case, WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.slow  # a variant of its own; which calls take it is tested below
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_rows_that_stay_in_the_l2_are_read_in_the_other_order(order, dtype):
    """Six queries that list 12 rows: one of no rows, one of a single step, the others of four; more work tiles than
    CTAs. Maxima grow by more than 8 where larger rows begin. Positions are of int64 here."""
    lengths = torch.tensor([270, 270, 0, 128, 190, 270], dtype=torch.int32)
    arguments = dict(
        q=torch.randn(6, 16, 512).to(dtype),
        window=rows(12).to(dtype),
        window_indices=numbers(6, 150, of=12),
        compressed=6 * rows(10).to(dtype),
        compressed_indices=numbers(6, 270, of=10),
        compressed_lengths=lengths,
        window_lengths=torch.where(lengths == 0, 0, torch.where(lengths == 128, 0, 150)).int(),
        sink=torch.randn(16),
        inverse_rope=(reference.rope_table(50, 64), torch.arange(6)),
    )
    target = dispatch.compile_target("sm_90a")
    p = problem.build(**arguments)
    (launch, *_) = calls.launches_of(dataclasses.replace(p, out=torch.empty_like(p.q)), target)
    assert launch.constants["RESIDENT"]
    compare(*run(order, sms=2, **arguments))


def test_the_order_of_rows_in_the_l2_is_not_taken_by_deterministic_calls_nor_for_large_pools():
    def resident(pool: int, **options) -> bool:
        q = torch.empty(4096, 64, 512, dtype=torch.bfloat16, device="meta")
        lists = torch.empty(4096, 512, dtype=torch.int32, device="meta")
        p = problem.build(q, torch.empty(pool, 512, dtype=torch.bfloat16, device="meta"), lists, **options)
        return entry.resident(p)

    assert resident(8192)
    assert not resident(8192, deterministic=True)
    assert not resident(65536)


def test_o_leaves_from_registers_where_ctas_have_several_whole_queries():
    def pieces(queries: int, num_splits: int = 0, **options) -> bool:
        q = torch.empty(queries, 64, 512, dtype=torch.bfloat16, device="meta")
        lists = torch.empty(queries, 128, dtype=torch.int32, device="meta")
        p = problem.build(q, torch.empty(65536, 512, dtype=torch.bfloat16, device="meta"), lists, **options)
        return entry.many(dataclasses.replace(p, num_splits=num_splits), dispatch.compile_target("sm_90a"))

    assert pieces(4 * 132)
    assert not pieces(4 * 132 - 1)
    assert not pieces(4 * 132, deterministic=True)  # through the combine kernel
    assert not pieces(4 * 132, num_splits=2)
