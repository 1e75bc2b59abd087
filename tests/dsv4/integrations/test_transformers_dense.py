"""attn_implementation="dsv4_dense" against "eager": tiny random Llama, Gemma 4 (head dim 512) and gpt-oss (sinks)."""

from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")

import in_fp64  # noqa: E402
from tiny_dense import KINDS, build  # noqa: E402

import dsv4.integrations.transformers_dense as integration  # noqa: E402


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    integration.register()
    integration.register()  # twice is once
    made = build(request.param)
    made.kind = request.param
    return made


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, implementation, ids, steps=None, **options):
    """Logits of one pass, or of these steps through a cache."""
    model.set_attn_implementation(implementation)
    if steps is None:
        return model(ids, use_cache=False, **options).logits
    cache, begin, out = transformers.DynamicCache(config=model.config), 0, []
    for n in steps:
        more = {key: x[:, : begin + n] for key, x in options.items()}
        out.append(model(ids[:, begin : begin + n], past_key_values=cache, use_cache=True, **more).logits)
        begin += n
    return torch.cat(out, 1)


@cache
def allowed(kind):
    return in_fp64.allowed(build(kind), torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(2)))


def same(model, a, b):
    assert a.isfinite().all() and b.std() > 0.1
    difference = (a - b).abs().max().item()
    assert difference <= allowed(model.kind), difference


def test_head_dim_512_is_really_there():
    layers = build("gemma4").model.layers
    assert [layer.self_attn.head_dim for layer in layers] == [64, 512]


@pytest.mark.parametrize("length", [1, 7, 9, 40])
def test_one_shot(model, ids, length):
    same(model, logits(model, "dsv4_dense", ids[:, :length]), logits(model, "eager", ids[:, :length]))


def test_cached(model, ids):
    steps = [13, 1, 1, 4, 1, 15, 2, 3]
    same(model, logits(model, "dsv4_dense", ids, steps), logits(model, "eager", ids))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, ids, side):
    some, mask = ids[:, :30], torch.ones(2, 30, dtype=torch.long)
    mask[1, slice(0, 11) if side == "left" else slice(19, 30)] = 0
    got, want = (logits(model, i, some, attention_mask=mask) for i in ("dsv4_dense", "eager"))
    same(model, got[mask.bool()], want[mask.bool()])  # what stands at padding means nothing
    if side == "left":
        steps = [20, 1, 4, 1, 4]
        got = logits(model, "dsv4_dense", some, steps, attention_mask=mask)
        same(model, got[mask.bool()], want[mask.bool()])


def test_greedy_generate(model, ids):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    said = {}
    for implementation in ("eager", "dsv4_dense"):
        model.set_attn_implementation(implementation)
        said[implementation] = model.generate(
            ids[:, :12], attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0
        )
    assert torch.equal(said["dsv4_dense"], said["eager"])


def test_the_random_numbers_of_the_caller_are_left_alone(ids):
    model = build("llama")
    integration.register()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    logits(model, "dsv4_dense", ids)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_it_cannot_do_it_says(ids):
    integration.register()
    model = build("gemma4")
    model.set_attn_implementation("dsv4_dense")
    with torch.no_grad(), pytest.raises(ValueError, match="^attn_implementation='dsv4_dense': got a mask of another"):
        packed = torch.cat([torch.arange(20), torch.arange(20)])[None]
        model(ids[:1], position_ids=packed, use_cache=False)
    holes = torch.ones(2, 40, dtype=torch.long)
    holes[1, 20:30] = 0
    with torch.no_grad(), pytest.raises(ValueError, match="^attention_mask: got padding between tokens"):
        model(ids, attention_mask=holes, use_cache=False)
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad(), pytest.raises(ValueError, match="^past_key_values: got keys up to 64"):
        model(ids, past_key_values=static, use_cache=True)
    with torch.no_grad(), pytest.raises(ValueError, match="^attention_mask: got .*; accepted: causal"):
        model(ids, attention_mask=torch.zeros(2, 1, 40, 40), use_cache=False)
    with pytest.raises(ValueError, match="^backend: "):
        integration.register(backend="gpu")
    q = torch.zeros(1, 2, 3, 64)
    module, rule = torch.nn.Module(), integration.Visible((-1, 0), None)
    for text, options in [
        ("softcap: got float -1.0", dict(softcap=-1.0)),
        ("dropout_p: ", dict(dropout=0.1)),
        ("attention_mask: got Module with .*causal", dict(is_causal=False)),
        ("sliding_window: got 5", dict(sliding_window=5, attention_mask=integration.Visible((7, 0), None))),
    ]:
        with pytest.raises(ValueError, match=f"^{text}"):
            integration.attention(module, q, q, q, **{"attention_mask": rule} | options)


@pytest.mark.parametrize("wrong", ["chunks", "bidirectional", "one less", "one more", "other sequences"])
def test_rules_of_another_kind_are_noticed(wrong):
    rules = {
        "chunks": lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        "bidirectional": lambda b, h, q, k: (k <= q) | ((q >= 5) & (q < 9) & (k >= 5) & (k < 9)),
        "one less": lambda b, h, q, k: (k <= q) & (k > q - 7),
        "one more": lambda b, h, q, k: (k <= q) & (k > q - 9),
        "other sequences": lambda b, h, q, k: (k <= q) & (k > q - 8) & ((b == 0) | (k // 20 == q // 20)),
    }
    for local in (8, None):
        with pytest.raises(ValueError, match="mask of another kind"):
            integration.visible(2, 40, 40, mask_function=rules[wrong], local_size=local)
    plain = integration.visible(2, 40, 40, mask_function=lambda b, h, q, k: (k <= q) & (k > q - 8), local_size=8)
    assert plain.window == (7, 0) and plain.padding is None
