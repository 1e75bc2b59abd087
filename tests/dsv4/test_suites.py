"""The suites run clean on the CPU path, and they notice when a result is wrong."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import dsv4
from dsv4 import suites
from dsv4.fmha import backward_cpu as fmha_backward
from dsv4.runtime.threads import one_thread
from dsv4.suites import Case, Check, Draw, Where, calls, run_case
from dsv4.v4 import backward_cpu as v4_backward

CPU = Where("cpu")
SEED = 20261115
ALL = [case for suite in suites.SUITES.values() for case in suite()]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_case_passes_on_the_cpu(case: Case) -> None:
    result = run_case(case, CPU, SEED)
    assert result.ok, result.why()


def test_seeds_are_the_grid_of_64_and_eight_longer_ones() -> None:
    want = {f"d{d}-t{t}-s{s}" for d in (64, 128, 256, 512) for t in (1, 4, 32, 128) for s in (128, 256, 384, 512)}
    assert len(want) == 64
    want |= {f"d{d}-t{t}-s1024" for d in (64, 128, 256, 512) for t in (1, 128)}
    cases = suites.seeds()
    assert len(want) == 72 and len(cases) == 72 and {case.name for case in cases} == want
    for case in cases:
        args = case.make(Draw(0)).args
        sizes = case.name.removeprefix("d").replace("-t", " ").replace("-s", " ").split()
        d, t, s = (int(x) for x in sizes)
        assert args["q"].shape == (1, t, 8, d) and args["k"].shape == args["v"].shape == (1, s, 1, d)
        assert args["q"].dtype == torch.bfloat16 and set(args) == {"q", "k", "v"}


@pytest.mark.parametrize("rows", [1, 4, 8, 64])
@pytest.mark.parametrize("keys", [2, 6, 30])
def test_the_norm_of_few_rounding_errors_has_room_to_spread(rows: int, keys: int) -> None:
    """An ideal kernel that rounds P relative to another maximum than the oracle, as after an earlier tile."""
    draw, dtype = Draw(SEED), torch.bfloat16
    for _ in range(100):
        v = draw.normal(keys, 64, dtype=dtype).double()
        p = torch.softmax(draw.normal(rows, keys).double(), -1)
        p, size = p / p.amax(-1, keepdim=True), torch.rand(rows, 1, generator=draw.generator).double().exp2()
        total = p.sum(-1, keepdim=True)
        got = ((p * size).to(dtype).double() @ v / (total * size)).to(dtype)
        checks = calls.judge(got, p @ v / total, p.to(dtype).double() @ v / total, calls.FEATURES)
        assert all(check.ok for check in checks), list(map(str, checks))


def test_a_sink_applied_to_a_rounded_result_is_judged_by_an_oracle_that_does_the_same() -> None:
    """With four rows, judged by an oracle that rounds once, 6 draws of 100 exceed 1.5 x its error."""
    for seed in range(100):
        draw = Draw(seed)
        q, k, v = (draw.normal(1, n, h, 64, dtype=torch.bfloat16) for n, h in ((1, 4), (6, 2), (6, 2)))
        call = calls.Call("fmha", {"q": q, "k": k, "v": v, "sink": draw.normal(4)})
        checks = call.check(call.run(CPU))
        assert all(check.ok and check.used < 0.8 for check in checks), list(map(str, checks))


def test_names_are_unique() -> None:
    assert len({str(case) for case in ALL}) == len(ALL)


def test_fmha_cases_are_small_enough_for_an_emulator() -> None:
    for case in suites.fmha():
        trial = case.make(Draw(0))
        args = trial.args if isinstance(trial, calls.Call) else vars(trial)
        if "cu_seqlens_q" in args:
            t, s = (max([0, *args[f"cu_seqlens_{x}"].diff().tolist()]) for x in "qk")
        else:
            t = args["q"].shape[1]
            s = args["k"].shape[1] if "k" in args else max([0, *args["lengths"].tolist()])
        assert t <= 300 and s <= 300 and args["q"].shape[-2] <= 8, case


def test_fmha_covers_every_head_dim_dtype_and_feature() -> None:
    cases = suites.fmha()
    assert {(c.head_dim, c.dtype) for c in cases} == {
        (d, dtype) for d in (64, 128, 256, 512) for dtype in (torch.bfloat16, torch.float16)
    }
    words = set().union(*(case.features for case in cases))
    assert {
        "causal",
        "window",
        "sink",
        "gqa",
        "mqa",
        "varlen",
        "paged",
        "strided",
        "zero",
        "nan",
        "merge",
        "softcap",
    } <= words


def test_v4_covers_drafts_of_one_to_four_tokens_and_every_layer_kind() -> None:
    names = " ".join(case.name for case in suites.v4())
    for kind in ("swa", "csa", "hca"):
        assert all(f"{kind}-mtp{n}-" in names for n in (1, 2, 3, 4))
        assert f"{kind}-layer" in names
    assert all(f"-t{t} " in names for t in (0, 3, 126, 127, 128, 255))


def test_inputs_depend_on_the_seed_and_on_nothing_else() -> None:
    case = suites.seeds()[5]
    same = [case.make(Draw(case.seed(7))).args["q"] for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], case.make(Draw(case.seed(8))).args["q"])


@pytest.mark.slow  # a process takes seconds to start
@pytest.mark.parametrize("jobs", [1, 2])
def test_other_processes_give_the_same_results(jobs, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: jobs)  # one thread each: the order of a BLAS' sums may depend on it
    cases = suites.select("fmha", "sink") + suites.select("v4", "ties")
    with one_thread():
        one = {str(result.case): result for result in suites.run_cases(cases, CPU, SEED)}
    for result in suites.run_parallel(cases, CPU, SEED, jobs=jobs):
        assert result.ok and result.checks == one.pop(str(result.case)).checks
        assert result.case in cases
    assert not one


# ---- A suite that cannot fail proves nothing: each mutant is a mistake that a kernel could make. Without it the case
# passes, with these inputs: the first test above.


def causal_off_by_one(real, q, k, v, **options):
    if options.get("causal"):
        options.update(causal=False, window=(options.get("window", (-1, -1))[0], 1))
    return real(q, k, v, **options)


def forgets_the_sink(real, q, k, v, **options):
    return real(q, k, v, **{**options, "sink": None})


def sink_in_the_lse(real, q, k, v, **options):
    result = real(q, k, v, **options)
    if options["return_lse"] and options.get("sink") is not None:
        result[1].copy_(torch.logaddexp(result[1], options["sink"][:, None].expand_as(result[1])))
    return result


def lse_in_base_two(real, q, k, v, **options):
    result = real(q, k, v, **options)
    if options["return_lse"]:
        result[1].mul_(math.log2(math.e))
    return result


def leaves_the_last_row_unwritten(real, q, k, v, **options):
    copy = options["out"].clone()
    result = real(q, k, v, **{**options, "out": copy})
    options["out"][:, :-1] = copy[:, :-1]
    return (options["out"], result[1]) if options["return_lse"] else options["out"]


def swaps_two_rows(real, q, k, v, **options):
    result = real(q, k, v, **options)
    if q.shape[1] > 1:
        options["out"][:, :2] = options["out"][:, :2].flip(1)
    return result


def drops_the_last_key(real, q, k, v, **options):
    k = k.clone()
    k[:, -1] = 0
    return real(q, k, v, **options)


def writes_past_the_end(real, q, k, v, **options):
    result = real(q, k, v, **options)
    out = options["out"]
    beyond = out.as_strided((8,), (1,), out.storage_offset() + out.numel())
    beyond.zero_()
    return result


def changes_an_input(real, q, k, v, **options):
    result = real(q, k, v, **options)
    v.mul_(2)
    return result


def rounds_p_twice_as_coarsely(real, q, k, v, **options):
    """Return a result with three times the error of the format: rounded to a bit and a half less."""
    result = real(q, k, v, **options)
    out = options["out"]
    eps = torch.finfo(out.dtype).eps
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)) * eps * 0.75
    out.copy_((out.float() * (1 + noise)).to(out.dtype))
    return result


def returns_another_tensor(real, q, k, v, **options):
    result = real(q, k, v, **options)
    return (result[0].clone(), result[1]) if options["return_lse"] else result.clone()


MUTANTS = {
    causal_off_by_one: ("fmha", "causal-square"),
    forgets_the_sink: ("fmha", "/sink-d"),
    sink_in_the_lse: ("fmha", "/sink-d"),
    lse_in_base_two: ("seeds", "d64-t4-s128"),
    leaves_the_last_row_unwritten: ("seeds", "d128-t32-s128"),
    swaps_two_rows: ("fmha", "t129-s257"),
    drops_the_last_key: ("seeds", "d64-t128-s128"),
    writes_past_the_end: ("seeds", "d64-t4-s128"),
    changes_an_input: ("seeds", "d64-t4-s128"),
    rounds_p_twice_as_coarsely: ("seeds", "d64-t32-s256"),
    returns_another_tensor: ("seeds", "d64-t4-s128"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_mistake_is_noticed(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, match = MUTANTS[mutant]
    (case, *_) = suites.select(suite, match)
    real = dsv4.fmha
    monkeypatch.setattr(dsv4, "fmha", lambda **a: mutant(real, a.pop("q"), a.pop("k"), a.pop("v"), **a))
    result = run_case(case, CPU, SEED)
    assert not result.ok and result.why()


@pytest.mark.parametrize(
    "change", [{"sink": None}, {"inverse_rope": None}, {"compressed": None, "compressed_indices": None}], ids=str
)
def test_a_mistake_in_a_v4_layer_is_noticed(change, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dsv4.v4_attention
    monkeypatch.setattr(dsv4, "v4_attention", lambda **a: real(**{**a, **change}))
    for name in ("csa-t127", "csa-layer-fp8"):
        (case,) = suites.select("v4", f"/{name}")
        assert not run_case(case, CPU, SEED).ok


# Gradients: (what is computed instead, and otherwise right results).


def forgets_delta(real, b):
    real(replace(b, forward=replace(b.forward, out=torch.zeros_like(b.forward.out)), dsink=None))


def scales_twice(real, b):
    b.dk.mul_(b.forward.softmax_scale)


def sees_one_key_more(real, b):
    options = b.forward.options._replace(window_right=b.forward.right + 1)
    real(replace(b, forward=replace(b.forward, options=options)))


def gradient_without_the_sink(real, b):
    real(replace(b, forward=replace(b.forward, sink=None), dsink=None))


def takes_the_lse_for_base_two(real, b):
    real(replace(b, forward=replace(b.forward, lse=b.forward.lse / math.log(2)), dsink=None))


def misses_a_head_of_a_group(real, b):
    dout = b.dout.clone()
    dout[..., -1, :] = 0
    real(replace(b, dout=dout, dq=None, dsink=None))


def drops_the_gradient_of_the_lse(real, b):
    real(replace(b, dlse=None))


def leaves_dout_unrotated(real, b):
    real(replace(b, forward=replace(b.forward, cos_sin=None, positions=None), dsink=None))


def sink_with_the_wrong_sign(real, b):
    b.dsink.neg_()


def counts_a_row_that_nobody_sees(real, b):
    b.dq[:, 0] = 1e-6


GRADIENT_MUTANTS = {
    forgets_delta: "causal-square",
    scales_twice: "causal-gqa-sink-d512",
    sees_one_key_more: "causal-gqa-sink-d64",
    gradient_without_the_sink: "causal-gqa-sink-d128",
    takes_the_lse_for_base_two: "causal-square",
    misses_a_head_of_a_group: "heads-8-on-1",
    drops_the_gradient_of_the_lse: "/lse-d",
    leaves_dout_unrotated: "v4-csa",
    sink_with_the_wrong_sign: "causal-gqa-sink-d256",
    counts_a_row_that_nobody_sees: "causal-more-queries",
}


@pytest.mark.parametrize("mutant", GRADIENT_MUTANTS, ids=lambda f: f.__name__)
def test_a_mistake_in_a_gradient_is_noticed(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    (case, *_) = suites.select("backward", GRADIENT_MUTANTS[mutant])
    for module in (fmha_backward, v4_backward):

        def wrong(b, real=module.backward):
            real(b)
            mutant(real, b)

        monkeypatch.setattr(module, "backward", wrong)
    result = run_case(case, CPU, SEED)
    assert not result.ok and result.error is None, result.error


def test_an_exception_is_a_failure_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(dsv4, "fmha", broken)
    result = run_case(suites.seeds()[0], CPU, SEED)
    assert not result.ok and result.why() == "RuntimeError: no such kernel"


def test_a_long_error_is_shown_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_):
        raise RuntimeError("at line 7\n" + "source\n" * 500 + "the reason")

    monkeypatch.setattr(dsv4, "fmha", broken)
    result = run_case(suites.seeds()[0], CPU, SEED)
    why = result.why()
    assert why.startswith("RuntimeError: at line 7 ") and why.endswith("the reason")
    assert "\n" not in why and len(why) < 450 and len(result.error or "") > 3000


def test_nan_is_never_within_a_bound() -> None:
    assert not Check("error", math.nan, 1.0).ok
    assert not Check("cosine", math.nan, 0.5, at_least=True).ok


# ---- Where


def test_auto_is_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Where("auto").resolve() == Where("cpu")
    with pytest.raises(suites.Unavailable, match="no CUDA device"):
        Where("cuda").resolve()


def test_bad_places_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backend: got 'tpu'; accepted: auto, cuda, softsm, cpu"):
        Where("tpu").resolve()
    with pytest.raises(ValueError, match="arch: got 'sm_80'; accepted: sm_90a, sm_100a, sm_103a"):
        Where("softsm", "sm_80").resolve()
    with pytest.raises(ValueError, match="does not apply to backend cpu"):
        Where("cpu", "sm_90a").resolve()


RACE = """
.version 8.7 .target sm_100a .address_size 64
.visible .entry racing(.param .u64 out) {
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def test_what_the_checkers_find_fails_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is right; two warps that write one word make the case fail, where softsm was asked to look."""
    import softsm

    real, word = dsv4.fmha, np.zeros(1, dtype=np.uint32)

    def racing(*args, **options):
        softsm.load(RACE).launch(grid=1, block=64, args=[word])
        return real(*args, **{**options, "backend": "cpu"})

    monkeypatch.setattr(dsv4, "fmha", racing)
    place = Where("softsm", "sm_100a", checked=True)
    assert place.resolve() == place
    result = run_case(suites.seeds()[0], place, SEED)
    assert not result.ok and "race" in result.why()
    assert run_case(suites.seeds()[0], Where("softsm", "sm_100a"), SEED).ok
    monkeypatch.setattr(dsv4, "fmha", lambda *args, **options: real(*args, **{**options, "backend": "cpu"}))
    assert run_case(suites.seeds()[0], place, SEED).ok


def test_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="suite: got 'nope'; accepted: seeds, fmha, v4, backward, all"):
        suites.select("nope")
