"""FP8 caches of dense models in the plug-ins of vLLM and SGLang, with stand-ins for what these import of the engines.
tests/engines has the engines themselves."""

import importlib
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch
from agreement import assert_same

from dsv4 import reference

E4M3 = torch.float8_e4m3fn
T = TypeVar("T")


class Base(Generic[T]):
    def __init__(self, *_):
        pass


class Type(Enum):
    DECODER = "decoder"


VLLM = {
    "vllm.platforms": dict(current_platform=SimpleNamespace(is_cuda=lambda: False)),
    "vllm.v1.attention.backend": dict(
        AttentionBackend=Base,
        AttentionCGSupport=SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE=1),
        AttentionImpl=Base,
        AttentionMetadataBuilder=Base,
        AttentionType=SimpleNamespace(DECODER="decoder"),
        CommonAttentionMetadata=object,
        MultipleOf=int,
    ),
    "vllm.v1.attention.backends.utils": dict(split_decodes_and_prefills=None),
}
SGLANG = {
    "sglang.srt.layers.attention.base_attn_backend": dict(AttentionBackend=Base),
    "sglang.srt.layers.radix_attention": dict(AttentionType=Type),
    "sglang.srt.mem_cache.memory_pool": dict(KVWriteLoc=lambda loc, window: loc),
    "sglang.srt.mem_cache.swa_memory_pool": dict(SWAKVPool=type("SWAKVPool", (), {})),
}


@pytest.fixture
def plugin(monkeypatch):
    """A function that imports a plug-in's module afresh, with stand-ins for its engine's."""

    def imported(name: str, stand_ins: dict) -> ModuleType:
        for path, contents in stand_ins.items():
            module = ModuleType(path)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)  # gone again after the test
        return module

    return imported


def drawn(tokens: int):
    q = torch.randn(tokens, 4, 64)
    k, v = (torch.randn(tokens, 2, 64) * 3 for _ in "kv")
    return q, k, v


def coded(x, scale):
    return (x / scale.reshape(-1, 1)).to(E4M3)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("k_scale", [torch.tensor(0.7), torch.tensor([0.5, 0.9])], ids=["one", "of each head"])
def test_vllm(plugin, name, k_scale):
    """A request with one new token of seven and one with five of five; slot -1 is nowhere."""
    dense = plugin("dsv4.integrations.vllm.dense", VLLM)
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=torch.tensor(1.3))
    impl = dense.Impl(4, 64, 0.125, 2, kv_cache_dtype=name)
    assert name in dense.Backend.supported_kv_cache_dtypes
    cache = torch.randint(0, 127, (5, 2, 4, 128), dtype=torch.uint8)  # pages of four rows
    q, k, v = drawn(12)
    table = torch.tensor([[3, 1], [0, 4]]).int()
    slots = [int(table[0, j // 4]) * 4 + j % 4 for j in range(7)] + [
        int(table[1, j // 4]) * 4 + j % 4 for j in range(5)
    ]
    impl.do_kv_cache_update(layer, torch.cat([k, k[:1]]), torch.cat([v, v[:1]]), cache, torch.tensor([*slots, -1]))
    m = dense.Metadata(1, 6, torch.tensor([0, 1, 6]).int(), torch.tensor([7, 5]).int(), table, 5, 7)
    out = torch.full((8, 4, 64), -1.0)
    impl.forward(layer, q[6:], None, None, cache, m, out)
    for queries, keys in ((slice(0, 1), slice(0, 7)), (slice(1, 6), slice(7, 12))):
        codes = (coded(k[None, keys], k_scale), coded(v[None, keys], layer._v_scale))
        want, _ = reference.fmha(q[None, 6:][:, queries], *codes, k_scale=k_scale, v_scale=layer._v_scale, causal=True)
        assert_same(out[None, queries], want.float())
    assert bool((out[6:] == -1).all())
    with pytest.raises(
        ValueError, match="--kv-cache-dtype: got fp8_e5m2; accepted: auto, bfloat16, float16, fp8, fp8_e4m3"
    ):
        dense.Impl(4, 64, 0.125, 2, kv_cache_dtype="fp8_e5m2")


class Pool:
    """A pool like SGLang's: it holds bytes, converts them, and returns them as e4m3."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.k, self.v = (torch.zeros(32, 2, 64, dtype=torch.uint8) for _ in "kv")

    def set_kv_buffer(self, layer, where, k, v, k_scale=None, v_scale=None):
        for to, x, by in ((self.k, k, k_scale), (self.v, v, v_scale)):
            to[where] = (x if by is None else x / by).to(self.dtype).view(torch.uint8)

    def get_key_buffer(self, _):
        return self.k.view(self.dtype)

    def get_value_buffer(self, _):
        return self.v.view(self.dtype)


@pytest.mark.parametrize("scaled", [False, True])
def test_sglang(plugin, scaled):
    """Two sequences of five and three tokens, then one token more of each."""
    dense = plugin("dsv4.integrations.sglang.dense", SGLANG)
    scale = torch.nn.Parameter(torch.tensor(0.6), requires_grad=False) if scaled else None
    layer = SimpleNamespace(head_dim=64, v_head_dim=64, tp_q_head_num=4, layer_id=0, scaling=0.125, logit_cap=0,
                            is_cross_attention=False, attn_type=Type.DECODER, sliding_window_size=-1, k_scale=scale,
                            v_scale=scale)  # fmt: skip
    places = torch.stack([torch.arange(8, 16), torch.arange(24, 32)]).int()

    def runner(dtype):
        return SimpleNamespace(
            use_mla_backend=False,
            model_config=SimpleNamespace(is_encoder_decoder=False, context_len=8),
            server_args=SimpleNamespace(speculative_algorithm=None),
            token_to_kv_pool=Pool(dtype),
            page_size=4,
            req_to_token_pool=SimpleNamespace(req_to_token=places),
        )

    backend = dense.Backend(runner(E4M3))
    q, k, v = drawn(10)

    def batch(lengths, new, decode):
        slots = torch.cat([places[n, s - t : s] for n, (s, t) in enumerate(zip(lengths, new))]).long()
        mode = SimpleNamespace(is_decode_or_idle=lambda: decode, is_target_verify=lambda: False)
        lengths, new = torch.tensor(lengths), torch.tensor(new)
        return SimpleNamespace(
            seq_lens=lengths, seq_lens_cpu=lengths, batch_size=2, req_pool_indices=torch.arange(2), out_cache_loc=slots,
            forward_mode=mode, spec_info=None, extend_seq_lens=new, extend_seq_lens_cpu=new.tolist(),
        )  # fmt: skip

    found = []
    for b, rows, call in (
        (batch([5, 3], [5, 3], False), [*range(5), *range(6, 9)], backend.forward_extend),
        (batch([6, 4], [1, 1], True), [5, 9], backend.forward_decode),
    ):
        backend.init_forward_metadata(b)
        found.append(call(q[rows].flatten(1), k[rows].clone(), v[rows].clone(), layer, b).view(-1, 4, 64))
    got = torch.cat([found[0][:5], found[1][:1], found[0][5:], found[1][1:]])
    by = torch.ones(()) if scale is None else scale.detach()
    for some in (slice(0, 6), slice(6, 10)):
        codes = (coded(x[None, some], by) for x in (k, v))
        want, _ = reference.fmha(q[None, some], *codes, k_scale=by, v_scale=by, causal=True)
        assert_same(got[None, some], want.float())
    with pytest.raises(ValueError, match="--kv-cache-dtype: got torch.float8_e5m2; accepted: .*fp8_e4m3"):
        dense.Backend(runner(torch.float8_e5m2))
