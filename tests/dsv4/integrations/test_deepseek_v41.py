"""DeepSeek-V4.1 in transformers: the model with dsv4's operations compared with its oracle; checkpoints, n-grams."""

import json
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import tiny_v41  # noqa: E402

import dsv4.integrations.deepseek_v41 as v41  # noqa: E402
from dsv4.caches.formats import MXFP8_528, NVFP4_288  # noqa: E402
from dsv4.caches.mxfp4_keys import INDEX_68  # noqa: E402
from dsv4.integrations.deepseek_v41 import engram, weights  # noqa: E402
from dsv4.integrations.deepseek_v41.eager import Eager  # noqa: E402
from dsv4.integrations.deepseek_v41.packed import Packed  # noqa: E402
from dsv4.runtime.threads import one_thread  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Use one thread: products this small last longer on more."""
    v41.register()
    v41.register()  # twice is once
    with one_thread():
        yield


model = cache(tiny_v41.build)


def tokens(batch, length, seed=1):
    return torch.randint(3, 500, (batch, length), generator=torch.Generator().manual_seed(seed))


def errors(got, want):
    """The relative error of each row."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


class Both(Eager):
    """Every step by the oracle and by dsv4, from the same inputs, so that a rounding that falls the other way in one
    step is not a difference in all those after it. The model goes on with what the oracle gives."""

    def __init__(self, config, batch, device):
        super().__init__(config, batch, device)
        self.other = Packed(config, batch, device)
        self.worst = dict(compress=0.0, attend=0.0)
        self.lists = 0

    def add_window(self, layer, rows):
        super().add_window(layer, rows)
        self.other.tokens = self.tokens
        self.other.add_window(layer, rows)

    def compress(self, layer, *given):
        want, got = super().compress(layer, *given), self.other.compress(layer, *given)
        assert got.shape == want.shape and got.dtype == want.dtype
        self.note("compress", got, want)
        return want

    def add_rows(self, layer, rows, keys):
        super().add_rows(layer, rows, keys)
        self.other.add_rows(layer, rows, keys)

    def choose(self, layer, q, weights):
        super().choose(layer, q, weights)
        self.other.choose(layer, q, weights)
        rows, m = self.other.rows[self.config.source_of(layer)], self.chosen.shape[-1]
        numbers = rows.numbers(torch.arange(m).expand(self.batch, -1))[:, None]  # [B, 1, m]
        listed = (self.other.chosen.view(self.batch, -1, 1, self.config.index_topk) == numbers[..., None]).any(-1)
        assert torch.equal(listed, self.chosen), f"layer {layer}"
        self.lists += int(self.chosen.sum())

    def attend(self, layer, q, sink):
        want = super().attend(layer, q, sink)
        self.note("attend", self.other.attend(layer, q, sink), want)
        return want

    def note(self, what, got, want):
        if want.numel():
            self.worst[what] = max(self.worst[what], errors(got, want).max().item())

    @staticmethod
    def experts(ffn, x):
        want = Eager.experts(ffn, x)
        error = errors(Packed.experts(ffn, x), want)
        # A hidden value next to the middle of two e4m3 may be either: 1/16 of one of 128.
        assert error.median() < 1e-6 and error.max() < 0.02
        return want


def test_every_step_is_the_oracles():
    """Prefill past the window, the lists and the kept blocks, then steps of one and more tokens: rows open and not."""
    ids, steps = tokens(2, 38), Both(tiny_v41.config(), 2, torch.device("cpu"))
    for part in ids.split([33, 1, 1, 3], 1):
        model()(part, past_key_values=steps)
    assert steps.tokens == 38 and steps.lists
    assert steps.kept.sum(-1)[:, -1].tolist() == [8 * tiny_v41.BLOCKS - 2] * 2  # the last block of 38 rows has six
    # fp32: sums of 512 products, and e^x of scores below 100
    assert steps.worst["compress"] < 1e-6 and steps.worst["attend"] < 1e-5, steps.worst


@pytest.mark.compile
def test_a_checkpoint_is_loaded_by_name(tmp_path):
    """Saved with the names and types of DeepSeek's, found by AutoModelForCausalLM; both implementations give the same
    tokens."""
    model().save_pretrained(tmp_path)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    kinds = {
        "embed.weight": torch.float32,
        "layers.0.attn.wq_b.weight": torch.float8_e4m3fn,
        "layers.0.attn.wq_b.scale": torch.float8_e8m0fnu,
        "layers.5.ffn.experts.3.w2.weight": torch.int8,
        "layers.5.ffn.experts.3.w2.scale": torch.float8_e8m0fnu,
        "layers.5.hc_ffn_fn": torch.float32,
        "layers.1.attn.compressor.wgate.weight": torch.float32,
        "layers.4.attn.indexer.wq_b.scale": torch.float8_e8m0fnu,
        "layers.3.attn.indexer.wk.weight": torch.float32,
        "head.weight": torch.float32,
    }
    assert {name: found[name].dtype for name in kinds} == kinds
    assert not any(
        name in found for name in ("layers.3.attn.compressor.wgate.weight", "layers.4.attn.indexer.wk.weight")
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "deepseek_v41" and config["quantization_config"]["weight_block_size"] == [32, 32]
    safetensors.save_file({**found, "mtp.0.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")

    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path, dtype=torch.float32, attn_implementation="dsv4")
    assert loaded.config._attn_implementation == "dsv4"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), found[name].view(torch.uint8)), name
    ids = tokens(2, 24)
    assert errors(loaded(ids).logits, model()(ids).logits).median() < 1e-5
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(loaded.generate(ids, **options), model().generate(ids, **options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_bf16_is_as_far_from_fp32_as_the_oracle(seed):
    ids, small = tokens(2, 70, seed), tiny_v41.build(torch.bfloat16)
    want = model()(ids).logits
    eager = small(ids).logits
    small.set_attn_implementation("dsv4")
    got = small(ids).logits
    assert got.dtype == torch.float32
    assert errors(got, want).mean() < 1.5 * errors(eager, want).mean()


def test_roundings_are_those_of_the_rows():
    """The oracle's own against dsv4's formats, groups of zeros and of every size among them."""
    torch.manual_seed(0)
    x = torch.randn(40, 512) * torch.exp2(torch.randint(-30, 9, (40, 32)).float()).repeat_interleave(16, 1)
    x[3, :64] = 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]).repeat(64)
    x = torch.cat([x, ties[None], -ties[None], 3 * ties[None]])
    for ours, format in ((weights.fp8_32, MXFP8_528), (weights.fp4_16, NVFP4_288), (weights.fp4_32, INDEX_68)):
        y = x[:, : format.values]
        assert torch.equal(ours(y), format.dequantize(*format.quantize(y), torch.float32)), format.name


def test_the_configuration_of_the_checkpoint():
    """config.json has the text model inside, and names for what the class fixes."""
    text = dict(num_hidden_layers=3, compress_ratios=[0, 0, 2, 0], kv_source_layer_ids=[2], index_source_layer_ids=[2],
                candidate_source_layer_id=-1, scoring_func="sqrtsoftplus", norm_topk_prob=True, n_shared_experts=1,
                rope_scaling=dict(type="yarn", factor=16, original_max_position_embeddings=65536, beta_fast=32,
                                  beta_slow=1))  # fmt: skip
    given = dict(
        model_type="deepseek_v41",
        text_config=text,
        vision_config={},
        image_token_id=7,
        quantization_config=dict(quant_method="fp8", weight_block_size=[32, 32]),
    )
    config = v41.DeepseekV41Config.from_dict(given)
    assert (config.num_hidden_layers, config.hidden_size, config.image_token_id) == (3, 5120, 7)
    assert config.rope_parameters["factor"] == 16 and not hasattr(config, "quantization_config")
    assert (config.source_of(1), config.source_of(2), config.chooser_of(2)) == (-1, 2, 2)
    with pytest.raises(ValueError, match=r"^quantization_config\['weight_block_size'\]: got \[128, 128\]; accepted"):
        v41.DeepseekV41Config.from_dict(given | dict(quantization_config=dict(weight_block_size=[128, 128])))
    with pytest.raises(ValueError, match="^scoring_func: got .*'sqrtsoftplus'"):
        tiny_v41.config(scoring_func="sigmoid")
    with pytest.raises(ValueError, match="^compress_ratios: got 2 of layer 0; accepted: 0 before"):
        tiny_v41.config(compress_ratios=[2] * 6)


def test_what_the_model_does_not_take():
    ids = tokens(1, 3)
    with pytest.raises(ValueError, match="^attention_mask: got padding"):
        model()(ids, attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ValueError, match="^input_ids: got a token of an image"):
        model()(torch.tensor([[tiny_v41.config().image_token_id]]))
    for changes in (dict(candidate_block_size=16), dict(index_head_dim=64)):
        with pytest.raises(ValueError, match=f"{[*changes][0]}.*accepted"):
            Packed(tiny_v41.config(**changes), 1, torch.device("cpu"))


def test_streams_are_v4s():
    """The weights of the streams are those of V4, whose class transformers has; V4.1 uses some a block later."""
    layer = model().layers[0]
    theirs = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HyperConnection(
        transformers.DeepseekV4Config(hidden_size=256, hc_sinkhorn_iters=3, rms_norm_eps=1e-20, num_hidden_layers=1)
    )
    theirs.fn.data, theirs.base.data, theirs.scale.data = layer.hc_attn_fn, torch.randn(24), torch.randn(3)
    layer.hc_attn_base.data, layer.hc_attn_scale.data = theirs.base.data, theirs.scale.data
    streams = torch.randn(2, 5, 4, 256)
    post, comb, collapsed = theirs(streams)
    pre, our_post, our_comb = layer._mixes(streams, "attn")
    assert torch.allclose(our_post, post, atol=1e-6) and torch.allclose(our_comb, comb, atol=1e-6)
    assert torch.allclose((pre[..., None] * streams).sum(2), collapsed, atol=1e-5)


ENGRAM = dict(
    engram_layer_ids=[0, 2], engram_num_embeddings=[200, 200], engram_max_ngram_size=3, engram_vocab_size=20,
    engram_compressed_vocab_size=100, engram_n_heads=2, engram_head_dim=32, engram_pad_token_id=5,
    num_hidden_layers=3, compress_ratios=[0, 2, 2],
)  # fmt: skip


def test_ngrams_find_their_rows():
    """Computed by hand: primes above the size, all different; each look-back has its factor; padding precedes the
    text."""
    ngrams = engram.NGrams(tiny_v41.config(**ENGRAM))
    assert ngrams.primes == {0: [[23, 29], [31, 37]], 2: [[41, 43], [47, 53]]}
    assert all(f % 2 == 1 and f > 0 for layer in (0, 2) for f in ngrams.factors[layer])
    ids, steps = tokens(1, 4), Eager(tiny_v41.config(**ENGRAM), 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="^ngrams: got no smaller vocabulary"):
        ngrams(ids, steps)
    numbers = torch.arange(tiny_v41.VOCABULARY) * 7 % 100
    ngrams.bind(numbers)
    got = torch.cat([ngrams(part, steps)[2] for part in ids.split([1, 3], 1)], 1)[0].tolist()
    at = [5, 5, *ids[0].tolist()]
    for t in range(4):
        a, b, c = (int(numbers[at[t + 2 - back]]) * ngrams.factors[2][back] for back in range(3))
        assert got[t] == [(a ^ b) % 41, (a ^ b) % 43 + 41, (a ^ b ^ c) % 47 + 84, (a ^ b ^ c) % 53 + 131]


def test_a_model_with_ngrams():
    """What is looked up enters the streams, a token's own n-grams only, and the same in steps."""
    small = tiny_v41.build(**ENGRAM)
    small.ngrams.bind(torch.arange(tiny_v41.VOCABULARY) * 7 % 100)
    ids = tokens(1, 6)
    whole = small(ids).logits
    first = small(ids[:, :4], use_cache=True)
    rest = small(ids[:, 4:], past_key_values=first.past_key_values).logits
    assert errors(torch.cat([first.logits, rest], 1), whole).median() < 1e-5
    streams, rows = torch.randn(1, 2, 4, 256), torch.randint(0, 200, (1, 2, 4))
    added = small.layers[0].engram(streams, rows) - streams
    value = added[0, 0] / added[0, 0].norm(dim=-1, keepdim=True)
    assert (value @ value.T > 0.999).all()  # one value for all streams; gates differ
    assert not torch.equal(small.layers[0].engram(streams, rows + 1) - streams, added)


def test_the_smaller_vocabulary():
    """Case, accents and outer spaces do not count, but a token of spaces alone is one of its own."""
    from tokenizers import Tokenizer, models

    class Tokens:
        backend_tokenizer = Tokenizer(
            models.WordLevel({w: i for i, w in enumerate(["the", "The", " é", "E", " ", "  ", "x"])})
        )

        def __len__(self):
            return 7

    assert engram.smaller_vocabulary(Tokens()).tolist() == [0, 0, 1, 1, 2, 2, 3]
