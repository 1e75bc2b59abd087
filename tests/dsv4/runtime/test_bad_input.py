"""Bad input to the fmha family: a ValueError that names the argument, what it got and what is accepted."""

import re

import pytest
import torch
from agreement import assert_agrees, qkv
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import reference

INF = float("inf")


def dense():
    q, k, v = qkv(2, 3, 5, 4, 2, 64)
    return {"q": q, "k": k, "v": v}


def varlen():
    q, k, v = (x[0] for x in qkv(1, 7, 9, 4, 2, 64))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 5, 9)}


def paged():
    q, k, v = qkv(2, 3, 4, 4, 2, 64)
    table = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    return {"q": q, "k_pages": k, "v_pages": v, "block_table": table, "lengths": ints(6, 4)}


def made_for_inference(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


FUNCTIONS = {dense: dsv4.fmha, varlen: dsv4.fmha_varlen, paged: dsv4.fmha_paged}
MAKE = {"dense": dense, "varlen": varlen, "paged": paged}

# kind, changed argument, how it is changed, argument that the message names
TABLE = [
    # not a tensor, rank
    ("dense", "q", lambda x: None, "q"),
    ("dense", "k", lambda x: x.tolist(), "k"),
    ("dense", "v", lambda x: 3, "v"),
    ("dense", "q", lambda x: x[0], "q"),
    ("dense", "q", lambda x: torch.tensor(1.0), "q"),
    ("dense", "q", lambda x: x.flatten(), "q"),
    ("varlen", "q", lambda x: x[:, 0, :40], "q"),
    ("dense", "v", lambda x: x[..., 0, :40], "v"),
    ("dense", "k", lambda x: x[0], "k"),
    ("dense", "v", lambda x: x[..., None], "v"),
    ("varlen", "q", lambda x: x[None], "q"),
    ("paged", "k_pages", lambda x: x[0], "k_pages"),
    # dtype
    ("dense", "q", lambda x: x.double(), "q"),
    ("dense", "q", lambda x: x.int(), "q"),
    ("dense", "k", lambda x: x.bfloat16(), "k"),
    ("dense", "v", lambda x: x.half(), "v"),
    ("varlen", "cu_seqlens_q", lambda x: x.long(), "cu_seqlens_q"),
    ("paged", "lengths", lambda x: x.float(), "lengths"),
    ("paged", "block_table", lambda x: x.long(), "block_table"),
    # sizes
    ("dense", "q", lambda x: x[..., :63], "q"),
    ("dense", "q", lambda x: x[..., :32], "q"),
    ("dense", "k", lambda x: torch.zeros(2, 5, 2, 128), "k"),
    ("dense", "v", lambda x: x[:, :4], "v"),
    ("dense", "k", lambda x: x[:1], "k"),
    ("dense", "q", lambda x: x[:, :, :3], "q"),
    ("varlen", "cu_seqlens_k", lambda x: x[:2], "cu_seqlens_k"),
    ("varlen", "cu_seqlens_q", lambda x: x[:0], "cu_seqlens_q"),
    ("varlen", "cu_seqlens_q", lambda x: x[None], "cu_seqlens_q"),
    ("paged", "v_pages", lambda x: x[:, :3], "v_pages"),
    ("paged", "lengths", lambda x: x[:1], "lengths"),
    ("paged", "block_table", lambda x: x[:1], "block_table"),
    # device, strides, layout
    ("dense", "k", lambda x: x.to("meta"), "k"),
    ("paged", "block_table", lambda x: x.to("meta"), "block_table"),
    ("dense", "q", lambda x: torch.randn(2, 3, 64, 4).transpose(2, 3), "q"),
    ("dense", "v", lambda x: torch.randn(2, 5, 2, 128)[..., ::2], "v"),
    ("dense", "k", lambda x: x.to_sparse(), "k"),
    # sink, scale, window, flags, backend
    ("dense", "sink", lambda x: torch.zeros(3), "sink"),
    ("dense", "sink", lambda x: torch.zeros(4, 1), "sink"),
    ("dense", "sink", lambda x: torch.zeros(4).bfloat16(), "sink"),
    ("dense", "sink", lambda x: 0.5, "sink"),
    ("dense", "sink", lambda x: torch.zeros(4, device="meta"), "sink"),
    ("dense", "softmax_scale", lambda x: "1", "softmax_scale"),
    ("dense", "softmax_scale", lambda x: float("nan"), "softmax_scale"),
    ("dense", "softmax_scale", lambda x: 1e40, "softmax_scale"),  # inf in fp32
    ("dense", "window", lambda x: 127, "window"),
    ("dense", "window", lambda x: (1, 2, 3), "window"),
    ("dense", "window", lambda x: (-2, 0), "window"),
    ("dense", "window", lambda x: (1.5, 0), "window"),
    ("dense", "window", lambda x: None, "window"),
    ("dense", "causal", lambda x: 1, "causal"),
    ("dense", "return_lse", lambda x: None, "return_lse"),
    ("dense", "deterministic", lambda x: "no", "deterministic"),
    ("dense", "backend", lambda x: "rocm", "backend"),
    ("dense", "backend", lambda x: "cuda", "backend"),
    ("dense", "plan", lambda x: object(), "plan"),
    # out
    ("dense", "out", lambda x: torch.zeros(2, 3, 4, 32), "out"),
    ("dense", "out", lambda x: torch.zeros(2, 3, 4, 64).bfloat16(), "out"),
    ("dense", "out", lambda x: torch.zeros(2, 3, 4, 64, device="meta"), "out"),
    ("dense", "out", lambda x: torch.zeros(2, 3, 4, 128)[..., ::2], "out"),
    ("dense", "out", lambda x: torch.zeros(1, 3, 4, 64).expand(2, 3, 4, 64), "out"),
    ("dense", "out", lambda x: torch.zeros(3000).as_strided((2, 3, 4, 64), (256, 100, 64, 1)), "out"),
    ("dense", "out", lambda x: made_for_inference(2, 3, 4, 64), "out"),
    ("dense", "out", lambda x: [], "out"),
    # values
    ("varlen", "cu_seqlens_q", lambda x: ints(1, 3, 7), "cu_seqlens_q"),
    ("varlen", "cu_seqlens_q", lambda x: ints(0, 8, 7), "cu_seqlens_q"),
    ("varlen", "cu_seqlens_k", lambda x: ints(0, 5, 10), "cu_seqlens_k"),
    ("varlen", "max_seqlen_q", lambda x: 3, "max_seqlen_q"),
    ("varlen", "max_seqlen_k", lambda x: -1, "max_seqlen_k"),
    ("varlen", "max_seqlen_k", lambda x: 5.0, "max_seqlen_k"),
    ("paged", "lengths", lambda x: ints(9, 4), "lengths"),
    ("paged", "lengths", lambda x: ints(-1, 4), "lengths"),
    ("paged", "block_table", lambda x: torch.tensor([[1, 2], [0, 1]], dtype=torch.int32), "block_table"),
    ("paged", "block_table", lambda x: torch.tensor([[-1, 0], [0, 1]], dtype=torch.int32), "block_table"),
]


@pytest.mark.parametrize(
    "kind, argument, change, named", TABLE, ids=[f"{r[0]}-{r[1]}-{n}" for n, r in enumerate(TABLE)]
)
def test_bad_argument(kind, argument, change, named):
    make = MAKE[kind]
    arguments = make()
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(ValueError, match="accepted: ") as error:
        FUNCTIONS[make](**arguments)
    assert str(error.value).startswith(f"{named}: got "), str(error.value)


def test_out_must_not_touch_the_inputs():
    a = dense()
    for clash in ("q", "overlap"):
        out = a["q"] if clash == "q" else torch.zeros(400 * 64)[: 2 * 3 * 4 * 64].view(2, 3, 4, 64)
        q = a["q"] if clash == "q" else out.view(-1).as_strided((2, 3, 4, 64), (768, 256, 64, 1), 64)
        with pytest.raises(ValueError, match="out: got memory that overlaps q"):
            dsv4.fmha(q, a["k"], a["v"], out=out)


def test_pages_of_no_rows():
    a = paged() | {"k_pages": torch.zeros(2, 0, 2, 64), "v_pages": torch.zeros(2, 0, 2, 64)}
    with pytest.raises(ValueError, match="k_pages: got"):
        dsv4.fmha_paged(**a)


def test_table_entries_past_the_length_are_not_looked_at():
    a = paged()
    want = dsv4.fmha_paged(**a)
    a["block_table"][1, 1] = 12345  # length 4 fills one page
    assert torch.equal(dsv4.fmha_paged(**a), want)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_is_refused_by_name():
    """Sizes are tensors there: a head dim of 64 was rejected because a head dim of 64 was accepted."""
    with pytest.raises(ValueError, match="^torch.jit.trace: .*; accepted: torch.compile or torch.export"):
        torch.jit.trace(dsv4.fmha, tuple(dense().values()))


def test_the_raw_ops_check_as_well():
    a = dense()
    with pytest.raises(ValueError, match="q: got head dim 32"):
        torch.ops.dsv4.fmha(a["q"][..., :32], a["k"], a["v"])
    with pytest.raises(ValueError, match="lse: got"):
        torch.ops.dsv4.fmha_out(**a, out=torch.empty_like(a["q"]), lse=torch.empty(2, 3, 4))


@given(
    shape=st.lists(st.integers(0, 3), min_size=0, max_size=5),
    tail=st.sampled_from([1, 2, 64, 65, 512]),
    which=st.sampled_from(["q", "k", "v"]),
)
def test_any_shape_is_refused_or_right(shape, tail, which):
    """Whatever shape one operand has: a ValueError, or the result the oracle gives."""
    a = dense()
    a[which] = torch.randn(*shape, tail)
    try:
        got = dsv4.fmha(**a, causal=True, return_lse=True)
    except ValueError as error:
        assert ": got " in str(error) and "; accepted: " in str(error)
        return
    assert_agrees(got, reference.fmha, a["q"], a["k"], a["v"], causal=True)


@given(
    lengths=st.lists(st.integers(-2, 12), min_size=2, max_size=2),
    table=st.lists(st.integers(-2, 3), min_size=4, max_size=4),
)
def test_any_table_is_refused_or_right(lengths, table):
    a = paged() | {"lengths": ints(*lengths), "block_table": ints(*table).view(2, 2)}
    used = [table[2 * n + j] for n in range(2) for j in range(2) if 4 * j < lengths[n]]
    good = all(0 <= n <= 8 for n in lengths) and all(0 <= p < 2 for p in used)
    if good:
        got = dsv4.fmha_paged(**a, return_lse=True)
        assert_agrees(got, reference.fmha_paged, *a.values())
    else:
        with pytest.raises(ValueError, match="(lengths|block_table): got .*; accepted: "):
            dsv4.fmha_paged(**a)


@pytest.mark.parametrize(
    "experts, text",
    [
        ((torch.ones(2, 3),), "experts: got a tuple of float32 [2, 3] on cpu; accepted: "),
        ({"w1": torch.ones(9, 9), "w2": 0}, "experts: got a dict with the keys 'w1', 'w2'; accepted: "),
    ],
)
def test_values_of_tensors_in_a_container_are_not_printed(experts, text):
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(text)):
        dsv4.moe(x, experts, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
