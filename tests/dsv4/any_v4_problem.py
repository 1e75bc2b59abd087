"""Random V4 problems, drawn from a seed: pools of every kind and stride, lists with holes, lengths, block tables,
requests, sinks, angles, scales, splits, NaN in every row that no query names; every fifth in fp16. `DSV4_SEED` draws
others."""

import os
import random
from dataclasses import replace

import torch
from torch import Tensor

import dsv4
from dsv4 import reference, suites
from dsv4.suites.calls import Call

SEED = int(os.environ.get("DSV4_SEED", "0"))
NAN, INF = float("nan"), float("inf")


class Problem:
    """One call, drawn from a seed."""

    def __init__(self, seed: int, where: suites.Where):
        self.r, self.where = random.Random(seed), where
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float16 if seed % 5 == 4 else torch.bfloat16
        pick = self.r.choice
        self.queries, self.heads = pick((1, 2, 3, 5)), pick((1, 3, 8, 64, 65, 128))
        wide = torch.full((self.queries, self.heads, 512 + pick((0, 0, 8, 3))), NAN, dtype=self.dtype)
        wide[..., :512] = self.normal(self.queries, self.heads, 512)
        self.args: dict = dict(q=wide.to(where.device)[..., :512])
        self.fp8 = pick((True, False))
        self.listed("window", pick((0, 1, 63, 64, 65, 128, 200)))
        kind = pick((None, "list", "table"))
        if kind == "list":
            self.listed("compressed", pick((0, 1, 64, 130)))
        elif kind == "table":
            self.table()
        self.args["softmax_scale"] = pick((None, None, 0.0, -0.05, 0.3))
        if pick((True, False)):
            sink = torch.randn(self.heads, generator=self.generator) * 3
            sink[:: pick((1, 2, 3))] = pick((INF, -INF, 0.0))
            self.args["sink"] = sink.to(where.device)
        if width := pick((None, 2, 64, 300, 512)):
            positions = self.integers(0, 9, self.queries).to(pick((torch.int32, torch.int64)))
            self.args["inverse_rope"] = (reference.rope_table(9, width).to(where.device), positions.to(where.device))
        self.call = Call("v4_attention", self.args, out_pad=pick((0, 8, 3)), extra=self.extra())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def pool(self, pages: int, page_rows: int, used: Tensor, paged: bool):
        """Rows that are used are finite, the others NaN. Now and then the pools are of two kinds; fp16 has one."""
        fp8 = self.fp8 if self.r.random() < 0.8 else not self.fp8
        rows = self.normal(len(used), 512)
        if fp8 and self.dtype == torch.bfloat16:
            stride = page_rows * 584 + self.r.choice((-1, -1, 0, 8, 2, 1))
            stride = -1 if stride < page_rows * 584 else stride
            cache = dsv4.Fp8Cache(torch.zeros(0, dtype=torch.uint8), page_rows, stride)
            storage = torch.full((pages * cache.page_stride,), 255, dtype=torch.uint8)
            cache = replace(cache, storage=storage)
            cache.write(used, rows)
            return replace(cache, storage=storage.to(self.where.device))
        row = 512 + self.r.choice((0, 0, 64, 3))
        wide = torch.full((pages, page_rows * row + self.r.choice((0, 0, 512, 640, 5))), NAN, dtype=self.dtype)

        def view(x: Tensor) -> Tensor:
            return x[:, : page_rows * row].unflatten(1, (page_rows, row))[..., :512]

        view(wide)[used.long() // page_rows, used.long() % page_rows] = rows
        found = view(wide.to(self.where.device))
        return found if paged or page_rows > 1 else found[:, 0]

    def listed(self, name: str, width: int) -> None:
        page_rows = self.r.choice((1, 2, 3, 64))
        pages = self.r.choice((1, 2, 40))
        numbers = self.integers(0, pages * page_rows, self.queries, width)
        numbers[self.integers(0, 4, self.queries, width) == 0] = -1
        seen = numbers.clone()
        if self.r.choice((True, False)):
            lengths = self.integers(0, width + 1, self.queries)
            self.args[f"{name}_lengths"] = lengths.to(self.where.device)
            seen[torch.arange(width) >= lengths[:, None]] = -1
        used = seen[seen >= 0].unique()
        self.args[name] = self.pool(pages, page_rows, used, paged=False)
        self.args[f"{name}_indices"] = numbers.to(self.where.device)

    def table(self) -> None:
        page_rows, pages, width = self.r.choice((1, 2, 3, 64)), self.r.choice((2, 30)), self.r.choice((1, 3, 40))
        requests = self.r.choice((1, 2, 4))
        cuts = sorted(self.r.randint(0, self.queries) for _ in range(requests - 1))
        starts = torch.tensor([0, *cuts, self.queries], dtype=torch.int32)
        table = self.integers(0, pages, requests, width)
        lengths = self.integers(0, min(width * page_rows, 150) + 1, self.queries)
        owner = torch.searchsorted(starts, torch.arange(self.queries, dtype=torch.int32), right=True) - 1
        used = [torch.empty(0, dtype=torch.int32)]
        for n in range(self.queries):
            j = torch.arange(int(lengths[n]))
            used.append(table[owner[n], j // page_rows] * page_rows + (j % page_rows).int())
        self.args |= dict(
            compressed=self.pool(pages, page_rows, torch.cat(used).unique(), paged=True),
            compressed_block_table=table.to(self.where.device),
            compressed_lengths=lengths.to(self.where.device),
            request_starts=starts.to(self.where.device),
        )

    def extra(self) -> dict:
        kind = self.r.choice((None, None, "deterministic", "splits"))
        if kind == "deterministic":
            return dict(deterministic=True)
        if kind is None:
            return {}
        made = dsv4.plan(dsv4.v4_attention, batch=self.queries, q_heads=self.heads, kv_heads=1, head_dim=512,
                         max_seqlen_k=5000, device=self.where.device)  # fmt: skip
        n = self.r.choice((2, 3, 9))
        room = torch.full((n * made.rows * 513,), NAN, device=self.where.device)
        return dict(plan=replace(made, num_splits=n, scratch=room))

    def __str__(self) -> str:
        return str({key: (list(x.shape), x.stride()) if isinstance(x, Tensor) else x for key, x in self.args.items()})

    def wrong(self) -> list[str]:
        return [str(check) for check in self.call.check(self.call.run(self.where)) if not check.ok]
