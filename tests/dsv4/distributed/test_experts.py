"""Experts on several ranks: by collectives, and by one kernel that reaches the memory of all."""

from functools import partial

import launches
import moe_cases
import planted
import pytest
import torch
import torch.distributed as dist

import softsm
from dsv4 import Fp4Experts, distributed
from dsv4.kernels.compat import TRITON_VERSION
from softsm.errors import Deadlock

needs_triton = pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="the Blackwell kernels need triton >= 3.9")
EXPERTS, TOKENS = 4, (5, 3, 4, 6)


def parts_of(layer: moe_cases.Layer, ranks: int) -> list[Fp4Experts]:
    each = EXPERTS // ranks
    some = [{name: x[r * each : (r + 1) * each] for name, x in layer.given.items()} for r in range(ranks)]
    return [Fp4Experts.pack(**given, layout="sm100") for given in some]


def shared_expert():
    return (torch.randn(2 * 128, 256) * 0.05).bfloat16(), (torch.randn(256, 128) * 0.1).bfloat16()


def test_collectives_give_the_bits_of_one_call():
    layer, given, shared = moe_cases.layer(layout="sm100"), moe_cases.tokens(6), shared_expert()
    given["ids"][1] = given["ids"][4, 0] = -1
    options = dict(shared=shared, deterministic=True)
    want = distributed.experts.api.moe(**given, experts=layer.experts, **options)
    parts = parts_of(layer, 2)

    def program(rank):
        mine = {name: x.view(2, 3, *x.shape[1:])[rank] for name, x in given.items()}
        return distributed.moe(**mine, experts=parts[rank], **options)

    with softsm.use("sm_100a", ranks=2) as world:
        assert torch.equal(torch.cat(world.run(program)), want)


def test_wrong_arguments():
    experts, given = moe_cases.layer(layout="sm100").experts, moe_cases.tokens(3)

    def program(rank, change):
        memory = distributed.ExpertMemory(8, 256, 3, device="cpu")
        return distributed.moe(**given | dict(experts=experts, fused=memory) | change)

    for change, says in (
        (dict(fused=True), "^fused: got bool True; accepted: None or a dsv4.distributed.ExpertMemory"),
        (dict(experts=3), "^experts: got int 3; accepted: a dsv4.Fp4Experts"),
        (dict(backend="cpu"), "^fused: got memory, with backend 'cpu'; accepted: None there"),
        (dict(ids=torch.full((3, 3), 8)), "^ids: got values from 8 to 8; accepted: values from -1 to 7"),
        (dict(group=dist), "^group: got module"),
        (dict(x=given["x"].clone().requires_grad_()), "^x: got a tensor that requires grad"),
        (
            moe_cases.tokens(9),
            "^fused: got memory for up to 8 tokens of 256, 3 experts each, with x .9, 256.*for these",
        ),
    ):
        with softsm.use("sm_100a", ranks=2) as world, pytest.raises(ValueError, match=says):
            world.run(partial(program, change=change))
    with pytest.raises(ValueError, match="^group: got no process group"):
        distributed.moe(**given, experts=experts)


def fused(layer, given, ranks, order="random", sms=2, repeat=1, **options):
    """Outputs of all ranks, of several calls in the same memory, and the report."""
    parts = parts_of(layer, ranks)

    def program(rank):
        memory = distributed.ExpertMemory(max(TOKENS), 256, given[rank]["ids"].shape[1], device="cpu")
        memory.slots.fill_(float("nan"))
        how = dict(experts=parts[rank], fused=memory, backend="softsm", **options)
        return [distributed.moe(**given[rank], **how) for _ in range(repeat)]

    with softsm.use("sm_100a", ranks=ranks, sms=sms) as world, softsm.checking(order=order) as report:
        return world.run(program), report


def tokens_of(ranks):
    """The last experts have no token; a token has no expert, a slot has none, a token has one expert twice."""
    given = [moe_cases.tokens(t, k=2) for t in TOKENS[:ranks]]
    for g in given:
        g["ids"][:] = torch.tensor([1, 0])
        g["ids"][0] = torch.tensor([2, -1])
        g["ids"][1] = torch.tensor([1, 1])
        g["ids"][2] = -1
    return given


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("ranks, recipe", [(2, "fp8_32"), (4, "fp8_128"), (2, "nvfp4")])
def test_bits_are_those_of_one_rank(ranks, recipe):
    layer, given = moe_cases.layer(nvfp4=recipe == "nvfp4", layout="sm100"), tokens_of(ranks)
    options = dict(shared=shared_expert(), activations=recipe)
    want = [moe_cases.kernel("sm_100a", layer.experts, g, **options) for g in given]
    for order in ("eager", "latest", "random"):
        outs, report = fused(layer, given, ranks, order, repeat=2, **options)
        assert not report, report
        assert all(torch.equal(out, w) for each, w in zip(outs, want) for out in each)


@needs_triton
@pytest.mark.slow
def test_fewer_ctas_resident_than_launched(monkeypatch):
    launches.num_sms(monkeypatch, 5)
    layer, given = moe_cases.layer(layout="sm100"), tokens_of(2)
    want = [moe_cases.kernel("sm_100a", layer.experts, g) for g in given]
    outs, report = fused(layer, given, 2, sms=1)
    assert not report and all(torch.equal(each[0], w) for each, w in zip(outs, want))


BUGS = {
    "signals at .gpu scope": ('RANKS) * 4 + word, "sys")', 'RANKS) * 4 + word, "gpu")'),
    "outputs not waited for": ("wait_for(peers.signals_ptr + HAS_WRITTEN,", "gl.maximum(RANKS,"),
}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("lines, instead", BUGS.values(), ids=BUGS.keys())
def test_races_between_ranks_are_named(lines, instead, monkeypatch, tmp_path):
    """Every token has only experts of the other rank."""
    plant(monkeypatch, tmp_path, (lines, instead))
    given = tokens_of(2)
    for g, ids in zip(given, ([2, 3], [0, 1])):
        g["ids"][:] = torch.tensor(ids)
    _, report = fused(moe_cases.layer(layout="sm100"), given, 2, "latest")
    assert set(report.codes()) == {"race"}
    assert between_ranks(next(iter(report)).parties) and ".sys scope" in next(iter(report)).fix, str(report)


def between_ranks(parties) -> bool:
    return len({x.who.split(" of GPU ")[1][0] for x in parties}) == 2


@needs_triton
@pytest.mark.slow
def test_one_output_that_crosses_is_enough(monkeypatch, tmp_path):
    """It is stored together with rows that stay on their rank."""
    plant(monkeypatch, tmp_path, BUGS["signals at .gpu scope"])
    given = tokens_of(2)
    for g, ids in zip(given, ([0, 1], [2, 3])):
        g["ids"][:] = torch.tensor(ids)
    given[0]["ids"][4, 1] = 2
    _, report = fused(moe_cases.layer(layout="sm100"), given, 2, "latest")
    assert any("write_slots" in x.source for d in report if between_ranks(d.parties) for x in d.parties), str(report)


@needs_triton
@pytest.mark.slow
def test_the_last_tile_has_to_know_of_the_others(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, ('sem="acq_rel"', 'sem="relaxed"'))
    _, report = fused(moe_cases.layer(layout="sm100"), tokens_of(2), 2)
    assert set(report.codes()) == {"race"}


@needs_triton
@pytest.mark.slow
def test_a_rank_that_does_not_tell_is_a_deadlock(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, ("            tell(peers, HAS_WRITTEN, RANKS)", "            tell(peers, 7, RANKS)"))
    with pytest.raises(Deadlock, match="GPU 1"):
        fused(moe_cases.layer(layout="sm100"), tokens_of(2), 2)


def plant(monkeypatch, tmp_path, bug):
    from dsv4.moe.kernels.sm100 import mega

    planted.plant(monkeypatch, tmp_path, mega, "moe_mega_sm100", bug)
