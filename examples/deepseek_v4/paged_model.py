"""transformers' DeepSeek-V4 with dsv4's caches: several requests at once, chunked prefill together with decode.

    from deepseek_v4.paged_model import PagedModel
    served = PagedModel(model, tokens=100_000, rows="fp8")
    logits = served.step({"a": prompt_a, "b": prompt_b})      # prompts of any lengths
    logits = served.step({"a": [7], "c": prompt_c})           # a decodes, c begins, b waits
    served.drop("b")

The model's weights, projections and experts are used as they are, with their hooks, and may be changed between steps.
Every attention layer compresses, selects and attends for all tokens of the step at once, over pages of rows that belong
to the requests (step.py, paging.py). The tokens of a step are packed end to end, so requests may be at different
positions and nothing is padded.

A step with one token per request is the same work whatever the lengths. On a GPU it is captured in a CUDA graph, one
for each power of two of requests, and replayed.

Up to rounding, a request gives the same logits as it would alone and in one piece: what a token sees depends only on
its own request.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseek_v4 import paging
from deepseek_v4.serving import Serving
from deepseek_v4.step import CSA, HCA, Step
from dsv4 import elementwise as parts
from dsv4.caches.formats import FP8_584
from dsv4.integrations.transformers import note_layers
from dsv4.runtime import checks
from dsv4.runtime.plan import plan
from dsv4.v4.api import v4_attention


class PagedModel:
    """A DeepseekV4ForCausalLM on one device, with room for a given number of requests and tokens.

    tokens       of all requests together
    requests     at a time
    chunk        tokens in one step
    context      tokens of one request; default: as many as the pages and the model's max_position_embeddings allow
    rows         "model": rows in the dtype of the model; "fp8": :class:`dsv4.Fp8Cache`, head dim 512 (the indexer's
                 keys stay in the model's dtype)
    page_tokens  tokens that a page stands for, a multiple of both compression ratios
    graphs       run decode steps as CUDA graphs; default: on a GPU, unless the model's experts_implementation is
                 "eager", which reads shapes back from the device
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
        graphs: bool | None = None,
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
        if rows == "fp8" and (config.head_dim, config.qk_rope_head_dim) != (
            FP8_584.values,
            FP8_584.values - FP8_584.coded,
        ):
            came = f"'fp8' with head dim {config.head_dim} and {config.qk_rope_head_dim} rotated dims"
            checks.fail(
                "rows", came, f"'fp8' with head dim {FP8_584.values} and {FP8_584.values - FP8_584.coded} rotated dims"
            )
        checks.head_dim("model.config.head_dim", config.head_dim)
        self.backend = checks.backend(backend)
        self.model, self.chunk, self.limit, self.vocabulary = model, chunk, requests, config.vocab_size
        self.device = layers[0].sinks.device
        if any(layer.sinks.device != self.device for layer in layers):
            checks.fail("model", "a model on several devices", "a model on one device")
        for layer in layers:
            for name, part in layer.named_modules():
                weight = getattr(part, "weight", None)
                if isinstance(weight, Tensor) and weight.dtype not in checks.FLOATS:
                    came = f"{name}.weight of layer {layer.layer_idx} in {str(weight.dtype).removeprefix('torch.')}"
                    checks.fail("model", came, "attention weights in bfloat16, float16 or float32 (dequantize them)")
        self.graphs = _graphs(graphs, self.device, config)
        self.parts = parts.choose(self.backend, self.device)
        pages = -(-tokens // page_tokens) + requests  # the last page of a request may be part full
        self.context = min(pages * page_tokens, config.max_position_embeddings)
        if context is not None:
            self.context = min(self.context, checks.at_least(1, "context", context))
        per_request = -(-self.context // page_tokens)
        window = config.sliding_window
        self.places = paging.Places(requests, pages, page_tokens, per_request, window, window_page, chunk)
        self.requests: dict[Hashable, paging.Request] = {}
        self.ratios = {kind: config.compress_rates[kind] for kind in (CSA, HCA) if kind in config.layer_types}
        self.pools = [self._pools(layer, rows == "fp8") for layer in layers]
        self.tables = {kind: _rope_table(model, kind, self.context) for kind in ("main", "compress")}
        self.modules = [part for part in model.modules() if part._parameters or part._buffers]
        self.decoders: dict[int, Decoder] = {}  # by the number of requests they take
        self.graph_memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _pools(self, layer: Any, fp8: bool) -> dict[str, Any]:
        """Return rows and states of one layer, and what else is kept for it."""
        places, dtype, device = self.places, layer.kv_proj.weight.dtype, self.device
        count = places.window_page_count
        pools: dict[str, Any] = {}
        pools["window"] = paging.pool(count, places.window_page, layer.head_dim, fp8, dtype, device)
        if layer.compressor is not None:
            rate, sparse = layer.compressor.compress_rate, layer.layer_type == CSA
            makers = {"compressed": layer.compressor} | ({"index": layer.compressor.indexer} if sparse else {})
            for name, part in makers.items():
                size = places.page_count, places.page_tokens // rate, part.head_dim
                pools[name] = paging.pool(*size, fp8 and name == "compressed", dtype, device)
                lines, width = (self.limit + 1) * rate * (1 + sparse), part.head_dim * (1 + sparse)
                options = dict(dtype=torch.float32, device=device)
                pools[f"{name} states"] = tuple(torch.zeros(lines, width, **options) for _ in "kg")
        return pools

    @torch.no_grad()
    def step(
        self, new: Mapping[Hashable, Sequence[int] | Tensor], *, all_logits: bool = False
    ) -> dict[Hashable, Tensor]:
        """Run the next tokens of some requests -> for each, the logits [vocabulary] after its last new token.

        A new name begins a request. all_logits: return [new tokens, vocabulary] for each. If it raises, every request
        is as it was before.
        """
        if not isinstance(new, Mapping):
            checks.fail("new", checks.describe(new), "a mapping of names to tokens")
        checks.flag("all_logits", all_logits)
        if not new:
            return {}
        tokens, counts = self._tokens(new)
        logits = self._step(list(new), tokens, counts, all_logits)
        return dict(zip(new, logits.split(counts) if all_logits else logits.unbind()))

    def _tokens(self, new: Mapping[Hashable, Sequence[int] | Tensor]) -> tuple[Tensor, list[int]]:
        """Check and return the tokens of all requests end to end, int64, and how many each has."""
        if all(type(x) is list for x in new.values()):  # the usual thing, all at once
            flat = list(itertools.chain.from_iterable(new.values()))
            counts = [len(x) for x in new.values()]
            if all(counts) and set(map(type, flat)) == {int} and 0 <= min(flat) <= max(flat) < self.vocabulary:
                return torch.tensor(flat, device="cpu"), counts
        ids = [self.token_ids(f"tokens of {name!r}", x) for name, x in new.items()]
        device = next((x.device for x in ids if x.device.type != "cpu"), ids[0].device)
        return torch.cat([x.to(device) for x in ids]), [len(x) for x in ids]

    def _step(self, names: list[Hashable], tokens: Tensor, counts: list[int], all_logits: bool = False) -> Tensor:
        """Return logits [requests or tokens, vocabulary]."""
        self._room(names, counts)
        places = self.places
        requests = [self.requests.get(name) or paging.Request(places.lines.take(1)[0]) for name in names]
        held = [(len(request.pages), len(request.window)) for request in requests]
        try:
            for request, count in zip(requests, counts):
                places.extend(request, count)
            if self.graphs and max(counts) == 1:
                logits = self._decoder(len(requests)).run(tokens, requests)
            else:
                logits = self._run(tokens, requests, counts, all_logits)
        except BaseException:
            for name, request, (pages, window) in zip(names, requests, held):
                if name in self.requests:
                    places.shrink(request, pages, window)
                else:
                    places.leave(request)
            raise
        for name, request, count in zip(names, requests, counts):
            self.requests[name] = request
            request.tokens += count
            places.pass_by(request)
        return logits

    def _run(self, tokens: Tensor, requests: list[paging.Request], counts: list[int], all_logits: bool) -> Tensor:
        """Run any step."""
        places, total = self.places, sum(counts)
        begins = np.array([request.tokens for request in requests])
        ends = begins + counts
        starts = np.concatenate([[0], np.cumsum(counts)])
        lines = np.array([request.line for request in requests])
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(total) - starts[owner] + begins[owner]
        arrays = dict(
            positions=positions, starts=starts, lines=lines, tables=places.tables[lines], windows=places.windows[lines]
        )
        if tokens.device.type == "cpu":
            arrays["ids"] = tokens.numpy()
        for kind, ratio in self.ratios.items():
            ring = ratio * (1 + (kind == CSA))
            rows = ends // ratio - begins // ratio
            arrays[f"{kind} owners"] = whose = np.repeat(np.arange(len(counts)), rows)
            within = np.arange(rows.sum()) - (np.cumsum(rows) - rows)[whose]
            arrays[f"{kind} numbers"] = begins[whose] // ratio + within
            arrays[f"{kind} kept"] = np.flatnonzero(positions >= ends[owner] - ring)
        sent = paging.Upload(self.device, **{name: x.shape for name, x in arrays.items()})
        for name, x in sent.begin().items():
            x[...] = arrays[name]
        sent.send()
        at = sent.device
        made = {
            kind: (at[f"{kind} owners"].long(), at[f"{kind} numbers"].long(), at[f"{kind} kept"].long())
            for kind in self.ratios
        }
        step = Step(self, at["positions"].long(), at["starts"], at["lines"].long(), at["tables"], at["windows"], made)
        ids = at["ids"].long() if "ids" in at else tokens.to(self.device)
        logits = self._forward(ids, step, 0 if all_logits else at["starts"][1:].long() - 1)
        step.commit()
        return logits

    def _forward(self, tokens: Tensor, step: Step, keep: int | Tensor) -> Tensor:
        with self.parts.running():
            return self.model(
                tokens[None],
                position_ids=step.positions[None],
                past_key_values=step,
                attention_mask={"sliding_attention": None},  # made by the step, not by the model
                use_cache=True,
                logits_to_keep=keep,
            ).logits[0]

    def _decoder(self, requests: int) -> Decoder:
        size = min(1 << (requests - 1).bit_length(), self.limit)
        if size not in self.decoders:
            self.decoders[size] = Decoder(self, size)
        return self.decoders[size]

    def drop(self, name: Hashable) -> None:
        """End the request and free its pages."""
        if not isinstance(name, Hashable) or name not in self.requests:
            checks.fail("name", checks.describe(name), "the name of a request")
        self.places.leave(self.requests.pop(name))

    def generate(
        self, prompts: Sequence[Sequence[int] | Tensor], new_tokens: int, *, stop: int | None = None
    ) -> list[list[int]]:
        """Decode greedily: the next new_tokens tokens of each prompt, or fewer if the token ``stop`` comes first.

        Prompts start when there is room, together with requests that are decoding (serving.py).
        """
        if not isinstance(prompts, Sequence) and not (checks.is_tensor(prompts) and prompts.ndim == 2):
            checks.fail("prompts", checks.describe(prompts), "a list of prompts")
        serving, jobs = Serving(self), []
        for n, prompt in enumerate(prompts):
            jobs.append(serving.submit(prompt, new_tokens, stop=stop, name=object(), argument=f"prompts[{n}]"))
        try:
            while serving:
                serving.step()
                if not serving.fed:
                    checks.fail("prompts", "no room for a request", "fewer other requests; drop finished ones")
        finally:
            for job in list(serving.jobs):
                serving.cancel(job)
        return [job.said for job in jobs]

    @torch.no_grad()
    def next_tokens(self, new: Mapping[Hashable, Sequence[int] | Tensor]) -> list[int]:
        """Run a step -> the most likely next token of each request."""
        return self._step(list(new), *self._tokens(new)).argmax(-1).tolist()

    def pages_for(self, tokens: int) -> int:
        """Return the token pages of a request with this many tokens."""
        return -(-tokens // self.places.page_tokens)

    def token_ids(self, name: str, x: Sequence[int] | Tensor) -> Tensor:
        """Check token numbers; return them as int64 [n] on their device."""
        accepted = "one or more token numbers"
        try:
            ids = x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            checks.fail(name, checks.describe(x), accepted)
        if not checks.is_tensor(ids) or ids.ndim != 1 or not len(ids) or ids.dtype not in (torch.int32, torch.int64):
            checks.fail(name, checks.describe(x), accepted)
        if checks.values_checked(ids):
            checks.in_range(name, ids, 0, self.vocabulary - 1)
        return ids.long()

    def _room(self, names: list[Hashable], counts: list[int]) -> None:
        """Raise a ValueError unless there is room for this many tokens."""
        if sum(counts) > self.chunk:
            came = f"{sum(counts)} tokens"
            checks.fail("new", came, f"at most {self.chunk} in a step, the chunk of this PagedModel")
        begun = sum(name not in self.requests for name in names)
        if len(self.requests) + begun > self.limit:
            came = f"{begun} requests more than the {len(self.requests)} there are"
            checks.fail("new", came, f"at most {self.limit} at a time; drop finished ones")
        missing = -len(self.places.pages.free)
        for name, count in zip(names, counts):
            request = self.requests.get(name)
            end = count + (request.tokens if request else 0)
            if end > self.context:
                checks.fail("new", f"token {end} of {name!r}", f"at most {self.context} tokens in a request")
            missing += self.pages_for(end) - (len(request.pages) if request else 0)
        if missing > 0:
            came = f"tokens that need {missing} more pages than are free"
            checks.fail("new", came, "fewer tokens, or drop a request")


class Decoder:
    """A step of one token for each of up to ``size`` requests, as a CUDA graph. Places that are not taken feed token 0
    to the line and the pages that no request has.
    """

    def __init__(self, owner: PagedModel, size: int):
        self.owner, self.size, places, device = owner, size, owner.places, owner.device
        tables, windows = (size, places.tables.shape[1]), (size, places.windows.shape[1])
        self.sent = paging.Upload(device, ids=(size,), positions=(size,), lines=(size,), tables=tables, windows=windows)
        config = owner.model.config
        widths = {"sliding_attention": 0, CSA: config.index_topk}
        if HCA in owner.ratios:  # as many as the pages of the table hold
            widths[HCA] = tables[1] * (places.page_tokens // owner.ratios[HCA])
        self.plans = {
            kind: plan(v4_attention, batch=size, q_heads=config.num_attention_heads, kv_heads=1,
                       head_dim=config.head_dim, max_seqlen_k=places.window + width, device=device, deterministic=False)
            for kind, width in widths.items()
        }  # fmt: skip
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.weights: list[int] = []

    def _weights(self) -> list[int]:
        """Return where the model's weights are: a graph reads them there, whatever the model has got since it was
        captured.
        """
        return [
            x.data_ptr()
            for module in self.owner.modules
            for x in (*module._parameters.values(), *module._buffers.values())
            if x is not None
        ]

    def run(self, tokens: Tensor, requests: list[paging.Request]) -> Tensor:
        """Return logits [requests, vocabulary]."""
        count, places, host = len(requests), self.owner.places, self.sent.begin()
        lines = np.full(self.size, self.owner.limit)
        lines[:count] = [request.line for request in requests]
        host["positions"][:count] = [request.tokens for request in requests]
        host["positions"][count:] = 0
        host["lines"][:], host["tables"][:], host["windows"][:] = lines, places.tables[lines], places.windows[lines]
        host["ids"][count:] = 0
        if tokens.device.type == "cpu":
            host["ids"][:count] = tokens.numpy()
        self.sent.send()
        if tokens.device.type != "cpu":
            self.sent.device["ids"][:count] = tokens
        if self.owner.device.type == "cpu":
            return self._logits()[:count]
        if self.graph is None or self.weights != self._weights():
            self._capture()
        assert self.graph is not None and self.logits is not None
        self.graph.replay()
        return self.logits[:count].clone()

    def step(self) -> Step:
        """Return the step for what was sent last."""
        at = self.sent.device
        return Step(self.owner, at["positions"].long(), self.starts, at["lines"].long(), at["tables"], at["windows"],
                    plans=self.plans)  # fmt: skip

    def _logits(self) -> Tensor:
        return self.owner._forward(self.sent.device["ids"].long(), self.step(), 0)

    def _capture(self) -> None:
        """Capture a graph after a run without one, which compiles the kernels. Repeating the step changes nothing:
        it writes the same rows, and reads of the states only tokens before it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._logits()
        torch.cuda.current_stream().wait_stream(stream)
        self.weights = self._weights()
        # The graph before it goes when this one is there: a pool that no graph uses no longer exists.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.owner.graph_memory):
            self.logits = self._logits()
        self.graph = graph


def _graphs(graphs: bool | None, device: torch.device, config: Any) -> bool:
    fixed = getattr(config, "_experts_implementation", None) != "eager"
    if graphs is None:
        return fixed and device.type == "cuda"
    if checks.flag("graphs", graphs) and device.type == "cuda" and not fixed:
        checks.fail("graphs", "True for a model with experts_implementation='eager'", "a model with another one")
    return graphs


def _rope_table(model: Any, kind: str, positions: int) -> Tensor:
    """Return fp32 [positions, r]: the model's own cosines, then its sines."""
    device = model.model.rotary_emb.main_inv_freq.device
    numbers = torch.arange(positions, device=device)[None]
    with torch.no_grad():
        like = torch.zeros(1, dtype=torch.float32, device=device)
        tables = model.model.rotary_emb(like, numbers, layer_type=kind)
    return torch.cat(tables, -1)[0].contiguous()


def _layers(model: Any) -> list[Any]:
    from transformers import DeepseekV4ForCausalLM

    if not isinstance(model, DeepseekV4ForCausalLM):
        checks.fail("model", type(model).__name__, "a DeepseekV4ForCausalLM of transformers")
    return [layer.self_attn for layer in model.model.layers]
