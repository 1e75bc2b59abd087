"""SGLang's own indexer of DeepSeek-V4.1 compared with dsv4's, in decode on a CPU: python sglang_v41_index.py
RESULT.json

The classes are the installed ones. SGLang's scores come from its Triton kernel, in softsm, its choices from torch (what
it does on GPUs that are neither Hopper nor Blackwell; on Hopper another Triton kernel with the same roundings scores).
The keys are FP4 in pages, the queries are there already; values are such that every score is exact in bf16.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"

import sglang_run  # noqa: F401  stand-ins, before SGLang is imported
import torch

import softsm

TOPK, HEADS, PAGE, KEPT, WIDTH = 64, 32, 64, 12, 5  # WIDTH: pages of a request
POSITIONS, REQUESTS = {1: [0, 70, 319, 318, 130], 2: [0, 140, 639, 638, 260]}, [0, 1, 2, 2, 3]  # two drafts of one


def main(result: str) -> None:
    from sglang.srt.layers.attention.dsv4.v41_indexer import scoring

    from dsv4.integrations.sglang import calls

    scoring.get_platform = lambda: SimpleNamespace(is_sm90=False)
    with softsm.use("sm_90a", sms=1):
        found = compared(1) | compared(2)
    Path(result).write_text(json.dumps(found | dict(calls=dict(calls))))


def compared(ratio: int) -> dict:
    """(what SGLang's methods choose, what dsv4's choose) by the kind of layer."""
    from sglang.srt.layers.attention.dsv4.v41_indexer import dense_blocks, full_topk, scoring

    from dsv4.integrations.sglang import v41

    torch.manual_seed(ratio)
    step = Step(ratio)
    given = dict(token_to_kv_pool=step.pool, req_to_token=step.places)
    every = full_topk.FullTopKIndexer(**given, use_deep_gemm_prefill=False, use_deep_gemm_decode=False)
    every.use_deep_select_decode = False
    blocks = dense_blocks.DenseBlocksBackend(
        **given, candidate_topk_blocks=KEPT, candidate_block_size=8, use_deep_gemm_prefill=False
    )
    scores = scoring.decode_scores(inputs=step.inputs(), **given).scores
    published = step.lists(blocks.publish_decode)[1]
    kept = step.lists(lambda inputs: v41.publish_decode(blocks, inputs))[1]
    ways = {
        "all": (every.topk_decode, lambda inputs: v41.topk_decode(every, inputs)),
        "source": (blocks.publish_decode, lambda inputs: v41.publish_decode(blocks, inputs)),
        "consumer": (
            lambda inputs: blocks.consume_decode(inputs, published),
            lambda inputs: v41.consume_decode(blocks, inputs, published),
        ),
    }
    found = {f"{name} {ratio}": [step.taken(scores, step.lists(way)[0]) for way in both] for name, both in ways.items()}
    return found | {f"blocks {ratio}": [step.best(scores, x.blocks) for x in (published, kept)]}


class Step:
    """One decode of SGLang: pages of keys, where tokens are, queries."""

    def __init__(self, ratio: int):
        from dsv4 import IndexCache
        from dsv4.caches.mxfp4_keys import INDEX_68

        pages = (max(REQUESTS) + 1) * WIDTH
        values = torch.randint(-1, 2, (pages * PAGE, 128)) * (torch.rand(1, 128) < 0.2)
        cache = IndexCache.pack(values.float(), rows_per_page=PAGE, page_stride=PAGE * 68, format=INDEX_68)
        keys = cache.page_view().flatten(1)
        self.pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: keys)
        table = torch.randperm(pages).view(-1, WIDTH).int()
        rows = torch.arange(WIDTH * PAGE)
        slots = table.long()[:, rows // PAGE] * PAGE + rows % PAGE
        self.places = (slots[..., None] * ratio + torch.arange(ratio)).flatten(1).int()  # of each token
        self.ratio, self.table, self.slots = ratio, table[REQUESTS], slots[REQUESTS]
        n = len(REQUESTS)
        self.q = torch.randint(-1, 2, (n, HEADS, 128)).bfloat16()
        self.weights = (torch.randint(0, 2, (n, HEADS)) * 2 - 1).bfloat16()
        self.positions = torch.tensor(POSITIONS[ratio])
        self.lengths = (self.positions + 1) // ratio

    def inputs(self):
        from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
        from sglang.srt.layers.attention.dsv4.v41_indexer.types import DecodeInputs

        indexer = SimpleNamespace(
            queries=lambda q_lora, freqs: self.q, head_weights=lambda x: self.weights, index_topk=TOPK
        )
        metadata = PagedIndexerMetadata(
            256, PAGE, self.table, self.lengths.int().clamp_min(1), use_topk_v2=False, compress_ratio=self.ratio
        )
        return DecodeInputs(
            indexer=indexer, layer_id=0, compress_ratio=self.ratio, freqs_cis=torch.zeros(1024, 1), x=torch.zeros(1),
            q_lora=torch.zeros(1), positions=self.positions, req_rows=torch.tensor(REQUESTS), paged_metadata=metadata,
            is_verify=False, out_page_indices=torch.full((len(REQUESTS), TOPK), -1, dtype=torch.int32),
        )  # fmt: skip

    def lists(self, way) -> tuple:
        """(the slots that it writes, what it returns)."""
        inputs = self.inputs()
        published = way(inputs)
        return inputs.out_page_indices, published

    def taken(self, scores, lists) -> list:
        """The scores of what was chosen, best first: lists may differ among equal ones."""
        found = []
        for n, count in enumerate(self.lengths.tolist()):
            chosen = lists[n][lists[n] >= 0].long()
            assert len(chosen.unique()) == len(chosen)
            here = torch.isin(self.slots[n, :count], chosen)
            assert int(here.sum()) == len(chosen), "a row that the query does not see"
            found.append(sorted(scores[n, :count][here].tolist(), reverse=True))
        return found

    def best(self, scores, blocks) -> list:
        """The best scores of the kept blocks but the last one that a query sees, which is always kept."""
        found = []
        for n, count in enumerate(self.lengths.tolist()):
            most = [float(x.max()) for x in scores[n, :count].split(8) if count]
            kept = [b for b in blocks[n].tolist() if b >= 0]
            assert not count or len(most) - 1 in kept
            found.append([len(kept), *sorted(most[b] for b in kept if b != len(most) - 1)])
        return found


if __name__ == "__main__":
    main(sys.argv[1])
