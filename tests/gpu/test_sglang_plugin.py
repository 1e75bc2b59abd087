"""What the plug-in for SGLang writes into pages, on a GPU: eagerly and in a CUDA graph."""

import pytest
import torch

from dsv4 import Fp8Cache
from dsv4.integrations.sglang import rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PAGE, PAGES, TOKENS, POSITIONS = 256, 5, 70, 4096


class Plan(tuple):
    """SGLang's plan: (ratio, entries of 16 bytes, whether it is a decode step)."""

    compress_ratio, is_decode = property(lambda self: self[0]), property(lambda self: self[2])


def pages(device):
    return torch.zeros(PAGES, -(-PAGE * 584 // 576) * 576, dtype=torch.uint8, device=device)


def unpacked(x):
    return Fp8Cache.from_pages(x.cpu()[:, : PAGE * 584].unflatten(1, (PAGE, 584))).unpack(torch.float32)


def assert_same_on_a_gpu(call, kv, weight, slots):
    """Rows agree up to one step of e4m3: a sum in another order may be rounded the other way."""
    angles = torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    table = torch.polar(torch.ones_like(angles), angles)
    wanted = pages("cpu")
    call(kv, weight, table, slots, wanted, "cpu")
    moved = [x.cuda() for x in (kv, weight, table, slots)]
    eager, replayed = pages("cuda"), pages("cuda")
    call(*moved, eager, "cuda")
    call(*moved, replayed, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*moved, replayed, "cuda")
    replayed.zero_()
    graph.replay()
    assert torch.equal(eager, replayed)
    got, there = unpacked(eager), unpacked(wanted)
    assert there.any(-1).sum() > 10 and torch.equal(got.any(-1), there.any(-1))
    assert ((got - there).abs() <= there.abs() * 2**-3 + there.abs().amax(-1, keepdim=True) / 448 * 2**-8).all()


@pytest.fixture
def given():
    torch.manual_seed(0)
    kv = torch.randn(TOKENS, 1536 + 512).bfloat16()[:, 1536:]  # columns of a wider projection
    slots = torch.randperm(PAGES * PAGE)[:TOKENS].int()
    return kv, torch.rand(512).bfloat16() + 0.5, slots


def test_new_rows_of_the_window(given):
    kv, weight, slots = given
    slots[5] = -1
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    there = {"cpu": positions, "cuda": positions.cuda()}  # nothing is moved inside a graph

    def call(kv, weight, table, slots, out, device):
        rows.store(kv, weight, 1e-6, table, there[device], slots, out, PAGE)

    assert_same_on_a_gpu(call, kv, weight, slots)


@pytest.mark.parametrize("decode", [True, False])
def test_rows_of_the_compressor(given, decode):
    kv, weight, slots = given
    seen = torch.randint(1, POSITIONS // 4, (TOKENS,)) * 4
    seen[::7] -= 1  # does not end a group
    seen[-3:] = -1  # padding of a graph
    token = torch.randperm(TOKENS)
    entries = torch.stack([seen, token + (3 << 16), seen, seen], 1).int().view(torch.uint8)
    plans = {"cpu": Plan((4, entries, decode)), "cuda": Plan((4, entries.cuda(), decode))}

    def call(kv, weight, table, slots, out, device):
        rows.compressed(
            None, kv, plans[device], norm_weight=weight, norm_eps=1e-6, freq_cis=table, out_loc=slots, kvcache=out,
            page_size=PAGE,
        )  # fmt: skip

    assert_same_on_a_gpu(call, kv.contiguous(), weight, slots)
