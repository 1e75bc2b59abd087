"""The gradients of fmha by the Hopper kernels, through softsm, against the fp64 formulas."""

from dataclasses import replace

import launches
import pytest
import torch
from fmha_gradients import (
    BF16,
    FP16,
    QUICK_CHAIN,
    SLOW_CHAIN,
    TOGETHER,
    check,
    check_a_large_gradient_of_the_lse,
    check_chain_takes_sequences,
    check_sequences_go_together,
    check_sinks_far_above_the_lse,
    check_slabs_of_sequences_do_not_show,
    deterministic,
    request,
    varlen_request,
)

import softsm
from dsv4.fmha import problem
from dsv4.fmha.kernels import chain
from dsv4.fmha.kernels.backward import Adding, Packed
from dsv4.fmha.kernels.sm90 import adding, backward
from dsv4.reference import backward as reference_backward

pytestmark = pytest.mark.compile

SOFTCAP = 1.5


def run(b):
    with softsm.use("sm_90a"):
        launches.run(b)


CASES = {
    "full-hd512": dict(t=132, s=150, heads=(1, 1), d=512),
    "causal-gqa-sink-dlse-hd64": dict(t=150, s=200, heads=(4, 2), d=64, causal=True, sink=True, dlse=True),
    "causal-gqa-sink-dlse-hd128": dict(t=150, s=200, heads=(4, 2), d=128, causal=True, sink=True, dlse=True),
    "window-hd64": dict(t=200, s=150, heads=(2, 1), d=64, window=(40, 3), batch=2),
    "window-fp16-hd64": dict(t=200, s=150, heads=(2, 1), d=64, dtype=FP16, window=(40, 3), batch=2),
    "causal-hd64": dict(t=150, s=300, heads=(2, 1), d=64, causal=True),
    "more-pairs-than-go-together-hd64": dict(t=70, s=260, heads=(2, 1), d=64, causal=True, batch=6),
}
# further variants of kernels that the other tests compile
SLOW = ["full-hd512", "causal-gqa-sink-dlse-hd128", "window-fp16-hd64"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_gradients(name):
    b, want, low = request(**CASES[name])
    run(b)
    check(b, want, low)


@pytest.mark.slow  # fp16, variants of their own, is quick with the Blackwell kernels
@pytest.mark.parametrize("d, name", [(64, "dq"), (64, "dk"), (256, "dk")])
def test_fp16_where_the_gradient_of_the_lse_is_the_larger(d, name):
    check_a_large_gradient_of_the_lse(run, d, name)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "options",
    [
        dict(t=129, s=257, heads=(2, 2)),
        dict(t=300, s=70, heads=(1, 1), causal=True, sink=True),  # rows that see nothing
        dict(t=70, s=300, heads=(3, 1), window=(20, 0), dlse=True),  # keys that no query sees, a group of 3
        dict(t=1, s=140, heads=(8, 1), softmax_scale=-0.1),
    ],
)
def test_every_head_dim(d, dtype, options):
    b, want, low = request(d=d, dtype=dtype, **options)
    run(b)
    check(b, want, low)


@pytest.mark.parametrize("batch, heads, tokens, d, causal, rows", [
    (1, (20, 4), 336, 256, False, 64),
    (5, (11, 11), 263, 256, True, 64),
    (1, (1, 1), 402, 256, True, 64),
    (4, (16, 16), 4096, 256, False, 192),
    (4, (16, 16), 4096, 256, True, 192),
    (9, (75, 15), 431, 256, True, 192),
    (1, (32, 4), 6144, 512, True, 192),
])  # fmt: skip
def test_tiles_of_products_are_small_where_they_are_few(batch, heads, tokens, d, causal, rows):
    q, k = (torch.empty(batch, tokens, n, d, dtype=BF16, device="meta") for n in heads)
    p = problem.dense(q, k, k, causal=causal)
    packed = torch.empty(batch, heads[1], tokens * p.group, d, device="meta")
    x = Packed(p, p.group, packed, k.transpose(1, 2), k, packed, *[packed] * 4, k, k, None)
    assert backward.product_rows(x, 132, 192) == rows


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_query_heads_that_share_keys_are_not_packed(order, causal, monkeypatch):
    """No copies of Q, dO and dQ: two launches after that of the rows."""
    b, want, low = request(t=140, s=200, heads=(6, 2), d=256, causal=causal, batch=2)
    names = launches.launched(monkeypatch)
    with launches.race_free("sm_90a", order=order, seed=7):
        launches.run(b)
    assert names == ["backward_rows", "backward_scores", "backward_products"]
    check(b, want, low)


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
def test_large_tiles_of_products(order, monkeypatch):
    """Those of 192 rows, or keys: two multiprocessors, in a varlen batch too."""
    monkeypatch.setattr(backward, "product_rows", lambda *_: 192)
    launches.num_sms(monkeypatch, 2)
    b, want, low = request(t=300, s=420, heads=(1, 1), d=256, causal=True)
    with launches.race_free("sm_90a", order=order, seed=7):
        launches.run(b)
    check(b, want, low)
    check_chain_takes_sequences("sm_90a", "window-gqa", order, monkeypatch)


def test_slabs_do_not_show(monkeypatch):
    """A slab of 128 tokens of one head, so that dK and dV are summed; two multiprocessors."""
    monkeypatch.setattr(chain, "SLAB_BYTES", 0)
    launches.num_sms(monkeypatch, 2)
    b, want, low = request(t=300, s=330, heads=(2, 1), d=256, window=(150, 20), batch=2)
    run(b)
    check(b, want, low)


@pytest.mark.parametrize("d", [64, 256])
def test_only_what_is_wanted(d):
    """Head dim 64 takes the kernels of deterministic gradients, with softcap."""
    for name in ("dq", "dk", "dv"):
        b, want, low = request(t=140, s=130, heads=(2, 1), d=d, softcap=SOFTCAP if d == 64 else 0.0)
        b = replace(b, **{other: None for other in ("dq", "dk", "dv") if other != name})
        run(b)
        check(b, want, low)


def test_a_varlen_batch():
    b, want, low = varlen_request(starts_q=(0, 20, 50), starts_k=(0, 60, 100), heads=2, kv_heads=1)
    run(b)
    check(b, want, low)


@pytest.mark.slow  # Blackwell's are quick
@pytest.mark.parametrize("name, order, dq", TOGETHER)
def test_sequences_go_together(name, order, dq, monkeypatch):
    kernels = ("backward_keys", "round_sum")
    check_sequences_go_together("sm_90a", kernels, name, order, dq, monkeypatch)


@pytest.mark.slow
def test_starts_that_fall_access_nothing_out_of_bounds():
    """No values are checked on a GPU; softsm would name the access."""
    b, _, _ = varlen_request(starts_q=range(0, 601, 120), starts_k=range(0, 601, 120))
    for cu in ([0, 600, 0, 600, 0, 600], [0, -5, 2**31 - 1, 7, 600, 0]):
        cu = torch.tensor(cu, dtype=torch.int32)
        p = replace(b.forward, cu_seqlens_q=cu, cu_seqlens_k=cu)
        with softsm.use("sm_90a"):
            launches.run(replace(b, forward=p, dq=None))
        assert not any(x[600:].any() for x in (b.dk, b.dv))


@pytest.mark.parametrize("name, order", [*QUICK_CHAIN, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_CHAIN)])
def test_chain_takes_sequences(name, order, monkeypatch):
    check_chain_takes_sequences("sm_90a", name, order, monkeypatch)


def test_slabs_of_sequences_do_not_show(monkeypatch):
    check_slabs_of_sequences_do_not_show(run, monkeypatch)


FEW_KEY_TILES = {
    "causal": lambda: request(t=150, s=300, heads=(2, 1), d=64, causal=True),
    "varlen": lambda: varlen_request(starts_q=(0, 20, 50), starts_k=(0, 60, 100), heads=2, kv_heads=1),
    "fp16-hd128": lambda: request(t=200, s=150, heads=(2, 1), d=128, dtype=FP16, dlse=True),
}


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("name", ["causal", "varlen", pytest.param("fp16-hd128", marks=pytest.mark.slow)])
def test_rows_of_a_key_tile_in_several_parts(name, splits, monkeypatch):
    """Some parts are empty."""
    monkeypatch.setattr(adding, "split_rows", lambda *_: splits)
    b, want, low = FEW_KEY_TILES[name]()
    with launches.race_free("sm_90a", order="latest"):
        launches.run(b)
    check(b, want, low)


PACKS = {
    "two-packs-of-two": dict(t=150, s=140, heads=(4, 1), d=64, causal=True, sink=True, dlse=True),
    "groups-of-three": dict(t=90, s=140, heads=(6, 2), d=64, window=(40, 3), batch=2),
    "hd128-fp16": dict(t=130, s=70, heads=(4, 1), d=128, dtype=FP16),
}


FURTHER = [("two-packs-of-two", 1), ("groups-of-three", 1), ("hd128-fp16", 1), ("hd128-fp16", 2)]


@pytest.mark.parametrize(
    "name, pack",
    [("two-packs-of-two", 2), ("groups-of-three", 3), *(pytest.param(*x, marks=pytest.mark.slow) for x in FURTHER)],
)
def test_query_heads_that_share_keys_add_to_one_sum(name, pack, monkeypatch):
    monkeypatch.setattr(backward, "find_adding", lambda *_: Adding(pack, 1))
    b, want, low = request(**PACKS[name])
    with launches.race_free("sm_90a", order="latest"):
        launches.run(b)
    check(b, want, low)


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
def test_short_causal_sequences_without_sums(order, monkeypatch):
    """As in a large batch: CTAs loop, and nothing is added in memory."""
    monkeypatch.setattr(backward, "find_adding", lambda *_: None)
    names = launches.launched(monkeypatch)
    launches.num_sms(monkeypatch, 3)
    b, want, low = request(t=200, s=200, heads=(2, 2), d=128, causal=True, batch=2, dlse=True)
    with launches.race_free("sm_90a", order=order, seed=3):
        launches.run(b)
    assert names == ["backward_rows", "backward_keys", "backward_dq"]
    check(b, want, low)


def test_tensors_that_cannot_be_addressed_are_copied():
    """Gradients with strides of 8 elements and a few; dout expanded, as .sum() makes it."""
    b, want, low = request(t=70, s=90, heads=(2, 1), d=64)
    odd = [torch.empty(*x.shape[:-1], 68, dtype=x.dtype)[..., :64] for x in (b.dq, b.dk, b.dv)]
    one = torch.ones((), dtype=BF16).expand(b.dout.shape)
    p = b.forward
    b = replace(b, dout=one, dq=odd[0], dk=odd[1], dv=odd[2])
    run(b)
    check(b, reference_backward.fmha(p.q, p.k, p.v, one), reference_backward.fmha(p.q, p.k, p.v, one, p_dtype=BF16))


ORDERS = ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("d, t, s, dtype", [
    (64, 500, 150, BF16), (64, 152, 1000, BF16), (256, 300, 520, BF16),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        (128, 500, 150, BF16), (128, 150, 1000, BF16), (512, 300, 520, BF16),
        (64, 300, 400, FP16), (128, 300, 400, FP16), (256, 300, 520, FP16), (256, 1, 200, FP16),
    )),
])  # fmt: skip
def test_no_race_whenever_copies_and_products_complete(order, d, t, s, dtype, monkeypatch):
    """Seven tiles and more for each of two multiprocessors, four slots full and more for a CTA: every slot is filled
    again and again."""
    launches.num_sms(monkeypatch, 2)
    b, want, low = request(t=t, s=s, heads=(1, 1), d=d, dtype=dtype, causal=True)
    with launches.race_free("sm_90a", order=order, seed=7):
        launches.run(b)
    check(b, want, low)


def test_a_sink_far_above_the_lse_leaves_the_gradient_of_the_lse():
    check_sinks_far_above_the_lse(run)


def copies(b, count):
    return [replace(b, dq=b.dq.clone(), dk=b.dk.clone(), dv=b.dv.clone()) for _ in range(count)]


def test_deterministic_gradients_have_the_same_bits_in_every_run():
    """dQ has a kernel of its own then. With softcap, as test_only_what_is_wanted has it."""
    b, want, low = request(t=300, s=200, heads=(2, 1), d=64, causal=True, softcap=SOFTCAP)
    first, again = copies(deterministic(b), 2)
    for x in (first, again):
        run(x)
        check(x, want, low)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_a_sum_of_dq_changes_neither_dk_nor_dv(d):
    b, want, low = request(t=300, s=200, heads=(2, 2), d=d, causal=True)
    (summed,), (sure,) = copies(b, 1), copies(deterministic(b), 1)
    for x in (summed, sure):
        run(x)
        check(x, want, low)
    assert torch.equal(summed.dk, sure.dk) and torch.equal(summed.dv, sure.dv)
