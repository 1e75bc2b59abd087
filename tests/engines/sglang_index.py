"""SGLang's own indexer of DeepSeek-V4 compared with dsv4's, on a CPU: python sglang_index.py RESULT.json

SGLang's method is the one that is installed, with its scores and its choice in torch (a switch of SGLang's for GPUs
without DeepGEMM). The backend around it is stubs: pages of keys, metadata, and queries that are there already.
Values are such that every score is exact in bf16, which SGLang's scores in torch go through.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"

import sglang_run  # noqa: F401  stand-ins, before SGLang is imported
import torch

TOPK, HEADS, PAGE = 512, 64, 64
LENGTHS = {"decode": [1, 512, 513, 700, 2000], "extend": [(600, 20), (2100, 60), (3, 3)]}  # extend: (tokens, new)


def main(result: str) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention.dsv4 import indexer as theirs
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dsv4.integrations.sglang import calls, indexer

    runtime_context.get_parallel = lambda: SimpleNamespace(attn_cp_size=1)  # a server publishes it
    found = {}
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        torch.manual_seed(0)
        batch, lengths, requests = steps(mode)
        width, count = -(-int(lengths.max()) // PAGE), requests[-1] + 1
        pages = keys(count * width)
        table = torch.randperm(count * width).view(count, width).int()[torch.tensor(requests)]
        q = torch.randint(-1, 2, (len(lengths), HEADS, 128)).to(torch.float8_e4m3fn)
        weights = (torch.randint(0, 2, (len(lengths), HEADS, 1)) * 2 - 1).float()
        methods = theirs.C4IndexerBackendMixin.forward_c4_indexer, indexer.forward_c4_indexer
        lists = [chosen(method, batch, pages, table, lengths, q, weights) for method in methods]
        found[mode.name] = compared(theirs, q, pages, weights, lengths, table, *lists)
    Path(result).write_text(json.dumps(found | dict(calls=dict(calls))))


def chosen(method, batch, pages, table, lengths, q, weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(slots, in prefill also rows of the request) that the method writes."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    n = len(lengths)
    slots = torch.full((n, TOPK), -1, dtype=torch.int32)
    rows = None if batch.forward_mode.is_decode() else torch.empty_like(slots)
    core = SimpleNamespace(
        positions=torch.zeros(n, dtype=torch.int64), c4_sparse_page_indices=slots, c4_sparse_raw_indices=rows
    )
    index = PagedIndexerMetadata(256, PAGE, table, lengths.clamp_min(1), use_topk_v2=False)
    backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(indexer_metadata=index, core_metadata=core),
        token_to_kv_pool=SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: pages.flatten(1)),
        _forward_prepare_normal=lambda **_: (q, weights),
        _get_nonpaged_indexer_plan=lambda **_: None,
        debug_use_external_c4_sparse_indices=False,
        hisparse_coordinator=None,
        dsa_topk_backend=DSATopKBackend.TORCH,
    )
    x = torch.zeros(n, 1)
    method(backend, x, x, SimpleNamespace(layer_id=0, use_fp4_indexer=False, index_topk=TOPK), batch)
    return slots, rows


def steps(mode) -> tuple[SimpleNamespace, torch.Tensor, list[int]]:
    """(a batch of SGLang, what each query sees, the request of each query)."""
    batch = SimpleNamespace(
        forward_mode=mode,
        _original_forward_mode=None,
        tbo_parent_token_range=None,
        extend_seq_lens=None,
        extend_num_tokens=None,
    )
    if mode.is_decode():
        return batch, torch.tensor(LENGTHS["decode"], dtype=torch.int32), list(range(len(LENGTHS["decode"])))
    new = [n for _, n in LENGTHS["extend"]]
    batch.extend_seq_lens, batch.extend_num_tokens = torch.tensor(new), sum(new)
    lengths = torch.cat([torch.arange(total - n, total) + 1 for total, n in LENGTHS["extend"]]) // 4
    return batch, lengths.int(), [r for r, n in enumerate(new) for _ in range(n)]


def keys(pages: int) -> torch.Tensor:
    """Return pages of 132-byte keys: a few ones and minus ones, with scales that are powers of two."""
    from dsv4 import IndexCache

    values = torch.randint(-1, 2, (pages * PAGE, 128)) * (torch.rand(1, 128) < 0.2)
    cache = IndexCache.pack(values.float(), rows_per_page=PAGE, page_stride=PAGE * 132)
    return cache.page_view()


def compared(theirs, q, pages, weights, lengths, table, wanted, got) -> dict:
    """Lists may differ among equal scores, and in order: the scores of what was chosen may not."""
    scores = theirs.fp8_paged_mqa_logits_torch(
        q[:, None], pages.unsqueeze(2), weights[..., 0], lengths, table, None, table.shape[1] * PAGE, False
    )
    slots = table.long().repeat_interleave(PAGE, 1) * PAGE + torch.arange(table.shape[1] * PAGE) % PAGE
    result = dict(queries=len(q), chosen=int((wanted[0] >= 0).sum()))
    for name, lists in (("theirs", wanted), ("ours", got)):
        rows = rows_of(lists[0], slots)
        taken = scores.gather(1, rows.clamp_min(0)).masked_fill(rows < 0, float("-inf"))
        result[name] = taken.sort(1, descending=True).values.tolist()
        twice = rows.sort(1).values
        result[f"{name} twice"] = int(((twice[:, 1:] == twice[:, :-1]) & (twice[:, 1:] >= 0)).sum())
        result[f"{name} hidden"] = int((rows >= lengths.clamp_min(1)[:, None]).sum())
        if lists[1] is not None:
            result[f"{name} rows agree"] = bool(torch.equal(lists[1].long(), rows))
    return result


def rows_of(lists: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots of the pool [n, K] -> rows of the request; -1 where there is none."""
    order = slots.sort(1)
    at = torch.searchsorted(order.values, lists.long().clamp_min(0)).clamp_max(slots.shape[1] - 1)
    assert torch.equal(order.values.gather(1, at)[lists >= 0], lists[lists >= 0].long()), "a slot of another request"
    return order.indices.gather(1, at).masked_fill(lists < 0, -1)


if __name__ == "__main__":
    main(sys.argv[1])
