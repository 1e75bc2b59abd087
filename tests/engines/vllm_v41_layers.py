"""Layers of DeepSeek-V4.1 in vLLM on a CPU, in a process of its own: python vllm_v41_layers.py KIND RESULT.json

vLLM has no V4.1 for CPUs, so no engine runs. The attention layers, their constructors, specifications of pages,
metadata builders and Triton kernels (in softsm, which plays a Hopper GPU) are vLLM's; attention, indexer and the
writers of rows that the plug-in brings are dsv4's. Between the input and the output projections all is real: rows and
keys are written to pages, lists are chosen, prompts are gathered, tokens are decoded.

KIND: hopper (rows of 584 bytes), fp8 (528 bytes in both caches), own (528 and 288 bytes); vllm: without the plug-in,
vLLM's own layers on rows of 584 bytes, their CUDA kernels in torch (vllm_cuda_kernels.py).
RESULT: {"calls": {of dsv4}, "kernels": {of the stand-ins}, "pages": {layer: [bytes of a row, rows, alignment]},
"steps": how many were compared}.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
sys.path.append(str(Path(__file__).parents[1] / "dsv4"))

import torch
import triton.backends
from agreement import assert_right

import softsm
from dsv4 import reference

KINDS = {"vllm": ("", "auto"), "hopper": ("", "auto"), "fp8": ("v41", "fp8_ds_mla"), "own": ("v41", "auto")}
RATIOS, SOURCES, INDEXERS, TWO_LEVELS = [0, 2, 2, 1, 1, 1], [1, 3], [1, 3, 5], 3
HEADS, LORA, BLOCK, WINDOW_PAGE, TOPK, BLOCKS = 4, 64, 64, 32, 512, 48
STEPS = [[(0, 530), (1, 3)], [(0, 1), (1, 20)], [(0, 1), (1, 1)]]  # (request, its new tokens); decodes come first


def configuration(dtype: str):
    from vllm.config import VllmConfig
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    config = VllmConfig()
    config.cache_config.cache_dtype, config.cache_config.block_size = dtype, BLOCK
    config.kernel_config.enable_jit_warmup = False
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    hf = DeepseekV41Config(text_config=dict(
        hidden_size=256, num_hidden_layers=len(RATIOS), num_attention_heads=HEADS, q_lora_rank=LORA, o_lora_rank=32,
        o_groups=2, compress_ratios=RATIOS, kv_source_layer_ids=SOURCES, index_source_layer_ids=INDEXERS,
        candidate_source_layer_id=TWO_LEVELS, candidate_topk_blocks=BLOCKS, candidate_block_size=8, head_dim=512,
        qk_rope_head_dim=64, sliding_window=128, rms_norm_eps=1e-20, index_topk=TOPK, index_n_heads=32,
        index_head_dim=128, max_position_embeddings=8192, rope_theta=10000, compress_rope_theta=160000,
        rope_scaling=dict(
            rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
        ),
    ))  # fmt: skip
    config.model_config = SimpleNamespace(
        hf_config=hf,
        hf_text_config=hf,
        max_model_len=1024,
        dtype=torch.bfloat16,
        architectures=[],
        is_moe=False,
        get_num_attention_heads=lambda parallel: HEADS,
    )
    return config


def built(config, plugin: bool) -> list:
    """The layers, of the class that vLLM's model takes; what they ask a GPU for is answered."""
    from vllm.models.deepseek_v41.nvidia import flashmla, model

    from dsv4.integrations.vllm import choice, install, v41

    if plugin:
        install.on_cuda()
    v41.check_device = choice._check_v41 = lambda *_: None
    torch.cuda.Event = lambda: None
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    flashmla.compute_fp8_einsum_recipe = lambda size: ((1, 128, 128), False)
    flashmla.register_dsv41_o_proj_warmup = lambda layer: None
    lists = torch.full((1024, TOPK), -1, dtype=torch.int32)
    blocks = torch.full((1024, BLOCKS), -1, dtype=torch.int32)
    layers = []
    for n in range(len(RATIOS)):
        layer = model._select_dsv4_attn_cls(config)(config, f"model.layers.{n}.attn", lists, None, blocks)
        for p in layer.parameters():
            p.data = (torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1)).to(p.dtype)
        for module in layer.modules():  # as after loading a checkpoint
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        layers.append(layer)
    return layers


def bind(owner, spec, pages: int) -> list:
    """Pages of this cache, with those of another layer behind each of them -> [bytes of a row, rows, alignment]."""
    rows, width = spec.block_size // (spec.tokens_per_state or 1), spec.state_content_bytes or spec.head_size
    raw = torch.full((pages, spec.page_size_bytes + 576 * 512), 255, dtype=torch.uint8)
    assert spec.page_size_bytes >= rows * width and spec.page_size_bytes % spec.alignment == 0
    owner.bind_kv_cache(raw[:, : rows * width].unflatten(1, (1, rows, width)))
    return [width, rows, spec.alignment]


class Engine:
    """Pages, block tables and metadata of two requests."""

    def __init__(self, config, layers):
        self.config, self.layers, self.pages, self.builders = config, layers, {}, {}
        self.seen, self.history = [0, 0], [[[] for _ in layers] for _ in range(2)]
        self.tables = {
            BLOCK: torch.randperm(24).view(2, 12).int() + 1,
            WINDOW_PAGE: torch.randperm(48).view(2, 24).int() + 1,
            "ring": torch.tensor([[2], [1]]).int(),
        }
        for layer in layers:
            self.add(layer.swa_cache_layer, WINDOW_PAGE, 49)
            if layer.is_kv_source:
                self.add(layer, BLOCK, 25)
                self.add(layer.indexer.k_cache, BLOCK, 25)
                if layer.compressor.state_cache is not None:
                    cache = layer.compressor.state_cache
                    spec = cache.get_kv_cache_spec(config)
                    cache.bind_kv_cache(torch.zeros(3, 1, spec.block_size, spec.head_size))
                    self.builders[cache.prefix] = self.builder(cache, spec), "ring"

    def add(self, owner, table, pages) -> None:
        spec = owner.get_kv_cache_spec(self.config)
        self.pages[owner.prefix] = bind(owner, spec, pages)
        self.builders[owner.prefix] = self.builder(owner, spec), table

    def builder(self, owner, spec):
        cls = owner.get_attn_backend().get_builder_cls()
        wide = dict(block_table_width=12) if "Indexer" in cls.__name__ else {}
        return cls(spec, [owner.prefix], self.config, torch.device("cpu"), **wide)

    def metadata(self, step) -> tuple:
        """(metadata by prefix, positions, requests) of new tokens."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = [count for _, count in step]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([self.seen[r] + count for r, count in step]).int()
        requests = torch.cat([torch.full((count,), r) for r, count in step])
        positions = torch.cat([torch.arange(count) + self.seen[r] for r, count in step])
        made = {}
        for prefix, (builder, key) in self.builders.items():
            table = self.tables[key][[r for r, _ in step]]
            slots = torch.zeros(len(positions), dtype=torch.int64)
            if key != "ring":
                slots = self.tables[key][requests, positions // key].long() * key + positions % key
            common = CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(step),
                num_actual_tokens=len(positions), max_query_len=max(counts), max_seq_len=int(lengths.max()),
                block_table_tensor=table.clone(), slot_mapping=slots, positions=positions,
                seq_lens_cpu_upper_bound=lengths, is_prefilling=torch.tensor([c > 1 for c in counts]),
            )  # fmt: skip
            made[prefix] = builder.build(0, common)
        return made, positions, requests

    def run(self, step) -> None:
        from vllm.forward_context import set_forward_context

        found, positions, requests = self.metadata(step)
        n = len(positions)
        with set_forward_context(found, self.config):
            for layer in self.layers:
                self.one(layer, n, positions, requests)
        for r, count in step:
            self.seen[r] += count

    def one(self, layer, n, positions, requests) -> None:
        qr, kv = torch.randn(n, LORA).bfloat16(), torch.randn(n, 512).bfloat16()
        scores = torch.randn(n, 512 * max(1, layer.compress_ratio)) if layer.is_kv_source else None
        weights = torch.randn(n, 32).bfloat16() if layer.indexer is not None else None
        out, queries = torch.full((n, layer.padded_heads, 512), float("nan")).bfloat16(), []
        forward = type(layer).forward_mqa
        layer.forward_mqa = lambda q, *rest: (queries.append(q), forward(layer, q, *rest))
        layer._prepare_and_attn(torch.zeros(n, 256).bfloat16(), qr, kv, None, scores, weights, positions, out)
        for t in range(n):
            self.history[requests[t]][layer.layer_id].append((kv[t], None if scores is None else scores[t]))
        self.check_rows(layer, set(requests.tolist()))
        self.check_out(layer, queries[0][:, :HEADS], out[:, :HEADS], positions, requests)

    def check_rows(self, layer, requests) -> None:
        """Rows of the caches against rows in fp64, of all tokens so far."""
        for r in requests:
            kv, scores = zip(*self.history[r][layer.layer_id])
            at = torch.arange(len(kv))
            angles = layer.rotary_emb.cos_sin_cache.double()
            last = slice(max(0, len(kv) - 128), None)  # of the window
            packed(
                layer.swa_cache_layer.kv_cache,
                self.slots(WINDOW_PAGE, WINDOW_PAGE, r, at),
                turned(torch.stack(kv), angles[at]),
                last,
            )
            if not layer.is_kv_source:
                continue
            m, all_scores = layer.compress_ratio, torch.stack(scores).double()
            groups = len(kv) // m
            value, gate = (
                all_scores[: groups * m].unflatten(0, (groups, m)).split(512, -1)
                if m > 1
                else (all_scores[:, None], None)
            )
            pooled = value[:, 0] if gate is None else (value * gate.softmax(1)).sum(1)
            latent = (
                pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True)) * layer.compressor.norm.weight.double()
            )
            first = torch.arange(groups) * m
            rows = turned(latent.bfloat16(), angles[first])
            packed(layer.kv_cache, self.slots(BLOCK, BLOCK // m, r, torch.arange(groups)), rows, slice(None))

    def slots(self, table, rows, r, at):
        """Return the slots of places `at` of request r, in a cache with this many rows in a page."""
        return self.tables[table][r, at // rows].long() * rows + at % rows

    def check_out(self, layer, q, out, positions, requests) -> None:
        """Attention against the oracle on the rows of the caches, with lists made here; of long ones the indexer's."""
        from dsv4.integrations.vllm import v41

        window = v41.pool(layer.swa_cache_layer.kv_cache)
        n, m = len(q), layer.compress_ratio
        lists = torch.full((n, 128), -1, dtype=torch.int32)
        chosen = torch.full((n, TOPK), -1, dtype=torch.int32)
        for t in range(n):
            at = torch.arange(max(0, int(positions[t]) - 127), int(positions[t]) + 1)
            lists[t, : len(at)] = (
                self.tables[WINDOW_PAGE][requests[t], at // WINDOW_PAGE] * WINDOW_PAGE + at % WINDOW_PAGE
            ).int()
            if m:
                rows, sees = layer.topk_indices_buffer[t].long(), (int(positions[t]) + 1) // m
                rows = rows[rows >= 0]
                blocks = layer.candidate_block_buffer[t]
                few = layer.layer_id > TWO_LEVELS + 1 and sees > 8 * BLOCKS  # the second level of a choice
                assert len(rows.unique()) == len(rows) and (rows < sees).all()
                if few:
                    assert 8 * BLOCKS - 7 <= len(rows) <= 8 * BLOCKS and torch.isin(rows // 8, blocks.long()).all()
                else:
                    assert len(rows) == min(sees, TOPK), (layer.layer_id, t, len(rows), sees)
                page = BLOCK // m
                chosen[t, : len(rows)] = (self.tables[BLOCK][requests[t], rows // page] * page + rows % page).int()
        more = dict(compressed=v41.pool(layer._compressed_kv_cache()), compressed_indices=chosen) if m else {}
        some = slice(max(0, n - 12), None)  # the oracle is slow
        more = {k: x[some] if k == "compressed_indices" else x for k, x in more.items()}
        wanted, low = (
            reference.v4_attention(
                q[some], window, lists[some], sink=layer.attn_sink[:HEADS], softmax_scale=layer.scale, p_dtype=p, **more
            )[0]
            for p in (None, torch.bfloat16)
        )
        assert_right(out[some], wanted, low)


def turned(x, cos_sin):
    """fp64: pairs (0, 1), (2, 3), .. of the last 64 columns turned."""
    cos, sin = cos_sin.chunk(2, -1)
    even, odd = x[..., 448::2].double(), x[..., 449::2].double()
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :448].double(), pairs], -1)


def packed(pages, slots, rows, some) -> None:
    """The cache has these rows up to its steps: e2m1 is off by a quarter of a value, or half of its least number, and a
    scale in e4m3 by 2^-4; e4m3 by 2^-4, or half of the least number of a scale at most twice what the largest needs."""
    from dsv4.integrations.vllm import v41

    pool = v41.pool(pages)
    at = slots[some] // pool.rows_per_page, slots[some] % pool.rows_per_page
    got = pool.format.dequantize(pool.data_view()[at], pool.scale_view()[at], torch.float64)
    rows = rows[some]
    group = {584: 64, 528: 32, 288: 16}[pages.shape[-1]]
    largest = rows.unflatten(-1, (-1, group)).abs().amax(-1).repeat_interleave(group, -1)
    step, least = (0.25 + 2**-4, largest * (1 / 24 + 2**-4)) if group == 16 else (2**-4, largest / 448 * 2**-9)
    bound = rows.abs() * (step + 2**-8) + least + 1e-6
    assert ((got - rows).abs() <= bound).all(), float(((got - rows).abs() / bound).max())


def main(kind: str, result: str) -> None:
    torch.manual_seed(0)
    rows, dtype = KINDS[kind]
    plugin = kind != "vllm"
    os.environ |= {"DSV4_VLLM": str(int(plugin)), "DSV4_VLLM_ROWS": rows}
    os.environ["DSV4_VLLM_PARTS"] = "indexer" if rows else "indexer,insertion"
    # vLLM's CPU build wants a Triton with a backend "cpu"; softsm plays a Hopper GPU for vLLM's kernels.
    triton.backends.backends["cpu"] = triton.backends.backends["nvidia"]
    with softsm.use("sm_90a", sms=1):
        import vllm_cpu_operators
        import vllm_cuda_kernels
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.v1.worker import workspace

        from dsv4.integrations.vllm import calls

        vllm_cpu_operators.define()  # vLLM rotates and packs an indexer's queries by one of them where there is no GPU
        kernels = {} if plugin else vllm_cuda_kernels.prepare()
        config = configuration(dtype)
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel()
            workspace.init_workspace_manager(torch.device("cpu"))
            torch.set_default_dtype(torch.bfloat16)
            layers = built(config, plugin)
            torch.set_default_dtype(torch.float32)
            engine = Engine(config, layers)
            for step in STEPS:
                with torch.inference_mode():
                    engine.run(step)
                print("step", step, dict(calls), flush=True)
    said = dict(calls=dict(calls), kernels=dict(kernels), pages=engine.pages, steps=len(STEPS))
    Path(result).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
