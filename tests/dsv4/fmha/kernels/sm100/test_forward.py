"""The Blackwell FMHA kernel, run by softsm: right under every order of completion, and no race found.

Compiling a variant takes much longer than running it, so the quick tests share four of them through Triton's disk
cache, and a lock keeps two workers from compiling the same one. Together they have every head dim, every way of P and
every way to read keys: rows at 64 and 512, pages by TMA at 128, by cp.async at 256. The last one also has softcap,
which is a variant of its own, and compiles in a third of the time that it takes with the two tiles of head dim 128.
Other combinations are slow.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import launches
import pytest
import torch
from agreement import assert_agrees
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
import softsm
from dsv4 import reference, suites
from dsv4.runtime import calls, checks, dispatch, structs
from dsv4.suites import Case, Draw, Where, run_case
from dsv4.suites.calls import Call
from dsv4.suites.fmha_cases import dense, paged, varlen

if dispatch.triton_version() < (3, 9):
    pytest.skip("the Blackwell kernels need triton >= 3.9", allow_module_level=True)

from dsv4.fmha.kernels.sm100 import entry as fmha
from softsm.engine.options import options

pytestmark = pytest.mark.compile

WHERE = Where("softsm", "sm_100a")
SEED = 20261115
BF16, FP16 = torch.bfloat16, torch.float16
ROWS, CP_ASYNC = "rows", "cp_async"  # how keys are read; a number: the rows of a page, by TMA

# (head dim, dtype, P through tensor memory, how): all that the tests compile. P goes through shared memory at head dim
# 512, and at 256, which no call asks for: `make test` tries 512. Its calls with many rows take another kernel, that of
# test_forward_pair.py; among the seeds there are both.
DIMS = (64, 128, 256, 512)
PATHS = [(64, True), (128, True), (256, True), (256, False), (512, False)]
QUICK = [(64, BF16, True, ROWS), (128, BF16, True, 16), (256, BF16, True, CP_ASYNC), (512, BF16, False, ROWS)]
LONGEST = [(128, BF16, True, 16), (512, BF16, False, ROWS)]  # to compile
OF_ROWS = [(d, BF16, p_tmem, ROWS) for d, p_tmem in PATHS]
OF_PAGES = [(64, BF16, True, 16), (128, BF16, True, 16), (256, BF16, True, 16), (512, BF16, False, 16),
            (64, BF16, True, CP_ASYNC), (128, BF16, True, CP_ASYNC), (256, BF16, True, CP_ASYNC)]  # fmt: skip
VARIANTS = [*OF_ROWS, (256, FP16, True, ROWS), *OF_PAGES]
ORDERS = [("eager", 0), ("latest", 0), ("random", 1), ("random", 2), ("random", 3)]


def default_path(head_dim: int) -> bool:
    return head_dim < 512


def variant(case: Case) -> tuple:
    """What Triton compiles for a case of the suites, with the default P path."""
    how: str | int = ROWS
    if "paged" in case.features:
        page = case.make(Draw(0)).args["k_pages"].shape[1]
        how = min(page & -page, 128 if case.head_dim < 256 else 64) if page % 8 == 0 else CP_ASYNC
    return case.head_dim, case.dtype, default_path(case.head_dim), how


def slow_unless_quick(keys: list, tested: list | None = None) -> list:
    """Parameters, marked by the variants that they compile."""
    params = keys if tested is None else tested
    marks = [[pytest.mark.slow] * (key not in QUICK) + [pytest.mark.compile] * (key in LONGEST) for key in keys]
    return [pytest.param(x, marks=found) for x, found in zip(params, marks, strict=True)]


def softcap_of(key: tuple) -> dict[str, float]:
    return {"softcap": 1.5} if key == (256, BF16, True, CP_ASYNC) else {}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A function that compiles a variant unless it is done, one worker at a time."""
    root = tmp_path_factory.getbasetemp()
    folder = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    done = set()

    def ensure(key: tuple) -> None:
        if key in done:
            return
        with open(folder / f"sm100-{'-'.join(map(str, key))}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            smallest(key, **softcap_of(key))
        done.add(key)

    return ensure


def smallest(key: tuple, **more) -> None:
    """Run one key past one query with this variant."""
    d, dtype, p_tmem, how = key
    if how == ROWS:
        call = dense(Draw(0), d, dtype, {"t": 1, "s": 1}, **more)
    else:
        call = paged(Draw(0), d, dtype, page=3 if how == CP_ASYNC else how, lengths=[1], heads=1, **more)
    with path(p_tmem):
        call.run(WHERE)


@contextmanager
def path(p_tmem: bool):
    """Calls inside take P through tensor memory, or through shared memory."""
    original = fmha.prepare
    calls.forget()  # the path is not part of a call's key
    fmha.prepare = partial(original, p_tmem=p_tmem)
    try:
        yield
    finally:
        fmha.prepare = original
        calls.forget()


def right(call: Call) -> None:
    """Run in softsm and compare with the oracle, guards and inputs included."""
    bad = [str(check) for check in call.check(call.run(WHERE)) if not check.ok]
    assert not bad, bad


def unsplit(draw: Draw, d: int, dtype: torch.dtype, size: dict, page: int | None = None, **more) -> Call:
    """A call whose keys one CTA walks alone, so that every ring and barrier comes round several times."""
    keys, heads = size["s"], {"heads": size["heads"], "kv_heads": size["kv_heads"]}
    if page is None:
        call, operation = dense(draw, d, dtype, size, **more), dsv4.fmha
    else:
        call, operation = paged(draw, d, dtype, page, [keys], t=size["t"], **heads, **more), dsv4.fmha_paged
        keys = page * call.args["block_table"].shape[1]
    plan = dsv4.plan(operation, batch=1, q_heads=size["heads"], kv_heads=size["kv_heads"], head_dim=d,
                     max_seqlen_q=size["t"], max_seqlen_k=keys, device="cpu")  # fmt: skip
    call.extra = {"plan": plan}
    return call


SEEDS = suites.seeds()
FEWER = re.compile("d512-.*-s(256|512)")  # at head dim 512 three of five numbers of keys are quick
SEED_KEYS = [None if FEWER.match(case.name) else variant(case) for case in SEEDS]


@pytest.mark.parametrize("case", slow_unless_quick(SEED_KEYS, SEEDS), ids=lambda case: case.name)
def test_seeds_latest(case: Case, compiled) -> None:
    """The 72 configurations, with every asynchronous operation completing as late as it may."""
    compiled(variant(case))
    with options(order="latest"):
        result = run_case(case, WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.parametrize("key", slow_unless_quick([*OF_ROWS, (128, BF16, True, 16), (256, BF16, True, 16)]), ids=str)
def test_every_order_and_no_race(key: tuple, compiled) -> None:
    """There is one case per head dim and P path, with more keys than the ring holds, partly masked rows, rising
    maxima."""
    compiled(key)
    d, dtype, p_tmem, how = key
    size = {"t": 12, "s": 5 * (128 if d < 256 else 64) + 9, "heads": 8, "kv_heads": 1}
    for order, seed in ORDERS:
        call = unsplit(Draw(seed), d, dtype, size, page=None if how == ROWS else how, causal=True)
        grow(call, size["s"])
        with path(p_tmem), softsm.checking(order=order, seed=seed) as report:
            right(call)
        assert report.launches > 0 and not report, f"{order} {seed}:\n{report}"


def grow(call: Call, keys: int) -> None:
    """Later keys are longer: O is rescaled again and again."""
    ramp = torch.linspace(0.2, 4.0, keys)
    if "k" in call.args:
        call.args["k"] = (call.args["k"].float() * ramp[:, None, None]).to(BF16)
        return
    pages = call.args["k_pages"]
    page = pages.shape[1]
    for j in range(keys):
        pages[int(call.args["block_table"][0, j // page]), j % page] *= float(ramp[j])


@pytest.mark.parametrize(
    "key",
    slow_unless_quick(
        [key for key in OF_ROWS if key[:3] not in ((64, BF16, False), (128, BF16, False))]
        + [(256, BF16, True, 16), (512, BF16, False, 16)]
    ),
    ids=str,
)
def test_k_is_v(key: tuple, compiled) -> None:
    """Latents are one tensor for both: at head dims 256 and 512, TMA loads a tile once for both products."""
    compiled(key)
    d, dtype, p_tmem, how = key
    keys = 64 if d >= 256 else 128
    if how == ROWS:
        call = unsplit(Draw(7), d, dtype, {"t": 3, "s": 5 * keys + 9, "heads": 16, "kv_heads": 1}, causal=True)
        call.args["v"] = call.args["k"]
    else:
        call = paged(Draw(7), d, dtype, page=how, lengths=[2 * keys + 1, 3 * keys - 5], t=2, heads=4, kv_heads=1)
        call.args["v_pages"] = call.args["k_pages"]
    for order, seed in [("latest", 0), ("random", 1)]:
        with path(p_tmem), softsm.checking(order=order, seed=seed) as report, softsm.counting() as activity:
            right(call)
        assert not report, f"{order} {seed}:\n{report}"
    copies = activity.roles["load_role"].operations["TMA load"]
    assert copies.bytes == 6 * keys * d * 2 * (1 if d >= 256 else 2)


# test_e4m3_rows.py has those of FP8 caches, which are other variants.
FEATURES = [case for case in suites.fmha() if variant(case) in VARIANTS and "e4m3" not in case.features]
# fp16 differs by one bit of a descriptor. What the suite has at head dim 128 or 256 alone is quick at 64.
FEATURES += [
    replace(case, name=f"{case.name}-at-64", make=partial(case.make, d=64), head_dim=64)
    for case in FEATURES
    if variant(case) in ((128, BF16, True, ROWS), (256, BF16, True, ROWS))
    if not case.name.startswith(("full", "causal-odd", "window-sink", "varlen-d"))
]


# softcap is a variant of its own; the quick one has it where cp.async reads the keys, and nowhere else
FEATURE_KEYS = [
    None if ("softcap" in case.name) != bool(softcap_of(variant(case))) else variant(case) for case in FEATURES
]


@pytest.mark.parametrize("case", slow_unless_quick(FEATURE_KEYS, FEATURES), ids=lambda case: case.name)
def test_features(case: Case, compiled) -> None:
    compiled(variant(case))
    result = run_case(case, WHERE, SEED)
    assert result.ok, result.why()


def test_features_meet_every_way_to_read_keys() -> None:
    assert set(VARIANTS) - {variant(case) for case in FEATURES} <= {
        (d, BF16, p_tmem, ROWS) for d, p_tmem in PATHS if p_tmem != default_path(d)
    } | {key for key in OF_PAGES if key[3] == CP_ASYNC}
    assert {d for d, *_ in QUICK} == set(DIMS) and {str(how) for *_, how in QUICK} == {ROWS, CP_ASYNC, "16"}
    assert {"varlen", "sink", "window", "nan", "strided", "zero", "softmax", "deterministic", "paged"} <= {
        feature for case in FEATURES if variant(case) in QUICK for feature in case.features
    }


@pytest.mark.parametrize(
    ("d", "page"),
    [
        (256, 1),
        (256, 12),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in itertools.product((64, 128), (1, 3, 12, 20))),
    ],
)
def test_pages_by_cp_async(d: int, page: int, compiled) -> None:
    """Page sizes that TMA boxes do not tile: shuffled pages, padding between them, NaN in every unused row."""
    key = (d, BF16, True, CP_ASYNC)
    compiled(key)
    more = softcap_of(key)
    with softsm.checking(order="latest") as report:
        right(paged(Draw(page), d, BF16, page=page, lengths=[page + 3, 150, 0], t=2, causal=True, page_pad=2, **more))
    assert not report, str(report)


@pytest.mark.parametrize("key", slow_unless_quick(OF_PAGES), ids=str)
def test_keys_of_pages_that_are_none_are_unseen(key: tuple, compiled, monkeypatch) -> None:
    """Without value checks (as on a GPU) a bad page number counts as -1: its keys have no weight, in any split."""
    compiled(key)
    d, dtype, _, how = key
    monkeypatch.setattr(checks, "values_checked", lambda x: False)
    page = 5 if how == CP_ASYNC else how
    draw = Draw(page)
    q, (k, v) = draw.normal(3, 2, 2, d, dtype=dtype), (draw.normal(40, page, 1, d, dtype=dtype) for _ in "kv")
    pages = -(-300 // page)
    table = torch.randint(0, 40, (3, pages), dtype=torch.int32, generator=draw.generator)
    lengths = torch.tensor([300, 190, 77], dtype=torch.int32)
    bad = torch.zeros(3, pages, dtype=torch.bool)
    bad[0, [0, 3, pages - 1]] = bad[1] = True  # some; all of a sequence; none
    table[bad] = torch.tensor([-1, 40, -(1 << 31), (1 << 31) - 1], dtype=torch.int32).repeat(pages)[: int(bad.sum())]
    plan = dsv4.plan(dsv4.fmha_paged, batch=3, q_heads=2, kv_heads=1, head_dim=d, max_seqlen_q=2,
                     max_seqlen_k=pages * page, device="cpu")  # fmt: skip
    with launches.race_free("sm_100a", order="latest"):
        out, lse = dsv4.fmha_paged(
            q, k, v, table, lengths, plan=replace(plan, num_splits=2), return_lse=True, backend="softsm",
            **softcap_of(key),
        )  # fmt: skip
    for n, length in enumerate(lengths.tolist()):
        seen = (~bad[n]).repeat_interleave(page)[:length]
        kn, vn = (x[table[n].clamp(0, 39).long()].flatten(0, 1)[:length][seen][None] for x in (k, v))
        assert_agrees((out[n : n + 1], lse[n : n + 1]), reference.fmha, q[n : n + 1], kn, vn, **softcap_of(key))


def test_unaligned_pages(compiled) -> None:
    """Rows that start at odd multiples of 2 bytes: neither TMA nor 16-byte copies can read them in place."""
    compiled((128, BF16, True, 16))
    call = paged(Draw(0), 128, BF16, page=16, lengths=[40, 100])
    for name in ("k_pages", "v_pages"):
        x = call.args[name]
        wide = torch.full((*x.shape[:-1], 128 + 3), float("nan"), dtype=BF16)
        wide[..., 1:129] = x
        call.args[name] = wide[..., 1:129]
    right(call)


@pytest.mark.parametrize("splits", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("d", [64, 512])
def test_split_keys(d: int, splits: int, compiled) -> None:
    """More splits than some sequences have tiles: the empty ones write no O, and the combine kernel reads none."""
    compiled((d, BF16, default_path(d), ROWS))
    call = varlen(Draw(splits), d, BF16, [(3, 400), (2, 0), (1, 70)], causal=True, sink=True)
    plan = dsv4.plan(
        dsv4.fmha_varlen, batch=3, q_heads=4, kv_heads=2, head_dim=d, max_seqlen_q=3, max_seqlen_k=400, device="cpu"
    )
    call.extra = {"plan": replace(plan, num_splits=splits)}
    with softsm.checking(order="latest") as report:
        right(call)
    assert report.launches == 2 and not report, str(report)


def test_scale_of_zero(compiled) -> None:
    """All weights are equal; a masked score of -inf times 0 must not become NaN."""
    compiled((64, BF16, True, ROWS))
    right(dense(Draw(0), 64, BF16, {"t": 20, "s": 30}, causal=True, softmax_scale=0.0))


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (2**40, 3)])
def test_bounds_that_are_none(window: tuple[int, int], compiled) -> None:
    """The window is wider than any tensor: its sums with row numbers must not wrap around."""
    compiled((64, BF16, True, ROWS))
    right(dense(Draw(0), 64, BF16, {"t": 20, "s": 30}, window=window))


def test_grids_are_checked() -> None:
    """Batches and splits that no grid holds are rejected by name; nothing is launched."""
    from dsv4.fmha import problem

    q, k = (torch.empty(1, n, 128, 64, dtype=BF16) for n in (1, 256))
    p = replace(problem.dense(q, k, k), out=q, num_splits=512)
    with pytest.raises(ValueError, match="128 KV heads x 512 splits"):
        calls.launches_of(p, dispatch.compile_target("sm_100a"))
    many = torch.empty(1, 1, 1, 64, dtype=BF16).expand(65536, 1, 1, 64)
    assert fmha.supports(problem.dense(many, many, many)) == "batch 65536 is over 65535"


def test_budgets_are_checked() -> None:
    for d, p_tmem in PATHS:
        fmha.tiling(d, p_tmem)
    with pytest.raises(ValueError, match="p_tmem: got True for head dim 512"):
        fmha.tiling(512, True)
    with pytest.raises(ValueError, match="p_tmem: got False for head dim 128"):
        fmha.tiling(128, False)
    with pytest.raises(ValueError, match="640 of 512 columns"):
        fmha.check_budget(256, 128, 64, 2, 4, True)
    with pytest.raises(ValueError, match="of 232448 bytes"):
        fmha.check_budget(128, 128, 128, 2, 4, False)


@settings(max_examples=25)
@given(
    d=st.sampled_from([64, 512]), batch=st.integers(1, 2), t=st.integers(0, 70), s=st.integers(0, 270),
    heads=st.sampled_from([(1, 1), (4, 4), (8, 1), (6, 2), (5, 5)]), left=st.sampled_from([-1, 0, 5, 40, 500]),
    right_=st.sampled_from([-1, 0, 3, 90]), pad=st.sampled_from([0, 8, 3]), seed=st.integers(0, 1000),
    order=st.sampled_from(["eager", "latest", "random"]),
)  # fmt: skip
def test_any_shape(compiled, d, batch, t, s, heads, left, right_, pad, seed, order) -> None:
    """Shapes, head ratios, windows and row strides (3: not even a multiple of 4 bytes) are drawn, in any order."""
    compiled((d, BF16, default_path(d), ROWS))
    size = {"t": t, "s": s, "heads": heads[0], "kv_heads": heads[1], "batch": batch}
    call = dense(Draw(seed), d, BF16, size, window=(left, right_))
    for name in "qkv":
        x = call.args[name]
        wide = torch.full((*x.shape[:-1], d + pad), float("nan"), dtype=BF16)
        wide[..., :d] = x
        call.args[name] = wide[..., :d]
    call.out_pad = pad
    with options(order=order, seed=seed):
        right(call)


@pytest.mark.slow  # the assembler takes as long as the compiler
@pytest.mark.parametrize("key", [key for key in VARIANTS if key[0] != 256], ids=str)
def test_spills(key: tuple, compiled, monkeypatch) -> None:
    """The assembler spills at most 256 bytes of the PTX that the other tests ran. In a main loop it spills nothing at
    head dim 64 and one word at 128, part of a descriptor in the one warp that issues products."""
    from dsv4.kernels.figures import figures
    from dsv4.runtime import launch

    compiled(key)
    kernels = []
    make = launch.ready_launch

    def noted(step, target):
        kernels.append(step.kernel.warmup(*structs.neutral(step.arguments), grid=step.grid, **step.constants))
        return make(step, target)

    monkeypatch.setattr(launch, "ready_launch", noted)
    smallest(key)
    found = figures(kernels[0], "sm_100a")
    assert found.spill_stores + found.spill_loads <= 256, found
    assert found.loop_spills <= {64: 0, 128: 1}.get(key[0], found.loop_spills), found


def test_the_page_of_figures_is_up_to_date() -> None:
    """The budget, which is computed; and every variant has its line, though only `dsv4 kernels` compiles them all."""
    from dsv4.commands import kernels

    page = (Path(__file__).parents[5] / "docs" / "kernels.md").read_text()
    for line in kernels.budget_section():
        assert line in page, f"run dsv4 kernels --write docs/kernels.md: {line}"
    for d, p_tmem in PATHS:
        assert f"| {d} | {'tensor' if p_tmem else 'shared'} | rows |" in page


# ---- the full product ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("d", "p_tmem"), PATHS)
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_seeds_in_every_order(d: int, p_tmem: bool, order: str, seed: int, compiled) -> None:
    compiled((d, BF16, p_tmem, ROWS))
    for case in (case for case in suites.seeds() if case.head_dim == d):
        with path(p_tmem), softsm.checking(order=order, seed=seed) as report:
            result = run_case(case, WHERE, SEED + seed)
        assert result.ok and not report, f"{case}: {result.why()}\n{report}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", suites.fmha(), ids=lambda case: case.name)
def test_suite_without_races(case: Case, compiled) -> None:
    compiled(variant(case))
    with softsm.checking(order="latest") as report:
        result = run_case(case, WHERE, SEED)
    assert result.ok and not report, f"{result.why()}\n{report}"
