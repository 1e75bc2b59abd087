"""dsv4.distributed over gloo: the ranks are processes of distributed_worker.py, whose verdicts are shown here."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import wrong
from agreement import assert_lse, assert_right
from distributed_worker import CHECKS
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
from dsv4 import reference
from dsv4.distributed import forward as distributed
from dsv4.distributed.attend import State

WORKER = Path(__file__).with_name("distributed_worker.py")
PATHS = os.pathsep.join(map(str, (WORKER.parents[3] / "src", WORKER.parents[1])))


def run(size: int, folder: Path, *failing: str) -> list[dict[str, str]]:
    """Verdicts of every rank."""
    # Loopback: gloo would look the name of the machine up, which not every machine can.
    env = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error::FutureWarning", str(WORKER), str(size), str(folder), *failing]
    ranks = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = ranks.communicate(timeout=800)[1][-2000:]
    except subprocess.TimeoutExpired:
        said = "it did not end"
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    files = [folder / f"{n}.json" for n in range(size)]
    left = {"": said} if ranks.returncode else {}
    return [left | (json.loads(f.read_text()) if f.exists() else {}) for f in files]


@pytest.fixture(scope="module")  # with two ranks a ring has only one step
def three_ranks(tmp_path_factory):
    return run(3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS)
def test_three_ranks(three_ranks, check):
    for rank, verdicts in enumerate(three_ranks):
        assert verdicts.get(check, f"not reached: {verdicts}") == "", f"rank {rank}"


@pytest.mark.slow
def test_two_ranks(tmp_path):
    for verdicts in run(2, tmp_path):
        assert verdicts == dict.fromkeys(CHECKS, "")


@pytest.mark.slow
def test_a_failed_check_fails_alone(tmp_path):
    """Rank 0 fails before it sends anything; rank 1, which waits for it, fails in the same check."""
    for verdicts in run(2, tmp_path, "check_prefill"):
        assert [name for name in CHECKS if verdicts[name]] == ["check_prefill"], verdicts


@settings(max_examples=60)
@given(
    t=st.integers(1, 9),
    s=st.integers(1, 9),
    shift=st.integers(-12, 12),
    left=st.integers(-1, 8),
    right=st.integers(-1, 4),
    split=st.integers(1, 9),
)
def test_a_piece_of_queries_sees_what_it_should(t, s, shift, left, right, split):
    """Any place of the keys relative to the queries, in one part and in two."""
    generator = torch.Generator().manual_seed(t + 10 * s)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (t, s, s))
    i, j = torch.arange(t)[:, None] + shift, torch.arange(s)
    mask = torch.ones(t, s, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    want, want_lse = reference.attend(*(x[0].transpose(0, 1) for x in (q, k, v)), mask, None, 0.125, torch.float64)
    state = State(q, torch.float32)
    for begin, end in ((0, split), (split, s)):
        if begin < min(end, s):
            part = slice(begin, min(end, s))
            state.attend(q, k[:, part], v[:, part], shift - begin, left, right, {}, None)
    out, lse = state.result(q.dtype, None)
    assert_right(out[0].transpose(0, 1), want, merged=True)
    assert_lse(lse[0], want_lse)


def test_without_a_process_group_it_says_so():
    q = torch.zeros(1, 4, 2, 64)
    for call in (lambda: distributed.prefill(q, q, q), lambda: distributed.shard(q), lambda: distributed.local_rows(q)):
        with pytest.raises(ValueError, match="^group: got no process group; accepted: .*init_process_group"):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_arguments(tmp_path):
    q, k = torch.randn(2, 2, 4, 64), torch.randn(2, 2, 2, 64)
    sink = torch.zeros(4)

    def decode(attention, q, **options):
        return distributed.decode(attention, q, k, k, **options)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        common = dict(group=dist.group.WORLD)
        attention = dict(sink=sink, return_lse=True, softmax_scale=0.1, **common)
        cut = dict(order="zigzag", **common)
        for function, right in (
            (decode, dict(attention=dsv4.fmha, q=q, heads="mine", causal=False, window=(-1, -1), **attention)),
            (distributed.merge, dict(out=q, lse=torch.zeros(2, 4, 2), sink=sink, heads="all", **common)),
            (distributed.local_rows, dict(indices=torch.tensor([1]), block=2, **common)),
            (distributed.local_lengths, dict(lengths=torch.tensor([1]), block=2, **common)),
            (distributed.shard, dict(x=torch.randn(1, 4, 2), dim=1, **cut)),
            (distributed.unshard, dict(x=torch.randn(1, 4, 2), dim=1, **cut)),
            (distributed.positions, dict(length=4, device="cpu", **cut)),
            (distributed.prefill, dict(q=q, k=k, v=k, causal=True, window=(3, 0), method="ring", deterministic=False,
                                       backend="cpu", **cut, **{x: attention[x] for x in attention if x != "group"})),
        ):  # fmt: skip
            # tensors of any dtype and shape can be cut
            meant = [("x", what) for what in ("complex tensor", "bool tensor", "seven dimensions")]
            wrong.each_in_turn(function.__name__, function, right, meant)
        # the window of v4_attention is a pool, also by name
        rows = torch.randn(9, 64)
        got = distributed.decode(dsv4.v4_attention, q[0], window=rows, window_indices=torch.ones(2, 3).int(), sink=sink)
        assert torch.equal(got, dsv4.v4_attention(q[0], rows, torch.ones(2, 3).int(), sink=sink))
    finally:
        dist.destroy_process_group()
