"""dsv4.compress against a loop over tokens, and against itself cut into other steps."""

import pytest
import torch
from compress_inputs import BOUND, KINDS, by_hand, inputs, some
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
from dsv4.compress import forward as compressor
from dsv4.compress.problem import CompressState


def stepwise(args, cuts):
    """Rows of all calls together, the tokens cut at these places."""
    ends = [*cuts, args["kv"].shape[-2]]
    state, rows, begin = None, [], 0
    for end in ends:
        part = some(args, ..., slice(begin, end), slice(None))
        more, state = dsv4.compress(**args | part, state=state)
        rows.append(more)
        begin = end
        assert state.tokens == end
    return torch.cat(rows, -2), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 127, 128, 129, 300])
def test_rows_are_those_of_the_loop(kind, tokens):
    args = inputs(kind, tokens)
    rows, state = dsv4.compress(**args)
    want = by_hand(kind, **args)
    assert rows.shape == want.shape and rows.dtype == torch.float32 and state.tokens == tokens
    assert not len(want) or (rows - want).abs().max() <= BOUND
    rows64, _ = dsv4.compress(**args | {k: None if x is None else x.double() for k, x in some(args).items()})
    assert rows64.dtype == torch.float64
    assert torch.allclose(rows64, want, rtol=1e-12, atol=1e-12)  # fp64: 2^-53 a rounding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_1_to_4_tokens_give_the_bits_of_one_shot(kind, dtype):
    tokens = KINDS[kind][1] + 22  # past a row
    args = inputs(kind, tokens, seed=3, dtype=dtype)
    once, end = dsv4.compress(**args)
    for step in (1, 2, 3, 4, tokens - 19):
        rows, state = stepwise(args, range(step, tokens, step))
        assert torch.equal(rows, once), step
        assert all(torch.equal(a, b) for a, b in zip(state[:2], end[:2]))


@settings(max_examples=60)
@given(st.sampled_from(list(KINDS)), st.integers(0, 300), st.lists(st.integers(0, 300), max_size=8), st.integers(0, 99))
def test_any_cut_gives_the_same_bits(kind, tokens, cuts, seed):
    args = inputs(kind, tokens, seed)
    once, _ = dsv4.compress(**args)
    rows, _ = stepwise(args, sorted(c for c in cuts if c <= tokens))
    assert torch.equal(rows, once)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_is_taken_in_pieces_with_the_same_bits(kind, monkeypatch):
    """Otherwise a prompt of 100,000 tokens takes six times its own memory."""
    arguments = inputs(kind, 301)
    want = dsv4.compress(**arguments)
    monkeypatch.setattr(compressor, "BLOCK_BYTES", 17 * 4 * arguments["kv"].shape[-1])
    got = dsv4.compress(**arguments)
    assert torch.equal(got[0], want[0]) and got[1].tokens == 301
    assert torch.equal(got[1].kv, want[1].kv) and torch.equal(got[1].gate, want[1].gate)


def test_threads_do_not_change_bits():
    args = inputs("csa", 4000, seed=5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = dsv4.compress(**args)[0]
        torch.set_num_threads(2)
        two = dsv4.compress(**args)[0]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_batch_is_its_sequences(kind):
    args = inputs(kind, 261, batch=(3,))
    rows, state = dsv4.compress(**args)
    for b in range(3):
        one, its_state = dsv4.compress(**args | {k: args[k][b] for k in ("kv", "gate")})
        assert torch.equal(rows[b], one) and torch.equal(state.kv[b], its_state.kv)


def test_an_older_state_can_be_gone_back_to():
    """Draft tokens that are rejected leave no trace: the state before them still stands."""
    args = inputs("csa", 40)

    def call(begin, end, state):
        part = {k: args[k][begin:end] for k in ("kv", "gate")}
        return dsv4.compress(**args | part, state=state)

    _, kept = call(0, 18, None)
    garbage = {k: torch.randn_like(args[k][:4]) for k in ("kv", "gate")}
    dsv4.compress(**args | garbage, state=kept)
    again, _ = call(18, 40, kept)
    assert torch.equal(again, dsv4.compress(**args)[0][18 // 4 :])


def test_the_state_is_as_small_as_the_window():
    args = inputs("csa", 4096)
    assert dsv4.compress(**args)[1].kv.shape == (4, 1024)  # the window before, for its a-half
    args = inputs("hca", 4095)
    assert dsv4.compress(**args)[1].kv.shape == (127, 512)
    assert dsv4.compress(**inputs("pair", 4095))[1].kv.shape == (1, 512)
    assert dsv4.compress(**inputs("token", 4095))[1].kv.shape == (0, 512)


def test_without_position_bias_the_ratio_is_given():
    """The same bits as with a bias of zeros."""
    args = inputs("small csa", 20) | dict(position_bias=None)
    rows, state = dsv4.compress(**args, ratio=3)
    want, its_state = dsv4.compress(**args | dict(position_bias=torch.zeros(3, 12)), ratio=3)
    assert torch.equal(rows, want) and torch.equal(state.gate, its_state.gate)


def test_rows_come_in_the_asked_dtype_and_without_rope_when_there_is_no_table():
    args = inputs("csa", 64)
    plain, _ = dsv4.compress(**args | {"cos_sin": None})
    full, _ = dsv4.compress(**args)
    assert torch.equal(plain[:, :448], full[:, :448]) and torch.equal(plain[0], full[0])  # position 0 turns by 0
    half, _ = dsv4.compress(**args, dtype=torch.bfloat16)
    assert torch.equal(half, full.bfloat16())


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_rows_go_into_a_pool(kind):
    args = inputs(kind, 650, batch=(2,))
    rows, state = dsv4.compress(**args, dtype=torch.bfloat16)
    n = rows.shape[1]
    slots = torch.randperm(2 * n + 9)[: 2 * n].view(2, n)
    slots[1, 0] = -1
    cache, want = (dsv4.Fp8Cache.empty(-(-(2 * n + 9) // 5), 5) for _ in "ab")
    got, its_state = dsv4.compress(**args, dtype=torch.bfloat16, out=cache, slots=slots)
    want.write(slots.flatten(), rows.flatten(0, 1))
    assert got is cache and torch.equal(cache.storage, want.storage)
    assert torch.equal(its_state.kv, state.kv) and its_state.tokens == 650
    for pool in (torch.zeros(cache.rows, 512), torch.zeros(cache.pages, 5, 512, dtype=torch.bfloat16)):
        dsv4.compress(**args, dtype=torch.bfloat16, out=pool, slots=slots)
        by_row = torch.zeros(cache.rows, 512)
        keep = slots.flatten() >= 0
        by_row[slots.flatten()[keep]] = rows.flatten(0, 1)[keep].float()
        assert torch.equal(pool.flatten(0, -2).float(), by_row)


def test_strides_are_honoured():
    args = inputs("csa", 64)
    wide = {k: torch.stack([args[k], torch.full_like(args[k], float("nan"))], -1)[..., 0] for k in ("kv", "gate")}
    assert wide["kv"].stride(-1) == 2
    assert torch.equal(dsv4.compress(**args | wide)[0], dsv4.compress(**args)[0])


GOOD = inputs("small csa", 10)
STATE = dsv4.compress(**GOOD)[1]
BAD = {
    "kv rank": ({"kv": torch.zeros(10)}, "kv"),
    "kv type": ({"kv": [1.0]}, "kv"),
    "kv dtype": ({"kv": torch.zeros(10, 12, dtype=torch.int32)}, "kv"),
    "kv width": ({"kv": torch.zeros(10, 11), "gate": torch.zeros(10, 11)}, "kv"),
    "gate shape": ({"gate": torch.zeros(9, 12)}, "gate"),
    "gate device": ({"gate": torch.zeros(10, 12, device="meta")}, "gate"),
    "bias width": ({"position_bias": torch.zeros(3, 6)}, "position_bias"),
    "bias empty": ({"position_bias": torch.zeros(0, 12)}, "position_bias"),
    "neither bias nor ratio": ({"position_bias": None}, "ratio"),
    "ratio 0": ({"position_bias": None, "ratio": 0}, "ratio"),
    "another ratio": ({"ratio": 4}, "ratio"),
    "no gate, many tokens": ({"gate": None}, "gate"),
    "no gate, overlap": ({"gate": None, "position_bias": None, "ratio": 1}, "gate"),
    "norm rank": ({"norm_weight": torch.zeros(2, 6)}, "norm_weight"),
    "table odd": ({"cos_sin": torch.zeros(99, 3)}, "cos_sin"),
    "table wide": ({"cos_sin": torch.zeros(99, 8)}, "cos_sin"),
    "table short": ({"cos_sin": torch.zeros(6, 4)}, "cos_sin"),
    "table dtype": ({"cos_sin": torch.zeros(99, 4, dtype=torch.bfloat16)}, "cos_sin"),
    "state type": ({"state": (STATE.kv, STATE.gate, 10)}, "state"),
    "state of another count": ({"state": CompressState(STATE.kv, STATE.gate, 11)}, "state.kv"),
    "state of another batch": ({"state": CompressState(STATE.kv[None], STATE.gate[None], 10)}, "state.kv"),
    "dtype": ({"dtype": torch.int8}, "dtype"),
    "out without slots": ({"out": torch.zeros(9, 6)}, "out, slots"),
    "slots without out": ({"slots": torch.arange(3)}, "out, slots"),
    "slots past the pool": ({"out": torch.zeros(2, 6), "slots": torch.arange(3)}, "slots"),
    "slots shape": ({"out": torch.zeros(9, 6), "slots": torch.arange(4)}, "slots"),
    "out width": ({"out": torch.zeros(9, 7), "slots": torch.arange(3)}, "out"),
    "an Fp8Cache for other rows": ({"out": dsv4.Fp8Cache.empty(1, 9), "slots": torch.arange(3)}, "out"),
    "backend": ({"backend": "gpu"}, "backend"),
    "grad with a pool": (
        {"kv": torch.zeros(10, 12, requires_grad=True), "out": torch.zeros(9, 6), "slots": torch.arange(3)},
        "kv",
    ),
    "grad of a pool": ({"out": torch.zeros(9, 6, requires_grad=True), "slots": torch.arange(3)}, "out"),
    "grad of a state": ({"state": STATE._replace(gate=STATE.gate.clone().requires_grad_())}, "state.gate"),
    "eps below 0": ({"eps": -5}, "eps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    change, argument = BAD[case]
    with pytest.raises(ValueError, match=rf"^{argument}: got .*; accepted: "):
        dsv4.compress(**GOOD | change)


def test_a_pool_that_overlaps_the_tokens_is_named():
    """The kernel writes rows while it still reads tokens."""
    memory = torch.randn(24, 64)
    kv, gate, weight, slots = memory[:8], memory[8:16], torch.ones(64), torch.tensor([0, 1])
    for name, out in (("kv", memory[4:10]), ("gate", memory[15:].unflatten(0, (3, 3)))):
        with pytest.raises(
            ValueError, match=f"^out: got memory that overlaps {name}; accepted: memory that overlaps no"
        ):
            dsv4.compress(kv, gate, None, weight, ratio=4, out=out, slots=slots)
    dsv4.compress(kv, gate, None, weight, ratio=4, out=memory[16:], slots=slots)


def test_the_compiler_does_not_warn(recwarn):
    torch._dynamo.utils.warn_once_cache.clear()
    args = inputs("small csa", 9)
    rows, _ = torch.compile(dsv4.compress, backend="eager", fullgraph=True)(**args)
    assert torch.equal(rows, dsv4.compress(**args)[0]) and not recwarn.list
