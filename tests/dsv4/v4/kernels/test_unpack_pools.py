"""FP8 rows that become bf16 before attention reads them: when that pays, and that nothing but the time changes."""

from dataclasses import replace

import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.runtime import calls, dispatch
from dsv4.v4 import problem
from dsv4.v4.kernels import unpack_pools
from dsv4.v4.kernels.sm90 import entry


def launches(queries: int, listed: int, rows: int, heads: int = 64, **options) -> list[str]:
    """The kernels of a call with these sizes."""
    pages = dsv4.Fp8Cache.empty(rows // 64, 64)
    q = torch.empty(queries, heads, 512, dtype=torch.bfloat16)
    p = problem.build(q, pages, torch.zeros(queries, listed, dtype=torch.int32), **options)
    p = replace(p, out=torch.empty_like(q))
    return [launch.kernel.__name__ for launch in calls.launches_of(p, dispatch.compile_target("sm_90a"))]


def test_rows_are_unpacked_where_they_are_listed_often_enough():
    assert launches(unpack_pools.LISTED, 64, 64) == ["v4_unpack", "v4_sparse"]
    assert "v4_unpack" not in launches(unpack_pools.LISTED - 1, 64, 64)


def test_the_copy_is_never_larger_than_q():
    assert "v4_unpack" in launches(64, 4096, 4096)
    assert "v4_unpack" not in launches(64, 4096, 4160)


def test_deterministic_calls_do_not_depend_on_how_many_queries_there_are():
    assert "v4_unpack" not in launches(256, 64, 64, deterministic=True)


def scaled_rows(count: int) -> torch.Tensor:
    """Scales from 2^-12 to 2^12."""
    return torch.randn(count, 512) * torch.exp2(torch.randint(-12, 13, (count, 1)))


@pytest.mark.compile  # an attention kernel of its own
def test_a_query_that_lists_one_row_gets_its_bits(monkeypatch):
    """Its weight is 1. Rows of the window, and of another pool in pages of 2."""
    monkeypatch.setattr(unpack_pools, "pays", lambda p: True)
    window, compressed = scaled_rows(70), scaled_rows(30)
    pools = [dsv4.Fp8Cache.pack(x, rows_per_page=n) for x, n in ((window, 16), (compressed, 2))]
    lists = torch.tensor([[0], [17], [69], [-1], [-1]]).int(), torch.tensor([[-1], [-1], [-1], [1], [29]]).int()
    q = torch.randn(5, 16, 512).bfloat16() / 64
    with softsm.use("sm_90a"), softsm.checking() as report:
        out = dsv4.v4_attention(q, pools[0], lists[0], pools[1], lists[1], backend="softsm")
    assert report.launches == 3 and not report, str(report)
    rows = [x.unpack() for x in pools]
    want = torch.stack([rows[int(a[0] < 0)][int(max(a[0], b[0]))] for a, b in zip(*lists)])
    assert torch.equal(out, want[:, None].expand_as(out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "stride"),
    [pytest.param(*x, id=n) for x, n in (((16, None), "by 16 bytes"), ((2, 1176), "by 8"), ((5, 2925), "by 1"))],
)
@pytest.mark.parametrize("tabled", [True, False])
def test_unpacked_rows_give_the_same_bits(page, stride, tabled, monkeypatch):
    """Rows that are not there, a last page in part; two pools in one call. Rows that are not unpacked are those of a
    block table or of lists."""
    torch.manual_seed(3)
    rows = scaled_rows(70)
    table = torch.randint(0, 15, (2, 25), dtype=torch.int32)
    common = dict(
        q=torch.randn(2, 16, 512).bfloat16() / 64,
        window=dsv4.Fp8Cache.pack(rows, rows_per_page=page, page_stride=stride),
        window_indices=torch.randint(-1, 70, (2, 60), dtype=torch.int32),
        compressed=dsv4.Fp8Cache.pack(torch.randn(30, 512), rows_per_page=2),
    )
    listed = common | dict(compressed_indices=(2 * table[..., None] + torch.arange(2)).flatten(1).int())
    by_table = common | dict(
        compressed_block_table=table,
        compressed_lengths=torch.tensor([50, 50], dtype=torch.int32),
        request_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
    )

    def run(first: bool, arguments: dict):
        monkeypatch.setattr(unpack_pools, "pays", lambda p: first)
        monkeypatch.setattr(entry, "decode_kernel", lambda p, target: None)  # another kernel, which rounds differently
        calls.forget()
        with softsm.use("sm_90a"), softsm.checking(races=True, order="latest") as report:
            got = dsv4.v4_attention(**arguments, return_lse=True, backend="softsm")
        assert not report, str(report)
        assert report.launches == 1 + 2 * first
        return got

    got = run(True, listed)
    assert_agrees(got, reference.v4_attention, **listed)
    for mine, other in zip(got, run(False, by_table if tabled else listed)):
        assert torch.equal(mine, other)


@pytest.mark.compile
def test_a_pool_that_is_window_and_compressed_is_unpacked_once(monkeypatch):
    """Also through another view of its storage."""
    monkeypatch.setattr(unpack_pools, "pays", lambda p: True)
    cache, other = (dsv4.Fp8Cache.pack(torch.randn(32, 512), rows_per_page=16) for _ in range(2))
    again = dsv4.Fp8Cache(cache.storage.view_as(cache.storage), 16, cache.page_stride)
    q, some = torch.randn(1, 16, 512).bfloat16(), torch.randint(-1, 32, (1, 8), dtype=torch.int32)
    for compressed, expected in ((cache, 2), (again, 2), (other, 3), (cache, 2)):
        given = dict(q=q, window=cache, window_indices=some, compressed=compressed, compressed_indices=some)
        with softsm.use("sm_90a"), softsm.checking() as report:
            got = dsv4.v4_attention(**given, return_lse=True, backend="softsm")
        assert report.launches == expected
        assert_agrees(got, reference.v4_attention, **given)
