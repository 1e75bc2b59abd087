"""What `dsv4 compile` writes is what a model launches: no call of a V4 layer is left to a compiler."""

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("triton")
import tiny_v4  # noqa: E402
import torch  # noqa: E402
from written import SIZES, of_part, recording, written  # noqa: E402

import dsv4  # noqa: E402
import dsv4.bench as bench  # noqa: E402
from deepseek_v4.paged_model import PagedModel  # noqa: E402
from deepseek_v4.step import CSA, HCA  # noqa: E402
from dsv4.bench.v4 import V4Case  # noqa: E402
from dsv4.commands import moe_variants, variants  # noqa: E402
from dsv4.fmha import problem  # noqa: E402
from dsv4.fmha.backward import FmhaBackward  # noqa: E402
from dsv4.fmha.kernels.backward import Adding  # noqa: E402
from dsv4.fmha.kernels.sm90 import backward  # noqa: E402
from dsv4.runtime import aot, calls, dispatch  # noqa: E402
from dsv4.runtime.checks import HEAD_DIMS  # noqa: E402
from dsv4.v4.problem import build  # noqa: E402


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_launch_of_a_model_is_written(arch):
    model = tiny_v4.build(512, torch.bfloat16, rope=64, index_head_dim=128, num_hidden_layers=3,
                          layer_types=["sliding_attention", CSA, HCA])  # fmt: skip
    ids = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    with recording(arch) as launched:
        for rows in ("model", "fp8"):
            served = PagedModel(model, tokens=256, context=256, requests=2, chunk=24, page_tokens=16, window_page=8,
                                rows=rows, graphs=True, backend="softsm")  # fmt: skip
            served.step({"a": ids[0, :14], "b": ids[1, :2]})
            served.step({"a": ids[0, 14:15]})
            served.step({"a": ids[0, 15:16], "b": ids[1, 2:3]})
    assert {"ring_rows", "normed_rows", "collapse_streams", "spread_streams", "index_choose"} <= set(launched.values())
    missing = set(launched) - written(variants.OF_V4, arch)
    assert not missing, [launched[one] for one in missing]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_kernel_is_specialised_for_a_number(arch):
    """One cubin for one sequence and one for many had the same name: with the wheel, gradients were wrong."""
    parts = variants.wanted(variants.KINDS, HEAD_DIMS, ["bf16"])
    made = [x for part in parts for x in variants.launches(part, variants.Sizes(), arch)]
    for x in {(x.kernel, tuple(map(type, x.arguments))): x for x in made}.values():
        for param, argument in zip(x.kernel.params, x.arguments):
            number = isinstance(argument, int) and not param.is_constexpr
            assert not number or param.do_not_specialize, f"{x.kernel.__name__}: {param.name}"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("numbers", [torch.int32, torch.int64])
def test_index_calls_of_fp8_keys_are_written(arch, each, numbers):
    n = 2 * each
    cache = dsv4.IndexCache.empty(64, 4)
    q, w = torch.empty(n, 16, 128).to(torch.float8_e4m3fn), torch.empty(n, 16)
    table = torch.zeros(2, 16, dtype=torch.int32)
    starts = torch.arange(0, n + 1, each, dtype=torch.int32)
    more = dict(block_table=table, request_starts=starts, lengths=torch.full((n,), 60, dtype=numbers))
    with recording(arch) as launched:
        dsv4.index_topk(q, cache, w, 8, **more, request_rows=True, backend="softsm")
    assert launched and not set(launched) - written(["index"], arch)


def test_compressed_rows_without_rope_are_written():
    kv, weight = torch.empty(8, 1024, dtype=torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
    with recording("sm_90a") as launched:
        dsv4.compress(kv, kv, torch.empty(4, 1024, dtype=torch.bfloat16), weight, backend="softsm")
    assert launched and not set(launched) - written(["compress"], "sm_90a")


# (batch, queries, keys, KV heads, heads of a group): decode, prompts, few heads, whose keys are split, many
# tiles, few keys
SHAPES = [(64, 1, 8192, 8, 8), (1, 1, 131072, 8, 8), (2, 2048, 2048, 16, 1), (1, 512, 512, 4, 1), (1, 40, 131072, 2, 4),
          (3, 300, 4096, 3, 1), (8, 4, 1000, 1, 16), (3, 4096, 4096, 16, 8), (62, 24, 24, 2, 8),
          (4, 1, 50, 2, 4), (1, 2000, 2000, 8, 5)]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", variants.OF_FMHA)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_calls_of_fmha_are_written(arch, kind, d):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    known, target = written([kind], arch, d, sizes=variants.Sizes()), dispatch.compile_target(arch)
    for (b, t, s, heads, group), causal in itertools.product(SHAPES, (False, True)):
        q, k, v = empty(b, t, heads * group, d), empty(b, s, heads, d), empty(b, s, heads, d)
        if kind == "dense":
            p = problem.dense(q, k, v, causal=causal)
        elif kind == "varlen":
            starts = [empty(b + 1, dtype=torch.int32) for _ in "qk"]
            rows = (x.flatten(0, 1) for x in (q, k, v))
            p = problem.varlen(*rows, *starts, causal=causal, max_seqlen_q=t, max_seqlen_k=s)
        else:
            pages = empty(99, 64, heads, d), empty(99, 64, heads, d)
            table, lengths = empty(b, -(-s // 64), dtype=torch.int32), empty(b, dtype=torch.int32)
            p = problem.paged(q, *pages, table, lengths, causal=causal)
        p = replace(p, out=empty(*p.q.shape), lse=empty(*p.lse_shape, dtype=torch.float32))
        for same in (False, True) if kind == "varlen" else (False,):
            launched = calls.launches_of(replace(p, same_sequences=same), target)
            missing = {aot.variant_of(x, arch): x.kernel.__name__ for x in launched}
            assert not missing.keys() - known, (b, t, s, heads, group, causal, missing)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_fmha_are_written(arch, d, dtype):
    """Odd sizes, groups, sinks, the gradient of the LSE, and sequences of a packed batch, whose LSE begins anywhere."""
    draw = dict(dtype=variants.DTYPES[dtype], requires_grad=True)
    q, k = torch.zeros(1, 131, 6, d, **draw), torch.zeros(1, 57, 2, d, **draw)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 101, 101, 131], [0, 3, 20, 57]))
    sink = torch.zeros(6, requires_grad=True)
    with recording(arch) as launched, torch.enable_grad():
        for out, lse in (
            dsv4.fmha(q, k, k * 1, window=(20, 3), sink=sink, return_lse=True, backend="softsm"),
            dsv4.fmha_varlen(q[0], k[0], k[0] * 1, cu_q, cu_k, causal=True, return_lse=True, backend="softsm"),
        ):
            torch.autograd.grad([out, lse], [q, k], [torch.zeros_like(out), torch.zeros_like(lse)])
    forward = written(["dense", "varlen"], arch, d, dtype)
    gradients = set(launched) - forward
    assert "backward_rows" in launched.values() and len(gradients) >= 2
    assert not gradients - written(["fmha-backward"], arch, d, dtype), [launched[one] for one in gradients]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_gradients_of_few_work_tiles_are_written(d, group):
    """Query heads go together, but CTAs do not loop."""
    q, k, v = (torch.empty(2, 1024, n, d, dtype=torch.bfloat16, device="meta") for n in (8 * group, 8, 8))
    p = replace(problem.dense(q, k, v), out=torch.empty_like(q), lse=torch.empty(2, 8 * group, 1024, device="meta"))
    b = FmhaBackward(p, torch.empty_like(q), None, *(torch.empty_like(x) for x in (q, k, v)))
    launched = calls.launches_of(b, dispatch.compile_target("sm_90a"))
    missing = [
        x.constants for x in launched if aot.variant_of(x, "sm_90a") not in written(["fmha-backward"], "sm_90a", d)
    ]
    assert not missing


def test_gradients_of_groups_are_written(monkeypatch):
    """A TMA box holds the heads of a group that go together, if there is a power of two of them."""
    monkeypatch.setattr(backward, "loops", lambda *given: True)  # as in a large problem
    draw = dict(dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, 20, 64], dtype=torch.int32)
    with recording("sm_90a") as launched, torch.enable_grad():
        for group, pack in ((2, 2), (3, 1), (3, 3), (4, 4), (8, 8), (16, 16)):
            q, k = torch.zeros(1, 64, 2 * group, 64, **draw), torch.zeros(1, 64, 2, 64, **draw)
            with monkeypatch.context() as patch:
                patch.setattr(backward, "find_adding", lambda *given, pack=pack: Adding(pack, 1))
                for out in (
                    dsv4.fmha(q, k, k * 1, causal=True, backend="softsm"),
                    dsv4.fmha_varlen(q[0], k[0], k[0] * 1, starts, starts, backend="softsm"),
                ):
                    torch.autograd.grad(out, [q, k], torch.zeros_like(out))
                if pack > 4:
                    continue  # under a mask the L2 does not hold the rows of more, so they are rare
                patch.setattr(backward, "lengths_differ", lambda x: x.sequences is not None)
                out = dsv4.fmha_varlen(q[0], k[0], k[0] * 1, starts, starts, causal=True, backend="softsm")
                torch.autograd.grad(out, [q, k], torch.zeros_like(out))
    assert "list_key_tiles" in launched.values()
    assert sum(name == "backward_keys" for name in launched.values()) == 13  # three heads together, or apart: one
    missing = set(launched) - written(["dense", "varlen", "fmha-backward"], "sm_90a", 64, "bf16")
    assert not missing, [launched[one] for one in missing]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("d", [128, 512])
def test_capped_scores_are_written(arch, d):
    draw = dict(dtype=torch.bfloat16, requires_grad=True)
    q, k = torch.zeros(1, 131, 6, d, **draw), torch.zeros(1, 57, 2, d, **draw)
    with recording(arch) as launched, torch.enable_grad():
        out = dsv4.fmha(q, k, k * 1, softcap=30.0, causal=True, backend="softsm")
        torch.autograd.grad(out, [q, k], torch.zeros_like(out))
    capped = set(launched) - written(["dense", "fmha-backward"], arch, d)
    assert len(capped) >= 2
    assert not capped - written(["softcap"], arch, d), [launched[one] for one in capped]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_fp8_caches_are_written(arch):
    """Pages, by few rows and by many, with scales and without; dense keys that are converted first."""
    k = torch.zeros(3, 4, 2, 128).to(torch.float8_e4m3fn)
    table, lengths, scale = torch.zeros(1, 3).int(), torch.tensor([9]).int(), torch.ones(2)
    with recording(arch) as launched:
        for t in (1, 20, 40, 60):
            q = torch.zeros(1, t, 6, 128).bfloat16()
            dsv4.fmha_paged(q, k, k.clone(), table, lengths, k_scale=scale, backend="softsm")
            dsv4.fmha_paged(q, k, k.clone(), table, lengths, causal=True, backend="softsm")
            dsv4.fmha(q, k[:1], k[1:2], v_scale=scale[0], causal=True, backend="softsm")
    assert len(launched) >= 3
    missing = set(launched) - written(["e4m3"], arch, 128)
    assert not missing, [launched[one] for one in missing]


@pytest.mark.parametrize(
    "arch, form, activations",
    [("sm_90a", "mxfp4", "fp8_128"), ("sm_100a", "mxfp4", "fp8_32"), ("sm_100a", "nvfp4", "nvfp4")],
)
def test_calls_of_experts_are_written(arch, form, activations):
    e, h, i, topk = 5, 512, 384, 2
    group, scale = (16, torch.float8_e4m3fn) if form == "nvfp4" else (32, torch.uint8)
    packed = []
    for rows, columns in ((i, h), (i, h), (h, i)):
        packed += [
            torch.zeros(e, rows, columns // 2, dtype=torch.uint8),
            torch.zeros(e, rows, columns // group).to(scale),
        ]
    whole = {f"w{n}_global": torch.ones(e) for n in (1, 3, 2)} if form == "nvfp4" else {}
    experts = dsv4.Fp4Experts.pack(*packed, **whole, layout="sm90" if arch == "sm_90a" else "sm100")
    bias, table = torch.zeros(e), torch.zeros(9, topk, dtype=torch.int64)
    shared = torch.zeros(2 * 128, h, dtype=torch.bfloat16), torch.zeros(h, 128, dtype=torch.bfloat16)
    with recording(arch) as launched:
        for tokens in (3, 700):
            x, gate = torch.zeros(tokens, h, dtype=torch.bfloat16), torch.zeros(e, h, dtype=torch.bfloat16)
            dsv4.moe_route(x, gate, bias=bias, topk=topk, backend="softsm")
            one = torch.zeros(tokens, dtype=torch.int64)
            ids, weights = dsv4.moe_route(x, gate, table=table, token_ids=one, topk=topk, backend="softsm")
            dsv4.moe(x, experts, ids.long(), weights, activations=activations, shared=shared, backend="softsm")
            for fused in {False, arch == "sm_100a"}:
                dsv4.moe(x, experts, ids, weights, activations=activations, fused=fused, backend="softsm")
    assert {"moe_logits", "moe_choose", "moe_sort_rows", "moe_rows", "moe_sum"} <= set(launched.values())
    missing = set(launched) - written(["moe"], arch, sizes=SIZES._replace(hidden=h, experts=e, experts_of_token=topk))
    assert not missing, [launched[one] for one in missing]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_v4_attention_and_its_gradients_are_written(arch, dtype, deterministic):
    draw = dict(dtype=variants.DTYPES[dtype], requires_grad=True)
    q, rows = (torch.zeros(n, **draw) for n in ((3, 5, 512), (70, 512)))
    numbers = torch.zeros(3, 7, dtype=torch.int32)
    with recording(arch) as launched, torch.enable_grad():
        for rope in (None, (torch.zeros(9, 64), torch.zeros(3, dtype=torch.int64))):
            out = dsv4.v4_attention(
                q, rows, numbers, rows, numbers, inverse_rope=rope, deterministic=deterministic, backend="softsm"
            )
            torch.autograd.grad(out, [q, rows], torch.zeros_like(out))
    assert {"query_rows", "number_rows", "backward_sparse"} <= set(launched.values())
    missing = set(launched) - written(["v4", "v4-backward"], arch, dtype=dtype)
    assert not missing, [launched[one] for one in missing]


@pytest.mark.parametrize(
    "text, got",
    [('{"hidden_size": 4096}', "q_lora_rank, "), ("[4096]", "JSON object"), ("import torch", "JSON object")],
)
def test_a_config_without_the_sizes_is_refused(tmp_path, text, got):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config.json: got no {got}.*accepted: the config.json of a DeepSeek-V4"):
        variants.Sizes.read(path)


def test_a_config_gives_the_sizes(tmp_path):
    config = tiny_v4.build(512, rope=64, index_head_dim=128).config
    config.save_pretrained(tmp_path)
    assert variants.Sizes.read(tmp_path / "config.json") == SIZES._replace(
        index_rows=65536, page_size=64, ratios=(4, 128), streams=config.hc_mult, experts=4, experts_of_token=2
    )


def dense_problem(case):
    """The launches of a row of the bench; nothing is drawn."""
    q, k = (
        torch.empty(case.batch, n, h, case.head_dim, dtype=case.dtype)
        for n, h in ((case.queries, case.q_heads), (case.keys, case.kv_heads))
    )
    window = (-1, 0 if case.causal else -1)
    p = problem.dense(q, k, k if case.same_kv else torch.empty_like(k), window=window)
    return replace(p, out=torch.empty_like(q), same_kv=case.same_kv)


def v4_problem(case):
    def pool():
        return dsv4.Fp8Cache.empty(case.pool // 64, 64) if case.fp8 else torch.empty(case.pool, 512, dtype=q.dtype)

    q = torch.empty(case.queries, case.heads, 512, dtype=torch.bfloat16)
    window, listed = (torch.empty(case.queries, n, dtype=torch.int32) for n in (case.window, case.compressed))
    more = dict(compressed=pool(), compressed_indices=listed) if case.compressed else {}
    p = build(q, pool(), window, **more, sink=torch.empty(case.heads))
    return replace(p, out=torch.empty_like(p.q))


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_the_dense_rows_of_the_speed_table_are_written(d):
    """So their times hold for whoever installs the wheel of these files, with any Triton."""
    there = written(["dense"], "sm_90a", d)
    target = dispatch.compile_target("sm_90a")
    for case in (x for x in bench.cases("dense") if x.head_dim == d):
        for one in calls.launches_of(dense_problem(case), target):
            assert aot.variant_of(one, "sm_90a") in there, f"{case.name}: {one.kernel.__name__} {one.constants}"


@pytest.mark.slow
def test_the_v4_rows_of_the_speed_table_are_written():
    """But those by block table, whose pages of two rows make a variant of their own."""
    there = written(["v4"], "sm_90a")
    target = dispatch.compile_target("sm_90a")
    for case in (x for x in bench.cases("v4") if isinstance(x, V4Case) and not x.each):
        for one in calls.launches_of(v4_problem(case), target):
            assert aot.variant_of(one, "sm_90a") in there, f"{case.name}: {one.kernel.__name__} {one.constants}"


@pytest.mark.parametrize("named", ["list", "table"])
@pytest.mark.parametrize("rows", [*variants.POOLS, "bf16"])
def test_decode_whose_whole_tiles_come_first_is_written(rows, named):
    """More work tiles than SMs: few partial results and many, in every number of splits; in one launch or two."""
    pools = variants.POOLS.get(rows, (None, None))
    parts = {("v4", "fp8", named), ("v4.1", "attention", named) if rows == "v4.1" else ("v4", rows, named)}
    known = set().union(*(of_part(part, "sm_90a") for part in parts))
    target = dispatch.compile_target("sm_90a")
    window, compressed = (None if x is None else x.empty(1600, 64) for x in pools)
    plain = torch.empty(1600, 64, 512, dtype=torch.bfloat16)
    window, compressed = plain if window is None else window, plain if compressed is None else compressed
    found, seconds = set(), set()
    shapes = itertools.product((67, 72, 80, 96, 136, 160, 192, 300), (12, 32, 128), (512, 1024, 1536))
    for queries, heads, width in shapes:
        q = torch.empty(queries, heads, 512, dtype=torch.bfloat16)
        numbers = torch.empty(queries, 128, dtype=torch.int32)
        if named == "list":
            more = dict(compressed_indices=torch.empty(queries, width, dtype=torch.int32))
        else:
            more = dict(compressed_block_table=torch.empty(queries, width // 64, dtype=torch.int32))
            more["compressed_lengths"] = torch.empty(queries, dtype=torch.int32)
        p = build(q, window, numbers, compressed, **more, sink=torch.empty(heads))
        for one in calls.launches_of(replace(p, out=torch.empty_like(q)), target):
            assert aot.variant_of(one, "sm_90a") in known, (queries, heads, width, one.kernel.__name__, one.constants)
            if one.constants.get("WHOLE_FIRST"):
                found.add(one.constants["SPLIT"])
            if one.constants.get("AFTER"):
                seconds.add((one.kernel.__name__, int(one.constants["SPLIT"])))
    by_table = named == "table" and rows != "bf16"
    assert found == (set() if by_table else {1, 2})
    of_few = {("v4_decode_swap_ab_ws", 1)} if named == "list" and rows in ("fp8", "v4.1") else set()
    assert seconds == (of_few | {("v4_sparse", 1), ("v4_sparse", 2)} if by_table else of_few)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_tile_of_experts_is_written(arch):
    """Tiles have as many rows as the experts of V4-Flash expect."""
    s, target = variants.Sizes(), dispatch.compile_target(arch)
    known = {aot.variant_of(x, arch) for x in variants.launches(("moe", "mxfp4", False), s, arch)}
    layout = "sm90" if arch == "sm_90a" else "sm100"
    for tokens in (1, 3, 8, 22, 43, 86, 171, 342, 683, 900, 1366, 3000, 3700, 5000, 20000):
        sizes = (tokens, s.experts_of_token, s.experts, s.hidden, 2048)
        p = moe_variants.without_memory(sizes, layout, ("mxfp4", "fp8_128"), False, False, torch.int32)
        for launch in calls.launches_of(p, target):
            assert aot.variant_of(launch, arch) in known, (tokens, launch.kernel.__name__, launch.constants)
