"""The Hopper kernel of V4 attention for few work tiles of FP8 rows, on a CPU through softsm."""

import dataclasses

import launches
import pytest
import torch
from agreement import assert_agrees
from v41_problem import numbers

import dsv4
from dsv4 import reference
from dsv4.runtime import calls, dispatch
from dsv4.v4 import problem
from dsv4.v4.kernels.sm90 import entry

SEED = 13
NAN = float("nan")


def pool(count: int, per_page: int = 64, **options) -> dsv4.Fp8Cache:
    return dsv4.Fp8Cache.pack(torch.randn(count, 512).bfloat16(), rows_per_page=per_page, **options)


def launch_of(**arguments):
    p = problem.build(**arguments)
    (launch, *_) = calls.launches_of(
        dataclasses.replace(p, out=torch.empty_like(p.q)), dispatch.compile_target("sm_90a")
    )
    return launch


@pytest.fixture
def check(monkeypatch):
    """What the kernel gives, races checked, against the definition."""
    launches.num_sms(monkeypatch, 132)  # with the few that are emulated, v4_sparse would take these calls
    names = launches.launched(monkeypatch)

    def checked(order: str = "latest", **arguments) -> None:
        out = torch.full_like(arguments["q"], NAN)
        with launches.race_free("sm_90a", order=order, seed=SEED):
            got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
        assert names[0] == "v4_decode_swap_ab"
        assert_agrees(got, reference.v4_attention, **arguments)

    return checked


@pytest.mark.parametrize("order", ["latest", pytest.param("eager", marks=pytest.mark.slow)])
def test_blocks_are_split_and_merged(order, check):
    """Three blocks of window rows and two of compressed ones, one each per CTA; 20 heads are two tiles. One row has
    scales that need two products."""
    window = pool(100)
    page = window.storage[: window.page_stride]
    page[64 * 576 + 3 * 8 :][:7] = torch.tensor([140, 127, 0, 120, 136, 134, 135], dtype=torch.uint8)
    page[3 * 576 :][:448] = 0x08  # 2^-6
    check(
        order,
        q=torch.randn(2, 20, 512).bfloat16(),
        window=window,
        window_indices=numbers(2, 150, of=100),
        compressed=pool(90, 2),
        compressed_indices=numbers(2, 70, of=90),
        sink=torch.randn(20),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3, 49], dtype=torch.int32)),
    )


def test_a_query_without_rows_waits_for_its_copies(check):
    """Its CTA has no block of rows: Q must have landed before its memory serves the sums at the end."""
    check(
        q=torch.randn(2, 16, 512).bfloat16(),
        window=pool(100),
        window_indices=numbers(2, 128, of=100),
        window_lengths=torch.tensor([30, 0], dtype=torch.int32),
        compressed=pool(90, 2),
        compressed_indices=numbers(2, 48, of=90),
        compressed_lengths=torch.tensor([48, 0], dtype=torch.int32),
        sink=torch.randn(16),
    )


@pytest.mark.slow
def test_rows_by_block_table_and_requests(check):
    """Three requests of 1, 0 and 2 queries; the last query belongs to none. Pages of two rows, NaN where none are."""
    compressed = dsv4.Fp8Cache.empty(80, 2)
    compressed.storage.fill_(255)
    compressed.write(torch.arange(150), torch.randn(150, 512).bfloat16())
    check(
        q=torch.randn(4, 16, 512).bfloat16(),
        window=pool(64),
        window_indices=numbers(4, 60, of=64),
        window_lengths=torch.tensor([60, 0, 7, 33], dtype=torch.int32),
        compressed=compressed,
        compressed_block_table=torch.randint(0, 75, (3, 40), dtype=torch.int32),
        compressed_lengths=torch.tensor([80, 70, 0, 80], dtype=torch.int32),
        request_starts=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        softmax_scale=-0.1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ["latest", "eager"])
@pytest.mark.parametrize("queries, rows, keys", [(8, 640, 128), (5, 576, 64)])
def test_32_heads_in_a_cta(queries, rows, keys, order, check, monkeypatch):
    """Where CTAs of 16 would be too many. Blocks of 128 rows where those of 64 would be too many, too. By list the
    other decode kernel would take these queries; by table it does not, and then this kernel has them."""
    monkeypatch.setattr(entry, "SWAP_AB_WS", ((), (), ()))
    lengths = torch.tensor([0, 65, rows, 1, 500, 129, 64, rows], dtype=torch.int32)[:queries]
    lists = numbers(queries, rows, of=5200)
    problem = dict(q=torch.randn(queries, 64, 512).bfloat16(), window=pool(5200), window_indices=lists)
    constants = launch_of(**problem).constants
    assert (constants["HEADS"], constants["KEYS"]) == (32, keys)
    check(order, **problem, window_lengths=lengths)


@pytest.mark.slow  # a variant of its own, with the same lines for larger tiles
def test_blocks_of_128_rows(check, monkeypatch):
    """A block of window rows and two of compressed ones, two of them in one CTA; 40 heads are two tiles."""
    monkeypatch.setattr(entry, "decode_kernel", lambda p, target: (entry.v4_decode_swap_ab, entry.OF_32_LONG, 2))
    check(
        q=torch.randn(1, 40, 512).bfloat16(),
        window=pool(100),
        window_indices=numbers(1, 100, of=100),
        compressed=pool(90, 2),
        compressed_indices=numbers(1, 150, of=90),
        sink=torch.randn(40),
        inverse_rope=(reference.rope_table(50, 64), torch.tensor([3], dtype=torch.int32)),
    )


@pytest.mark.parametrize("order", ["latest", pytest.param("eager", marks=pytest.mark.slow)])
def test_plain_rows_come_when_those_of_the_last_block_are_no_longer_read(order, check, monkeypatch):
    """Two blocks of window rows and three of compressed ones, in two CTAs for each tile of heads; rows apart, NaN
    between them and where no list leads."""
    monkeypatch.setattr(entry, "decode_kernel", lambda p, target: (entry.v4_decode_swap_ab, entry.OF_16, 2))
    window, compressed = torch.full((90, 576), NAN).bfloat16(), torch.full((40, 2, 520), NAN).bfloat16()
    window[:60, :512] = torch.randn(60, 512)
    compressed[:30, :, :512] = torch.randn(30, 2, 512)
    check(
        order,
        q=torch.randn(1, 20, 512).bfloat16(),
        window=window[:, :512],
        window_indices=numbers(1, 100, of=60),
        compressed=compressed[:, :, :512],
        compressed_indices=numbers(1, 150, of=60),
        sink=torch.randn(20),
    )


@pytest.mark.slow
@pytest.mark.parametrize("stride", [0, 1])
def test_one_pool_of_any_stride_and_one_without_rows(stride, check):
    empty = dsv4.Fp8Cache(torch.empty(0, dtype=torch.uint8), 64)
    check(
        q=torch.randn(1, 8, 512).bfloat16(),
        window=pool(9, 3, page_stride=3 * 584 + stride),
        window_indices=numbers(1, 30, of=9),
        compressed=empty,
        compressed_indices=torch.full((1, 5), -1, dtype=torch.int32),
    )


def test_few_items_take_it():
    """Until v4_decode_swap_ab_ws is faster, for two blocks of a CTA and more, or v4_sparse; all CTAs run at once, but
    for up to 32 heads. Deterministic calls do not: a query's result would depend on how many others there are."""

    def launch(queries: int, heads: int, rows: int = 640, **options):
        lists = torch.zeros(queries, rows, dtype=torch.int32)
        q = torch.empty(queries, heads, 512, dtype=torch.bfloat16)
        pages = dsv4.Fp8Cache.empty(queries * rows // 64, 64)
        found = launch_of(q=q, window=pages, window_indices=lists, **options)
        return found.kernel.__name__, found.constants.get("HEADS"), found.constants.get("KEYS"), found.grid

    assert launch(1, 64) == ("v4_decode_swap_ab", 16, 64, (4, 1, 10))
    assert launch(1, 128) == ("v4_decode_swap_ab", 16, 64, (8, 1, 10))
    assert launch(1, 1, 0) == ("v4_decode_swap_ab", 16, 64, (1, 1, 1))
    assert launch(1, 128, 1152) == ("v4_decode_swap_ab_ws", 16, None, (8, 1, 9))
    assert launch(2, 128, 1152) == ("v4_decode_swap_ab_ws", 16, None, (8, 2, 6))
    assert launch(8, 64) == ("v4_decode_swap_ab_ws", 16, None, (4, 8, 4))
    assert launch(8, 64, 1152) == ("v4_decode_swap_ab_ws", 32, None, (2, 8, 6))
    assert launch(8, 128) == launch(8, 128, 1152) == ("v4_decode_swap_ab_ws", 32, None, (4, 8, 4))
    assert launch(128, 8) == launch(128, 16) == launch(128, 16, 1152) == ("v4_decode_swap_ab_ws", 16, None, (1, 128, 1))
    assert launch(128, 32) == ("v4_decode_swap_ab_ws", 32, None, (1, 128, 1))
    assert launch(512, 16) == ("v4_decode_swap_ab_ws", 16, None, (1, 512, 1))
    assert launch(32, 64)[0] == launch(128, 32, 704)[0] == "v4_sparse"
    assert launch(256, 32) == ("v4_decode_swap_ab_ws", 32, None, (1, 256, 1))
    assert (
        launch(64, 64)[0] == launch(128, 16, 1216)[0] == launch(256, 32, 1216)[0] == launch(600, 16)[0] == "v4_sparse"
    )
    assert launch(1, 64, deterministic=True)[0] == "v4_sparse"


def test_few_items_of_plain_rows_take_it():
    def launch(queries: int, heads: int, rows: int = 640, dtype=torch.bfloat16):
        lists = torch.zeros(queries, rows, dtype=torch.int32)
        q, window = torch.empty(queries, heads, 512, dtype=dtype), torch.empty(9999, 512, dtype=dtype)
        found = launch_of(q=q, window=window, window_indices=lists)
        return found.kernel.__name__, found.constants.get("HEADS"), found.constants.get("KEYS"), found.grid

    assert launch(1, 64) == ("v4_decode_swap_ab", 16, 64, (4, 1, 10))
    assert launch(8, 64) == ("v4_decode_swap_ab", 32, 128, (2, 8, 5))
    assert launch(32, 64)[0] == launch(4096, 64)[0] == launch(1, 64, dtype=torch.float16)[0] == "v4_sparse"
