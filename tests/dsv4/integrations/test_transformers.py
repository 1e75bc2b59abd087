"""attn_implementation="dsv4" against "eager": a tiny random DeepSeek-V4 with layers of every kind, real code."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_v4 import WINDOW, build, same  # noqa: E402

import dsv4.integrations.transformers as integration  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()
    integration.register()  # twice is once


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (2, 140), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def eager(model, ids):
    """Logits [2, 140, vocabulary]; the model is causal, so they hold those of every shorter sequence."""
    return logits(model, "eager", ids)


@torch.no_grad()
def logits(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    return model(ids, use_cache=False, **options).logits


@torch.no_grad()
def cached(model, implementation, ids, steps, **options):
    """Feed the tokens in these steps; the last one takes the rest."""
    model.set_attn_implementation(implementation)
    cache, out, begin = transformers.DynamicCache(config=model.config), [], 0
    for n in steps:
        end = begin + n
        more = {k: v[:, :end] for k, v in options.items()}
        out.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True, **more).logits)
        begin = end
    return torch.cat(out, 1)


# Both sides of: the first row of CSA and of HCA, the full window, the second HCA row, the full top-k list (4 * 8).
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 35, 36, 37, 63, 64, 65, 127, 128, 129, 140]


@pytest.mark.parametrize("length", LENGTHS)
def test_one_shot(model, ids, eager, length):
    same(logits(model, "dsv4", ids[:, :length]), eager[:, :length])


def test_eager_agrees_with_itself(model, ids, eager):
    """Shorter inputs and other steps measure the tolerance."""
    same(logits(model, "eager", ids[:, :50]), eager[:, :50])
    same(cached(model, "eager", ids[:, :60], [33, 1, 2, 3, 4, 17]), eager[:, :60])


def test_one_shot_with_as_many_heads_dims_as_v4(ids):
    """head_dim 512 goes through without padding; 24 is padded to 64."""
    for head_dim in (512, 24):
        model = build(head_dim)
        same(logits(model, "dsv4", ids[:, :70]), logits(model, "eager", ids[:, :70]))


@pytest.mark.parametrize(
    "prefill, step",
    [
        pytest.param(prefill, step, marks=[pytest.mark.slow] * (n + 1 != step))
        for n, prefill in enumerate((1, 14, 30, 55))
        for step in (1, 2, 3, 4)
    ],
)
def test_cached_steps_of_1_to_4_tokens(model, ids, eager, prefill, step):
    """From each prefill the steps cross boundaries of the window, of CSA and of HCA, at every phase."""
    steps = [prefill] + [step] * (20 // step)
    some = ids[:, : sum(steps)]
    same(cached(model, "dsv4", some, steps), eager[:, : some.shape[1]])


def test_mixed_steps_and_chunked_prefill(model, ids):
    steps = [33, 1, 2, 3, 4, 17, 1, 1, 40, 4, 3, 31]
    same(cached(model, "dsv4", ids, steps), cached(model, "eager", ids, steps))


@pytest.mark.parametrize("prompt", [15, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 50))])
def test_greedy_generate(model, ids, prompt):
    said = {}
    for implementation in ("eager", "dsv4"):
        model.set_attn_implementation(implementation)
        said[implementation] = model.generate(
            ids[:, :prompt], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert torch.equal(said["dsv4"], said["eager"]) and said["dsv4"].shape[1] == prompt + 24


def test_padding_is_hidden_as_eager_hides_it(model, ids):
    some = ids[:, :60]
    for side in ("left", "right"):
        mask = torch.ones_like(some)
        mask[1, slice(0, 9) if side == "left" else slice(51, 60)] = 0
        want, got = (logits(model, i, some, attention_mask=mask) for i in ("eager", "dsv4"))
        same(got, want)
        if side == "left":  # as generation pads
            steps = [41, 1, 4, 2, 12]
            want, got = (cached(model, i, some, steps, attention_mask=mask) for i in ("eager", "dsv4"))
            same(got, want)
    said = {}
    for implementation in ("eager", "dsv4"):
        model.set_attn_implementation(implementation)
        mask = torch.ones_like(some)
        mask[1, :9] = 0
        options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        said[implementation] = model.generate(some, attention_mask=mask, **options)
    assert torch.equal(said["dsv4"], said["eager"])


def test_packed_sequences_are_kept_apart_in_the_window(model, ids):
    """position_ids that start again: transformers keeps the window rows of the sequences apart."""
    some = ids[:1, :60]
    positions = torch.cat([torch.arange(23), torch.arange(37)])[None]
    same(logits(model, "dsv4", some, position_ids=positions), logits(model, "eager", some, position_ids=positions))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions
def test_bf16_attention_is_as_near_to_fp32_as_eager_is(ids):
    """Logits of bf16 models cannot be compared (top-k and router flip), one layer's attention on equal inputs can."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    errors = {}

    def both(module, query, key, value, attention_mask, scaling, **options):
        ref, weights = eager_attention_forward(module, query, key, value, attention_mask, scaling, **options)
        options.pop("s_aux")
        wide, _ = eager_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, scaling)
        lists = integration.window_lists(
            2, query.shape[2], query.shape[2], mask_function=causal_window, local_size=WINDOW
        )
        got, _ = integration.attention(module, query, key, value, lists, scaling, s_aux=module.sinks)
        kind = errors.setdefault(module.layer_type, [])
        kind.append(((got - wide).norm() / wide.norm(), (ref - wide).norm() / wide.norm()))
        return ref, weights

    def causal_window(batch, head, q, k):
        return (k <= q) & (k > q - WINDOW)

    AttentionInterface.register("dsv4_beside_eager", both)
    AttentionMaskInterface.register("dsv4_beside_eager", eager_mask)
    model = build(dtype=torch.bfloat16)
    logits(model, "dsv4_beside_eager", ids[:, :50])
    assert set(errors) == set(model.config.layer_types)
    for kind, pairs in errors.items():
        for ours, eagers in pairs:
            assert ours <= max(eagers, 2.0**-9), (kind, ours, eagers)


def test_no_dense_mask_is_made(model, ids):
    lists = integration.window_lists(3, 50, 50, mask_function=lambda b, h, q, k: k > q - 16, local_size=16)
    assert lists.rows.shape == (3, 50, 16) and not isinstance(lists, torch.Tensor)
    assert lists.rows[0, 49].tolist() == list(range(34, 50)) and lists.rows[2, 0].tolist() == [-1] * 15 + [0]


def test_eager_is_left_as_it_was(model, ids):
    before = logits(model, "eager", ids)
    logits(model, "dsv4", ids)
    assert torch.equal(logits(model, "eager", ids), before)
    assert getattr(integration._LAYER, "now", None) is None


def test_what_it_cannot_do_it_says(model, ids):
    model.set_attn_implementation("dsv4")
    dense = torch.zeros(2, 1, 20, 20)
    with torch.no_grad(), pytest.raises(ValueError, match="^attention_mask: got .*; accepted: "):
        model(ids[:, :20], attention_mask=dense, use_cache=False)
    with pytest.raises(ValueError, match="^backend: "):
        integration.register(backend="gpu")
    llama = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        attn_implementation="dsv4",
    )
    with torch.no_grad(), pytest.raises(ValueError, match="accepted: DeepSeek"):
        transformers.LlamaForCausalLM(llama)(ids[:, :4] % 64)
