"""SGLang's indexer of DeepSeek-V4.1 by the plug-in, in decode, with stubs that have what the three methods look at."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dsv4
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.integrations import sglang
from dsv4.integrations.sglang import v41

PAGE, PAGES, HEADS, TOPK, KEPT = 64, 12, 32, 24, 3


@pytest.fixture
def blocks(monkeypatch):
    module = ModuleType("dense_blocks")
    module.BlockIds = lambda blocks: SimpleNamespace(blocks=blocks)
    name = "sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks"
    for n in range(1, len(name.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:n]), ModuleType("package"))
    monkeypatch.setitem(sys.modules, name, module)


class Layer:
    """One of SGLang's layers with an indexer, and the keys that it reads."""

    def __init__(self, ratio, positions, of):
        torch.manual_seed(0)
        self.pages = torch.full((PAGES, PAGE * 68 + 96), 255, dtype=torch.uint8)  # a page of SGLang has more bytes
        self.cache = dsv4.IndexCache.from_pages(self.pages[:, : PAGE * 68].unflatten(1, (PAGE, 68)), format=INDEX_68)
        self.cache.write(torch.arange(PAGES * PAGE), torch.randn(PAGES * PAGE, 128))
        table = torch.randperm(PAGES).view(3, 4).int()
        n = len(positions)
        x = torch.randn(n, HEADS, 128)
        codes, scales = INDEX_68.quantize(x.flatten(0, 1))
        self.q = INDEX_68.dequantize(codes, scales, torch.float32).view(n, HEADS, 128).bfloat16()  # exact
        self.weights = torch.randn(n, HEADS).bfloat16()
        self.table, self.lengths = table[of], [(p + 1) // ratio for p in positions]
        self.out = torch.full((n + 2, TOPK), 99, dtype=torch.int32)
        freqs = torch.randn(300, 32)
        self.backend = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: {20: self.pages}[layer_id]),
            topk_blocks=KEPT,
            block_size=8,
        )
        self.inputs = SimpleNamespace(
            indexer=SimpleNamespace(
                queries=lambda q_lora, f: self.q if torch.equal(f, freqs[positions]) else None,
                head_weights=lambda x: self.weights, index_topk=TOPK,
            ),
            layer_id=20, compress_ratio=ratio, freqs_cis=freqs, x=None, q_lora=None, req_rows=torch.tensor(of),
            positions=torch.tensor(positions), out_page_indices=self.out, reset_outputs=lambda: self.out.fill_(-1),
            paged_metadata=SimpleNamespace(
                compressed_page_size=PAGE, page_table=torch.cat([self.table, self.table[:1]])
            ),
        )  # fmt: skip

    def scores(self, n):
        """Return the scores of the rows that query n sees, rounded as by DeepSeek: every product, and their sum."""
        rows = self.slots(n, torch.arange(self.lengths[n]))
        keys = self.cache.unpack(torch.float32)[rows]
        parts = (self.q[n].float() @ keys.T).bfloat16().relu() * self.weights[n, :, None]
        return parts.float().sum(0).bfloat16().float()

    def slots(self, n, rows):
        return self.table[n, rows // PAGE].long() * PAGE + rows % PAGE

    def agrees(self, allowed=None):
        """The best rows of each query, of the allowed ones; equal scores may change places."""
        for n, count in enumerate(self.lengths):
            among = torch.arange(count) if allowed is None else allowed[n]
            got = self.out[n][self.out[n] >= 0].long()
            assert len(got) == min(TOPK, len(among)) and len(got.unique()) == len(got)
            every = self.slots(n, among)
            assert torch.isin(got, every).all()
            if len(got):
                scores = self.scores(n)[among]
                chosen = torch.isin(every, got)
                assert scores[chosen].min() >= scores[~chosen].max() if len(among) > TOPK else chosen.all()
        assert bool((self.out[len(self.lengths) :] == 99).all())


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("positions, of", [([0, 20, 255], [0, 1, 2]), ([100, 101, 102, 7, 8], [2, 2, 2, 0, 0])])
def test_all_rows(ratio, positions, of):
    """One query of each request, or several drafts of some; a query may see no row, or fewer than it may list."""
    layer, before = Layer(ratio, positions, of), sglang.calls["index"]
    v41.topk_decode(layer.backend, layer.inputs)
    layer.agrees()
    assert sglang.calls["index"] == before + 1


def test_two_levels(blocks):
    """One layer keeps the best blocks of 8 rows, of which the last that it sees; another one chooses among them."""
    positions, of = [0, 20, 255, 199], [0, 1, 2, 2]
    layer = Layer(1, positions, of)
    published = v41.publish_decode(layer.backend, layer.inputs)
    layer.agrees()
    allowed = []
    for n, count in enumerate(layer.lengths):
        best = torch.stack([x.max() for x in layer.scores(n).split(8)])
        kept = published.blocks[n][published.blocks[n] >= 0].long()
        assert len(kept) == min(KEPT, len(best)) and (count - 1) // 8 in kept
        rest = best[[b for b in range(len(best)) if b not in kept]]
        assert not len(rest) or best[kept[kept != (count - 1) // 8]].min() >= rest.max()
        rows = (kept[:, None] * 8 + torch.arange(8)).flatten()
        allowed.append(rows[rows < count])
    other = Layer(1, positions, of)
    other.q, other.weights = other.q.flip(0), other.weights.flip(0)
    v41.consume_decode(other.backend, other.inputs, published)
    other.agrees(allowed)


def test_no_row_at_all(blocks):
    layer, before = Layer(1, [], []), sglang.calls["index"]
    assert v41.publish_decode(layer.backend, layer.inputs) is None
    v41.topk_decode(layer.backend, layer.inputs)
    v41.consume_decode(layer.backend, layer.inputs, None)
    assert bool((layer.out == -1).all()) and sglang.calls["index"] == before


def test_other_blocks_and_other_keys_are_refused_by_name(blocks):
    layer = Layer(1, [5], [0])
    layer.backend.block_size = 16
    with pytest.raises(ValueError, match="candidate_block_size: got 16; accepted: 8, or DSV4_SGLANG_PARTS without"):
        v41.publish_decode(layer.backend, layer.inputs)
    layer.inputs.paged_metadata.compressed_page_size = 128
    with pytest.raises(ValueError, match="index keys: got 128 rows in 4448 bytes; accepted: rows of 68: FP4 keys"):
        v41.topk_decode(layer.backend, layer.inputs)
