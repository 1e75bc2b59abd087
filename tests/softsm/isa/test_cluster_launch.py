"""clusterlaunchcontrol: running clusters take the work of those that have not started."""

import numpy as np
from launching import ptx, run, words

BARRIER = ".shared .align 8 .b8 bar[64];"


def test_running_ctas_take_over_the_rest_of_the_grid():
    """Persistent CTAs ask for more work until none is left; every ctaid is done exactly once."""
    body = """mov.u32 %r2, bar;
mov.u32 %r3, answer;
mov.u32 %r4, %ctaid.x;
mov.u32 %r5, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
LOOP:
mul.wide.u32 %rd4, %r4, 4;
add.s64 %rd4, %rd1, %rd4;
@%p1 red.global.add.u32 [%rd4], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r2];
W:
mbarrier.try_wait.parity.shared::cta.b64 %p10, [%r2], %r5;
@!%p10 bra W;
ld.shared.b128 %answer, [%r3];
xor.b32 %r5, %r5, 1;
bar.sync 0;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %answer;
@!%p2 bra DONE;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r6, %r7, _}, %answer;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %answer;
bra LOOP;
DONE:
"""
    shared = BARRIER + " .shared .align 16 .b8 answer[16]; .reg .b128 %answer;"
    text = ptx(body, shared=shared, target="sm_100a", version="8.6")
    np.testing.assert_array_equal(run(text, [words(200)], grid=200), 1)
