"""A tiny DeepSeek-V4 with dsv4's caches against the model's own eager attention, one request at a time and unpaged."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import wrong  # noqa: E402
from tiny_v4 import allowed, build, same  # noqa: E402

import dsv4  # noqa: E402
import softsm  # noqa: E402
from deepseek_v4 import step  # noqa: E402
from deepseek_v4.paged_model import PagedModel  # noqa: E402
from deepseek_v4.serving import Serving  # noqa: E402
from dsv4.caches import kv  # noqa: E402

SMALL = dict(tokens=640, requests=4, chunk=160, page_tokens=32, window_page=8)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (4, 110), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def eager(model, ids):
    """Causal, so the logits of every shorter sequence are in it."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def served(model, **options):
    """Fill every pool with NaN: a row that was not written must not be read."""
    made = PagedModel(model, **SMALL | options)
    for pools in made.pools:
        for pool in pools.values():
            if isinstance(pool, dsv4.Fp8Cache):
                pool.storage.fill_(255)
            elif isinstance(pool, tuple):  # the states of a compressor
                for state in pool:
                    state.fill_(float("nan"))
            else:
                pool.fill_(float("nan"))
    return made


@pytest.mark.parametrize("length", [1, 4, 15, 33, 110])
def test_one_request_at_once(model, ids, eager, length):
    got = served(model).step({"a": ids[0, :length]}, all_logits=True)["a"]
    same(got, eager[0, :length])


@pytest.mark.parametrize("prompt, graphs", [(1, False), (26, True)])
def test_token_by_token(model, ids, eager, prompt, graphs):
    """Past boundaries of the window, of both kinds of compressed rows and of pages."""
    engine = served(model, graphs=graphs)
    same(engine.step({"a": ids[0, :prompt].tolist()})["a"], eager[0, prompt - 1])
    for t in range(prompt, prompt + 20):
        same(engine.step({"a": [int(ids[0, t])]})["a"], eager[0, t])


def test_steps_of_fixed_shapes(model, ids, eager):
    """What a CUDA graph is made of, on a CPU: requests at different places, and fewer of them than the graph takes."""
    engine = served(model, graphs=True, requests=5, context=111)  # not a whole number of pages
    done = [0, 13, 31, 94]
    engine.step({r: ids[r, :n] for r, n in enumerate(done) if n})
    for here in [(1, 2, 3), (0, 1, 2, 3), (3,)] + [(2, 0, 3), (1, 0)] * 6:
        got = engine.step({r: ids[r, done[r]].reshape(1) for r in here})
        for r in here:
            same(got[r], eager[r, done[r]])
            done[r] += 1
    assert sorted(engine.decoders) == [1, 2, 4]


@pytest.mark.parametrize("seed", range(2))
def test_requests_side_by_side_in_chunks(model, ids, eager, seed):
    """Each step processes some tokens of some requests: prompts in chunks and single tokens, in any order."""
    generator = torch.Generator().manual_seed(seed)
    engine, done = served(model), [0, 0, 0, 0]
    while min(done) < 110:
        room, feed = 160, {}
        for r in torch.randperm(4, generator=generator).tolist():
            count = [0, 1, 9, 23, 70][int(torch.randint(0, 5, (1,), generator=generator))]
            count = min(count, room, 110 - done[r])
            if count:
                feed[r], room = ids[r, done[r] : done[r] + count], room - count
        for r, logits in engine.step(feed, all_logits=True).items():
            same(logits, eager[r, done[r] : done[r] + len(feed[r])])
            done[r] += len(feed[r])
    # the window of 16 rows touches at most 3 pages of 8
    assert all(len(request.window) <= 3 for request in engine.requests.values())


def test_pages_come_back_and_are_used_again(model, ids, eager):
    engine = served(model, tokens=120, requests=2)
    free = len(engine.places.pages.free), len(engine.places.window_pages.free)
    for r in (0, 1, 2, 3):  # more than there is room for at a time
        same(engine.step({r: ids[r, :100]})[r], eager[r, 99])
        same(engine.step({r: ids[r, 100:]})[r], eager[r, 109])
        engine.drop(r)
    assert (len(engine.places.pages.free), len(engine.places.window_pages.free)) == free


def test_a_step_that_fails_leaves_everything_as_it_was(model, ids, eager, monkeypatch):
    engine = served(model)
    engine.step({"a": ids[0, :21]})
    free = sorted(engine.places.pages.free), sorted(engine.places.window_pages.free)
    real, calls = step.v4_attention, []

    def failing(*args, **options):
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return real(*args, **options)

    monkeypatch.setattr(step, "v4_attention", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step({"a": ids[0, 21:70], "b": ids[1, :60]})
    assert (sorted(engine.places.pages.free), sorted(engine.places.window_pages.free)) == free
    assert list(engine.requests) == ["a"] and engine.requests["a"].tokens == 21
    got = engine.step({"b": ids[1, :60], "a": ids[0, 21:70]}, all_logits=True)
    same(got["a"], eager[0, 21:70])
    same(got["b"], eager[1, :60])


def test_fp8_rows_bit_for_bit(ids, monkeypatch):
    """Pages of 584-byte rows give the bits of rows that went through their quantisation and lie as floats."""
    model = build(512, rope=64)
    small = SMALL | dict(tokens=320)
    steps = [{"a": ids[0, :50], "b": ids[1, :7]}, {"a": ids[0, 50:51]}, {"b": ids[1, 7:60], "a": ids[0, 51:55]}]

    def run(**options):
        engine = served(model, **small, **options)
        return [engine.step(feed, all_logits=True) for feed in steps]

    packed = run(rows="fp8")
    real = kv.write_rows

    def rounded(target, slots, rows):
        if rows.shape[-1] == 512:
            rows = dsv4.Fp8Cache.pack(rows).unpack(rows.dtype)[: len(rows)]
        real(target, slots, rows)

    monkeypatch.setattr(kv, "write_rows", rounded)
    plain = run()
    for got, want in zip(packed, plain):
        assert all(torch.equal(got[name], want[name]) and got[name].isfinite().all() for name in want)


def test_weights_are_used_as_they_are(ids):
    """No parameter gets other memory; what replaces a weight counts at the next step, however it was put there."""
    model, other = build(), build(initializer_range=0.05)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    engine = served(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    where = engine._decoder(1)._weights()

    def changed():
        with torch.no_grad():
            want = model(ids[:1, :20], use_cache=False).logits[0, -1]
        engine.step({"a": ids[0, :19]})
        same(engine.step({"a": ids[0, 19:20]})["a"], want)
        engine.drop("a")
        return want

    first = changed()
    model.load_state_dict(other.state_dict(), assign=True)
    assert engine._decoder(1)._weights() != where  # a graph must be captured again
    assert (changed() - first).abs().max() > 100 * allowed()
    attention = model.model.layers[2].self_attn
    attention.kv_proj.weight.data = torch.randn_like(attention.kv_proj.weight)
    attention.sinks.data = attention.sinks + 1
    changed()


def test_hooks_of_projections_are_called(ids):
    model, seen = build(), []
    for layer in model.model.layers:
        for part in step.projections(layer.self_attn):
            part.register_forward_hook(lambda part, x, y: seen.append(part))
    served(model).step({"a": ids[0, :9]})
    assert seen == [part for layer in model.model.layers for part in step.projections(layer.self_attn)]


def test_fp8_weights_are_refused_by_name():
    model = build()
    model.model.layers[3].self_attn.kv_proj.weight.data = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="^model: got kv_proj.weight of layer 3 in float8_e4m3fn; accepted: "):
        PagedModel(model, **SMALL)


@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "cpu"), (torch.float32, "meta"), (torch.float64, "cpu")])
def test_the_default_dtype_and_device_change_nothing(model, ids, eager, dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            engine = served(model)
            first = engine.step({"a": ids[0, :30], "b": ids[1, :3].tolist()})
            second = engine.step({"a": [int(ids[0, 30])]})
    finally:
        torch.set_default_dtype(before)
    assert first["a"].dtype == torch.float32
    same(first["a"], eager[0, 29])
    same(second["a"], eager[0, 30])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernels_of_a_step(ids, arch):
    """Every kernel of the GPU's way through a layer, on softsm, is as near to fp32 as the CPU's way in bf16 is. All
    experts and all rows take part: a choice that rounding turns would be no error of theirs."""
    certain = dict(
        rope=64,
        num_experts_per_tok=4,
        index_topk=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", step.CSA, step.HCA],
    )
    low, high = build(512, torch.bfloat16, **certain), build(512, **certain)
    high.load_state_dict({name: x.float() for name, x in low.state_dict().items()})

    def run(model, **options):
        engine = served(model, **SMALL | dict(tokens=64, requests=2), rows="fp8", graphs=True, **options)
        feeds = [{"a": ids[0, :14], "b": ids[1, :2]}] + [{"a": ids[0, t : t + 1]} for t in (14, 15)]
        return torch.stack([engine.step(feed)["a"].float() for feed in feeds])

    want = run(high)
    unavoidable = (run(low) - want).norm()
    with softsm.use(arch):
        got = run(low, backend="softsm")
    assert (got - want).norm() <= 1.5 * unavoidable


def test_greedy_generation_is_that_of_transformers(model, ids):
    """Five prompts through two places, with a chunk that the longest does not fit into."""
    prompts = [ids[0, :50], ids[1, :1], ids[2, :17], ids[3, :33], ids[0, 60:64]]
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = [model.generate(p[None], **options)[0, len(p) :].tolist() for p in prompts]
    engine = served(model, requests=2, chunk=20)
    assert engine.generate(prompts, 6) == want and not engine.requests
    stop = want[2][4]
    until = want[2].index(stop) + 1
    assert engine.generate([ids[2, :17]], 6, stop=stop) == [want[2][:until]]


def test_prompts_wait_for_pages(model, ids):
    """Six pages of 32 tokens; a prompt and what follows it need three, so that four prompts go through by twos."""
    prompts = [ids[r, :62] for r in range(4)]
    together = served(model, tokens=64, chunk=70)
    assert len(together.places.pages.free) == 6
    assert together.generate(prompts, 4) == served(model).generate(prompts, 4)
    for some in ids[0, :100].split(50):  # four pages
        together.step({"other": some})
    with pytest.raises(ValueError, match="^prompts: got no room for a request"):
        together.generate(prompts, 4)
    assert together.requests.keys() == {"other"}


def test_jobs_come_and_go(model, ids):
    """tutorials/serve.py shows more of it."""
    engine = served(model, tokens=64, chunk=70)
    serving = Serving(engine)
    first = serving.submit(ids[0, :62], 3)
    assert serving.step() == [first] and serving.fed == [(first, 62)]
    second, third = serving.submit(ids[1, :90], 3, name="b"), serving.submit(ids[2, :5], 3)
    assert serving.step() == [first]  # with as much of the second as fits
    assert serving.fed == [(first, 1), (second, 69)]
    for name in ("b", []):
        with pytest.raises(ValueError, match="^name: got "):
            serving.submit([1], 3, name=name)
    serving.cancel(second)
    assert "b" not in engine.requests and second.done and serving.step() == [first, third]
    while serving:
        serving.step()
    assert [len(job.said) for job in (first, second, third)] == [3, 0, 3] and not engine.requests
    with pytest.raises(ValueError, match="^job: got "):
        serving.cancel(second)
    assert serving.step() == []


def test_eager_still_works_beside_it(model, ids, eager):
    served(model).step({"a": ids[0, :20]})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, eager)


def test_what_it_cannot_do_it_says(model, ids):
    for text, options in [
        ("page_tokens: got 24; accepted: a multiple of 16", dict(page_tokens=24)),
        ("rows: got str 'bf16'", dict(rows="bf16")),
        ("rows: got 'fp8' with head dim 64", dict(rows="fp8")),
        ("tokens: ", dict(tokens=0)),
        ("context: ", dict(context=0)),
        ("backend: ", dict(backend="gpu")),
    ]:
        with pytest.raises(ValueError, match=f"^{text}"):
            PagedModel(model, **SMALL | options)
    with pytest.raises(ValueError, match="^model: got Linear"):
        PagedModel(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="^model.config.head_dim: got head dim 24"):
        PagedModel(build(24), **SMALL)
    engine = served(model, tokens=96, requests=2, context=100)
    engine.step({"a": ids[0, :90]})
    assert engine.step({}) == {}
    for text, feed in [
        ("new: got 161 tokens", {"b": ids[0].repeat(2)[:161]}),
        ("new: got token 101 of 'a'", {"a": ids[0, :11]}),
        ("new: got 2 requests more than the 1 there are", {"b": ids[0, :1], "c": ids[0, :1]}),
        ("new: got tokens that need 1 more pages", {"b": ids[0, :80]}),
        ("tokens of 'a': got int64 .0.", {"a": ids[0, :0]}),
        ("tokens of 'a': got float32", {"a": ids[0, :2].float()}),
        ("tokens of 'a': got values from 512", {"a": [512]}),
    ]:
        with pytest.raises(ValueError, match=f"^{text}"):
            engine.step(feed)
    assert engine.requests.keys() == {"a"}
    with pytest.raises(ValueError, match="^name: "):
        engine.drop("b")
    engine.step({"b": ids[0, :2]})
    with pytest.raises(ValueError, match="^prompts: got no room"):
        engine.generate([ids[0, :3]], 2)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: got 98 tokens, and 4 new ones; accepted: at most 101"):
        engine.generate([ids[0, :9], ids[0, :98]], 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_arguments(model):
    options = dict(context=200, rows="model", backend="cpu", graphs=True, **SMALL)
    wrong.each_in_turn("PagedModel", PagedModel, dict(model=model, **options))
    engine = served(model)

    def step(tokens, new=None, all_logits=False):
        try:
            engine.step({"a": tokens} if new is None else new, all_logits=all_logits)
        finally:
            for name in list(engine.requests):
                engine.drop(name)

    wrong.each_in_turn(
        "step", step, dict(tokens=[1, 2], new={"a": [1]}, all_logits=True), [("tokens", "*"), ("new", "dict")]
    )
    wrong.each_in_turn("step", step, dict(tokens=[1, 2]))
    wrong.each_in_turn("submit", Serving(engine).submit, dict(prompt=[1, 2], new_tokens=2, stop=5))
    wrong.each_in_turn(
        "generate", engine.generate, dict(prompts=[[1], [2]], new_tokens=2, stop=5), [("prompts", "empty list")]
    )
    for name in ({}, [1], "b", None):
        with pytest.raises(ValueError, match="^name: got .*; accepted: the name of a request"):
            engine.drop(name)
