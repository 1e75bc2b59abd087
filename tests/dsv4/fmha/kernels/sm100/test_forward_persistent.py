"""FMHA at head dims 64 and 128 by CTAs that loop over work tiles, on a CPU, through softsm."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is unset

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

pytestmark = pytest.mark.compile

BF16, FP16 = torch.bfloat16, torch.float16
ORDERS = [("eager", 0), ("latest", 0), *(("random", seed) for seed in range(4))]
OF_128 = pytest.param(128, marks=pytest.mark.slow)


@pytest.fixture
def loop(monkeypatch):
    """There are two SMs, so that each CTA processes several work tiles; every launch is one of the looping kernel."""
    launches = launched(monkeypatch)
    num_sms(monkeypatch, 2)
    yield
    assert set(launches) == {"fmha_forward_persistent"}


def tensors(t: int, s: int, heads: int = 2, kv_heads: int = 1, batch: int = 1, d: int = 64, dtype=BF16) -> dict:
    shapes = dict(q=(batch, t, heads), k=(batch, s, kv_heads), v=(batch, s, kv_heads))
    return {name: torch.randn(*shape, d).to(dtype) for name, shape in shapes.items()}


def right(order: str, seed: int, arguments: dict, **more) -> None:
    torch.manual_seed(seed)
    out = torch.full_like(arguments["q"], float("nan"))
    with launches.race_free("sm_100a", order=order, seed=seed):
        got = dsv4.fmha(**arguments, **more, out=out, return_lse=True, backend="softsm")
    assert_agrees(got, reference.fmha, **arguments, **more)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("d", [64, OF_128])
def test_causal_tiles_of_several_sequences_and_heads(loop, d, order, seed):
    """Eight work tiles, four for each CTA, with odd and even numbers of tiles of keys; heads in groups of two; later
    keys are longer, so that O is rescaled, also in a work tile that follows another."""
    arguments = tensors(150, 400, heads=4, kv_heads=2, batch=2, d=d)
    arguments["k"] *= torch.linspace(0.2, 4.0, 400)[None, :, None, None].to(BF16)
    right(order, seed, arguments, causal=True, sink=torch.randn(4))


@pytest.mark.parametrize(("order", "seed"), ORDERS[1:4])
@pytest.mark.parametrize("d", [64, OF_128])
def test_windows(loop, d, order, seed):
    """Work tiles begin at other keys than 0; keys that no query sees are NaN."""
    arguments = tensors(390, 600, heads=3, d=d)
    for name in "kv":
        arguments[name][:, : 600 - 390 - 130] = float("nan")
    torch.manual_seed(seed)
    with launches.race_free("sm_100a", order=order, seed=seed):
        got = dsv4.fmha(**arguments, window=(130, 3), return_lse=True, backend="softsm")
    visible = {name: x.nan_to_num(0.0) for name, x in arguments.items()}
    assert_agrees(got, reference.fmha, **visible, window=(130, 3))


@pytest.mark.parametrize("scale", [-0.07, 0.0, 0.2])
def test_scales(loop, scale):
    right("latest", 0, tensors(300, 140), causal=True, softmax_scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_of_any_stride_and_one_tensor_for_both(loop, d, dtype):
    arguments = tensors(13, 200, heads=96, kv_heads=2, d=d, dtype=dtype)
    wide = {name: torch.full((*x.shape[:-1], d + 8), float("nan")).to(dtype) for name, x in arguments.items()}
    for name, x in arguments.items():
        wide[name][..., :d] = x
    latent = wide["k"][..., :d]
    right("random", 0, dict(q=wide["q"][..., :d], k=latent, v=latent))


@pytest.mark.parametrize("s", [1, 127, 128, 129])
def test_few_keys(loop, s):
    """Causal, the first rows see nothing, in the end whole work tiles of them."""
    right("latest", 0, tensors(300, s))
    right("latest", 1, tensors(s + 600, s, heads=1), causal=True)


@pytest.mark.parametrize("d", [64, OF_128])
def test_the_bits_of_the_kernel_without_a_loop(monkeypatch, d):
    arguments = tensors(400, 300, batch=2, d=d)
    num_sms(monkeypatch, 2)
    with softsm.use("sm_100a"):
        looped = dsv4.fmha(**arguments, causal=True, return_lse=True, backend="softsm")
        alone = dsv4.fmha(**arguments, causal=True, return_lse=True, deterministic=True, backend="softsm")
    assert all(torch.equal(a, b) for a, b in zip(looped, alone, strict=True))


@pytest.mark.parametrize(("change", "taken"), [
    ({}, True), ({"d": 128}, True), ({"d": 256}, False), ({"t": 256}, True), ({"t": 128}, False),
    ({"num_sms": 148}, False), ({"t": 18945, "num_sms": 148}, True), ({"splits": 2}, False),
    ({"deterministic": True}, False),
], ids=str)  # fmt: skip
def test_who_loops(change, taken):
    """Dense problems with a work tile of 256 rows for every SM, whose keys are not split."""
    size = dict(t=300, s=500, d=64, splits=0, deterministic=False, num_sms=2) | change
    q, k = (torch.empty(1, n, h, size["d"], dtype=BF16) for n, h in ((size["t"], 2), (size["s"], 1)))
    p = replace(problem.dense(q, k, k, deterministic=size["deterministic"]), num_splits=size["splits"])
    target = dispatch.compile_target("sm_100a")._replace(num_sms=size["num_sms"])
    assert fmha.loops(p, target) == taken
