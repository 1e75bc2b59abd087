"""The kernel that does a whole layer, on a CPU, through softsm: bit for bit what the several kernels do."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import launches
import moe_cases
import planted
import pytest
import torch

import dsv4
import softsm
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.moe import problem
from dsv4.moe.kernels.sm100 import entry
from dsv4.runtime import calls
from dsv4.runtime.dispatch import Target
from softsm.errors import Deadlock

pytestmark = pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9")
kernel = partial(moe_cases.kernel, "sm_100a")
unlimited = float("inf")


def case(recipe="fp8_128", tokens=18):
    """Experts with many rows, with one and with none, and a slot without an expert."""
    experts = moe_cases.layer(h=512, i=256, nvfp4=recipe == "nvfp4", layout="sm100").experts
    given = moe_cases.tokens(tokens, h=512, k=2)
    given["ids"][:] = torch.tensor([0, 3])
    given["ids"][4] = torch.tensor([-1, 1])
    return experts, given


def test_there_is_one_launch():
    e, given = case()
    options = dict(layout="sm100", fused=True)
    made = problem.build(given["x"], ids=given["ids"], weights=given["weights"], **e.tensors, **options)
    made = replace(made, out=torch.empty_like(given["x"]))
    found = calls.launches_of(made, Target("softsm", (10, 0), 5))
    assert [(x.kernel.__name__, x.grid) for x in found] == [("moe_mega_sm100", (5,))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, recipe",
    [(16, "fp8_128"), (32, "fp8_32"), (64, "fp8_128"), (128, "fp8_32"), (16, "nvfp4"), (64, "nvfp4"), (128, "nvfp4")],
)
def test_bits_are_those_of_the_several_kernels(rows, recipe, monkeypatch):
    """The bits are equal in every order, also with a shared expert and the outputs of slots."""
    monkeypatch.setattr(entry, "TILES", ((unlimited, rows),))
    experts, given = case(recipe, 140)
    shared = (torch.randn(2 * 128, 512) * 0.05).bfloat16(), (torch.randn(512, 128) * 0.1).bfloat16()
    options = dict(sms=2, activations=recipe, return_slots=True, shared=shared)
    want, want_slots = kernel(experts, given, **options)
    moe_cases.assert_right(want, want_slots, experts, given, recipe, shared=shared)
    for order in ("eager", "latest", "random"):
        out, slots = kernel(experts, given, order=order, fused=True, **options)
        assert torch.equal(out, want) and torch.equal(slots, want_slots)


@pytest.mark.slow
def test_tokens_have_their_bits_in_every_batch():
    experts, given = case()
    out = kernel(experts, given, fused=True)
    for some in ([17, 4], [4]):
        part = {name: x[some] for name, x in given.items()}
        assert torch.equal(kernel(experts, part, fused=True, order="latest"), out[some])
    nobody = given | dict(ids=torch.full_like(given["ids"], -1))
    assert not kernel(experts, nobody, fused=True).any()


@pytest.mark.slow
@pytest.mark.parametrize("sms", [1, 3])
def test_fewer_ctas_resident_than_launched(sms, monkeypatch):
    launches.num_sms(monkeypatch, 7)
    experts, given = case()
    want = kernel(experts, given, sms=sms)
    for order in ("latest", "random"):
        assert torch.equal(kernel(experts, given, order=order, sms=sms, fused=True), want)


def plant(monkeypatch, tmp_path, *bugs: tuple[str, str]) -> None:
    from dsv4.moe.kernels.sm100 import mega

    planted.plant(monkeypatch, tmp_path, mega, "moe_mega_sm100", *bugs)


WAIT, FENCE = "    wait_for(counters.ptr + {}, {})\n", "    fence_async()\n"
LANDED = WAIT.format("LANDED", "landed")
HIDDEN = "            wait_for(counters.hidden_ptr + atom, up.blocks)\n"
WRITES = "            write_hidden(gate, linear, block, atom * N, atom * N + rows, atom, pool, hidden, RECIPE)\n"
COUNTS = "            signal(counters.hidden_ptr + atom)\n"
BUGS = {
    "no fence for rows of x": (LANDED + FENCE, LANDED, "fence.proxy.async"),
    "no fence for hidden values": (HIDDEN + 2 * "    " + FENCE, HIDDEN, "fence.proxy.async"),
    "rows not waited for": (LANDED, "", ""),
    "hidden values not waited for": (HIDDEN, "", ""),
    "counts not waited for": (WAIT.format("COUNTED", "RANKS * pieces"), "", ""),
    "outputs not waited for": ("    wait_for(counters.ptr + WRITTEN, tiles * down.blocks)\n", "    pass\n", ""),
    "hidden values counted too early": (WRITES + COUNTS, COUNTS + WRITES, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("line, instead, fix", BUGS.values(), ids=BUGS.keys())
def test_races_are_named(line, instead, fix, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, (line, instead))
    experts, given = case()
    with softsm.use("sm_100a", sms=3), softsm.checking(order="random") as report:
        with suppress(Deadlock):  # where counts change between two reads
            dsv4.moe(**given, experts=experts, backend="softsm", fused=True)
    found = [x for x in report if x.code == "race"]
    assert found and any(fix in x.fix for x in found), str(report)
    assert any("planted.py" in x.source or "tiles.py" in x.source for x in found[0].parties), str(report)


@pytest.mark.slow
def test_without_tickets_all_ctas_have_to_be_resident(monkeypatch, tmp_path):
    launches.num_sms(monkeypatch, 7)
    ticket = "    item = take(counters.ptr + ROW_TICKET)\n"
    first, next_one = (ticket + "    items", "    " + ticket + "    return")
    plant(
        monkeypatch,
        tmp_path,
        (first, first.replace("take(counters.ptr + ROW_TICKET)", "gl.program_id(0)")),
        (next_one, next_one.replace("take(counters.ptr + ROW_TICKET)", "item + gl.num_programs(0)")),
    )
    experts, given = case()
    with softsm.use("sm_100a", sms=2), pytest.raises(Deadlock, match="have not started"):
        dsv4.moe(**given, experts=experts, backend="softsm", fused=True)


def test_hopper_has_no_such_kernel():
    experts, given = moe_cases.layer().experts, moe_cases.tokens(3)
    with softsm.use("sm_90a"), pytest.raises(ValueError, match="^fused: got True; accepted: False on sm_90a"):
        dsv4.moe(**given, experts=experts, backend="softsm", fused=True)
    assert torch.equal(dsv4.moe(**given, experts=experts, fused=True), dsv4.moe(**given, experts=experts))
