"""The gradients of fmha by the Blackwell kernels, through softsm, against the fp64 formulas."""

from dataclasses import replace

import launches
import pytest
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
)

import softsm
from dsv4 import suites

pytestmark = pytest.mark.compile


def run(b):
    with softsm.use("sm_100a"):
        launches.run(b)


CASES = {
    "full-hd64": dict(t=132, s=150, heads=(1, 1), d=64),
    "causal-gqa-sink-dlse-hd64": dict(t=70, s=200, heads=(4, 2), d=64, causal=True, sink=True, dlse=True),
    "full-hd128": dict(t=130, s=150, heads=(1, 1), d=128),
    "causal-gqa-sink-dlse-fp16-hd64": dict(
        t=70, s=200, heads=(4, 2), d=64, dtype=FP16, causal=True, sink=True, dlse=True
    ),
    "window-hd128": dict(t=200, s=150, heads=(2, 1), d=128, window=(40, 3)),
    "causal-hd512": dict(t=132, s=150, heads=(1, 1), d=512, causal=True),
}


# At head dims 64 and 128 one kernel gives all three; another, in an order that is always the same, dK and dV or dQ. The
# quick tests compile three variants, at 64: the first in bf16, dQ in fp16, dK and dV of a varlen batch in bf16.
QUICK = ["full-hd64", "causal-gqa-sink-dlse-hd64"]


@pytest.mark.parametrize("dtype", [FP16, pytest.param(BF16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUICK)
def test_dq(name, dtype):
    b, want, low = request(**CASES[name], dtype=dtype)
    b = replace(b, dk=None, dv=None)
    run(b)
    check(b, want, low)


def test_fp16_where_the_gradient_of_the_lse_is_the_larger():
    check_a_large_gradient_of_the_lse(run, 64, "dq")


SLOW = set(CASES) - {*QUICK, "causal-hd512"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES])
def test_gradients(name):
    b, want, low = request(**CASES[name])
    run(b)
    check(b, want, low)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in CASES if x != "causal-hd512"])
def test_deterministic_gradients(name):
    b, want, low = request(**CASES[name])
    b = deterministic(b)
    run(b)
    check(b, want, low)


@pytest.mark.slow
def test_one_launch_adds_dq_unless_the_order_is_fixed(monkeypatch):
    b, *_ = request(**CASES["full-hd64"])
    names = launches.launched(monkeypatch)
    run(b)
    run(deterministic(b))
    assert names == ["backward_rows", "backward_keys", "round_sum", "backward_rows", "backward_tiles", "backward_tiles"]


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "options",
    [
        dict(t=129, s=257, heads=(2, 2), batch=2),
        dict(t=300, s=70, heads=(1, 1), causal=True, sink=True),  # rows that see nothing
        dict(t=70, s=300, heads=(3, 1), window=(20, 0), dlse=True),  # keys that no query sees, a group of 3
        dict(t=1, s=140, heads=(8, 1), softmax_scale=-0.1),
        dict(t=300, s=40, heads=(1, 1), window=(0, 1)),  # tiles of rows and of keys without a visible pair
    ],
)
def test_every_head_dim(d, dtype, options):
    b, want, low = request(d=d, dtype=dtype, **options)
    run(b)
    check(b, want, low)


@pytest.mark.slow
def test_only_what_is_wanted():
    for name in ("dq", "dk", "dv"):
        b, want, low = request(t=140, s=130, heads=(1, 1), d=64)
        b = replace(b, **{other: None for other in ("dq", "dk", "dv") if other != name})
        run(b)
        check(b, want, low)


@pytest.mark.parametrize("name, order, dq", TOGETHER)
def test_sequences_go_together(name, order, dq, monkeypatch):
    kernels = ("backward_keys", "round_sum") if dq else ("backward_tiles", "")
    check_sequences_go_together("sm_100a", kernels, name, order, dq, monkeypatch)


@pytest.mark.parametrize("name, order", [*QUICK_CHAIN, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_CHAIN)])
def test_chain_takes_sequences(name, order, monkeypatch):
    check_chain_takes_sequences("sm_100a", name, order, monkeypatch)


@pytest.mark.slow  # Hopper's is quick
def test_slabs_of_sequences_do_not_show(monkeypatch):
    check_slabs_of_sequences_do_not_show(run, monkeypatch)


LONG = {"keys": dict(t=60, s=900), "queries": dict(t=900, s=60)}  # eight tiles go past a CTA: a slot is filled 4 times


@pytest.mark.parametrize(
    "d, long, order, all_three",
    [
        (64, "keys", "latest", False),
        (64, "queries", "latest", True),
        *(
            pytest.param(d, x, y, True, marks=pytest.mark.slow)
            for d in (64, 128)
            for x in LONG
            for y in ("latest", "eager", "random")
        ),
    ],
)
def test_no_race_whenever_copies_and_products_complete(d, long, order, all_three):
    """A tile of dQ meets all keys, one of dK and dV all queries. Not all three: dQ alone, in fp16."""
    b, want, low = request(heads=(1, 1), d=d, dtype=BF16 if all_three else FP16, **LONG[long])
    b = b if all_three else replace(b, dk=None, dv=None)
    with launches.race_free("sm_100a", order=order, seed=7):
        launches.run(b)
    check(b, want, low)


@pytest.mark.parametrize(
    "d, order",
    [
        pytest.param(512, "latest", marks=pytest.mark.compile),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((512, "eager"), (512, "random"), (256, "latest"), (256, "eager"), (256, "random"))
        ),
    ],
)
def test_no_race_between_the_tiles_of_a_multiprocessor(d, order, monkeypatch):
    """Two SMs have seven tiles or more each: every slot, and every stage of S and dP, is filled many times."""
    launches.num_sms(monkeypatch, 2)
    b, want, low = request(t=300, s=520, heads=(1, 1), d=d, causal=True)
    with launches.race_free("sm_100a", order=order, seed=7):
        launches.run(b)
    check(b, want, low)


@pytest.mark.slow
def test_autograd_takes_them():
    (case,) = suites.select("backward", "backward/causal-gqa-sink-d64-bf16")
    result = suites.run_case(case, suites.Where("softsm", "sm_100a", checked=True), seed=1)
    assert result.ok, result.why()


def test_a_sink_far_above_the_lse_leaves_the_gradient_of_the_lse():
    check_sinks_far_above_the_lse(run, FP16, dkv=False)
