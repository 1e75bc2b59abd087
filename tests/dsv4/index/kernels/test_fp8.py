"""The index_topk kernels for FP8 keys on a CPU, through softsm: scores of each architecture, the choice by groups."""

from dataclasses import replace

import index_cases
import pytest
import torch

from dsv4.index import cpu, problem, sizes
from dsv4.kernels.compat import TRITON_VERSION


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.compile)])
def arch(request):
    if request.param == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    return request.param


def test_requests_in_pages_with_ties(arch):
    arguments = index_cases.fp8_ragged()
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.slow
def test_rows_of_the_request(arch):
    arguments = index_cases.fp8_ragged() | dict(request_rows=True)
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_the_models_size(arch, order):
    arguments = index_cases.fp8_random(n=2, rows=700, heads=64, topk=64, lengths=(700, 129))
    index_cases.assert_fp8_best(index_cases.kernel(arch, order, **arguments), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("each", [2, 5, 9])
def test_many_queries_share_keys(arch, each):
    lengths = (700, 699, 640, 129, 128, 127, 1, 0, 513)[:each]
    arguments = index_cases.fp8_random(n=each, rows=700, heads=16, topk=100, lengths=lengths, requests=1)
    index_cases.assert_fp8_best(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.slow
def test_a_query_has_the_same_list_whatever_is_asked_beside_it(arch="sm_90a"):
    """Alone, with others, and with others of its request, which share the keys that a block of the kernel reads. Only
    Hopper's scores promise it: those of plain Triton are added up in an order that the compiler chooses for a tile."""
    arguments = index_cases.fp8_random(n=3, rows=300, heads=64, topk=40, lengths=(300, 300, 200), requests=1)
    together = index_cases.kernel(arch, **arguments)
    arguments["block_table"] = arguments["block_table"].expand(3, -1).contiguous()
    del arguments["request_starts"]
    apart = index_cases.kernel(arch, **arguments)
    one = {name: arguments[name][1:2] for name in ("q", "weights", "lengths", "block_table")}
    alone = index_cases.kernel(arch, **(arguments | one))
    for a, b, c in zip(together, apart, alone):
        assert torch.equal(a, b) and torch.equal(a[1:2], c)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 5, 33, 128])
def test_heads(arch, heads):
    arguments = index_cases.fp8_random(n=3, rows=200, heads=heads, topk=7, lengths=(200, 7, 6))
    index_cases.assert_fp8_best(index_cases.kernel(arch, **arguments), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 5, 128, 1000])
@pytest.mark.parametrize("what", ["random", "equal", "two values", "neighbours", "far apart"])
def test_the_choice_by_groups(what, topk):
    """900 rows are 57 groups; lists of fewer look into that many groups, wider ones into all."""
    g = torch.Generator().manual_seed(topk)
    scores = {
        "random": torch.randn(900, generator=g),
        "equal": torch.full((900,), -3.0),
        "two values": torch.randint(0, 2, (900,), generator=g).float(),
        "neighbours": torch.randn(57, generator=g).repeat_interleave(16)[:900] + torch.arange(900) % 16,
        "far apart": torch.randn(900, generator=g) * 2.0 ** torch.randint(-30, 30, (900,), generator=g),
    }[what]
    index_cases.assert_fp8_select("sm_90a", scores, topk)


@pytest.mark.slow
def test_lists_too_wide_for_the_groups(arch, monkeypatch):
    """The choice in rounds, of the same scores."""
    monkeypatch.setattr("dsv4.index.kernels.choice.MAX_TOPK_BY_GROUPS", 10)
    arguments = index_cases.fp8_ragged()
    index_cases.assert_exact(index_cases.kernel(arch, **arguments), **arguments)


def test_a_page_that_is_not_there_is_chosen_last_and_has_no_name(arch, monkeypatch):
    """Where values are not checked, as on a GPU."""
    monkeypatch.setattr("dsv4.runtime.checks.values_checked", lambda x: False)
    arguments = index_cases.fp8_ragged()
    arguments["weights"] = -arguments["weights"].abs()  # all scores are negative: zeros would come first
    arguments["block_table"][0, 3] = -7
    arguments["block_table"][2, 1] = 10**6
    lists, scores = index_cases.kernel(arch, **arguments)
    given = problem.build(**(arguments | dict(k=arguments["k"].page_view())))
    want = replace(given, out=torch.empty_like(lists), scores=torch.empty_like(scores))
    cpu.forward(want)
    assert torch.equal(lists, want.out) and torch.equal(scores, want.scores)
    assert (lists[1] >= 0).sum() == 20 and (lists[2] == -1).sum() == 13  # query 2 sees 7 rows, all of a good page


def test_room_for_scores_and_maxima():
    line = sizes.index_line(900)
    assert line == 960  # in fours of groups
    assert sizes.index_words(900, 20) == line + line // 16 + 2 * 128
