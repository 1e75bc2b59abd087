"""Plans: sized by capacities alone, rejected for a problem they do not cover, without effect on the result."""

import itertools
import math

import pytest
import torch
from agreement import qkv

import dsv4
from dsv4.fmha.plan import splits_of
from dsv4.runtime.plan import Capacities
from dsv4.runtime.splits import choose_splits, deterministic_cut, fmha_splits, uneven, whole_first

CAPACITY = dict(batch=2, q_heads=4, kv_heads=2, head_dim=64, max_seqlen_q=3, max_seqlen_k=9, device="cpu")


def test_a_plan_changes_nothing_but_the_speed():
    q, k, v = qkv(2, 3, 9, 4, 2, 64)
    made = dsv4.plan(dsv4.fmha, **CAPACITY)
    assert made.num_splits == 1 and made.scratch.numel() == 0
    for size in (9, 5):
        want = dsv4.fmha(q, k[:, :size], v[:, :size], return_lse=True)
        for a, b in zip(dsv4.fmha(q, k[:, :size], v[:, :size], return_lse=True, plan=made), want):
            assert torch.equal(a, b)


@pytest.mark.parametrize("function", [dsv4.fmha, dsv4.fmha_varlen, dsv4.fmha_paged])
def test_warmup_gives_a_plan_for_calls_of_that_size_and_no_larger(function):
    made = dsv4.warmup(function, **CAPACITY)
    wanted = {name: CAPACITY[name] for name in CAPACITY if name != "device"}
    assert {name: getattr(made, name) for name in wanted} == wanted and made.operation == function.__name__
    q, k, v = qkv(2, 3, 9, 4, 2, 64)
    cu_q, cu_k = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 9, 18]).int()
    table, lengths = torch.tensor([[0], [1]]).int(), torch.tensor([9, 9]).int()
    tensors = {
        "fmha": (q, k, v),
        "fmha_varlen": (*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k),
        "fmha_paged": (q, k, v, table, lengths),
    }[function.__name__]
    assert torch.equal(function(*tensors, plan=made), function(*tensors))
    with pytest.raises(ValueError, match="^plan: got capacity "):
        function(*tensors, plan=dsv4.warmup(function, **CAPACITY | dict(batch=1, max_seqlen_q=2)))


def kinds_of(operation, **more):
    """(k is v, causal, deterministic) of the calls that warmup makes."""
    seen = set()

    def spy(q, k, v, *tensors, **options):
        seen.add((k.data_ptr() == v.data_ptr(), options["causal"], options["deterministic"]))
        return operation(q, k, v, *tensors, **options)

    spy.__name__ = operation.__name__
    dsv4.warmup(spy, **CAPACITY | more)
    return seen


@pytest.mark.parametrize("operation", [dsv4.fmha, dsv4.fmha_varlen, dsv4.fmha_paged])
def test_warmup_makes_every_kind_of_call(operation):
    """Each of them may be another kernel: one that is missing would be compiled in the middle of serving."""
    assert kinds_of(operation) == set(itertools.product((False, True), repeat=3))
    assert {same for same, _, _ in kinds_of(operation, same_kv=False)} == {False}
    assert {bits for _, _, bits in kinds_of(operation, deterministic=False)} == {False}


def test_warmup_runs_dense_keys_in_whole_tiles_too():
    """Tiles of which every row sees every key have a kernel of their own."""
    seen = set()

    def fmha(q, k, v, **options):
        seen.add(k.shape[1])
        return dsv4.fmha(q, k, v, **options)

    dsv4.warmup(fmha, **CAPACITY | dict(max_seqlen_k=200))
    assert seen == {1, 128}


def test_warmup_makes_every_kind_of_v4_call():
    seen = []

    def v4_attention(*tensors, **options):
        seen.append((isinstance(tensors[1], dsv4.Fp8Cache), len(tensors), "compressed_block_table" in options))
        return dsv4.v4_attention(*tensors, **options)

    sizes = dict(batch=2, q_heads=4, kv_heads=1, head_dim=512, max_seqlen_k=80, device="cpu")
    dsv4.warmup(v4_attention, **sizes)
    forms = [(3, False), (5, False), (4, True)]  # window only, a list, a block table
    assert set(seen) == {(fp8, *form) for fp8 in (False, True) for form in forms}
    seen.clear()
    dsv4.warmup(v4_attention, **sizes, fp8=True)
    assert all(fp8 for fp8, _, _ in seen)
    seen.clear()
    dsv4.warmup(v4_attention, **sizes, dtype=torch.float16)  # FP8 rows go with bf16
    assert {(False, *form) for form in forms} == set(seen)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"batch": 1}, "batch"),
        ({"q_heads": 2}, "q_heads"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"head_dim": 128}, "head_dim"),
        ({"max_seqlen_q": 2}, "max_seqlen_q"),
        ({"max_seqlen_k": 8}, "max_seqlen_k"),
        ({"device": "meta"}, "device"),
    ],
)
def test_a_plan_too_small_is_refused(change, word):
    made = dsv4.plan(dsv4.fmha, **CAPACITY | change)
    with pytest.raises(ValueError, match=f"plan: got .*{word}|plan: got .*meta"):
        dsv4.fmha(*qkv(2, 3, 9, 4, 2, 64), plan=made)


def test_a_plan_for_another_operation_is_refused():
    with pytest.raises(ValueError, match="plan: got a plan for fmha_paged"):
        dsv4.fmha(*qkv(2, 3, 9, 4, 2, 64), plan=dsv4.plan(dsv4.fmha_paged, **CAPACITY))


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"batch": 0}, "batch"),
        ({"batch": 2.0}, "batch"),
        ({"head_dim": 96}, "head_dim"),
        ({"q_heads": 3}, "q_heads"),
        ({"max_seqlen_k": -1}, "max_seqlen_k"),
    ],
)
def test_bad_capacities(change, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        dsv4.plan(dsv4.fmha, **CAPACITY | change)


def test_bad_operation():
    with pytest.raises(ValueError, match="operation: got "):
        dsv4.plan(print, **CAPACITY)


@pytest.mark.parametrize("tiles", [1, 3, 33, 132, 200])
@pytest.mark.parametrize("keys", [1, 128, 4096, 1 << 20])
def test_splits_fill_the_machine_and_no_more(tiles, keys):
    splits = splits_of(Capacities(tiles, 8, 1, 128, 1, keys), 132)
    assert 1 <= splits <= max(1, keys // 32)  # no split of a few keys
    if keys == 1 << 20:
        rounds = tiles * splits / 132
        assert rounds / math.ceil(rounds) > 0.75  # no nearly empty last round when there is enough to split
    if tiles == 132:
        assert splits == 1


def test_a_plan_splits_rows_of_two_warpgroups_as_the_kernels_do_without_it():
    assert splits_of(Capacities(3, 1, 1, 256, 2401, 2401), 132) == 2  # 19 tiles of 128 rows each
    assert splits_of(Capacities(3, 1, 1, 64, 2401, 2401), 132) == 1  # 38 of 64


@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("rows", [1, 64, 65, 200, 1023])
def test_deterministic_cuts_depend_on_the_sequence_alone(rows, step):
    """Whatever the capacity, the splits of a sequence are those of the capacity that is just its own."""

    def cut(keys: int, capacity: int) -> int:
        splits, each = deterministic_cut(rows, capacity)
        tiles = -(-keys // step) + 1  # the range may start within a tile
        chunk = max(-(-tiles // splits), each // step)
        assert splits * chunk >= tiles
        return chunk

    for keys in (1, 2000, 2048, 4096, 30_000, 65_536, 100_000, 1_000_000):
        assert len({cut(keys, capacity) for capacity in (keys, keys + 63, 2 * keys, 50 * keys)}) == 1


def test_many_rows_are_never_split_when_deterministic():
    assert deterministic_cut(1024, 1 << 20) == (0, 0)


def test_long_prompts_are_not_split_for_the_sake_of_the_last_round():
    """16 heads of 16384 rows fill 132 multiprocessors 31 times; partial results would be a gigabyte."""
    assert choose_splits(16 * 256, 132, 16384) == 1
    assert choose_splits(16 * 256, 132, 16384, merged=False) > 1  # no partial results: the last round counts
    assert choose_splits(8, 132, 16384) > 8


def test_a_prompt_is_not_split_where_merging_all_of_its_rows_takes_longer():
    """(1, 32:8, 737): 376 tiles, whose last round is a third full; 23584 rows would be merged. A chunk of 128 tokens
    behind 32768 keys is split all the same."""
    assert choose_splits(376, 132, 737, shared=2) > 1
    assert choose_splits(376, 132, 737, shared=2, many_rows=32 * 737) == 1
    assert choose_splits(32, 132, 32768, many_rows=32 * 128) == 4


def test_blocks_that_share_a_multiprocessor_come_in_pairs():
    """528 blocks are two for each of 132 multiprocessors, twice; 384 would leave each with one in the end. Up to 132
    blocks nothing is shared."""
    assert choose_splits(48, 132, 35325, shared=2) == 11
    assert choose_splits(48, 132, 35325) == 8
    assert choose_splits(8, 132, 100000, shared=2) == choose_splits(8, 132, 100000) == 16


def test_dense_decode_has_few_splits_where_starts_and_ends_of_ctas_would_count():
    """(48, 64:1, 6000) and (90, 64:1, 2000) at head dim 512; six sequences of 8 KV heads at head dim 64."""
    assert fmha_splits(48, 132, 6000, 1, 0) == 2
    assert fmha_splits(90, 132, 2000, 1, 0) == 1
    assert fmha_splits(48, 132, 35325, 2, 0) == 11


def test_a_step_that_is_left_over_is_a_split_where_multiprocessors_are_left_over():
    """65 steps of 16 tiles: eight splits of eight steps on 128 of 132 multiprocessors; the other four take four short
    ones each. Not where there are too many of those, two steps are left over, or no multiprocessor is."""
    assert choose_splits(16, 132, 65 * 128) == 8
    assert uneven(16, 132, 65, 8) == (9, 128, 65)
    for tiles, steps, splits in ((64, 65, 2), (16, 66, 8), (16, 33, 8), (12, 67, 11), (8, 65, 16), (132, 65, 1)):
        assert uneven(tiles, 132, steps, splits)[:2] == (splits, 0)


def test_whole_tiles_come_first_where_equal_splits_need_more_steps_in_a_row():
    """V4 decode of FP8 rows on an H200, timed both ways: (queries, head tiles, steps) and whole queries, splits of the
    others. Equal splits stay where all tiles have an SM, where the last round is nearly full, and where the difference
    is small: 187 x 32 heads x 128+1856 takes 137 us both ways."""
    timed = {(160, 1, 9): (132, 3), (72, 2, 13): (66, 7), (300, 1, 9): (264, 3), (200, 2, 13): (198, 13),
             (132, 1, 9): (0, 1), (256, 1, 9): (0, 1), (120, 1, 9): (0, 1), (187, 1, 16): (0, 2)}  # fmt: skip
    for (queries, head_tiles, steps), want in timed.items():
        splits = choose_splits(queries * head_tiles, 132, steps * 128)
        assert whole_first(queries, head_tiles, 132, steps, splits) == want, (queries, head_tiles, steps)


def test_whole_tiles_come_first_where_merging_them_pays_too():
    """Timed both ways on an H200: plain rows, which take one step more to merge if nothing was merged before; packed
    rows by table, where the others are a launch of their own."""
    plain = {(160, 1, 9): (132, 3), (300, 1, 5): (264, 3), (192, 1, 5): (0, 1), (199, 1, 10): (0, 1)}
    by_table = {(136, 1, 65): (132, 33), (306, 1, 15): (264, 3), (192, 1, 65): (0, 2), (328, 1, 4): (0, 1)}
    for timed, always in ((plain, False), (by_table, True)):
        for (queries, head_tiles, steps), want in timed.items():
            splits = choose_splits(queries * head_tiles, 132, steps * 128)
            more = 1 if always or splits == 1 else 0
            assert whole_first(queries, head_tiles, 132, steps, splits, more) == want, (queries, head_tiles, steps)
