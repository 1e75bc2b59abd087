"""Compressed rows from rings, on softsm: requests at different places, against dsv4.compress one by one."""

import launches
import pytest
import torch

import dsv4
from dsv4.compress.kernels.rings import compress_rings
from dsv4.reference import rope_table

TABLE = rope_table(256)


def check(d, m, overlap, fp8, cuts, dtype=torch.bfloat16):
    """cuts: for each call the tokens of each of three requests; the rows as dsv4.compress makes them, in any cut."""
    g = torch.Generator().manual_seed(d + m)
    width, ring, total = d * (1 + overlap), m * (1 + overlap), [sum(c) for c in zip(*cuts)]
    kv, gate = ([torch.randn(n, width, generator=g).to(dtype) for n in total] for _ in "kg")
    bias, weight = torch.randn(m, width, generator=g), torch.rand(d, generator=g) + 0.5
    states = tuple(torch.full((4 * ring, width), float("nan")) for _ in "kg")
    lines, per = torch.tensor([2, 0, 3]), max(total) // m + 1
    pool = dsv4.Fp8Cache.empty(3 * per, 1) if fp8 else torch.zeros(3 * per, 1, d)
    done = [0, 0, 0]
    for counts in cuts:
        some = [slice(b, b + n) for b, n in zip(done, counts)]
        here = [torch.cat([x[s] for x, s in zip(xs, some)]) for xs in (kv, gate)]
        positions = torch.cat([torch.arange(s.start, s.stop) for s in some])
        whose = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)
        one = max(counts) <= 1
        # One token each: the row of every one's window, finished or not. Else those that are finished.
        made = [(r, w) for r, s in enumerate(some) for w in range(s.start // m, s.stop // m + (one and s.stop % m > 0))]
        r, w = torch.tensor(made, dtype=torch.long).reshape(-1, 2).unbind(1)
        finished = (w + 1) * m <= torch.tensor([s.stop for s in some])[r]
        rows = (w.contiguous(), lines[r], torch.tensor(done)[r], starts[r], torch.where(finished, r * per + w, -1))
        places = lines[whose] * ring + positions % ring
        compress_rings(*here, bias, weight, 1e-6, TABLE, states, rows, pool, positions, places if one else None)
        if not one:
            for t in range(len(positions)):  # in order: of those at one place the last
                states[0][places[t]] = here[0][t].float()
                states[1][places[t]] = here[1][t].float() + bias[positions[t] % m]
        done = [s.stop for s in some]
    got = (pool.unpack(torch.float32) if fp8 else pool).reshape(3, per, d)
    for r in range(3):
        want, _ = dsv4.compress(kv[r], gate[r], bias, weight, cos_sin=TABLE, dtype=torch.float32)
        largest = want.abs().amax(-1, keepdim=True)
        bound = 4 * m * torch.finfo(torch.float32).eps * largest  # sums of m terms, in another order
        if fp8:  # half a step of e4m3, and of its least numbers, of which the scale is at most 2 / 448 of the largest
            bound = 1.001 * (want.abs() * 2**-4 + largest * 2 / 448 * 2**-10)
        assert ((got[r, : len(want)] - want).abs() <= bound).all()
        assert not got[r, len(want) :].any()


def run(arch, *arguments):
    with launches.race_free(arch):
        check(*arguments)


def test_sparse_rows():
    run("sm_90a", 512, 4, True, True, [(5, 0, 9), (1, 1, 1), (1, 1, 0), (2, 4, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_more_rows(arch):
    run(arch, 512, 4, True, True, [(5, 0, 9), (1, 1, 1), (1, 1, 0), (6, 4, 1), (1, 1, 1), (1, 1, 1)])
    run(arch, 128, 4, True, False, [(5, 0, 9), (1, 1, 1), (1, 1, 0), (6, 4, 1)])
    run(arch, 512, 32, False, False, [(31, 3, 64), (1, 1, 1), (34, 28, 1), (1, 1, 1)])
