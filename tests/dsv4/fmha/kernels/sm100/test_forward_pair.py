"""FMHA at head dim 512 by a pair of CTAs, on a CPU, through softsm. test_fmha.py's seeds take it too, quickly."""

from dataclasses import replace

import launches
import pytest
import torch
from agreement import assert_agrees
from launches import launched, num_sms

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha import problem
from dsv4.runtime import dispatch

if dispatch.triton_version() < (3, 9):
    pytest.skip("the Blackwell kernels need triton >= 3.9", allow_module_level=True)

from dsv4.fmha.kernels.sm100 import entry as fmha

BF16, FP16 = torch.bfloat16, torch.float16
ORDERS = [("eager", 0), ("latest", 0), *(("random", seed) for seed in range(4))]


@pytest.fixture
def pairs(monkeypatch):
    """There are two SMs, so that one pair processes all; every launch is one of the pair kernel."""
    launches = launched(monkeypatch)
    num_sms(monkeypatch, 2)
    yield
    assert set(launches) == {"fmha_forward_pair"}


def tensors(t: int, s: int, heads: int = 2, kv_heads: int = 1, batch: int = 1, dtype=BF16) -> dict:
    shapes = dict(q=(batch, t, heads), k=(batch, s, kv_heads), v=(batch, s, kv_heads))
    return {name: torch.randn(*shape, 512).to(dtype) for name, shape in shapes.items()}


def right(order: str, seed: int, arguments: dict, **more) -> None:
    torch.manual_seed(seed)
    out = torch.full_like(arguments["q"], float("nan"))
    with launches.race_free("sm_100a", order=order, seed=seed):
        got = dsv4.fmha(**arguments, **more, out=out, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, **arguments, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_causal_tiles_of_several_sequences_and_heads(pairs, order, seed):
    """Three tiles of rows each, the last in part, of one to four blocks; heads in groups of two; later keys are longer,
    so that O is rescaled."""
    arguments = tensors(150, 400, heads=4, kv_heads=2, batch=2)
    arguments["k"] *= torch.linspace(0.2, 4.0, 400)[None, :, None, None].to(BF16)
    right(order, seed, arguments, causal=True, sink=torch.randn(4))


@pytest.mark.slow
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_windows(pairs, order, seed):
    """The first tile starts at key 0, the others later; some rows of a tile see nothing of its first or last block."""
    right(order, seed, tensors(400, 390, heads=1), window=(130, 3))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.07, 0.0, 0.2])
def test_scales(pairs, scale):
    right("latest", 0, tensors(70, 140), causal=True, softmax_scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_of_any_stride_and_one_tensor_for_both(pairs, dtype):
    arguments = tensors(3, 200, heads=96, kv_heads=2, dtype=dtype)
    wide = {name: torch.full((*x.shape[:-1], 520), float("nan")).to(dtype) for name, x in arguments.items()}
    for name, x in arguments.items():
        wide[name][..., :512] = x
    latent = wide["k"][..., :512]
    right("random", 0, dict(q=wide["q"][..., :512], k=latent, v=latent))


@pytest.mark.slow
@pytest.mark.parametrize("s", [1, 127, 128, 129])
def test_few_keys(pairs, s):
    """Causal, the first rows see nothing, in the end whole tiles of them."""
    right("latest", 0, tensors(64, s))
    right("latest", 1, tensors(s + 200, s, heads=1), causal=True)


@pytest.mark.slow
def test_the_same_bits_whatever_else_is_in_the_call(pairs):
    both = tensors(600, 300, batch=2)
    with softsm.use("sm_100a"):
        many = dsv4.fmha(**both, causal=True, deterministic=True, backend="softsm")
        alone = dsv4.fmha(**{k: x[1:] for k, x in both.items()}, causal=True, deterministic=True, backend="softsm")
    assert torch.equal(many[1:], alone)


@pytest.mark.parametrize(("change", "taken"), [
    ({}, True), ({"t": 64}, True), ({"t": 63}, False), ({"d": 256}, False), ({"window": (200, 0)}, True),
    ({"window": (199, 0)}, False), ({"splits": 2}, True), ({"splits": 4, "num_sms": 148}, False),
    ({"num_sms": 148}, False), ({"t": 16384, "s": 2048, "num_sms": 148}, True),
    ({"deterministic": True}, False), ({"deterministic": True, "t": 512}, True),
], ids=str)  # fmt: skip
def test_what_pairs_take(change, taken):
    """Whole tiles of rows, keys that are not better split, and none that no query sees. 256 tiles are 3.5 rounds of 74
    pairs; split in two for one CTA they would be 7 rounds of half the keys, at half the rate."""
    size = dict(t=300, s=500, d=512, window=(-1, -1), splits=0, deterministic=False, num_sms=2) | change
    q, k = (torch.empty(1, n, h, size["d"], dtype=BF16) for n, h in ((size["t"], 2), (size["s"], 1)))
    p = problem.dense(q, k, k, window=size["window"], deterministic=size["deterministic"])
    p = replace(p, num_splits=size["splits"])
    target = dispatch.compile_target("sm_100a")._replace(num_sms=size["num_sms"])
    assert fmha.pairs(p, target) == taken
