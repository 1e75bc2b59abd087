"""The Hopper kernels on a CPU, through softsm: one case per part of the code; the rest of the suites is slow."""

import dataclasses
import math

import launches
import pytest
import torch
from agreement import assert_agrees, assert_right

import dsv4
import softsm
from dsv4 import reference, suites
from dsv4.fmha import problem
from dsv4.fmha.kernels import prepare
from dsv4.fmha.kernels.sm90 import entry as fmha
from dsv4.fmha.kernels.sm90 import forward, forward_d512, forward_persistent
from dsv4.kernels import combine
from dsv4.runtime import calls, checks, dispatch, splits

SEED = 7
WHERE = suites.Where("softsm", "sm_90a")
CASES = {str(case): case for case in suites.fmha()}
QUICK = [
    "fmha/causal-odd-gqa-d64-bf16",  # one consumer, packed heads, masks
    "fmha/varlen-d64-bf16",  # rows of neighbours zeroed
    "fmha/paged-12-d64-fp16",  # pages that TMA boxes do not tile
    "fmha/window-sink-mqa-d64-bf16",
]
if dispatch.triton_version() < (3, 9):
    QUICK.append("fmha/t129-s257-d64-fp16")  # three consumers; a newer Triton compiles these elsewhere


@pytest.mark.parametrize("name", QUICK)
def test_one_case_of_each_part(name):
    result = suites.run_case(CASES[name], WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_the_other_cases(name):
    result = suites.run_case(CASES[name], WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.parametrize(
    "head_dim, same_kv", [(64, False), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((128, False), (512, True)))]
)
def test_split_keys_are_merged_in_order(head_dim, same_kv):
    """Three splits of two tiles, the last without keys, NaN in the buffers; twice the same bits."""
    q = torch.randn(1, 1, 8, head_dim).bfloat16()
    k = torch.randn(1, 200, 1, head_dim).bfloat16()
    v = k if same_kv else torch.randn_like(k)
    sink = torch.randn(8)
    plan = dsv4.plan(dsv4.fmha, batch=1, q_heads=8, kv_heads=1, head_dim=head_dim, max_seqlen_k=200, device="cpu")
    outs = []
    for _ in range(2):
        scratch = torch.full((3 * 8 * (head_dim + 1),), float("nan"))
        plan = dataclasses.replace(plan, num_splits=3, scratch=scratch)
        with softsm.use("sm_90a"):
            outs.append(dsv4.fmha(q, k, v, sink=sink, return_lse=True, plan=plan, backend="softsm"))
    (out, lse), (again, _) = outs
    assert torch.equal(out, again)
    assert_agrees((out, lse), reference.fmha, q, k, v, sink=sink)


@pytest.mark.compile
def test_short_partial_results_hold_values_of_any_size(monkeypatch):
    """Many partial results of head dim 512 are 16 bits wide; each half of a row has its own power of two."""
    monkeypatch.setattr(prepare, "FP16_PARTIALS_FROM", 0)
    q, k = torch.randn(1, 1, 8, 512).bfloat16(), torch.randn(1, 300, 1, 512).bfloat16()
    size = torch.cat([torch.full((256,), 1e30), torch.full((256,), 1e-30)])
    v = (torch.randn(1, 300, 1, 512) * size).bfloat16()
    v[..., 7] = 0
    plan = dsv4.plan(dsv4.fmha, batch=1, q_heads=8, kv_heads=1, head_dim=512, max_seqlen_k=300, device="cpu")
    plan = dataclasses.replace(plan, num_splits=3, scratch=torch.full((3 * 8 * 513,), float("nan")))
    names = launches.launched(monkeypatch)
    with launches.race_free("sm_90a"):
        out = dsv4.fmha(q, k, v, plan=plan, backend="softsm")
    assert names[-1] == "combine_rows_fp16"
    want, low = reference.fmha(q, k, v)[0], reference.fmha(q, k, v, p_dtype=torch.bfloat16)[0]
    for half in (slice(0, 256), slice(256, 512)):  # in one comparison the first would hide the second
        assert_right(out[..., half], want[..., half], low[..., half])


LARGE = [(64, False), (128, True), (128, False), (256, True)]


@pytest.mark.parametrize(
    "head_dim, causal", [(64, True), *(pytest.param(d, c, marks=pytest.mark.slow) for d, c in LARGE)]
)
def test_one_block_loops_over_many_tiles(monkeypatch, head_dim, causal):
    """The GPU seems to have two SMs: the ring and its phases continue from tile to tile."""
    monkeypatch.setattr(fmha, "is_short", lambda *_: False)
    q = torch.randn(2, 330, 2, head_dim).bfloat16()
    k, v = torch.randn(2, 200, 2, head_dim).bfloat16(), torch.randn(2, 200, 2, head_dim).bfloat16()
    two = dispatch.compile_target("sm_90a")._replace(num_sms=2)
    assert fmha.tiling(problem.dense(q, k, v, causal=causal), two).loop
    out = torch.full_like(q, float("nan"))
    with launches.race_free("sm_90a", sms=2, order="latest"):
        _, lse = dsv4.fmha(q, k, v, causal=causal, out=out, return_lse=True, backend="softsm")
    assert_agrees((out, lse), reference.fmha, q, k, v, causal=causal)


ORDERS = ("eager", "latest", "random")


@pytest.mark.compile
@pytest.mark.parametrize(
    "head_dim, order",
    [(128, "latest"), *(pytest.param(d, o, marks=pytest.mark.slow) for d in (64, 128, 256) for o in ORDERS
                        if (d, o) != (128, "latest"))],
)  # fmt: skip
def test_only_the_last_tile_of_keys_is_masked(monkeypatch, head_dim, order):
    """There is no mask, or a diagonal that crosses one tile in 64 rows. The keys shrink: the last tile comes first,
    and others raise the maximum of some rows by more than 8 and of some by less: O is rescaled, or left as it is."""
    monkeypatch.setattr(fmha, "is_short", lambda *_: False)
    one = dispatch.compile_target("sm_90a")._replace(num_sms=1)
    for tokens, keys, causal in ((330, 500, False), (330, 458, True), (458, 330, True)):
        q, v = torch.randn(1, tokens, 2, head_dim).bfloat16(), torch.randn(1, keys, 1, head_dim).bfloat16()
        k = (torch.randn(1, keys, 1, head_dim) * torch.linspace(8, 0.5, keys)[:, None, None]).bfloat16()
        assert fmha.tiling(problem.dense(q, k, v, causal=causal), one).options["EVEN"]
        sink, out = torch.randn(2), torch.full_like(q, float("nan"))
        with launches.race_free("sm_90a", sms=1, order=order, seed=SEED):
            _, lse = dsv4.fmha(q, k, v, sink=sink, causal=causal, out=out, return_lse=True, backend="softsm")
        assert_agrees((out, lse), reference.fmha, q, k, v, sink=sink, causal=causal)
        s = torch.einsum("bthd,bsd->bhts", q.float(), k[:, :, 0].float()) * head_dim**-0.5 / math.log(2)
        s = torch.nn.functional.pad(s, (0, 512 - keys), value=-1e3).unflatten(3, (4, 128))
        grown = s.amax(4).flip(3).cummax(3).values.diff(dim=3)
        assert (grown > 8).any() and (grown < 8).any()


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    "head_dim", [64, pytest.param(128, marks=pytest.mark.compile), pytest.param(192, marks=pytest.mark.slow)]
)
def test_some_warps_rescale_while_others_keep_their_maxima(monkeypatch, head_dim, short):
    """A warp has 16 rows and rescales O if one of them needs it. In the last of three tiles of keys the maximum of a
    row of the first warp grows by 20 and that of one of the third by 4, in the second tile one of the second by 30. At
    head dim 64 all is in a window, for which other tests have compiled the looping kernel too."""
    window = (500, 500) if head_dim == 64 else (-1, -1)
    q, k, v = (torch.randn(1, n, 1, head_dim) * 0.1 for n in (450, 384, 384))
    factor = head_dim**-0.5 / math.log(2)
    for row, first, last, grown in ((5, 0, 64, 20), (40, 0, 64, 4), (26, 130, 190, 30), (100, 320, 384, 12)):
        q[0, row] = 0
        q[0, row, 0, row % 7] = 8.0
        k[0, first:last, 0, row % 7] += grown / 8.0 / factor
    k = k.flip(1) if short else k  # the looping kernel begins with the last tile
    q, k, v = q.bfloat16(), k.contiguous().bfloat16(), v.bfloat16()
    monkeypatch.setattr(fmha, "is_short", lambda *_: short)
    target = dispatch.compile_target("sm_90a")._replace(num_sms=1)
    assert fmha.tiling(problem.dense(q, k, v, window=window), target).loop != short
    for order in ORDERS:
        with launches.race_free("sm_90a", sms=1, order=order, seed=SEED):
            got = dsv4.fmha(q, k, v, window=window, return_lse=True, backend="softsm")
        assert_agrees(got, reference.fmha, q, k, v)


@pytest.mark.compile
@pytest.mark.parametrize("lengths", [(1, 63, 17, 64, 5), (128, 3, 90)])
def test_three_blocks_of_few_keys_share_a_multiprocessor(lengths):
    """At head dim 64 a tile has 64 keys where no sequence has more than two tiles. Values of the next sequence, which
    TMA loads too, are NaN. Where nothing may depend on the batch, tiles do not depend on its longest sequence."""
    n = sum(lengths)
    q, k, v = torch.randn(n, 4, 64).bfloat16(), torch.randn(n, 2, 64).bfloat16(), torch.randn(n, 2, 64).bfloat16()
    v[lengths[0] : lengths[0] + lengths[1]] = float("nan")
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    sizes = dict(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    target = dispatch.compile_target("sm_90a")
    for deterministic, keys, registers in ((False, 64, 80), (True, 128, 128)):
        p = problem.varlen(q, k, v, starts, starts, causal=True, deterministic=deterministic, **sizes)
        options = fmha.tiling(p, target).options
        assert (options["BN"], options["maxnreg"]) == (keys, registers)
    with launches.race_free("sm_90a", order="latest"):
        out, lse = dsv4.fmha_varlen(q, k, v, starts, starts, causal=True, return_lse=True, backend="softsm", **sizes)
    for begin, end in zip(starts, starts[1:]):
        one = q[begin:end][None], k[begin:end][None], v[begin:end][None]
        got = out[begin:end][None], lse[begin:end].T[None]
        if begin == lengths[0]:
            assert got[0].isnan().all()
        else:
            assert_agrees(got, reference.fmha, *one, causal=True)


@pytest.mark.compile
@pytest.mark.parametrize("order", ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))])
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_three_roles_of_head_dim_64(monkeypatch, order, causal):
    """Causal roles begin at different tiles of keys, and some rows see none. Five heads of a group do not divide the 64
    rows of a role, and an odd number of keys before the first query moves the diagonal from the corners of the tiles:
    then the loop has a mask."""
    monkeypatch.setattr(fmha, "THREE_ROLES", 0.0)
    monkeypatch.setattr(fmha, "THREE_WITH_MASKS", 0.0)
    monkeypatch.setattr(fmha, "is_short", lambda *_: False)
    one = dispatch.compile_target("sm_90a")._replace(num_sms=1)
    shapes = (
        (450, 450, (2, 2), False),
        (380, 316, (2, 1), False),
        (170, 170, (5, 1), causal),
        (300, 331, (2, 2), causal),
    )
    for tokens, keys, heads, masks in shapes:
        q = torch.randn(1, tokens, heads[0], 64).bfloat16()
        k, v = (torch.randn(1, keys, heads[1], 64).bfloat16() for _ in "kv")
        options = fmha.tiling(problem.dense(q, k, v, causal=causal), one).options
        found = (options["CONSUMERS"], options["EVEN"], options["MASKS"], options["OWN_END"])
        assert found == (3, True, masks, causal)
        out = torch.full_like(q, float("nan"))
        with launches.race_free("sm_90a", sms=1, order=order, seed=SEED):
            _, lse = dsv4.fmha(q, k, v, causal=causal, out=out, return_lse=True, backend="softsm")
        assert_agrees((out, lse), reference.fmha, q, k, v, causal=causal)


@pytest.mark.parametrize("batch, heads, kv_heads, tokens, roles", [(9, 5, 1, 3140, 3), (6, 10, 2, 900, 2)])
def test_roles_that_ask_for_masks(batch, heads, kv_heads, tokens, roles):
    """Three roles take 143 instead of 157 us for the first problem on an H200, 35 instead of 32 for the second."""
    q = torch.empty(batch, tokens, heads, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, tokens, kv_heads, 64, dtype=torch.bfloat16, device="meta")
    options = fmha.tiling(problem.dense(q, k, k.clone(), causal=True), dispatch.compile_target("sm_90a")).options
    assert options["CONSUMERS"] == roles and options["MASKS"] == (roles == 3)


@pytest.mark.parametrize(
    "head_dim, order",
    [
        (64, "latest"),
        *(pytest.param(d, o, marks=pytest.mark.slow) for d in (64, 128) for o in ORDERS if (d, o) != (64, "latest")),
    ],
)
def test_rows_that_see_few_keys_or_none_of_a_tile(monkeypatch, head_dim, order):
    """There are more queries than keys, and windows: some rows see nothing, some begin late, some end early."""
    monkeypatch.setattr(fmha, "is_short", lambda *_: False)
    q = torch.randn(1, 500, 1, head_dim).bfloat16()
    k, v = (torch.randn(1, 260, 1, head_dim).bfloat16() for _ in "kv")
    one = dispatch.compile_target("sm_90a")._replace(num_sms=1)
    assert fmha.tiling(problem.dense(q, k, v, causal=True), one).loop
    for window in ((-1, 0), (90, 20)):
        out = torch.full_like(q, float("nan"))
        with launches.race_free("sm_90a", sms=1, order=order, seed=SEED):
            _, lse = dsv4.fmha(q, k, v, window=window, out=out, return_lse=True, backend="softsm")
        assert_agrees((out, lse), reference.fmha, q, k, v, window=window)


@pytest.mark.parametrize(
    "batch, heads, kv_heads, tokens, causal, short",
    [(6, 6, 6, 366, True, True), (1, 8, 8, 1000, True, True), (2, 30, 6, 824, True, False),
     (2, 16, 16, 2048, True, False), (16, 16, 16, 512, True, False), (1, 4, 4, 4000, False, False)],
)  # fmt: skip
def test_short_problems_have_row_tiles_of_64(batch, heads, kv_heads, tokens, causal, short):
    """The choice follows times on an H200: the looping kernel needs more time to begin a row tile, and less for a
    step."""
    q, k = (torch.empty(batch, tokens, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    c = fmha.tiling(problem.dense(q, k, k.clone(), causal=causal), dispatch.compile_target("sm_90a"))
    assert (c.rows, c.loop) == ((64, False) if short else (128, True))


def test_short_sequences_beside_a_long_one_have_no_grid_of_empty_tiles():
    """A CTA for each row tile that a sequence might have: 200 sequences, of which one has 5000 tokens."""
    x = torch.empty(15000, 8, 128, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(201, dtype=torch.int32, device="meta")
    target = dispatch.compile_target("sm_90a")
    problems = [
        problem.varlen(x, x.clone(), x.clone(), starts, starts, causal=True, max_seqlen_q=n, max_seqlen_k=n)
        for n in (100, 5000)
    ]
    assert [fmha.tiling(p, target).loop for p in problems] == [False, True]


def test_every_head_dim_has_a_configuration():
    for d, tokens in ((64, 1), (64, 300), (128, 1), (128, 300), (256, 1), (256, 300), (512, 1), (512, 300)):
        q = torch.empty(1, tokens, 1, d, dtype=torch.bfloat16)
        c = fmha.tiling(problem.dense(q, q, q), dispatch.compile_target("sm_90a"))
        assert c.keys % 64 == 0 and c.rows in (64, 128, 192)


@pytest.mark.compile
@pytest.mark.parametrize(
    "head_dim, same_kv, order",
    [
        (128, False, "latest"),
        pytest.param(512, True, "latest", marks=pytest.mark.slow),
        *(pytest.param(512, False, order, marks=pytest.mark.slow) for order in ("eager", "latest", "random")),
    ],
)
def test_no_race_whenever_copies_and_products_complete(head_dim, same_kv, order):
    """Asynchronous operations complete at once, as late as they may, or at random: the race checker is silent.

    Three steps at head dim 512, so that every slot is filled again and again. Keys grow, so that O is rescaled in all
    of them."""
    q = torch.randn(1, 70, 1, head_dim).bfloat16()
    k = (torch.randn(1, 300, 1, head_dim) * torch.linspace(0.5, 8, 300)[:, None, None]).bfloat16()
    v = k if same_kv else torch.randn_like(k)
    with launches.race_free("sm_90a", order=order, seed=SEED):
        got = dsv4.fmha(q, k, v, causal=True, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, q, k, v, causal=True)


@pytest.mark.parametrize(
    "splits, seed, same_kv",
    [
        pytest.param(2, 1, False, marks=pytest.mark.compile),
        *(pytest.param(1, n, same, marks=pytest.mark.slow) for n in (1, 2, 3, 4) for same in (False, True)),
    ],
)
def test_no_slot_is_filled_before_all_have_seen_it(splits, seed, same_kv, monkeypatch):
    """Seven steps of a split at head dim 512. A wait for a filling that the next one has overtaken would not end. Two
    splits make fp16 partial results: the kernel that the test of their values compiles. A window and a sink too."""
    monkeypatch.setattr(prepare, "FP16_PARTIALS_FROM", 0)
    keys = 850 * splits
    q, k = torch.randn(1, 64, 1, 512).bfloat16(), torch.randn(1, keys, 1, 512).bfloat16()
    v = k if same_kv else torch.randn_like(k)
    plan = dsv4.plan(
        dsv4.fmha, batch=1, q_heads=1, kv_heads=1, head_dim=512, max_seqlen_q=64, max_seqlen_k=keys, device="cpu"
    )
    plan = dataclasses.replace(plan, num_splits=splits, scratch=torch.full((splits * 64 * 513,), float("nan")))
    seen = dict(window=(keys - 80, 20), sink=torch.randn(1))
    with launches.race_free("sm_90a", order="random", seed=seed):
        got = dsv4.fmha(q, k, v, **seen, plan=plan, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, q, k, v, **seen)


@pytest.mark.parametrize(
    "page, head_dim, dtype, splits",
    [
        pytest.param(16, 256, torch.bfloat16, 2, marks=pytest.mark.compile),
        (5, 64, torch.float16, 1),
        *(
            pytest.param(*x, 2, marks=pytest.mark.slow)
            for x in ((16, 64, torch.bfloat16), (5, 64, torch.float16), (16, 512, torch.bfloat16))
        ),
    ],
)
def test_keys_of_pages_that_are_none_are_unseen(page, head_dim, dtype, splits, monkeypatch):
    """Without value checks (as on a GPU) a bad page number counts as -1: its keys have no weight, in any split. At head
    dim 256 the scale is negative, which is a variant of its own; so is that of the deterministic rows below."""
    monkeypatch.setattr(checks, "values_checked", lambda x: False)
    scale = -0.0625 if head_dim == 256 else head_dim**-0.5
    q = torch.randn(3, 2, 2, head_dim).to(dtype)
    k, v = (torch.randn(40, page, 1, head_dim).to(dtype) for _ in "kv")
    pages = -(-200 // page)
    table = torch.randint(0, 40, (3, pages), dtype=torch.int32)
    lengths = torch.tensor([200, 190, 77], dtype=torch.int32)
    bad = torch.zeros(3, pages, dtype=torch.bool)
    bad[0, [0, 3, pages - 1]] = bad[1] = True  # some; all of a sequence; none
    table[bad] = torch.tensor([-1, 40, -(1 << 31), (1 << 31) - 1], dtype=torch.int32).repeat(pages)[: int(bad.sum())]
    plan = dsv4.plan(dsv4.fmha_paged, batch=3, q_heads=2, kv_heads=1, head_dim=head_dim, max_seqlen_q=2,
                     max_seqlen_k=pages * page, device="cpu")  # fmt: skip
    plan = dataclasses.replace(plan, num_splits=splits)
    with launches.race_free("sm_90a", order="latest"):
        out, lse = dsv4.fmha_paged(
            q, k, v, table, lengths, softmax_scale=scale, plan=plan, return_lse=True, backend="softsm"
        )
    for n, length in enumerate(lengths.tolist()):
        seen = (~bad[n]).repeat_interleave(page)[:length]
        kn, vn = (x[table[n].clamp(0, 39)].flatten(0, 1)[:length][seen][None] for x in (k, v))
        assert_agrees((out[n : n + 1], lse[n : n + 1]), reference.fmha, q[n : n + 1], kn, vn, softmax_scale=scale)


@pytest.mark.parametrize("scale", [pytest.param(-0.2, marks=pytest.mark.slow), 0.0, -0.0, 1e-46])
@pytest.mark.compile
def test_any_sign_of_the_scale_without_a_copy(scale):
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (20, 70, 70))
    p = dataclasses.replace(problem.dense(q, k, v, softmax_scale=scale), out=torch.empty_like(q))
    (launch,) = calls.launches_of(p, dispatch.compile_target("sm_90a"))
    assert launch.arguments[0].q_ptr.name == "q"
    with softsm.use("sm_90a"):
        got = dsv4.fmha(q, k, v, causal=True, softmax_scale=scale, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, q, k, v, causal=True, softmax_scale=scale)


@pytest.mark.compile
def test_deterministic_rows_are_the_same_in_any_batch(monkeypatch):
    """Keys are cut into short splits: a sequence gives the same bits alone, in a batch, and with a wider block table.

    Clones, because Triton compiles a variant more for a pointer into the middle of a tensor."""
    monkeypatch.setattr(splits, "DETERMINISTIC_KEYS", 128)
    q, sink = torch.randn(2, 1, 2, 64).bfloat16(), torch.randn(2)
    k, v = (torch.randn(24, 16, 1, 64).bfloat16() for _ in "kv")
    table = torch.randperm(24).to(torch.int32).view(2, 12)
    lengths = torch.tensor([190, 40], dtype=torch.int32)

    def run(rows: slice, table):
        own, length = table[rows].clone(), lengths[rows].clone()
        with softsm.use("sm_90a"):
            return dsv4.fmha_paged(q[rows], k, v, own, length, sink=sink, softmax_scale=-0.0625, deterministic=True,
                                   return_lse=True, backend="softsm")  # fmt: skip

    both, both_lse = run(slice(0, 2), table)
    for n, pages in ((0, 12), (1, 3), (1, 12)):
        rows = slice(n, n + 1)
        alone, alone_lse = run(rows, table[:, :pages].contiguous())
        assert torch.equal(alone, both[rows]) and torch.equal(alone_lse, both_lse[rows])
    assert_agrees((both, both_lse), reference.fmha_paged, q, k, v, table, lengths, sink=sink, softmax_scale=-0.0625)


def test_deterministic_splits_are_added_in_an_order_that_does_not_depend_on_the_room_for_them():
    """A sequence does not depend on how many splits a block table has room for, 3 or 32."""
    q, k = torch.empty(1, 1, 64, 512, dtype=torch.bfloat16), torch.empty(2, 64, 1, 512, dtype=torch.bfloat16)
    found = []
    for pages in (64, 1024):
        table, lengths = torch.zeros(1, pages, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        p = problem.paged(q, k, k, table, lengths, deterministic=True)
        p = dataclasses.replace(p, out=torch.empty_like(q))
        found.append(calls.launches_of(p, dispatch.compile_target("sm_90a"))[-1])
    assert [launch.kernel.__name__ for launch in found] == ["combine"] * 2
    assert found[0].constants == found[1].constants


def test_a_deterministic_tiling_does_not_depend_on_the_batch():
    def tilings(build):
        target = dispatch.compile_target("sm_90a")
        return [fmha.tiling(build(n, deterministic=True), target) for n in (1, 600)]

    cu = torch.zeros(2, dtype=torch.int32)
    for d in (64, 128, 256, 512):
        one, many = tilings(
            lambda n, d=d, **o: problem.dense(*[torch.empty(n, 500, 1, d, dtype=torch.bfloat16)] * 3, **o)
        )
        assert one == many and not one.loop
        rows = torch.empty(600, 1, d, dtype=torch.bfloat16)
        one, many = tilings(lambda n, r=rows, **o: problem.varlen(r, r, r, cu, cu, max_seqlen_q=n, **o))
        assert one == many


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 512])
def test_calls_of_a_size_that_was_warmed_up_compile_nothing(head_dim):
    def compiled():
        kernels = [
            forward.fmha_forward,
            forward_persistent.fmha_forward_persistent,
            forward_d512.fmha_forward_d512,
            combine.combine,
        ]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    sizes = dict(batch=2, q_heads=4, kv_heads=2, head_dim=head_dim, max_seqlen_q=1, max_seqlen_k=64, device="cpu")
    with softsm.use("sm_90a"):
        plan = dsv4.warmup(dsv4.fmha_paged, backend="softsm", page_size=16, **sizes)
        before = compiled()
        q = torch.randn(2, 1, 4, head_dim).bfloat16()
        k, v = (torch.randn(8, 16, 2, head_dim).bfloat16() for _ in "kv")
        table = torch.arange(8, dtype=torch.int32).view(2, 4)
        lengths = torch.tensor([50, 64], dtype=torch.int32)
        for values in (k, v):
            for causal, deterministic in ((False, False), (True, True)):
                dsv4.fmha_paged(q, k, values, table, lengths, causal=causal, deterministic=deterministic, plan=plan,
                                window=(30, -1), sink=torch.zeros(4), backend="softsm")  # fmt: skip
        assert before > 0 and compiled() == before
