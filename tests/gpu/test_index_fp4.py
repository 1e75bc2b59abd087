"""FP4 index keys and two levels on a GPU: exact where the sums are, close to the CPU elsewhere."""

import pytest
import torch
import v41_index

import dsv4
from dsv4.caches.index_keys import IndexCache
from dsv4.caches.mxfp4_keys import INDEX_68

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(arguments):
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    cache = arguments["k"]
    return moved | dict(k=IndexCache(cache.storage.cuda(), cache.rows_per_page, cache.page_stride, INDEX_68.name))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("page, fp4_queries", [(64, True), (32, False), (128, True)])
def test_whole_numbers_give_the_lists_and_blocks_of_the_cpu(page, fp4_queries, bf16):
    lengths = (700, 683, 129, 9, 0)
    arguments, _, _ = v41_index.problem(
        5, 700, lengths=lengths, topk=40, whole=True, page=page, fp4_queries=fp4_queries
    )
    arguments["bf16_scores"] = bf16
    want = dsv4.index_blocks(**arguments, topk_blocks=40)
    got = dsv4.index_blocks(**on_gpu(arguments), topk_blocks=40, backend="cuda")
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
    want = dsv4.index_topk(**arguments, blocks=want[1], return_scores=True)
    got = dsv4.index_topk(**on_gpu(arguments), blocks=got[1], return_scores=True, backend="cuda")
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


def test_more_rows_than_the_blocks_have():
    arguments, _, _ = v41_index.problem(4, 40000, lengths=(40000, 39993, 20000, 16385), topk=512, whole=True)
    want = dsv4.index_blocks(**arguments)
    got = dsv4.index_blocks(**on_gpu(arguments), backend="cuda")
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
    want = dsv4.index_topk(**arguments, blocks=want[1])
    assert torch.equal(dsv4.index_topk(**on_gpu(arguments), blocks=got[1], backend="cuda").cpu(), want)


def test_keys_are_written_as_on_a_cpu():
    keys = torch.randn(300, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    here, there = IndexCache.pack(keys, format=INDEX_68), IndexCache.pack(keys.cuda(), format=INDEX_68)
    assert torch.equal(there.storage.cpu(), here.storage)
