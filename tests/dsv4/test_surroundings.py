"""What surrounds a call changes no result: the default dtype, the default device, autocast, and what ran before."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import dsv4
from dsv4.fmha import cpu

N = torch.Generator()


def draw(*shape):
    return torch.randn(shape, generator=N)


def integers(*x):
    return torch.tensor(x, dtype=torch.int32)


def fmha(q, k, v, sink):
    return dsv4.fmha(q, k, v, window=(3, 2), sink=sink, return_lse=True)


def capped(q, k, v):
    return dsv4.fmha(q, k, v, causal=True, softcap=3.0)


def v4(q, window, compressed, sink, window_indices, table, lengths):
    more = dict(compressed_block_table=table, compressed_lengths=lengths)
    return dsv4.v4_attention(q, window, window_indices, compressed, sink=sink, return_lse=True, **more)


def loss(q, k, weights, attention_q, rows, lse, indices):
    return dsv4.index_loss(q, k, weights, indices, attention_q, rows, lse)


def moe(x, w13, w2, weights, ids):
    return dsv4.moe(x, (w13, w2), ids, weights, activations="bf16", shared=(w13[0], w2[0]))


def compress(kv, gate, bias, weight):
    return dsv4.compress(kv, gate, bias, weight)[0]


def merge(a, b, lse_a, lse_b, sink):
    return dsv4.merge_states([a, b], [lse_a, lse_b], sink)


def case(name):
    """Return (function, its tensors); those that float have gradients."""
    N.manual_seed(1)
    table = integers(0, 1, 1, 0).view(2, 2)
    return {
        "fmha": (fmha, [draw(1, 40, 2, 64), draw(1, 50, 2, 64), draw(1, 50, 2, 64), draw(2)]),
        "no key is seen": (fmha, [draw(1, 9, 2, 64), draw(1, 2, 2, 64), draw(1, 2, 2, 64), draw(2)]),
        "softcap": (capped, [draw(1, 5, 2, 80), draw(1, 9, 2, 80), draw(1, 9, 2, 48)]),
        "v4": (v4, [draw(2, 4, 64), draw(9, 64), draw(2, 8, 64), draw(4), table * 3, table, integers(3, 16)]),
        "loss": (loss, [draw(3, 4, 16), draw(6, 16), draw(3, 4), draw(3, 2, 64), draw(6, 64), draw(3, 2),
                        integers(0, 5, -1, 2, 3, 4).view(3, 2)]),
        "moe": (moe, [draw(3, 64), draw(2, 32, 64), draw(2, 64, 16), draw(3, 2),
                      integers(0, 1, -1, 0, 1, 0).view(3, 2)]),
        "compress": (compress, [draw(9, 128), draw(9, 128), draw(4, 128), draw(64)]),
        "merge": (merge, [draw(3, 4, 64), draw(3, 4, 64), draw(3, 4), draw(3, 4), draw(4)]),
    }[name]  # fmt: skip


NAMES = ("fmha", "no key is seen", "softcap", "v4", "loss", "moe", "compress", "merge")


@contextlib.contextmanager
def default(dtype=torch.float32, device="cpu"):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


SURROUNDINGS = {
    "float64": lambda: default(dtype=torch.float64),
    "bfloat16": lambda: default(dtype=torch.bfloat16),
    "meta": lambda: default(device="meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def results(name) -> list[Tensor]:
    """Return the outputs and all gradients, made without what earlier calls have kept."""
    function, given = case(name)
    cpu._mask.cache_clear()
    return outputs_and_gradients(function, given)


def outputs_and_gradients(function, given):
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
    out = function(*given)
    out = out if isinstance(out, tuple) else (out,)
    inputs = [x for x in given if x.requires_grad]
    found = torch.autograd.grad(out, inputs, [torch.ones_like(x) for x in out], allow_unused=True)
    return [*(x.detach() for x in out), *(x for x in found if x is not None)]


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_autocast_change_nothing(name, surroundings):
    want = results(name)
    function, given = case(name)
    cpu._mask.cache_clear()
    with SURROUNDINGS[surroundings]():
        got = outputs_and_gradients(function, given)
    after = results(name)
    for x, y, z in zip(want, got, after, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z) and y.device.type == "cpu"


def test_an_fp4_layer_sums_in_fp32_whatever_the_default():
    def codes(rows, columns):
        scales = torch.randint(116, 122, (2, rows, columns // 32), generator=N, dtype=torch.uint8)
        return torch.randint(0, 256, (2, rows, columns // 2), generator=N, dtype=torch.uint8), scales

    N.manual_seed(2)
    experts = dsv4.Fp4Experts.pack(*codes(128, 256), *codes(128, 256), *codes(256, 128))
    x, weights, ids = draw(3, 256), draw(3, 2), integers(0, 1, 1, 0, 0, 1).view(3, 2)
    want = dsv4.moe(x, experts, ids, weights)
    with default(dtype=torch.bfloat16):
        assert torch.equal(dsv4.moe(x, experts, ids, weights), want)


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_compress_has_one_graph(dynamic):
    function, given = case("compress")
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(*given), function(*given))


def test_fake_tensors_have_no_values_to_check():
    function, given = case("loss")
    cache = dsv4.IndexCache.pack(draw(4, 128))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = function(*(mode.from_tensor(x) for x in given))
        assert found.shape == () and found.dtype == torch.float32
        assert cache.gather(mode.from_tensor(torch.tensor([0, 3]))).shape == (2, 128)
    given[-1][0, 0] = 6
    for call in (function, torch.compile(function, backend="eager")):
        with pytest.raises(ValueError, match="^indices: got values from -1 to 6; accepted: values from -1 to 5"):
            call(*given)
