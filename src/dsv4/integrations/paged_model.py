"""DeepSeek-V4 of transformers with dsv4's caches: several requests at once, prefill in chunks beside decode.

    from dsv4.integrations.paged_model import PagedModel
    served = PagedModel(model, tokens=100_000, rows="fp8")
    logits = served.step({"a": prompt_a, "b": prompt_b})      # prompts of any lengths
    logits = served.step({"a": [7], "c": prompt_c})           # a decodes, c begins, b waits
    served.drop("b")

The model's weights, norms, projections and experts are used as they are; every attention layer is compress, index_topk
and one v4_attention call for all tokens of the step, over pages of rows that belong to the requests (paging.py).
The tokens of a step are laid end to end, so the requests need not be at the same place and nothing is padded.

A request gives the logits that it would give alone and in one piece, up to rounding: what a token sees depends on its
own request alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.caches import HEAD_DIM, ROPE
from dsv4.compressor import CompressState, compress
from dsv4.indexer import index_topk
from dsv4.integrations import paging
from dsv4.integrations.transformers import note_layers
from dsv4.v4 import v4_attention

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


class PagedModel:
    """A DeepseekV4ForCausalLM on one device, with room for so many requests and tokens.

    tokens       of all requests together
    requests     at a time
    chunk        tokens in one step
    context      tokens of one request; default: as many as there are
    rows         "model": rows in the dtype of the model; "fp8": :class:`dsv4.Fp8Cache`, head dim 512 (the indexer's
                 keys stay in the model's dtype)
    page_tokens  tokens that a page stands for, a multiple of both compression ratios
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens: int = 65536,
        requests: int = 8,
        chunk: int = 2048,
        context: int | None = None,
        rows: str = "model",
        page_tokens: int = 256,
        window_page: int = 64,
        backend: str = "auto",
    ):
        note_layers()
        layers = _layers(model)
        config = model.config
        for name, size in dict(
            tokens=tokens, requests=requests, chunk=chunk, page_tokens=page_tokens, window_page=window_page
        ).items():
            checks.at_least(1, name, size)
        for kind, rate in config.compress_rates.items():
            if page_tokens % rate:
                checks.fail("page_tokens", page_tokens, f"a multiple of {rate}, the ratio of {kind}")
        checks.one_of("rows", rows, ("model", "fp8"))
        if rows == "fp8" and (config.head_dim, config.qk_rope_head_dim) != (HEAD_DIM, ROPE):
            came = f"'fp8' with head dim {config.head_dim} and {config.qk_rope_head_dim} rotated dims"
            checks.fail("rows", came, f"'fp8' with head dim {HEAD_DIM} and {ROPE} rotated dims")
        checks.head_dim("model.config.head_dim", config.head_dim)
        self.backend = checks.backend(backend)
        self.model, self.chunk, self.limit = model, chunk, requests
        self.page_tokens, self.window_page, self.window = page_tokens, window_page, config.sliding_window
        self.device = layers[0].sinks.device
        if any(layer.sinks.device != self.device for layer in layers):
            checks.fail("model", "a model on several devices", "a model on one device")
        pages = -(-tokens // page_tokens) + requests  # the last page of a request may be part full
        each = -(-(self.window - 1) // window_page) + 1  # pages that a window touches
        window_pages = requests * (each + 1) + -(-chunk // window_page)
        self.context = min(pages * page_tokens, config.max_position_embeddings)
        if context is not None:
            self.context = min(self.context, checks.at_least(1, "context", context))
        self.token_pages, self.window_pages = paging.Pages(pages), paging.Pages(window_pages)
        self.requests: dict[Hashable, paging.Request] = {}
        dtype, fp8 = layers[0].kv_proj.weight.dtype, rows == "fp8"
        self.pools: list[dict[str, Any]] = []
        for layer in layers:
            pool = {"window": paging.pool(window_pages, window_page, layer.head_dim, fp8, dtype, self.device)}
            if layer.compressor is not None:
                count = page_tokens // layer.compressor.compress_rate
                pool["compressed"] = paging.pool(pages, count, layer.head_dim, fp8, dtype, self.device)
                if layer.layer_type == CSA:
                    width = layer.compressor.indexer.head_dim
                    pool["index"] = paging.pool(pages, count, width, False, dtype, self.device)
            self.pools.append(pool)
        self.tables = {kind: _rope_table(model, kind, self.context) for kind in ("main", "compress")}

    @torch.no_grad()
    def step(
        self, new: Mapping[Hashable, Sequence[int] | Tensor], *, all_logits: bool = False
    ) -> dict[Hashable, Tensor]:
        """Feed the next tokens of some requests -> for each the logits [vocabulary] that follow its last new token.

        A name that is not known yet begins a request. all_logits: [new tokens, vocabulary] of each. When it raises,
        every request is where it was.
        """
        if not isinstance(new, Mapping):
            checks.fail("new", checks.describe(new), "a mapping of names to tokens")
        checks.flag("all_logits", all_logits)
        ids = {name: self._ids(f"tokens of {name!r}", tokens) for name, tokens in new.items()}
        requests = self._room(ids)
        if not ids:
            return {}
        counts = [len(x) for x in ids.values()]
        held = [(len(request.pages), len(request.window)) for request in requests]
        try:
            for request, count in zip(requests, counts):
                tokens, window = request.needs(count, self.page_tokens, self.window_page)
                request.pages += self.token_pages.take(tokens)
                request.window += self.window_pages.take(window)
            batch = Batch(self, requests, counts)
            ends = batch.starts[1:].long() - 1
            logits = self.model(
                torch.cat(list(ids.values()))[None],
                position_ids=batch.positions[None],
                past_key_values=batch,
                attention_mask={"sliding_attention": None},  # made here, not by the model
                use_cache=True,
                logits_to_keep=0 if all_logits else ends,
            ).logits[0]
        except BaseException:
            for request, (tokens, window) in zip(requests, held):
                self.token_pages.give(request.pages[tokens:])
                self.window_pages.give(request.window[window:])
                del request.pages[tokens:], request.window[window:]
            raise
        for name, request, count, states in zip(ids, requests, counts, batch.states):
            self.requests[name] = request
            request.tokens += count
            request.states.update(states)
            self.window_pages.give(request.behind(self.window, self.window_page))
        return dict(zip(ids, logits.split(counts) if all_logits else logits))

    def drop(self, name: Hashable) -> None:
        """The request is over; its pages are free."""
        if not isinstance(name, Hashable) or name not in self.requests:
            checks.fail("name", checks.describe(name), "the name of a request")
        request = self.requests.pop(name)
        self.token_pages.give(request.pages)
        self.window_pages.give(request.window)

    def generate(
        self, prompts: Sequence[Sequence[int] | Tensor], new_tokens: int, *, stop: int | None = None
    ) -> list[list[int]]:
        """Greedy: the next new_tokens tokens of each prompt, or as many as it takes to the token ``stop``.

        Prompts come in as room allows, beside those that decode: one for which there are pages to its end.
        """
        checks.at_least(1, "new_tokens", new_tokens)
        if stop is not None:
            checks.at_least(0, "stop", stop, "None or a token number")
        if not isinstance(prompts, Sequence) and not (checks.is_tensor(prompts) and prompts.ndim == 2):
            checks.fail("prompts", checks.describe(prompts), "a list of prompts")
        left = {object(): self._ids(f"prompts[{n}]", x).tolist() for n, x in enumerate(prompts)}
        ends = {}  # tokens of each in the end; nobody sees the last one
        for n, (name, prompt) in enumerate(left.items()):
            ends[name] = len(prompt) + new_tokens - 1
            if ends[name] > self.context:
                came = f"{len(prompt)} tokens, and {new_tokens} new ones"
                checks.fail(f"prompts[{n}]", came, f"at most {self.context + 1} together in a request")
        said: dict[object, list[int]] = {name: [] for name in left}
        try:
            while left:
                feed: dict[Hashable, list[int]] = {}
                room = self.chunk
                spare = len(self.token_pages.free) - sum(
                    self._pages(ends[name]) - len(self.requests[name].pages) for name in left.keys() & self.requests
                )
                for name in sorted(left, key=lambda name: len(left[name])):  # those that decode first
                    if not room:
                        break
                    if name not in self.requests:
                        pages = self._pages(ends[name])
                        if pages > spare or len(self.requests.keys() | feed.keys()) == self.limit:
                            continue
                        spare -= pages
                    feed[name] = left[name][:room]
                    room -= len(feed[name])
                if not feed:
                    checks.fail("prompts", "no place for one", "fewer requests of others; drop those that are over")
                for name, logits in self.step(feed).items():
                    left[name] = left[name][len(feed[name]) :]
                    if not left[name]:  # the prompt is in
                        left[name] = [int(logits.argmax())]
                        said[name] += left[name]
                        if len(said[name]) == new_tokens or left[name] == [stop]:
                            self.drop(name)
                            del left[name]
        finally:
            for name in left.keys() & self.requests.keys():
                self.drop(name)
        return list(said.values())

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _ids(self, name: str, x: Sequence[int] | Tensor) -> Tensor:
        accepted = "one or more token numbers"
        try:
            ids = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError):
            checks.fail(name, checks.describe(x), accepted)
        if not checks.is_tensor(ids) or ids.ndim != 1 or not len(ids) or ids.dtype not in (torch.int32, torch.int64):
            checks.fail(name, checks.describe(x), accepted)
        if checks.values_checked(ids):
            checks.in_range(name, ids, 0, self.model.config.vocab_size - 1)
        return ids.to(self.device).long()

    def _room(self, ids: Mapping[Hashable, Tensor]) -> list[paging.Request]:
        """The requests of a step, if there is room for it; else ValueError."""
        total = sum(map(len, ids.values()))
        if total > self.chunk:
            checks.fail("new", f"{total} tokens", f"at most {self.chunk} in a step, the chunk of this PagedModel")
        if len(self.requests.keys() | ids.keys()) > self.limit:
            came = f"{len(ids.keys() - self.requests.keys())} requests more than the {len(self.requests)} there are"
            checks.fail("new", came, f"at most {self.limit} at a time; drop those that are over")
        found = [self.requests.get(name) or paging.Request() for name in ids]
        missing = -len(self.token_pages.free)
        for (name, new), request in zip(ids.items(), found):
            if request.tokens + len(new) > self.context:
                came = f"token {request.tokens + len(new)} of {name!r}"
                checks.fail("new", came, f"at most {self.context} tokens in a request")
            missing += request.needs(len(new), self.page_tokens, self.window_page)[0]
        if missing > 0:
            checks.fail("new", f"tokens that need {missing} pages more than are free", "less, or drop a request")
        return found


class Batch:
    """The tokens of one step. transformers takes it for its cache, and hands it to every attention layer."""

    def __init__(self, owner: PagedModel, requests: list[paging.Request], counts: list[int]):
        self.owner, self.requests, device = owner, requests, owner.device
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        self.slices = [slice(*pair) for pair in zip(starts, starts[1:])]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        begins = [request.tokens for request in requests]
        self.positions = torch.cat(
            [torch.arange(begin, begin + count, device=device) for begin, count in zip(begins, counts)]
        )
        self.ends = [begin + count for begin, count in zip(begins, counts)]
        self.states: list[dict[Hashable, CompressState]] = [{} for _ in requests]
        self.table = paging.table([request.pages for request in requests], device)
        # Window rows, as numbers of the pool: of each token, and of the window up to it.
        page, line = owner.window_page, paging.table([request.window for request in requests], device)
        of = torch.repeat_interleave(torch.arange(len(counts), device=device), torch.tensor(counts, device=device))
        first = torch.tensor([request.first for request in requests], device=device)[of, None]
        seen = self.positions[:, None] - torch.arange(owner.window, device=device)  # [N, window]
        place = seen.clamp_min(0) - first * page
        rows = line[of[:, None], (place // page).clamp_min(0)] * page + place % page
        self.window_rows = torch.where(seen >= 0, rows, -1).int()
        self.window_slots = rows[:, 0].long()

    def dsv4_attention(self, layer: Any, hidden: Tensor) -> Tensor:
        """DeepseekV4Attention.forward: [1, N, hidden] -> [1, N, hidden]."""
        x, pools = hidden[0], self.owner.pools[layer.layer_idx]
        cos_sin = self.owner.tables[layer.rope_layer_type]
        n = x.shape[0]
        low = layer.q_a_norm(layer.q_a_proj(x))
        q = _rope(layer.q_b_norm(layer.q_b_proj(low).view(n, layer.num_heads, -1)), cos_sin, self.positions)
        row = _rope(layer.kv_norm(layer.kv_proj(x)), cos_sin, self.positions)
        paging.write(pools["window"], self.window_slots, row)
        options: dict[str, Any] = {}
        if layer.compressor is not None:
            rate = layer.compressor.compress_rate
            self._compress(layer, layer.compressor, x, "compressed", cos_sin)
            if layer.layer_type == CSA:
                self._compress(layer, layer.compressor.indexer, x, "index", cos_sin)
                options["compressed_indices"] = self._choose(layer.compressor.indexer, x, low, pools["index"], cos_sin)
            else:
                options["compressed_block_table"] = self.table
                options["compressed_lengths"] = ((self.positions + 1) // rate).int()
                options["request_starts"] = self.starts
            options["compressed"] = pools["compressed"]
        out = v4_attention(
            q, pools["window"], self.window_rows, sink=layer.sinks.float(), softmax_scale=layer.scaling,
            inverse_rope=(cos_sin, self.positions), backend=self.owner.backend, **options,
        )  # fmt: skip
        grouped = layer.o_a_proj(out.reshape(1, n, layer.config.o_groups, -1)).flatten(2)
        return layer.o_b_proj(grouped)

    def _compress(self, layer: Any, part: Any, x: Tensor, name: str, cos_sin: Tensor) -> None:
        """The rows that these tokens finish, into the pool; the states stay here until the step has succeeded."""
        kv, gate = part.kv_proj(x), part.gate_proj(x)
        key, rate = (layer.layer_idx, name), part.compress_rate
        for r, (request, some) in enumerate(zip(self.requests, self.slices)):
            rows, self.states[r][key] = compress(
                kv[some], gate[some], part.position_bias, part.kv_norm.weight, cos_sin=cos_sin,
                state=request.states.get(key), eps=part.kv_norm.variance_epsilon,
            )  # fmt: skip
            first = request.tokens // rate
            numbers = torch.arange(first, first + len(rows), device=x.device)
            per_page = self.owner.page_tokens // rate
            target = self.owner.pools[layer.layer_idx][name]
            paging.write(target, paging.slots(self.table[r].long(), numbers, per_page), rows)

    def _choose(self, indexer: Any, x: Tensor, low: Tensor, pool: Tensor, cos_sin: Tensor) -> Tensor:
        """The rows of the compressed pool that each token reads, int32 [N, k]."""
        n, rate = x.shape[0], indexer.compress_rate
        q = _rope(indexer.q_b_proj(low).view(n, indexer.num_heads, -1), cos_sin, self.positions)
        weights = indexer.scorer.weights_proj(x)
        per_page = self.owner.page_tokens // rate
        width = min(indexer.index_topk, max(self.ends) // rate)
        chosen = []
        for r, some in enumerate(self.slices):
            line = self.table[r].long()
            rows = paging.slots(line, torch.arange(self.ends[r] // rate, device=x.device), per_page)
            keys = pool.view(-1, pool.shape[-1])[rows]
            local = index_topk(q[some], keys, weights[some], width, positions=self.positions[some], ratio=rate)
            assert isinstance(local, Tensor)
            there = paging.slots(line, local.clamp_min(0).long(), per_page)
            chosen.append(torch.where(local >= 0, there, -1).int())
        return torch.cat(chosen)


def _rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Turn the interleaved pairs of the last dims of x [N, ..., D]; in fp32, rounded once."""
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions].reshape(-1, *(1,) * (x.ndim - 2), r).chunk(2, -1)
    even, odd = x[..., -r:].float().unflatten(-1, (r // 2, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned.to(x.dtype)], -1)


def _rope_table(model: Any, kind: str, positions: int) -> Tensor:
    """fp32 [positions, r]: the model's own cosines, then its sines."""
    device = model.model.rotary_emb.main_inv_freq.device
    numbers = torch.arange(positions, device=device)[None]
    with torch.no_grad():
        tables = model.model.rotary_emb(torch.zeros(1, device=device), numbers, layer_type=kind)
    return torch.cat(tables, -1)[0].contiguous()


def _layers(model: Any) -> list[Any]:
    from transformers import DeepseekV4ForCausalLM

    if not isinstance(model, DeepseekV4ForCausalLM):
        checks.fail("model", type(model).__name__, "a DeepseekV4ForCausalLM of transformers")
    return [layer.self_attn for layer in model.model.layers]
