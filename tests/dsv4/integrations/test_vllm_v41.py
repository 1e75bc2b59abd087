"""DeepSeek-V4.1's layers of the plug-in for vLLM on pages and metadata as vLLM builds them, with stubs for what they
call of vLLM. tests/engines has vLLM's own classes and kernels."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from agreement import assert_right

import dsv4
from dsv4 import reference
from dsv4.caches.formats import FP8_584, MXFP8_528, NVFP4_288
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.integrations.vllm import calls, v41

HEADS, TOPK, BLOCK, WINDOW_PAGE = 4, 12, 8, 4  # BLOCK: tokens of a page of compressed rows
ROWS = {"hopper": (FP8_584, FP8_584), "fp8": (MXFP8_528, MXFP8_528), "own": (MXFP8_528, NVFP4_288)}
# (ratio, layer with the compressed rows, layer with the indexer): sources are 1, 3 and, of lists alone, 5
LAYERS = [(0, None, None), (2, 1, 1), (2, 1, 1), (1, 3, 3), (1, 3, 3), (1, 3, 5), (1, 3, 5)]


@pytest.fixture(autouse=True, params=["0.32.0", "0.33.0"])
def vllm(monkeypatch, request):
    """Its version decides how V4.1's rows lie in a page."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__version__ = request.param


@pytest.fixture
def converted(monkeypatch, vllm):
    """vLLM's function from rows of a request to slots, in torch -> the list of its calls."""
    made = []

    def slots(lists, owners, table, block, valid):
        made.append(lists)
        n = lists.shape[0]
        pages = table[owners[:n].long()].gather(1, lists.clamp_min(0).long() // block)
        found = torch.where(lists >= 0, pages * block + lists % block, -1).int()
        return found, ((lists >= 0).sum(-1) * valid).int()

    context = SimpleNamespace(attn_metadata=None)
    modules = {
        "vllm.models.deepseek_v41.common.ops": dict(compute_global_topk_indices_and_lens=slots),
        "vllm.forward_context": dict(get_forward_context=lambda: context),
    }
    for name, members in modules.items():
        for n in range(2, len(name.split("."))):
            monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:n]), ModuleType("package"))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(made=made, context=context)


class Theirs:
    """What the methods call of vLLM's layer."""

    def __init__(self):
        self.asked = []

    def forward_kv(self, positions, hidden_states):
        self.asked.append("forward_kv")

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        self.asked.append("insert")
        return q

    def _run_parallel_input_projections(self, hidden_states):
        return hidden_states, "scores", None

    def _split_qkv_and_norm(self, both):
        return None, None, both


class Layer(v41.Forward, Theirs):
    pass


def pages(format, count, rows):
    """Pages of packed rows at random, with the pages of other layers between them."""
    block = torch.full((count, rows * format.row_bytes + 512), 255, dtype=torch.uint8)
    page = block[:, : rows * format.row_bytes].unflatten(1, (rows, format.row_bytes))
    v41.pool(page).write(torch.arange(count * rows), torch.randn(count * rows, 512))
    return page


def model(kind):
    """Layers of one model, by their prefixes."""
    window, compressed = ROWS[kind]
    found = {}
    lists = torch.full((40, TOPK), -1, dtype=torch.int32)
    for n, (ratio, source, indexer) in enumerate(LAYERS):
        layer = found[f"model.layers.{n}.attn"] = Layer()
        vars(layer).update(
            layer_id=n, prefix=f"model.layers.{n}.attn", compress_ratio=ratio, scale=512**-0.5,
            attn_sink=torch.randn(HEADS), topk_indices_buffer=lists, is_index_source=indexer == n,
            index_source_layer_id=indexer, _static_forward_context=found, source=source,
            swa_cache_layer=SimpleNamespace(kv_cache=pages(window, 40, WINDOW_PAGE), prefix=f"{n}.swa"),
        )  # fmt: skip
        if source == n:
            layer.kv_cache = pages(compressed, 12, BLOCK // ratio)
    return found


def step(tokens, of, width=16, padding=0):
    """Metadata of decodes: `of` gives the request of each token; window lists of any rows, of which lengths count."""
    n, requests = len(tokens), max(of) + 1
    window = torch.randint(0, 40 * WINDOW_PAGE, (n, 1, width), dtype=torch.int32)
    lengths = torch.tensor(tokens).clamp_max(width).int()
    valid = torch.ones(n, dtype=torch.bool)
    if padding:
        lengths[-padding:], valid[-padding:] = 0, False
    swa = SimpleNamespace(
        num_decodes=requests,
        num_decode_tokens=n,
        token_to_req_indices=torch.tensor([*of, 0, 0]).int(),
        is_valid_token=valid,
        decode_swa_indices=window,
        decode_swa_lens=lengths,
    )
    table = torch.stack([torch.randperm(12) for _ in range(requests + 1)]).int()
    return swa, SimpleNamespace(block_table=table, block_size=BLOCK)


def choose(layer, tokens):
    """What an indexer would write: rows of the request, of those that each token sees; then -1."""
    layer.topk_indices_buffer.fill_(-1)
    for n, count in enumerate(tokens):
        best = torch.randperm(count // layer.compress_ratio)[:TOPK]
        layer.topk_indices_buffer[n, : len(best)] = best.int()


def wanted(layer, q, swa, attn):
    """The oracle, with slots found token by token."""
    pool = v41.pool(layer.swa_cache_layer.kv_cache)
    more = {}
    if layer.compress_ratio:
        source = layer._static_forward_context[f"model.layers.{layer.source}.attn"].kv_cache
        slots, rows = torch.full((len(q), TOPK), -1, dtype=torch.int32), source.shape[1]
        for n in range(len(q)):
            if swa.is_valid_token[n]:
                for k, row in enumerate(layer.topk_indices_buffer[n].tolist()):
                    page = attn.block_table[swa.token_to_req_indices[n], row // rows]
                    slots[n, k] = page * rows + row % rows if row >= 0 else -1
        more = dict(compressed=v41.pool(source), compressed_indices=slots)
    more |= dict(window_lengths=swa.decode_swa_lens, sink=layer.attn_sink, softmax_scale=layer.scale)
    return [
        reference.v4_attention(q, pool, swa.decode_swa_indices[:, 0], p_dtype=p, **more)[0] for p in (None, q.dtype)
    ]


def decode(layer, q, swa, attn):
    out = torch.full_like(q, float("nan"))
    source = layer._static_forward_context.get(f"model.layers.{layer.source}.attn")
    layer._forward_decode(q, source and source.kv_cache, swa, attn, layer.compress_ratio == 0, out)
    return out


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "tokens, of, padding",
    [
        ([1, 9, 60, 2], [0, 1, 2, 3], 0),  # one of each request; of one token no pair is complete
        ([30, 31, 32, 7, 8, 9], [0, 0, 0, 1, 1, 1], 0),  # drafts: queries of their own
        ([30, 31, 7, 1, 1], [0, 0, 1, 1, 1], 2),  # what fills a graph up
    ],
)
def test_decode_of_all_kinds_of_layers(converted, kind, tokens, of, padding):
    """Layers without compressed rows, with pairs, with a row for each token, and such as read another layer's."""
    layers = model(kind)
    (swa, attn), before = step(tokens, of, padding=padding), calls["decode"]
    for layer in layers.values():
        q = torch.randn(len(tokens), HEADS, 512).bfloat16()
        if layer.is_index_source:
            choose(layer, tokens)
        assert_right(decode(layer, q, swa, attn), *wanted(layer, q, swa, attn))
    assert calls["decode"] == before + len(LAYERS)
    assert len(converted.made) == 3  # once for each indexer


def test_drafts_of_dspark_see_all_rows_of_their_block(converted):
    """Layers of a window alone, 192 entries of which 128 rows before the block and its 5 rows count, in any order."""
    layer = model("own")["model.layers.0.attn"]
    swa, attn = step([133] * 5, [0] * 5, width=192)
    swa.decode_swa_indices[:] = swa.decode_swa_indices[:1].clone()
    swa.decode_swa_indices[..., 133:] = 1 << 30  # behind the length
    q = torch.randn(5, HEADS, 512)
    assert_right(decode(layer, q, swa, attn), wanted(layer, q, swa, attn)[0])
    assert not converted.made


def test_slots_are_made_again_where_another_batch_was_there_in_between(converted):
    """Two halves of a batch take turns, each with its metadata; and a second step has other lists."""
    layers = model("own")
    source, reader = layers["model.layers.3.attn"], layers["model.layers.4.attn"]
    halves = [step([30, 40], [0, 1]) for _ in range(2)]
    q = torch.randn(2, HEADS, 512)
    choose(source, [30, 40])
    for half in (*halves, halves[1]):
        decode(source, q, *half)
    assert len(converted.made) == 3
    for half, made in zip(halves[::-1], (3, 4)):
        assert_right(decode(reader, q, *half), wanted(reader, q, *half)[0])
        assert len(converted.made) == made
    choose(source, [30, 40])  # the next step; a graph keeps its metadata
    decode(source, q, *halves[1])
    assert_right(decode(reader, q, *halves[1]), wanted(reader, q, *halves[1])[0])


def test_other_rows_are_refused_by_name():
    for other in (torch.zeros(1, 4, 656, dtype=torch.uint8), torch.zeros(1, 4, 528)):
        with pytest.raises(ValueError, match=r"--kv-cache-dtype: got rows of \d+ x torch.*accepted: rows of 584, 528"):
            v41.pool(other)


def turned(x, angles):
    """fp64: pairs (0, 1), (2, 3), .. of the last 64 columns of x [N, .., 512] turned by angles [N, 32]."""
    angles = angles.view(len(x), *[1] * (x.ndim - 2), 32)
    even, odd = x[..., 448::2].double(), x[..., 449::2].double()
    pairs = [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()]
    return torch.cat([x[..., :448].double(), torch.stack(pairs, -1).flatten(-2)], -1)


ANGLES = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(32) / 32).double()
ROTARY = SimpleNamespace(cos_sin_cache=torch.cat([ANGLES.cos(), ANGLES.sin()], -1).float())


def assert_written(pages, slots, rows):
    """Those bytes, as packing the rounded rows makes them."""
    pool = v41.pool(pages)
    fresh = pool.format.quantize(rows.bfloat16())
    at = slots // pool.rows_per_page, slots % pool.rows_per_page
    assert torch.equal(pool.data_view()[at], fresh[0].view(torch.uint8))
    assert torch.equal(pool.scale_view()[at], fresh[1].view(torch.uint8))


@pytest.mark.parametrize("kind", ROWS)
def test_rows_go_into_the_window_and_queries_are_rotated_but_not_normed(converted, kind):
    layer = model(kind)["model.layers.3.attn"]
    layer.rotary_emb = ROTARY
    q, kv, positions = (
        torch.randn(4, HEADS, 512).bfloat16(),
        torch.randn(4, 512).bfloat16(),
        torch.tensor([4, 99, 0, 7]),
    )
    slots = torch.tensor([130, -1, 5])  # the last token fills a graph up
    metadata = {"3.swa": SimpleNamespace(slot_mapping=slots)}
    before = calls["insert"]
    assert layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata) is q and layer.asked == ["insert"]
    layer.writes_rows = True
    assert layer._fused_qnorm_rope_kv_insert(q, kv, positions, None) is q  # a profile run
    got = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
    exact = turned(q, ANGLES[positions])
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert_written(layer.swa_cache_layer.kv_cache, slots[[0, 2]], turned(kv, ANGLES[positions])[[0, 2]])
    assert calls["insert"] == before + 1


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("format", [FP8_584, MXFP8_528, NVFP4_288])
def test_the_compressor_writes_a_row_for_each_group_that_ends(converted, ratio, format):
    """Rotated at the group's first token; the latent of other tokens is undefined."""
    cache = pages(format, 4, 8)
    theirs = SimpleNamespace(
        k_cache_prefix="rows", compress_ratio=ratio, _static_forward_context={"rows": SimpleNamespace(kv_cache=cache)}
    )
    positions, slots = torch.tensor([6, 7, 8, 9, 11]), torch.tensor([3, 17, 20, 9])
    converted.context.attn_metadata = {"rows": SimpleNamespace(slot_mapping=slots)}
    ends = (positions[:4] + 1) % ratio == 0
    latent = torch.randn(5, 512).bfloat16()
    latent[:4][~ends] = float("nan")
    before, count = calls["compress"], cache.clone()
    v41.insert_cache(theirs, latent, positions, ROTARY)
    v41.insert_cache(theirs, None, positions, ROTARY)  # a profile run
    at = positions[:4] // ratio * ratio
    assert_written(cache, slots[ends], turned(latent[:4], ANGLES[at])[ends])
    assert calls["compress"] == before + 1
    if ratio == 2:  # the others are as they were
        pool, old = (v41.pool(x).data_view().flatten(0, 1) for x in (cache, count))
        assert torch.equal(pool[slots[~ends]], old[slots[~ends]])


def test_tokens_that_go_no_further_leave_the_same_rows(converted):
    """vLLM's forward_kv, and the context of a DSpark layer."""
    layer, done = model("own")["model.layers.3.attn"], []
    layer.rotary_emb, layer.indexer = ROTARY, SimpleNamespace(owns_k=True, _produce_k=lambda *a: done.append("key"))

    class Compressor:
        def __call__(self, kv_score, positions):
            return done.append(kv_score)

        def insert_cache(self, latent, positions, rotary_emb):
            done.append("row")

    layer.compressor = Compressor()
    kv, positions, slots = torch.randn(3, 512).bfloat16(), torch.tensor([1, 50, 99]), torch.tensor([0, 159, 77])
    converted.context.attn_metadata = {"3.swa": SimpleNamespace(slot_mapping=slots)}
    layer.forward_kv(positions, kv)
    context = v41.context_rows(lambda attn, *_: done.append("context"))
    context(layer, kv, positions, slots)
    assert layer.asked == ["forward_kv"] and done == ["context"]
    layer.writes_rows = True
    layer.forward_kv(positions, kv)
    assert done == ["context", "scores", "row", "key"]
    assert_written(layer.swa_cache_layer.kv_cache, slots, turned(kv, ANGLES[positions]))
    context(layer, kv, positions.flip(0), slots)
    assert_written(layer.swa_cache_layer.kv_cache, slots, turned(kv, ANGLES[positions.flip(0)]))


@pytest.mark.parametrize("ratio", [1, 2])
def test_fp4_keys_are_normed_rotated_and_packed(converted, ratio):
    """Where the pages have 68 bytes for a key; elsewhere vLLM writes them."""
    asked = []

    class Indexer:
        def _produce_k(self, *rest):
            asked.append(rest)

    weight = torch.rand(128) + 0.5
    made = v41.indexer_class(Indexer)()
    pages = torch.zeros(3, 32 * 68 + 64, dtype=torch.uint8)[:, : 32 * 68].unflatten(1, (32, 68))
    vars(made).update(
        use_fp4_kv=False,
        compress_ratio=ratio,
        k_cache=SimpleNamespace(prefix="keys", kv_cache=pages[..., :67]),
        wk=lambda latent: (latent[:, :128] * 2, None),
        k_norm=SimpleNamespace(weight=weight, variance_epsilon=1e-20),
    )
    positions, slots = torch.tensor([6, 7, 8, 9, 11]), torch.tensor([3, 70, 64, 9])
    converted.context.attn_metadata = {"keys": SimpleNamespace(slot_mapping=slots)}
    ends = (positions[:4] + 1) % ratio == 0
    latent = torch.randn(5, 512)
    made._produce_k(latent, positions, ROTARY)
    made.k_cache.kv_cache = pages
    made._produce_k(None, positions, ROTARY)
    assert len(asked) == 2 and not pages.any()
    before = calls["index keys"]
    made._produce_k(latent.masked_fill(~torch.cat([ends, ends[:1]])[:, None], float("nan")), positions, ROTARY)
    assert len(asked) == 2 and calls["index keys"] == before + 1
    keys = latent[:4, :128].double() * 2
    keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True)) * weight.double()
    wide = torch.cat([torch.zeros(4, 384), keys], -1)
    wanted = turned(wide, ANGLES[positions[:4] // ratio * ratio])[ends, 384:]
    cache = dsv4.IndexCache.from_pages(pages, format=INDEX_68)
    codes = INDEX_68.quantize(wanted.float())
    by_hand = INDEX_68.dequantize(*codes, torch.float64)
    got = cache.unpack(torch.float64)[slots[ends]]
    assert ((got - by_hand).abs() <= by_hand.abs() / 2).all() and (got == by_hand).double().mean() > 0.99
    others = torch.ones(96, dtype=torch.bool)
    others[slots[ends]] = False
    assert not cache.unpack()[others].any()


def test_keys_have_68_bytes_beside_the_models_own_rows(monkeypatch):
    width = v41.key_width(lambda dim, fp4: dim // 2 + 4 if fp4 else dim + 4)
    monkeypatch.setenv("DSV4_VLLM_PARTS", "indexer")
    assert width(128, False) == 132 and width(128, True) == 68
    with v41.rows_of_v41(True):
        assert width(128, False) == 68
        monkeypatch.setenv("DSV4_VLLM_PARTS", "")  # vLLM's own indexer reads no such keys on Hopper
        assert width(128, False) == 132


def test_vllms_rule_for_rows_is_overruled_while_a_layer_with_its_own_is_built():
    """And when vLLM asks for the pages of its index keys, which is later."""
    rule = v41.record_rule(lambda: False)
    cache = SimpleNamespace(get_kv_cache_spec=lambda config: (config, rule()))
    v41.keep_alignment(cache)
    assert not rule() and v41.record_rule(lambda: True)()
    with v41.rows_of_v41(True):
        assert rule()
        with v41.rows_of_v41(False):
            assert not rule()
    assert not rule() and cache.get_kv_cache_spec("a config") == ("a config", True) and not rule()
    with pytest.raises(KeyError), v41.rows_of_v41(True):
        raise KeyError
    assert not rule()
