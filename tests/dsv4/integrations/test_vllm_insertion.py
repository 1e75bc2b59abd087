"""Queries and rows on their way to the attention of DeepSeek-V4 in vLLM: on a CPU, and by the kernel in softsm."""

import pytest
import torch

from dsv4 import Fp8Cache, Mxfp8Cache, Nvfp4Cache
from dsv4.integrations.vllm.insertion import insert


def rope(x, angles):
    """fp64: pairs (0, 1), (2, 3), .. of the last 64 columns of x [N, .., 512] turned by angles [N, 32]."""
    angles = angles.view(len(x), *[1] * (x.ndim - 2), 32)
    even, odd = x[..., 448::2], x[..., 449::2]
    turned = [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()]
    return torch.cat([x[..., :448], torch.stack(turned, -1).flatten(-2)], -1)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("softsm", marks=pytest.mark.compile)])
@pytest.mark.parametrize("cls", [Mxfp8Cache, Nvfp4Cache])
def test_rows_of_deepseek_v4_1_are_rotated_then_packed(cls, backend):
    """Queries are not normed. A row rounded to bf16 first, as on a CPU, or not, as by the kernel: codes differ where
    that changes a tie, by one step."""
    torch.manual_seed(0)
    q, kv = torch.randn(3, 2, 512).bfloat16(), torch.randn(4, 512).bfloat16()
    positions, slots = torch.tensor([4, 99, 7]), torch.tensor([70, -1, 5])
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float()
    window, by_hand = (cls.empty(3, 32) for _ in range(2))
    got = insert(q, kv, positions, window, slots, cos_sin, None, backend)
    wanted = rope(q.double(), angles[positions].double())
    assert ((got.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()
    rows = rope(kv[:3].double(), angles[positions].double())
    by_hand.write(slots, rows.bfloat16() if backend == "cpu" else rows.float())
    made, right = (x.unpack(torch.float64) for x in (window, by_hand))
    step = right.abs() / (8 if cls is Mxfp8Cache else 2)  # of e4m3 and of e2m1, at least
    same = made == right
    assert (same | ((made - right).abs() <= step * (1 + 1e-9))).all() and same.double().mean() > 0.99
    others = torch.ones(96, dtype=torch.bool)
    others[[70, 5]] = False
    assert torch.equal(made[others], cls.empty(3, 32).unpack(torch.float64)[others])


@pytest.mark.parametrize("backend", ["cpu", pytest.param("softsm", marks=pytest.mark.compile)])
def test_queries_are_normed_and_rotated_and_rows_are_rotated_and_packed(backend):
    """Seven tokens of which five have a slot: padding of a graph behind them, one slot -1. Blocks are far apart."""
    torch.manual_seed(0)
    q, kv = torch.randn(7, 3, 512).bfloat16(), torch.randn(7, 512).bfloat16()
    positions, slots = torch.tensor([4, 5, 99, 0, 1, 0, 0]), torch.tensor([130, 131, -1, 7, 64])
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float()
    pages = torch.zeros(3, 3 * 64 * 584, dtype=torch.uint8)[:, : 64 * 584].unflatten(1, (64, 584))
    window, empty = Fp8Cache.from_pages(pages), pages.clone()
    got = insert(q, kv, positions, window, slots, cos_sin, 1e-6, backend)

    wanted = q.double() * torch.rsqrt(q.double().square().mean(-1, keepdim=True) + 1e-6)
    wanted = rope(wanted, angles[positions].double())
    assert got.dtype == q.dtype and got.shape == q.shape
    assert ((got.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()  # rounded once to bf16

    rows = rope(kv[:5].double(), angles[positions[:5]].double())[slots >= 0]
    kept = slots[slots >= 0]
    packed = window.unpack()[kept].double()
    # Half a step of e4m3 and of bf16; half of the least number of a scale at most twice what the largest value needs.
    largest = rows[:, :448].unflatten(1, (7, 64)).abs().amax(-1).repeat_interleave(64, 1)
    allowed = rows[:, :448].abs() * (2**-4 + 2**-8) + largest * 2 / 448 * 2**-10
    assert ((packed - rows)[:, :448].abs() <= allowed).all()
    assert ((packed - rows)[:, 448:].abs() <= rows[:, 448:].abs() * 2**-8 + 1e-6).all()

    for slot in kept.tolist():  # nothing else was touched
        page, row = divmod(slot, 64)
        pages.flatten(1)[page, row * 576 : row * 576 + 576] = 0
        pages.flatten(1)[page, 64 * 576 + row * 8 : 64 * 576 + row * 8 + 8] = 0
    assert torch.equal(pages, empty)
