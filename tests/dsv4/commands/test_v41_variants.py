"""What `dsv4 compile --kind v4.1` writes is what the calls of a V4.1 layer launch."""

import json

import pytest

pytest.importorskip("triton")
import torch  # noqa: E402
from written import SIZES, recording, written  # noqa: E402

import dsv4  # noqa: E402
from dsv4.caches.mxfp4_keys import INDEX_68  # noqa: E402
from dsv4.commands import variants  # noqa: E402
from dsv4.index.sizes import index_shares  # noqa: E402
from dsv4.runtime import dispatch  # noqa: E402

ARCHS = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
BACKEND = dict(backend="softsm")


def missing(launched, arch):
    assert launched
    kept = written(["v4.1"], arch)
    return sorted({kernel for name, kernel in launched.items() if name not in kept})


@ARCHS
@pytest.mark.parametrize("named", ["window only", "list", "table"])
def test_attention(arch, named):
    """Decode of few and many queries, of all heads and of a rank's share, and prefill."""
    window, compressed = dsv4.Mxfp8Cache.empty(8, 32), dsv4.Nvfp4Cache.empty(8, 64)
    of_64 = [(n, 64) for n in (1, 4, 8, 32, 128, 256, 1100)]
    sizes = [*of_64, (1, 8), (32, 8), (64, 16), (128, 16), (128, 32), (5, 128), (64, 128), (1000, 128)]
    with recording(arch) as launched:
        for queries, heads in sizes:
            q, numbers = torch.empty(queries, heads, 512, dtype=torch.bfloat16), torch.zeros(queries, 512).int()
            more = {}
            if named != "window only":
                more = dict(compressed=compressed, compressed_lengths=numbers[:, 0].contiguous())
                more["compressed_block_table" if named == "table" else "compressed_indices"] = numbers
            for positions in (torch.int32, torch.int64):
                rope = torch.empty(16, 64), torch.zeros(queries, dtype=positions)
                dsv4.v4_attention(q, window, numbers[:, :128], **more, inverse_rope=rope, **BACKEND)
    assert not missing(launched, arch)


@ARCHS
@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("requests, page", [(1, 64), (32, 32)])
def test_index(arch, each, requests, page):
    """A source of blocks, a consumer of them, and a layer that is neither, with weights of the model's dtype."""
    n, heads, topk = requests * each, SIZES.fp4_index_heads, SIZES.topk
    cache = dsv4.IndexCache.empty(4, page, format=INDEX_68)
    q, scales = torch.zeros(n, heads, 64, dtype=torch.uint8), torch.zeros(n, heads, dtype=torch.int32)
    more = dict(
        q_scales=scales,
        block_table=torch.zeros(requests, SIZES.index_rows // page, dtype=torch.int32),
        request_starts=torch.arange(0, n + 1, each, dtype=torch.int32),
        lengths=torch.ones(n).int(),
        **BACKEND,
    )
    with recording(arch) as launched:
        for dtype in (torch.float32, torch.bfloat16):
            call = q, cache, torch.empty(n, heads, dtype=dtype), topk
            more |= dict(bf16_scores=dtype == torch.bfloat16, request_rows=dtype == torch.float32)
            dsv4.index_topk(*call, **more)
            _, blocks = dsv4.index_blocks(*call, **more)
            dsv4.index_topk(*call, **more, blocks=blocks)
    shared = index_shares(n, dispatch.DEFAULT_NUM_SMS, SIZES.index_rows, topk, 0) > 1
    assert ("index_gather" if shared else "index_blocks_kernel") in launched.values()
    assert not missing(launched, arch)


@ARCHS
def test_compress(arch):
    kv, weight = torch.empty(6, 512), torch.empty(512, dtype=torch.bfloat16)
    pool, slots = dsv4.Nvfp4Cache.empty(1, 64), torch.arange(6)
    with recording(arch) as launched:
        for ratio, gate in ((2, kv), (1, None)):
            given = dict(ratio=ratio, eps=1e-20, dtype=torch.bfloat16, **BACKEND)
            dsv4.compress(kv, gate, None, weight, **given)
            dsv4.compress(
                kv, gate, None, weight, cos_sin=torch.empty(16, 64), out=pool, slots=slots[: 6 // ratio], **given
            )
    assert not missing(launched, arch)


def test_the_configuration_of_the_checkpoint(tmp_path):
    """The text model is inside, and its heads are those of FP4 keys."""
    text = dict(hidden_size=5120, q_lora_rank=1280, hc_mult=4, num_attention_heads=64, head_dim=512,
                qk_rope_head_dim=64, index_n_heads=48, index_head_dim=128, index_topk=512, n_routed_experts=384,
                num_experts_per_tok=6)  # fmt: skip
    (path := tmp_path / "config.json").write_text(json.dumps(dict(text_config=text)))
    sizes = variants.Sizes.read(path)
    assert (sizes.hidden, sizes.fp4_index_heads, sizes.experts) == (5120, 48, 384)
