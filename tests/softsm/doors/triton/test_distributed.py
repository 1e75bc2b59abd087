"""Kernels of several ranks, launched by programs that use torch.distributed and its symmetric memory."""

import subprocess
import sys

import pytest
import rank_kernels as kernels
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import softsm
from softsm.errors import Deadlock

RANKS, N, TOKENS = 3, 128, 7


def symmetric(*shape, dtype=torch.float32) -> torch.Tensor:
    """Addresses of zeroed symmetric memory of all ranks."""
    mine = symm_mem.empty(*shape, dtype=dtype, device="cpu").zero_()
    handle = symm_mem.rendezvous(mine, dist.group.WORLD)
    assert handle.buffer_ptrs[handle.rank] == mine.data_ptr()
    addresses = torch.tensor(handle.buffer_ptrs)
    addresses.handle = handle  # the memory lives as long as they do
    return addresses


def all_reduce(rank, bug):
    ctas = 2
    x = torch.randn(ctas * N)
    buffers = symmetric(ctas * N)
    signals = symmetric(ctas, dtype=torch.int32)
    out = torch.full_like(x, float("nan"))
    kernels.all_reduce[(ctas,)](x, out, buffers, signals, rank, RANKS, N, bug, num_warps=2)
    dist.all_reduce(x)
    return torch.allclose(out, x, atol=1e-5)


def all_to_all(rank, bug):
    x = torch.randn(RANKS, N)
    buffers = symmetric(RANKS, N)
    signals = symmetric(RANKS, dtype=torch.int32)
    out, right = torch.full_like(x, float("nan")), torch.empty_like(x)
    kernels.all_to_all[(RANKS,)](x, out, buffers, signals, rank, RANKS, N, bug, num_warps=2)
    dist.all_to_all_single(right, x)
    return torch.equal(out, right)


def experts(rank, bug):
    x, chosen = torch.randn(TOKENS, N), torch.randint(RANKS, (TOKENS,), dtype=torch.int32)
    inbox = symmetric(RANKS * TOKENS, N + 2)
    outbox = symmetric(TOKENS, N)
    counts = symmetric(1, dtype=torch.int32)
    signals = symmetric(1, dtype=torch.int32)
    out = torch.full_like(x, float("nan"))
    kernels.experts[(4,)](x, chosen, out, inbox, outbox, counts, signals, TOKENS, rank, RANKS, N, bug, num_warps=1)
    return torch.equal(out, x * (chosen[:, None] + 1))


def run(program, bug="", order="latest"):
    with softsm.use("sm_90a", ranks=RANKS) as world, softsm.checking(order=order) as report:
        right = world.run(lambda rank: program(rank, bug))
    return all(right), report


@pytest.mark.parametrize("program", [all_reduce, all_to_all, pytest.param(experts, marks=pytest.mark.compile)])
def test_kernels_of_several_ranks(program):
    for order in ("latest", "random"):
        right, report = run(program, order=order)
        assert right and not report, report


@pytest.mark.parametrize("program, bug", [
    (all_reduce, "scope"), (all_to_all, "row"), pytest.param(experts, "meet", marks=pytest.mark.compile),
    pytest.param(all_reduce, "early", marks=pytest.mark.slow), pytest.param(experts, "slot", marks=pytest.mark.slow),
])  # fmt: skip
def test_races_between_ranks_are_named(program, bug):
    _, report = run(program, bug)
    assert set(report.codes()) == {"race"}
    found = next(iter(report))
    assert len({p.who.split(" of GPU ")[1] for p in found.parties}) == 2, found
    assert "rank_kernels.py" in found.parties[0].source and ".sys scope" in found.fix


def test_a_signal_that_never_comes():
    with pytest.raises(Deadlock) as error:
        run(all_to_all, "short")
    assert "GPU 2: 0 of 3 CTAs have ended, 3 are resident" in str(error.value)
    assert "GPU 0: 3 of 3 CTAs have ended, 0 are resident" in str(error.value)


def test_the_process_group():
    """Collectives on host tensors, and torch's own functions outside of a rank's program."""

    def program(rank):
        dist.init_process_group("nccl")
        assert dist.is_initialized() and dist.get_rank() == rank and dist.get_world_size() == RANKS
        one = torch.tensor([rank + 1.0])
        dist.all_reduce(one)
        each = [torch.empty(1) for _ in range(RANKS)]
        dist.all_gather(each, torch.tensor([float(rank)]))
        flat, part = torch.empty(RANKS), torch.empty(2)
        dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * RANKS))
        dist.broadcast(word := torch.tensor([rank]), src=1)
        objects = [None] * RANKS
        dist.all_gather_object(objects, {rank})
        dist.barrier()
        dist.destroy_process_group()
        return [float(one), torch.cat(each).tolist(), flat.tolist(), part.tolist(), int(word), objects]

    with softsm.use("sm_90a", ranks=RANKS) as world:
        for rank, found in enumerate(world.run(program)):
            part = [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
            assert found == [6.0, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], part, 1, [{0}, {1}, {2}]]
        assert not dist.is_initialized()
    with (
        softsm.use("sm_90a", ranks=2) as world,
        pytest.raises(ValueError, match="rank 0 waits in .*barrier; rank 1 has"),
    ):
        world.run(lambda rank: dist.barrier() if rank == 0 else None)
    with softsm.use("sm_90a", ranks=2) as world, pytest.raises(ValueError, match="^group: got .*accepted: None"):
        world.run(lambda rank: dist.barrier(group=object()))


def test_a_handle_has_what_torchs_has():
    def program(rank):
        mine = symm_mem.empty((4, 8), dtype=torch.float32, device="cuda")
        handle = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
        mine.fill_(rank)
        handle.barrier()
        theirs = handle.get_buffer(1 - rank, (2, 8), torch.float32, storage_offset=8)
        assert theirs.shape == (2, 8) and (theirs == 1 - rank).all()
        assert handle.get_signal_pad(rank).sum() == 0 and handle.signal_pad_size == 2048
        assert handle.world_size == 2 and handle.rank == rank and handle.multicast_ptr
        return handle.buffer_ptrs

    with softsm.use("sm_90a", ranks=2, cuda_shim=True) as world:
        first, second = world.run(program)
    assert first == second


PROGRAM = """
import os
import torch
import torch.distributed as dist

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert torch.cuda.device_count() == count
dist.init_process_group("nccl")
x = torch.tensor([rank + 1.0], device=f"cuda:{rank}")
dist.all_reduce(x)
assert int(os.environ["LOCAL_RANK"]) == dist.get_rank() == rank and x.is_cuda
print("rank", rank, "of", count, "has", int(x))
"""


@pytest.mark.slow
def test_a_program_as_torchrun_starts_it(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "softsm", "run", "--ranks", "3", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {rank} of 3 has 6" for rank in range(3)]
