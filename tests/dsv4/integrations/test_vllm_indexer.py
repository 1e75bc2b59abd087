"""The indexer of the plug-in on metadata as vLLM builds it, with nothing else of vLLM: also draft tokens and sharded
prompts, which vLLM does not run on a CPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dsv4
from dsv4.caches.index_keys import quantize_queries
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.integrations.vllm import calls, indexer

ROWS, HEADS, TOPK, PAGES = 8, 4, 6, 20  # rows of a page


@pytest.fixture
def engine(monkeypatch):
    """make(metadata, tokens) -> what the indexer writes, and the naive choice for (token, request, rows it sees)."""
    context = SimpleNamespace(attn_metadata=None)
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    shard = SimpleNamespace(from_metadata=lambda prefill, n: getattr(prefill, "shard", None))
    modules = {
        "vllm.config": dict(get_current_vllm_config=lambda: SimpleNamespace(parallel_config=parallel)),
        "vllm.forward_context": dict(get_forward_context=lambda: context),
        "vllm.model_executor.layers.sparse_attn_indexer": dict(PrefillRowShard=shard),
    }
    for name in [x for x in sys.modules if x.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, members in modules.items():
        for n in range(1, len(name.split("."))):
            monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:n]), ModuleType("package"))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return Engine(context, parallel)


class Engine:
    def __init__(self, context, parallel):
        self.context, self.parallel = context, parallel
        # pages of 132-byte rows, with the pages of another layer between them
        block = torch.zeros(PAGES, 2, ROWS, 132, dtype=torch.uint8)
        self.pages = block[:, 1]
        dsv4.IndexCache.from_pages(self.pages).write(torch.arange(PAGES * ROWS), torch.randn(PAGES * ROWS, 128))
        self.keys = dsv4.IndexCache.from_pages(self.pages).unpack(torch.float32)
        self.table = torch.randperm(PAGES).view(4, 5).int()  # of four requests

    def fp4(self):
        """Keys of 68 bytes in place of those of 132."""
        self.pages = torch.zeros(PAGES, 2, ROWS, 68, dtype=torch.uint8)[:, 1]
        cache = dsv4.IndexCache.from_pages(self.pages, format=INDEX_68)
        cache.write(torch.arange(PAGES * ROWS), self.keys)
        self.keys = cache.unpack(torch.float32)

    def indexer(self, buffer, **options):
        cache = SimpleNamespace(prefix="layer", kv_cache=self.pages)
        options = dict(skip_k_cache_insert=True, compress_ratio=4) | options
        return indexer.Indexer(cache, 128, "ue8m0", TOPK, 128, 1024, 1024, buffer, **options)

    def run(self, metadata, tokens, **options):
        q, weights = quantize_queries(torch.randn(tokens, HEADS, 128), torch.randn(tokens, HEADS))
        buffer = torch.full((tokens + 3, TOPK + 2), 99, dtype=torch.int32)
        self.context.attn_metadata = {"layer": metadata}
        assert self.indexer(buffer, **options)(torch.zeros(tokens, 7), q, None, weights) is buffer
        assert bool((buffer[tokens:] == 99).all())  # nothing behind the step
        self.q, self.weights = q, weights
        return buffer[:tokens, :TOPK]

    def scores(self, token, request, seen):
        rows = self.table[request].long().repeat_interleave(ROWS)[:seen] * ROWS + torch.arange(seen) % ROWS
        return self.weights[token] @ (self.q[token].float() @ self.keys[rows].T).relu()

    def naive(self, token, request, seen):
        best = self.scores(token, request, seen).sort(descending=True, stable=True).indices[:TOPK]
        return torch.nn.functional.pad(best, (0, TOPK - len(best)), value=-1).int()

    def agrees(self, got, wanted):
        """wanted: (request, rows it sees) of each token; None for one that belongs to no request."""
        for n, one in enumerate(wanted):
            expected = torch.full((TOPK,), -1, dtype=torch.int32) if one is None else self.naive(n, *one)
            assert torch.equal(got[n], expected), f"token {n}"


def chunk(table, lengths, first=0):
    """Prefill of requests with these rows for each of their tokens, as vLLM counts: through all requests."""
    cu = torch.tensor([0, *(max(x) for x in lengths)]).cumsum(0).int()
    begins = torch.cat([cu[r].repeat(len(x)) for r, x in enumerate(lengths)])
    ends = begins + torch.tensor([m for x in lengths for m in x]).int()
    return SimpleNamespace(
        block_table=table,
        cu_seqlen_ks=begins,
        cu_seqlen_ke=ends,
        cu_seq_lens=cu,
        token_start=first,
        token_end=first + len(begins),
        num_reqs=len(lengths),
    )


def metadata(chunks=(), decode=None, decode_tokens=0, **prefill):
    return SimpleNamespace(
        max_seq_len=4 * 5 * ROWS,
        num_decode_tokens=decode_tokens,
        num_prefills=len(chunks),
        decode=decode,
        prefill=SimpleNamespace(chunks=chunks, row_shard_sizes=None, **prefill),
    )


def decode(table, lengths, each):
    return SimpleNamespace(
        block_table=table, seq_lens=torch.tensor(lengths).int(), decode_lens=torch.tensor(each).int()
    )


def test_one_token_for_each_request(engine):
    lengths = [[3], [40], [0], [17]]
    got = engine.run(metadata(decode=decode(engine.table, lengths, [1, 1, 1, 1]), decode_tokens=4), 4)
    engine.agrees(got, [(r, lengths[r][0]) for r in range(4)])


def test_draft_tokens_see_one_row_less_each_time_their_group_is_not_finished(engine):
    lengths = [[6, 7], [20, 20], [38, 39]]
    got = engine.run(metadata(decode=decode(engine.table[:3], lengths, [2, 2, 2]), decode_tokens=6), 6)
    engine.agrees(got, [(r, m) for r, pair in enumerate(lengths) for m in pair])


def test_requests_with_different_numbers_of_draft_tokens(engine):
    """The last column is the last token's, whatever number of them a request has; tokens that fill up a graph see
    nothing."""
    lengths = [[5, 6, 7], [20, 20, 21], [38, 39, 40]]
    got = engine.run(metadata(decode=decode(engine.table[:3], lengths, [3, 1, 2]), decode_tokens=8), 8)
    engine.agrees(got, [(0, 5), (0, 6), (0, 7), (1, 21), (2, 39), (2, 40), None, None])


@pytest.mark.parametrize("lengths", [[[9, 9, 10]], [[0, 0], [3, 4], [12]], [[5], [0], [0, 1]], [[7, 8], [0, 0]]])
def test_prompts_of_several_requests(engine, lengths):
    """Also such as have no finished row yet: vLLM's numbers do not tell them from their neighbours."""
    count = sum(map(len, lengths))
    got = engine.run(metadata([chunk(engine.table[: len(lengths)], lengths)]), count)
    engine.agrees(got, [(r, m) for r, x in enumerate(lengths) for m in x])


def test_decodes_before_prompts_in_two_chunks(engine):
    chunks = [chunk(engine.table[1:3], [[9, 9, 10], [30]], first=1), chunk(engine.table[3:], [[20, 21]], first=5)]
    before = calls.copy()
    got = engine.run(metadata(chunks, decode(engine.table[:1], [[33]], [1]), 1), 8)
    engine.agrees(got, [(0, 33), (1, 9), (1, 9), (1, 10), (2, 30), (3, 20), (3, 21), None])
    assert calls - before == {"index prefill": 2, "index decode": 1}


def test_a_rank_chooses_for_its_part_of_a_prompt_and_exchanges(engine):
    whole = chunk(engine.table[:2], [[9, 9, 10], [30, 31]])
    exchanged = []
    shard = SimpleNamespace(
        narrow=lambda c: None if c is not whole else (2, 4, c.cu_seqlen_ks[2:4], c.cu_seqlen_ke[2:4]),
        exchange_topk=lambda buffer, width: exchanged.append(width),
    )
    got = engine.run(metadata([whole, chunk(engine.table[2:3], [[4]], first=5)], shard=shard), 6)
    engine.agrees(got, [None, None, (0, 10), (1, 30), None, None])
    assert exchanged == [TOPK]


@pytest.mark.parametrize("bytes_", [132, 68])
def test_two_levels_of_deepseek_v4_1(engine, bytes_):
    """FP8 keys, or the model's own FP4 keys, with FP8 queries. One layer keeps the two best blocks of 8 rows of each
    query, of which the last one that it sees; another layer with queries of its own chooses among their rows. Decodes
    with drafts before prompts; a sharded prompt is not."""
    if bytes_ == 68:
        engine.fp4()
    chunks = [chunk(engine.table[2:], [[9, 9, 10], [0, 33]], first=4)]
    lengths = [[30, 31], [39, 40]]
    m = metadata(chunks, decode(engine.table[:2], lengths, [2, 2]), 4, shard="not asked for")
    seen = [(0, 30), (0, 31), (1, 39), (1, 40), (2, 9), (2, 9), (2, 10), (3, 0), (3, 33), None]
    kept = torch.full((12, 2), 99, dtype=torch.int32)
    both = dict(candidate_blocks=kept, candidate_block_size=8, compress_ratio=1)
    got = engine.run(m, 10, **both, candidate_write=True)
    engine.agrees(got, seen)  # of all rows
    assert bool((kept[9:] == 99).all())
    for n, one in enumerate(seen[:-1]):
        scores = engine.scores(n, *one)
        best = torch.stack([x.max() for x in scores.split(8)]) if len(scores) else scores
        best[-1:] = float("inf")
        blocks = best.sort(descending=True, stable=True).indices[:2].sort().values.tolist()
        assert kept[n].tolist() == blocks + [-1] * (2 - len(blocks)), f"token {n}"
    got = engine.run(m, 10, **both)
    assert bool((kept[9:] == 99).all())
    for n, one in enumerate(seen):
        rows = (
            []
            if one is None
            else [8 * b + i for b in kept[n].tolist() if b >= 0 for i in range(8) if 8 * b + i < one[1]]
        )
        scores = engine.scores(n, *one)[rows] if rows else torch.zeros(0)
        order = scores.sort(descending=True, stable=True).indices[:TOPK].tolist()
        assert got[n].tolist() == [rows[k] for k in order] + [-1] * (TOPK - len(order)), f"token {n}"


def test_a_profile_run_writes_nothing(engine):
    buffer = torch.full((4, TOPK), 99, dtype=torch.int32)
    engine.context.attn_metadata = None
    engine.indexer(buffer)(torch.zeros(4, 7), None, None, None)
    assert bool((buffer == 99).all())


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(use_fp4_cache=True), "indexer_kv_dtype: got mxfp4"),
        (dict(candidate_blocks=torch.zeros(1), candidate_block_size=16), "candidate_block_size: got 16; accepted: 8"),
        (dict(skip_k_cache_insert=False), "skip_k_cache_insert"),
    ],
)
def test_other_indexers_are_refused_by_name(engine, options, name):
    with pytest.raises(ValueError, match=f"{name}.*for vLLM's own attention"):
        engine.indexer(torch.zeros(1, TOPK, dtype=torch.int32), **options)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_is_refused_by_name(engine, name):
    setattr(engine.parallel, name, 2)
    with pytest.raises(ValueError, match=f"{name}: got 2; accepted: 1"):
        engine.indexer(torch.zeros(1, TOPK, dtype=torch.int32))
