"""Launches of two GPUs, one after the other: each GPU's own follow each other, those of the other may still run."""

import numpy as np
import pytest
from ruling import ORDERS, aligned

import softsm
from softsm.engine.options import current_options
from softsm.engine.ranks import Launch, together
from softsm.museum import text as t

PARAMS = "mine theirs flag raised turn"
SHAPE = (1, 32, 0, 1, ())
RACE = "launches follow each other on one GPU only"


def raises(offset):
    return f"st.release.sys.global.u32 [%rd4+{offset}], %r40;\n"


def awaits(offset):
    label = f"POLL{offset}"
    poll = f"{label}:\nld.acquire.sys.global.u32 %r41, [%rd3+{offset}];\n"
    return poll + f"setp.lt.u32 %p7, %r41, %r40;\n@%p7 bra {label};\n"


TURN = "ld.global.u32 %r40, [%rd5];\n"
WRITE, READ = "st.global.u32 [%rd1], %r40;\n", "ld.global.u32 %r42, [%rd2];\n"
EXCHANGE = TURN + WRITE + raises(0) + awaits(0) + READ


class Two:
    """Two GPUs, each with a buffer and flags that the other reads."""

    def __init__(self):
        self.arrays = [[aligned(np.zeros(4, np.uint32)) for _ in "df"] for _ in "01"]
        self.turn = aligned(np.zeros(1, np.uint32))

    def launch(self, bodies, turn, follows):
        self.turn[0] = turn
        given = []
        for rank, body in enumerate(bodies):
            (data, flag), (others, raised) = self.arrays[rank], self.arrays[1 - rank]
            text = t.kernel(t.only("%p0", body), PARAMS, shared=".shared .align 16 .b8 a[16];", target="sm_90a")
            kernel = body and softsm.load(text)
            given.append(body and Launch(kernel, SHAPE, [data, others, flag, raised, self.turn], None))
        together([x or None for x in given], follows)


def fixes(*launches, follows=True, strict=False, order="latest"):
    """The advice of the findings in these launches, each a body for both GPUs or one for each."""
    two = Two()
    with softsm.checking(order=order, strict=strict) as report:
        for k, bodies in enumerate(launches):
            bodies = (bodies, bodies) if isinstance(bodies, str) else bodies
            two.launch(bodies, k + 1, follows and k > 0)
    return [found.fix for found in report]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_another_gpu_reads_is_written_again_by_the_next_launch(order, strict):
    """A flag behind the read orders it, a wait of the host, or an exchange of other memory in between."""
    both = {"strict": strict, "order": order}
    found = fixes(EXCHANGE, EXCHANGE, **both)
    assert len(found) == 1 and RACE in found[0]
    behind = EXCHANGE + raises(4) + awaits(4)
    elsewhere = EXCHANGE.replace("[%rd1]", "[%rd1+4]").replace("[%rd2]", "[%rd2+4]")
    assert not fixes(behind, EXCHANGE, **both)
    assert not fixes(EXCHANGE, EXCHANGE, follows=False, **both)
    assert not fixes(EXCHANGE, elsewhere, EXCHANGE, **both)
    found = fixes(EXCHANGE, TURN + WRITE.replace("[%rd1]", "[%rd1+4]"), EXCHANGE, **both)
    assert len(found) == 1 and RACE in found[0], "nor does a launch without an exchange order it"


@pytest.mark.parametrize("order", ORDERS)
def test_a_flag_of_an_earlier_launch_orders_what_came_before_it(order):
    """GPU 0 writes in the first launch, GPU 1 reads in the second, and GPU 0 itself in either."""
    send, take = (TURN + WRITE + raises(0), ""), ("", TURN.replace("%r40", "%r45") + "mov.u32 %r40, 1;\n")
    assert not fixes(send, (take[0], take[1] + awaits(0) + READ), order=order)
    found = fixes(send, (take[0], take[1] + READ), order=order)
    assert len(found) == 1 and RACE in found[0]
    assert not fixes(send, (TURN + WRITE, ""), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_atomics_of_several_launches_need_no_order(order):
    """Both GPUs add to a word of GPU 0 in each launch; a plain store is another matter."""
    own = TURN + "red.relaxed.sys.global.add.u32 [%rd1], 1;\n"
    other = TURN + "red.relaxed.sys.global.add.u32 [%rd2], 1;\n"
    assert not fixes((own, other), (own, other), order=order)
    plain = TURN + "st.global.u32 [%rd2], %r40;\n"
    found = fixes((own, ""), ("", plain), order=order)
    assert len(found) == 1 and RACE in found[0]


@pytest.mark.parametrize("order", ORDERS)
def test_bulk_stores_of_an_earlier_launch(order):
    """GPU 0 stores in bulk and waits for that; GPU 1 reads it in the next launch."""
    store = TURN + "st.shared.v4.u32 [a], {%r40, %r40, %r40, %r40};\nfence.proxy.async;\n"
    store += "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [a], 16;\ncp.async.bulk.commit_group;\n"
    store += "cp.async.bulk.wait_group 0;\n"
    found = fixes((store, TURN), ("", READ), order=order)
    assert len(found) == 1 and RACE in found[0]
    assert not fixes((store + raises(0), TURN + awaits(0)), ("", READ), order=order)
    assert not fixes((store, TURN), (READ.replace("%rd2", "%rd1"), ""), order=order)


@pytest.mark.parametrize("between", [0, 1, 2])
def test_launches_of_ranks_are_ordered_by_a_collective(between):
    """Each rank launches the exchange twice, with so many collectives between."""
    two = Two()
    kernel = softsm.load(t.kernel(t.only("%p0", EXCHANGE), PARAMS, target="sm_90a"))

    def program(rank):
        (data, flag), (others, raised) = two.arrays[rank], two.arrays[1 - rank]
        for turn in (1, 2):
            two.turn[0] = turn
            kernel.launch(1, 32, [data, others, flag, raised, two.turn])
            for _ in range(between):
                current_options().meeting.exchange("barrier", rank)

    with softsm.checking() as report:
        softsm.ranks(2, program)
    assert [RACE in found.fix for found in report] == ([] if between else [True])
