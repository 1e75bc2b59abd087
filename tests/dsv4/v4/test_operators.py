"""v4_attention as a torch operator: schema, fake kernels, compile; and the input it rejects."""

import pytest
import torch
from agreement import assert_agrees
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import dsv4
from dsv4 import Fp8Cache, reference
from dsv4.caches import kv as caches

N, H, ROWS = 4, 2, 10


def arguments(**changes):
    """A small, right call."""
    g = torch.Generator().manual_seed(0)
    bf16 = torch.bfloat16
    good = dict(
        q=torch.randn(N, H, 512, generator=g).to(bf16),
        window=torch.randn(ROWS, 512, generator=g).to(bf16),
        window_indices=torch.randint(-1, ROWS, (N, 3), generator=g, dtype=torch.int32),
        compressed=torch.randn(ROWS, 512, generator=g).to(bf16),
        compressed_indices=torch.randint(-1, ROWS, (N, 5), generator=g, dtype=torch.int32),
        window_lengths=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        compressed_lengths=torch.tensor([5, 4, 3, 0], dtype=torch.int32),
        sink=torch.randn(H, generator=g),
        inverse_rope=(reference.rope_table(20), torch.tensor([0, 5, 19, 7])),
    )
    return good | changes


def table(**changes):
    """A right call with a block table."""
    good = arguments(
        compressed_indices=None,
        compressed_block_table=torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], dtype=torch.int32),
        request_starts=torch.tensor([0, 1, 4], dtype=torch.int32),
    )
    return good | changes


def op_arguments(**changes):
    """The same in the form that the operator accepts."""
    a = arguments(**changes)
    a["cos_sin"], a["positions"] = a.pop("inverse_rope")
    for pool in ("window", "compressed"):
        if isinstance(a[pool], Fp8Cache):
            cache = a[pool]
            a[pool] = cache.storage
            names = ("rows_per_page", "page_stride", "format")
            a |= {f"{pool}_{name}": x for name, x in zip(names, caches.parts_of(cache)[1:])}
    return a


CALLS = {
    "bf16 rows": lambda: op_arguments(),
    "fp8 rows": lambda: op_arguments(
        window=Fp8Cache.pack(arguments()["window"], rows_per_page=4),
        compressed=Fp8Cache.pack(arguments()["compressed"], rows_per_page=2),
    ),
    "block table": lambda: op_arguments(**table()),
    "window only": lambda: op_arguments(compressed=None, compressed_indices=None, compressed_lengths=None),
}


@pytest.mark.parametrize("call, return_lse", [*((call, True) for call in CALLS), ("bf16 rows", False)])
def test_opcheck(call, return_lse):
    opcheck(torch.ops.dsv4.v4_attention, (), CALLS[call]() | dict(return_lse=return_lse))


@pytest.mark.parametrize("call", CALLS)
def test_opcheck_of_the_out_form(call):
    a = CALLS[call]()
    opcheck(torch.ops.dsv4.v4_attention_out, (), a | dict(out=torch.empty_like(a["q"]), lse=torch.empty(N, H)))


def test_lse_has_size_0_when_not_wanted():
    out, lse = torch.ops.dsv4.v4_attention(**op_arguments())
    assert out.shape == (N, H, 512) and lse.shape == (0,)


@pytest.mark.parametrize("form", ["rows", "fp8", "out"])
def test_torch_compile_in_one_graph(form):
    a = arguments()
    if form == "fp8":
        a["window"] = Fp8Cache.pack(a["window"], rows_per_page=4)

    def model(a, out):
        a = a | dict(q=a["q"] * 2)
        return dsv4.v4_attention(**a, return_lse=True, out=out)

    def out():
        return torch.full_like(a["q"], float("nan")) if form == "out" else None

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(a, out()), model(a, out())):
        assert torch.equal(got, want)


def test_torch_compile_with_changing_pages():
    """Rows per page and page stride become symbols when they change from call to call."""
    a = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(dsv4.v4_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows_per_page in (4, 8, 2):
        a["window"] = Fp8Cache.pack(torch.randn(ROWS, 512), rows_per_page=rows_per_page)
        assert torch.equal(compiled(**a), dsv4.v4_attention(**a))


def test_autocast_changes_nothing():
    a = arguments(q=GOOD["q"].float(), window=GOOD["window"].float(), compressed=GOOD["compressed"].float())
    want = dsv4.v4_attention(**a)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(dsv4.v4_attention(**a), want)


def test_plan_made_beforehand():
    a = arguments()
    plan = dsv4.plan(dsv4.v4_attention, batch=N, q_heads=H, kv_heads=1, head_dim=512, max_seqlen_k=8)
    assert torch.equal(dsv4.v4_attention(**a, plan=plan), dsv4.v4_attention(**a))
    small = dsv4.plan(dsv4.v4_attention, batch=N, q_heads=H, kv_heads=1, head_dim=512, max_seqlen_k=7)
    with pytest.raises(ValueError, match="^plan: "):
        dsv4.v4_attention(**a, plan=small)
    warm = dsv4.warmup(dsv4.v4_attention, batch=N, q_heads=H, kv_heads=1, head_dim=512, max_seqlen_k=8)
    assert torch.equal(dsv4.v4_attention(**a, plan=warm), dsv4.v4_attention(**a))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


GOOD = arguments()
BF16 = torch.bfloat16
BAD = {
    "q rank": (dict(q=GOOD["q"][0]), "q"),
    "q type": (dict(q=[1.0]), "q"),
    "q dtype": (dict(q=GOOD["q"].double()), "q"),
    "q head dim": (dict(q=GOOD["q"][..., :500]), "q"),
    "q last stride": (dict(q=torch.zeros(N, H, 1024, dtype=BF16)[..., ::2]), "q"),
    "q grad": (dict(q=GOOD["q"].clone().requires_grad_(), out=torch.empty_like(GOOD["q"])), "q"),
    "sink grad": (dict(sink=torch.zeros(H, requires_grad=True), out=torch.empty_like(GOOD["q"])), "sink"),
    "window type": (dict(window=None), "window"),
    "window rank": (dict(window=GOOD["window"][0]), "window"),
    "window head dim": (dict(window=GOOD["window"][:, :256]), "window"),
    "window dtype": (dict(window=GOOD["window"].float()), "window"),
    "window last stride": (dict(window=torch.zeros(ROWS, 1024, dtype=BF16)[..., ::2]), "window"),
    "window device": (dict(window=GOOD["window"].to("meta")), "window"),
    "window pages of no rows": (dict(window=torch.zeros(3, 0, 512, dtype=BF16)), "window"),
    "fp8 window on another device": (dict(window=Fp8Cache.empty(1, 64, device="meta")), "window"),
    "list dtype": (dict(window_indices=GOOD["window_indices"].long()), "window_indices"),
    "list rank": (dict(window_indices=GOOD["window_indices"][0]), "window_indices"),
    "list queries": (dict(window_indices=GOOD["window_indices"][:3]), "window_indices"),
    "row past the end": (dict(window_indices=torch.full((N, 3), ROWS, dtype=torch.int32)), "window_indices"),
    "row -2": (dict(compressed_indices=torch.full((N, 5), -2, dtype=torch.int32)), "compressed_indices"),
    "lengths longer than the list": (dict(window_lengths=ints(0, 1, 2, 4)), "window_lengths"),
    "compressed lengths longer than the list": (dict(compressed_lengths=ints(6, 0, 0, 0)), "compressed_lengths"),
    "lengths negative": (dict(compressed_lengths=ints(-1, 0, 0, 0)), "compressed_lengths"),
    "lengths shape": (dict(window_lengths=ints(0, 1)), "window_lengths"),
    "lengths dtype": (dict(window_lengths=torch.zeros(N)), "window_lengths"),
    "lengths stride": (dict(window_lengths=torch.zeros(2 * N, dtype=torch.int32)[::2]), "window_lengths"),
    "compressed without rows": (dict(compressed_indices=None), "compressed_indices, compressed_block_table"),
    "list without compressed": (dict(compressed=None, compressed_lengths=None), "compressed_indices"),
    "lengths without compressed": (dict(compressed=None, compressed_indices=None), "compressed_lengths"),
    "list and table": (
        table(compressed_indices=GOOD["compressed_indices"]),
        "compressed_indices, compressed_block_table",
    ),
    "table without lengths": (table(compressed_lengths=None), "compressed_lengths"),
    "table without starts": (table(request_starts=None), "request_starts"),
    "table rank": (table(compressed_block_table=ints(0, 1)), "compressed_block_table"),
    "table longer than the pages": (table(compressed_lengths=ints(6, 0, 0, 0)), "compressed_lengths"),
    "table page -1": (table(compressed_block_table=-torch.ones(2, 5, dtype=torch.int32)), "compressed_block_table"),
    "table page past the end": (table(compressed_block_table=torch.full((2, 5), 10).int()), "compressed_block_table"),
    "starts count": (table(request_starts=ints(0, 4)), "request_starts"),
    "starts fall": (table(request_starts=ints(0, 3, 2)), "request_starts"),
    "starts past the queries": (table(request_starts=ints(0, 1, 5)), "request_starts"),
    "starts not from 0": (table(request_starts=ints(1, 2, 4)), "request_starts"),
    "starts empty": (dict(request_starts=ints()), "request_starts"),
    "rope type": (dict(inverse_rope=torch.zeros(20, 64)), "inverse_rope"),
    "rope width": (dict(inverse_rope=(torch.zeros(20, 63), ints(0, 0, 0, 0))), r"inverse_rope\[0\] \(cos_sin\)"),
    "rope dtype": (
        dict(inverse_rope=(torch.zeros(20, 64, dtype=BF16), ints(0, 0, 0, 0))),
        r"inverse_rope\[0\] \(cos_sin\)",
    ),
    "position past the table": (
        dict(inverse_rope=(torch.zeros(20, 64), ints(0, 0, 0, 20))),
        r"inverse_rope\[1\] \(positions\)",
    ),
    "position count": (dict(inverse_rope=(torch.zeros(20, 64), ints(0))), r"inverse_rope\[1\] \(positions\)"),
    "sink size": (dict(sink=torch.zeros(H + 1)), "sink"),
    "sink dtype": (dict(sink=torch.zeros(H, dtype=BF16)), "sink"),
    "scale nan": (dict(softmax_scale=float("nan")), "softmax_scale"),
    "scale type": (dict(softmax_scale="1"), "softmax_scale"),
    "out shape": (dict(out=torch.empty(N, H, 256, dtype=BF16)), "out"),
    "out dtype": (dict(out=torch.empty(N, H, 512, dtype=torch.float16)), "out"),
    "out type": (dict(out=1), "out"),
    "out shares elements": (dict(out=torch.empty(1, H, 512, dtype=BF16).expand(N, H, 512)), "out"),
    "out is q": (dict(out=GOOD["q"], q=GOOD["q"]), "out"),
    "return_lse": (dict(return_lse=1), "return_lse"),
    "deterministic": (dict(deterministic=None), "deterministic"),
    "backend": (dict(backend="gpu"), "backend"),
    "backend cuda on cpu tensors": (dict(backend="cuda"), "backend"),
    "plan": (dict(plan=3), "plan"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    change, argument = BAD[case]
    with pytest.raises(ValueError, match=rf"^{argument}: got .*; accepted: "):
        dsv4.v4_attention(**arguments() | change)


def test_an_fp8_pool_needs_head_dim_512():
    with pytest.raises(ValueError, match=r"^window: got packed rows of 512 values \(fp8_584\); accepted: rows of 64"):
        dsv4.v4_attention(torch.zeros(1, 1, 64, dtype=BF16), Fp8Cache.empty(1, 2), ints(0)[None])


def test_an_empty_pool_has_no_row_numbers():
    with pytest.raises(ValueError, match="^window_indices: got .*; accepted: -1, because window has no rows"):
        dsv4.v4_attention(torch.zeros(1, 1, 512), torch.zeros(0, 512), ints(0)[None])


def test_grad_is_no_matter_without_grad_mode():
    with torch.no_grad():
        dsv4.v4_attention(**arguments(q=GOOD["q"].clone().requires_grad_()))


@settings(max_examples=60)
@given(st.lists(st.integers(-4, 14), min_size=6, max_size=6), st.lists(st.integers(-2, 5), min_size=2, max_size=2))
def test_any_numbers_give_the_right_result_or_a_named_error(rows, lengths):
    q, pool = torch.randn(2, 1, 64), torch.randn(ROWS, 64)
    lists, counts = ints(*rows).view(2, 3), ints(*lengths)
    used = [r for line, c in zip(lists.tolist(), lengths) for r in line[: max(c, 0)]]
    if not all(0 <= c <= 3 for c in lengths):
        expected = "window_lengths"
    elif not all(-1 <= r < ROWS for r in used):
        expected = "window_indices"
    else:
        got = dsv4.v4_attention(q, pool, lists, window_lengths=counts, return_lse=True)
        assert_agrees(got, reference.v4_attention, q, pool, lists, window_lengths=counts)
        return
    with pytest.raises(ValueError, match=f"^{expected}: "):
        dsv4.v4_attention(q, pool, lists, window_lengths=counts)
