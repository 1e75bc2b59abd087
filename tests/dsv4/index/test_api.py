"""dsv4.index_topk against a loop, with ties in every form."""

import index_cases
import pytest
import torch
from agreement import assert_agrees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dsv4
from dsv4 import reference
from dsv4.index import cpu as cpu_index


def by_hand(q, k, weights, topk, visible):
    """Sort (-score, row) for each query; integer-valued inputs make the scores exact."""
    n, h, d = q.shape
    lists = []
    for i in range(n):
        scored = []
        for s in range(int(visible[i])):
            dots = (q[i].double() @ k[s].double()).clamp_min(0)
            scored.append((-(weights[i].double() * dots).sum().item(), s))
        chosen = [s for _, s in sorted(scored)[:topk]]
        lists.append(chosen + [-1] * (topk - len(chosen)))
    return torch.tensor(lists, dtype=torch.int32).view(n, topk)


def whole_numbers(n, m, h, d, seed, size=2):
    """Draw small integers: their arithmetic is exact, and many scores are equal."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-size, size + 1, shape, generator=g).float()

    return draw(n, h, d), draw(m, d), draw(n, h)


@settings(max_examples=60)
@given(
    st.integers(0, 9),
    st.integers(0, 30),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(0, 34),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
def test_lists_are_those_of_the_loop(n, m, h, d, topk, ratio, seed):
    q, k, w = whole_numbers(n, m, h, d, seed, size=1)
    assume((m + 1) * ratio > 1)  # else no position is possible
    positions = torch.randint(0, (m + 1) * ratio - 1, (n,), generator=torch.Generator().manual_seed(seed))
    got = dsv4.index_topk(q, k, w, topk, positions=positions, ratio=ratio, scale=1.0)
    assert got.dtype == torch.int32 and got.shape == (n, topk)
    visible = (positions + 1) // ratio
    assert torch.equal(got, by_hand(q, k, w, topk, visible))
    by_length = dsv4.index_topk(q, k, w, topk, lengths=visible.int(), scale=1.0)
    assert torch.equal(got, by_length)


def test_a_positive_scale_keeps_the_choice_0_makes_all_equal_and_a_negative_one_turns_it_round():
    q, k, w = whole_numbers(5, 30, 3, 4, seed=1)
    lengths = torch.tensor([30, 17, 9, 3, 0])

    def lists(weights, scale):
        return dsv4.index_topk(q, k, weights, 9, lengths=lengths, scale=scale, return_scores=True)

    for scale in (0.25, 1.0, 8.0):  # powers of two: the scores stay exact
        assert torch.equal(lists(w, scale)[0], by_hand(q, k, w, 9, lengths))
        assert torch.equal(lists(w, -scale)[0], by_hand(q, k, -w, 9, lengths))
    chosen, scores = lists(w, 0.0)
    assert torch.equal(chosen, torch.where(torch.arange(9) < lengths[:, None], torch.arange(9), -1))
    assert torch.equal(scores, torch.where(chosen < 0, float("-inf"), 0.0))


@pytest.mark.parametrize("visible", [0, 7, 8, 9, 40])
def test_fewer_equal_and_more_rows_than_topk(visible):
    q, k, w = torch.randn(3, 16, 32), torch.randn(40, 32), torch.randn(3, 16)
    got = dsv4.index_topk(q, k, w, 8, lengths=torch.full((3,), visible))
    there = min(visible, 8)
    assert (got[:, there:] == -1).all() and (got[:, :there] >= 0).all() and (got < max(visible, 1)).all()
    if visible <= 8:
        assert torch.equal(got[:, :there].sort(-1).values, torch.arange(there, dtype=torch.int32).expand(3, -1))


@pytest.mark.parametrize("t", [0, 2, 3, 4, 6, 7, 126, 127, 128, 255])
def test_a_row_is_visible_from_the_token_that_ends_it(t):
    q, k, w = torch.randn(1, 4, 8), torch.randn(64, 8), torch.randn(1, 4)
    got = dsv4.index_topk(q, k, w, 64, positions=torch.tensor([t]))
    assert sorted(got[0][got[0] >= 0].tolist()) == list(range((t + 1) // 4))


def test_exact_zero_scores_take_the_lowest_rows():
    """ReLU silences every key: all scores are 0, of either sign, whatever the weights."""
    q, k = torch.ones(2, 4, 8), -torch.rand(100, 8) - 0.1
    w = torch.tensor([[1.0, -1, 2, -3], [-1, -1, -1, -1]])
    got, scores = dsv4.index_topk(q, k, w, 5, lengths=torch.tensor([100, 3]), return_scores=True)
    assert got.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
    assert (scores[0] == 0).all() and scores[1, 3:].tolist() == [float("-inf")] * 2


def test_scores_are_those_of_the_formula_and_fall():
    torch.manual_seed(0)
    q, k, w = torch.randn(7, 64, 128), torch.randn(300, 128), torch.randn(7, 64)
    got, scores = dsv4.index_topk(q, k, w, 32, lengths=torch.full((7,), 300), return_scores=True)
    index_cases.assert_best((got, scores), q=q, k=k, weights=w, topk=32, lengths=torch.full((7,), 300))


def test_blocks_do_not_change_the_choice(monkeypatch):
    q, k, w = whole_numbers(37, 50, 4, 8, seed=1)
    lengths = torch.arange(37)
    once = dsv4.index_topk(q, k, w, 10, lengths=lengths)
    monkeypatch.setattr(cpu_index, "BLOCK_BYTES", 5 * (4 + 8) * 50 * 4)
    assert torch.equal(dsv4.index_topk(q, k, w, 10, lengths=lengths), once)


def test_autocast_does_not_change_the_choice():
    torch.manual_seed(0)
    q, k, w = torch.randn(7, 64, 128), torch.randn(300, 128), torch.randn(7, 64)
    want = dsv4.index_topk(q, k, w, 32, lengths=torch.full((7,), 300))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(dsv4.index_topk(q, k, w, 32, lengths=torch.full((7,), 300)), want)


def test_a_batch_is_its_sequences():
    torch.manual_seed(0)
    q, k, w = torch.randn(3, 5, 4, 16), torch.randn(3, 20, 16), torch.randn(3, 5, 4)
    positions = torch.randint(0, 80, (3, 5))
    got = dsv4.index_topk(q, k, w, 6, positions=positions)
    for b in range(3):
        assert torch.equal(got[b], dsv4.index_topk(q[b], k[b], w[b], 6, positions=positions[b]))


def test_pages_are_their_sequences():
    """The lists name rows of the pool; of equal scores the earlier row of the request wins, whatever its page."""
    call = index_cases.ragged()
    got, scores = dsv4.index_topk(**call, return_scores=True)
    table, starts, k = call.pop("block_table"), call.pop("request_starts").tolist(), call["k"]
    page = k.shape[1]
    for r, (begin, end) in enumerate(zip(starts, starts[1:])):
        some = slice(begin, end)
        rows = int(call["lengths"][some].max()) if end > begin else 0
        names = (table[r, : -(-rows // page), None] * page + torch.arange(page)).flatten()[:rows]
        own = {name: call[name][some] for name in ("q", "weights", "lengths")} | {"k": k.flatten(0, 1)[names]}
        want, its_scores = dsv4.index_topk(**call | own, return_scores=True)
        named = torch.where(want >= 0, names[want.clamp_min(0)], -1) if rows else want
        assert torch.equal(got[some], named) and torch.equal(scores[some], its_scores)
    assert (got[starts[-1] :] == -1).all()


def test_out_and_plan():
    call = index_cases.ragged()
    want = dsv4.index_topk(**call)
    plan = dsv4.plan(dsv4.index_topk, batch=9, q_heads=12, kv_heads=1, head_dim=64, max_seqlen_k=288, device="cpu")
    out = torch.full((9, 40), 7, dtype=torch.int32)[:, 10:30]
    assert dsv4.index_topk(**call, out=out) is out and torch.equal(out, want)
    with pytest.raises(ValueError, match="^plan: got head_dim=64; accepted: head_dim=32"):
        dsv4.index_topk(**call, plan=plan)
    with pytest.raises(ValueError, match="^out: got memory that overlaps lengths"):
        memory = torch.zeros(9 * 20, dtype=torch.int32)
        memory[:9] = call["lengths"]
        dsv4.index_topk(**call | dict(lengths=memory[:9]), out=memory.view(9, 20))
    q, k, w = torch.randn(2, 3, 4, 64), torch.randn(2, 9, 64), torch.randn(2, 3, 4)
    lengths, across = torch.full((2, 3), 9), torch.zeros(3, 2, 5, dtype=torch.int32).transpose(0, 1)
    plan = dsv4.warmup(dsv4.index_topk, batch=6, q_heads=4, kv_heads=1, head_dim=64, max_seqlen_k=9, page_size=3,
                       dtype=torch.float32, device="cpu")  # fmt: skip
    assert dsv4.index_topk(q, k, w, 5, lengths=lengths, out=across, plan=plan) is across
    assert torch.equal(across, dsv4.index_topk(q, k, w, 5, lengths=lengths))


@pytest.mark.slow
def test_operators():
    call = index_cases.ragged()
    which = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dsv4.index_topk.default, (), call | dict(return_scores=True), test_utils=which)
    out = torch.zeros(9, 20, dtype=torch.int32)
    written = dict(out=out, scores=torch.zeros(9, 20))
    torch.library.opcheck(torch.ops.dsv4.index_topk_out.default, (), call | written, test_utils=which)


def test_rows_that_nobody_sees_may_hold_anything():
    torch.manual_seed(0)
    q, k, w = torch.randn(4, 4, 16), torch.randn(20, 16), torch.randn(4, 4)
    lengths = torch.tensor([3, 9, 0, 12])
    clean = dsv4.index_topk(q, k, w, 8, lengths=lengths)
    k[12:] = float("nan")
    k[15] = float("inf")
    assert torch.equal(dsv4.index_topk(q, k, w, 8, lengths=lengths), clean)


def test_a_query_of_nan_harms_no_other():
    torch.manual_seed(0)
    q, k, w = torch.randn(4, 4, 16), torch.randn(20, 16), torch.randn(4, 4)
    lengths = torch.full((4,), 20)
    clean = dsv4.index_topk(q, k, w, 8, lengths=lengths)
    q[2] = float("nan")
    got = dsv4.index_topk(q, k, w, 8, lengths=lengths)
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_lists_go_into_v4_attention():
    torch.manual_seed(0)
    n, rows = 12, 40
    lists = dsv4.index_topk(
        torch.randn(n, 4, 16), torch.randn(rows, 16), torch.randn(n, 4), 8, positions=torch.arange(n) * 3
    )
    q, window, comp = torch.randn(n, 2, 512), torch.randn(n, 512), torch.randn(rows, 512)
    own = torch.arange(n, dtype=torch.int32)[:, None]
    got = dsv4.v4_attention(q, window, own, comp, lists, return_lse=True)
    assert_agrees(got, reference.v4_attention, q, window, own, comp, lists)


def test_torch_compile_in_one_graph():
    q, k, w = torch.randn(4, 4, 16).round(), torch.randn(20, 16).round(), torch.randn(4, 4).round()  # with ties
    lengths = torch.tensor([0, 3, 20, 11])
    compiled = torch.compile(dsv4.index_topk, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(f(q, k, w, 8, lengths=lengths, return_scores=True) for f in (compiled, dsv4.index_topk))):
        assert torch.equal(got, want)


Q, K, W, L = torch.zeros(4, 2, 8), torch.zeros(6, 8), torch.zeros(4, 2), torch.tensor([0, 1, 6, 3])
PAGES, TABLE = torch.zeros(12, 2, 8), torch.arange(12, dtype=torch.int32).view(4, 3)
STARTS = torch.tensor([0, 3, 2], dtype=torch.int32)
BAD = {
    "q rank": ((Q[0], K, W, 2), dict(lengths=L), "q"),
    "q dtype": ((Q.int(), K, W, 2), dict(lengths=L), "q"),
    "q type": ((None, K, W, 2), dict(lengths=L), "q"),
    "k type": ((Q.to(torch.float8_e4m3fn), None, W, 2), dict(lengths=L), "k"),
    "k width": ((Q, K[:, :4], W, 2), dict(lengths=L), "k"),
    "k rank": ((Q, K[None], W, 2), dict(lengths=L), "k"),
    "k device": ((Q, K.to("meta"), W, 2), dict(lengths=L), "k"),
    "weights shape": ((Q, K, W[:, :1], 2), dict(lengths=L), "weights"),
    "topk negative": ((Q, K, W, -1), dict(lengths=L), "topk"),
    "topk past all row numbers": ((Q, K, W, 2**62), dict(lengths=L), "topk"),
    "topk float": ((Q, K, W, 2.0), dict(lengths=L), "topk"),
    "ratio": ((Q, K, W, 2), dict(positions=L, ratio=0), "ratio"),
    "neither": ((Q, K, W, 2), {}, "positions, lengths"),
    "both": ((Q, K, W, 2), dict(positions=L, lengths=L), "positions, lengths"),
    "lengths too long": ((Q, K, W, 2), dict(lengths=L + 1), "lengths"),
    "lengths negative": ((Q, K, W, 2), dict(lengths=L - 1), "lengths"),
    "lengths dtype": ((Q, K, W, 2), dict(lengths=L.float()), "lengths"),
    "lengths shape": ((Q, K, W, 2), dict(lengths=L[:3]), "lengths"),
    "position past the rows": ((Q, K, W, 2), dict(positions=torch.tensor([0, 0, 0, 27])), "positions"),
    "position negative": ((Q, K, W, 2), dict(positions=torch.tensor([0, 0, 0, -1])), "positions"),
    "grad": ((Q.clone().requires_grad_(), K, W, 2), dict(lengths=L), "q"),
    "table and rows": ((Q, K, W, 2), dict(lengths=L, block_table=TABLE), "k"),
    "table and a batch": ((Q[None], K[None], W[None], 2), dict(lengths=L[None], block_table=TABLE), "q"),
    "table rank": ((Q, PAGES, W, 2), dict(lengths=L, block_table=TABLE[0]), "block_table"),
    "table dtype": ((Q, PAGES, W, 2), dict(lengths=L, block_table=TABLE.long()), "block_table"),
    "page number": ((Q, PAGES, W, 2), dict(lengths=L, block_table=TABLE + 9), "block_table"),
    "pages of no row": ((Q, PAGES[:, :0], W, 2), dict(lengths=L, block_table=TABLE), "k"),
    "a line too few": ((Q, PAGES, W, 2), dict(lengths=L, block_table=TABLE[:3]), "request_starts"),
    "starts fall": ((Q, PAGES, W, 2), dict(lengths=L, block_table=TABLE[:2], request_starts=STARTS), "request_starts"),
    "starts without a table": ((Q, K, W, 2), dict(lengths=L, request_starts=STARTS), "request_starts"),
    "out dtype": ((Q, K, W, 2), dict(lengths=L, out=torch.zeros(4, 2)), "out"),
    "out shape": ((Q, K, W, 2), dict(lengths=L, out=torch.zeros(4, 3, dtype=torch.int32)), "out"),
    "plan": ((Q, K, W, 2), dict(lengths=L, plan=7), "plan"),
    "backend": ((Q, K, W, 2), dict(lengths=L, backend="gpu"), "backend"),
    "cuda": ((Q, K, W, 2), dict(lengths=L, backend="cuda"), "backend"),
    "kernels and fp32": ((Q, K, W, 2), dict(lengths=L, backend="softsm"), "backend"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    args, options, argument = BAD[case]
    form = "'softsm' cannot run" if case == "kernels and fp32" else "got .*; accepted: "
    with pytest.raises(ValueError, match=rf"^{argument}: {form}"):
        dsv4.index_topk(*args, **options)
