"""Every argument of the calls of FlashMLA, flash-attn and torch, each replaced by things that are not meant."""

import pytest
import torch
import wrong

from dsv4.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dsv4.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from dsv4.integrations.sdpa import scaled_dot_product_attention


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


COMMON = dict(softmax_scale=0.1, causal=True, window_size=(3, 0), softcap=0.0, alibi_slopes=None,
              learnable_sink=torch.zeros(4), deterministic=False, backend="cpu")  # fmt: skip
FLASH = dict(dropout_p=0.0, return_attn_probs=True, **COMMON)
VARLEN = dict(q=torch.randn(7, 4, 64), cu_seqlens_q=ints(0, 3, 7), cu_seqlens_k=ints(0, 5, 9), max_seqlen_q=4,
              max_seqlen_k=5, **FLASH)  # fmt: skip
CACHE = dict(q=torch.randn(2, 1, 4, 64), cache_leftpad=None, num_splits=0, return_softmax_lse=True, **COMMON)
NEW = dict(
    k=torch.randn(2, 1, 2, 64),
    v=torch.randn(2, 1, 2, 64),
    rotary_cos=torch.randn(9, 16),
    rotary_sin=torch.randn(9, 16),
    rotary_interleaved=True,
)
PAGES, LINES, ROWS = torch.randn(4, 4, 2, 64), torch.randn(4, 8, 2, 64), torch.zeros(4, 4, 1, 584, dtype=torch.uint8)
TABLE, LISTS = ints(0, 1, 2, 3).view(2, 2), torch.zeros(2, 2, 3, dtype=torch.int32)
MLA = dict(head_dim_v=512, num_splits=None, softmax_scale=0.1, attn_sink=torch.zeros(4), enable_batch_invariant=False,
           backend="cpu")  # fmt: skip

# name -> function, arguments of a right call
CALLS = {
    "flash_attn_func": (flash_attn_func, dict(
        q=torch.randn(2, 3, 4, 64), k=torch.randn(2, 5, 2, 64), v=torch.randn(2, 5, 2, 64), **FLASH)),
    "scaled_dot_product_attention": (scaled_dot_product_attention, dict(
        query=torch.randn(2, 4, 3, 64), key=torch.randn(2, 2, 5, 64), value=torch.randn(2, 2, 5, 64), attn_mask=None,
        dropout_p=0.0, is_causal=True, scale=0.1, enable_gqa=True, sink=torch.zeros(4), backend="cpu")),
    "flash_attn_varlen_func": (flash_attn_varlen_func, dict(
        k=torch.randn(9, 2, 64), v=torch.randn(9, 2, 64), **VARLEN)),
    "flash_attn_varlen_func, pages": (flash_attn_varlen_func, dict(k=PAGES, v=PAGES, block_table=TABLE, **VARLEN)),
    "flash_attn_with_kvcache, pages": (flash_attn_with_kvcache, dict(
        k_cache=PAGES.clone(), v_cache=PAGES.clone(), cache_seqlens=ints(5, 2), block_table=TABLE, **NEW, **CACHE)),
    "flash_attn_with_kvcache, lines": (flash_attn_with_kvcache, dict(
        k_cache=LINES, v_cache=LINES, cache_seqlens=5, cache_batch_idx=ints(3, 1), **CACHE)),
    "flash_mla_with_kvcache, dense": (flash_mla_with_kvcache, dict(
        q=torch.randn(2, 1, 4, 512), k_cache=torch.randn(4, 4, 1, 512), block_table=TABLE, cache_seqlens=ints(5, 7),
        causal=True, is_fp8_kvcache=False, indices=None, out=torch.zeros(2, 1, 4, 512), **MLA)),
    "flash_mla_with_kvcache, lists": (flash_mla_with_kvcache, dict(
        q=torch.randn(2, 2, 4, 512), k_cache=ROWS, block_table=None, cache_seqlens=None, causal=False,
        is_fp8_kvcache=True, indices=LISTS, extra_k_cache=ROWS, extra_indices_in_kvcache=LISTS, topk_length=ints(1, 2),
        extra_topk_length=ints(1, 2), out=torch.zeros(2, 2, 4, 512), **MLA)),
    "flash_mla_sparse_fwd": (flash_mla_sparse_fwd, dict(
        q=torch.randn(3, 4, 512), kv=torch.randn(9, 1, 512), indices=torch.zeros(3, 1, 5, dtype=torch.int32),
        sm_scale=0.1, d_v=512, attn_sink=torch.zeros(4), topk_length=ints(1, 2, 3), return_max_logits=True,
        out=torch.zeros(3, 4, 512), backend="cpu")),
}  # fmt: skip
# None means no bound in flash-attn 4; FlashMLA reads only the lists if there are any.
MEANT = {"window_size": "list of None"}
UNSEEN = {"flash_mla_with_kvcache, lists": ("block_table", "cache_seqlens")}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_argument_wrong_in_turn(name):
    wrong.each_in_turn(name, *CALLS[name], [*MEANT.items(), *((x, "*") for x in UNSEEN.get(name, ()))])


def test_a_generous_bound_of_queries_costs_nothing():
    function, right = CALLS["flash_attn_varlen_func, pages"]
    want = function(**right)
    for got, same in zip(function(**right | dict(max_seqlen_q=1 << 40)), want):
        assert torch.equal(got, same)
