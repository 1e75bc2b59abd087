"""Every argument of every public function, each replaced by things that are not meant: a ValueError of one form.

The tables next to the operations list which argument a message names; here nothing is chosen by hand, so an argument
that no table lists cannot cause another exception.
"""

import numpy as np
import pytest
import torch
import wrong

import dsv4
from dsv4 import Fp8Cache, reference

BF16 = torch.bfloat16


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


COMMON = dict(causal=True, window=(3, 0), softmax_scale=0.1, return_lse=True, deterministic=False, backend="cpu")
SIZES = dict(batch=2, q_heads=4, kv_heads=2, head_dim=64, max_seqlen_k=9, max_seqlen_q=2, device="cpu")
V4 = dict(
    q=torch.randn(4, 2, 512).to(BF16), window=torch.randn(10, 512).to(BF16),
    window_indices=torch.zeros(4, 3, dtype=torch.int32), compressed=torch.randn(10, 512).to(BF16),
    window_lengths=ints(0, 1, 2, 3), compressed_lengths=ints(0, 1, 2, 3), request_starts=ints(0, 2, 4),
    inverse_rope=(reference.rope_table(20), ints(0, 1, 2, 3)), sink=torch.zeros(2), softmax_scale=0.1,
    out=torch.zeros(4, 2, 512, dtype=BF16), plan=None, return_lse=True, deterministic=False, backend="cpu",
)  # fmt: skip
TOKENS = dict(
    kv=torch.randn(9, 16), gate=torch.randn(9, 16), position_bias=torch.randn(4, 16), norm_weight=torch.ones(8)
)
CACHE = Fp8Cache.pack(torch.randn(9, 512), rows_per_page=4)
INDEX = dict(q=torch.randn(4, 3, 8), k=torch.randn(6, 8), weights=torch.randn(4, 3), topk=3, ratio=4, scale=0.1,
             return_scores=True)  # fmt: skip
DENSE = dict(q=torch.randn(2, 3, 4, 64), sink=torch.zeros(4), out=torch.zeros(2, 3, 4, 64), plan=None, **COMMON)
ROWS = dict(q=torch.randn(7, 4, 64), sink=torch.zeros(4), out=torch.zeros(7, 4, 64), plan=None, **COMMON)

# name -> function, arguments of a right call
CALLS = {
    "fmha": (dsv4.fmha, dict(k=torch.randn(2, 5, 2, 64), v=torch.randn(2, 5, 2, 64), **DENSE)),
    "fmha_varlen": (dsv4.fmha_varlen, dict(
        k=torch.randn(9, 2, 64), v=torch.randn(9, 2, 64), cu_seqlens_q=ints(0, 3, 7), cu_seqlens_k=ints(0, 5, 9),
        max_seqlen_q=4, max_seqlen_k=5, **ROWS)),
    "fmha_paged": (dsv4.fmha_paged, dict(
        k_pages=torch.randn(4, 4, 2, 64), v_pages=torch.randn(4, 4, 2, 64), block_table=ints(0, 1, 2, 3).view(2, 2),
        lengths=ints(6, 8), **DENSE)),
    "v4_attention, list": (dsv4.v4_attention, V4 | dict(compressed_indices=torch.ones(4, 3, dtype=torch.int32))),
    "v4_attention, table": (dsv4.v4_attention, V4 | dict(
        window=CACHE, compressed_block_table=torch.arange(10, dtype=torch.int32).view(2, 5))),
    "merge_states": (dsv4.merge_states, dict(
        outs=[torch.randn(2, 3, 4, 64)] * 2, lses=[torch.randn(2, 4, 3)] * 2, sink=torch.zeros(4))),
    "quantize_mxfp8": (dsv4.quantize_mxfp8, dict(x=torch.randn(3, 4, 64), backend="cpu")),
    "compress": (dsv4.compress, TOKENS | dict(
        cos_sin=reference.rope_table(20, 4), state=dsv4.compress(**TOKENS)[1], eps=1e-6, dtype=torch.float32,
        out=torch.zeros(5, 8), slots=torch.tensor([1, 3]), backend="cpu")),
    "index_topk, positions": (dsv4.index_topk, INDEX | dict(positions=torch.tensor([0, 5, 9, 20]))),
    "index_topk, lengths": (dsv4.index_topk, INDEX | dict(
        lengths=ints(0, 1, 2, 3), out=torch.zeros(4, 3, dtype=torch.int32), plan=None, backend="cpu")),
    "index_topk, table": (dsv4.index_topk, INDEX | dict(
        k=torch.randn(6, 2, 8), lengths=ints(0, 1, 2, 3), block_table=ints(0, 1, 2, 3).view(2, 2),
        request_starts=ints(0, 2, 4))),
    "plan": (dsv4.plan, dict(operation=dsv4.fmha, **SIZES)),
    "warmup": (dsv4.warmup, dict(
        operation=dsv4.fmha, dtype=torch.float32, backend="cpu", page_size=4, same_kv=False, fp8=True, **SIZES)),
    "Fp8Cache": (Fp8Cache, dict(storage=torch.zeros(9000, dtype=torch.uint8), rows_per_page=4, page_stride=2336)),
    "Fp8Cache.empty": (Fp8Cache.empty, dict(pages=2, rows_per_page=4, page_stride=2336, device="cpu")),
    "Fp8Cache.pack": (Fp8Cache.pack, dict(rows=torch.randn(9, 512), rows_per_page=4, page_stride=2336)),
    "Fp8Cache.from_pages": (Fp8Cache.from_pages, dict(pages=torch.zeros(2, 4, 584, dtype=torch.uint8))),
    "Fp8Cache.write": (CACHE.write, dict(slots=torch.tensor([1, 2]), rows=torch.randn(2, 512))),
    "Fp8Cache.gather": (CACHE.gather, dict(indices=torch.tensor([1, 2]), dtype=torch.float32)),
    "Fp8Cache.unpack": (CACHE.unpack, dict(dtype=torch.float32)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_argument_wrong_in_turn(name):
    wrong.each_in_turn(name, *CALLS[name])


def test_a_state_that_compress_did_not_make():
    for field, what in (("tokens", None), ("tokens", 9.0), ("tokens", -1), ("kv", None), ("gate", torch.zeros(1))):
        state = dsv4.compress(**TOKENS)[1]._replace(**{field: what})
        with pytest.raises(ValueError, match=rf"^state.{field}: got .*; accepted: "):
            dsv4.compress(**TOKENS, state=state)


def test_an_array_in_place_of_a_tensor_is_named_by_its_dtype_and_shape():
    q = torch.randn(1, 5, 2, 64)
    with pytest.raises(ValueError, match=r"^q: got ndarray of float32 \[1, 5, 2, 64\]; accepted: a tensor"):
        dsv4.fmha(q.numpy(), q, q)


def test_numbers_of_numpy_are_numbers():
    q, k = torch.randn(1, 5, 2, 64), torch.randn(1, 9, 2, 64)
    got = dsv4.fmha(q, k, k, window=(np.int64(3), np.int32(0)), softmax_scale=np.float32(0.25))
    assert torch.equal(got, dsv4.fmha(q, k, k, window=(3, 0), softmax_scale=0.25))


def test_a_window_wider_than_any_sequence_is_no_window():
    q, k = torch.randn(1, 9, 2, 64), torch.randn(1, 5, 2, 64)  # four queries stand before the first key
    for wide in (1 << 31, (1 << 63) - 1, 1 << 70):
        assert torch.equal(dsv4.fmha(q, k, k, window=(wide, wide)), dsv4.fmha(q, k, k))
        assert torch.equal(dsv4.fmha(q, k, k, window=(wide, 0)), dsv4.fmha(q, k, k, causal=True))
