"""Rows of DeepSeek-V4 on their way into SGLang's pages: on a CPU, and by the kernel in softsm. SGLang's objects are
stubs with what the two functions look at; tests/engines has them in a whole engine."""

from types import SimpleNamespace

import pytest
import torch

from dsv4 import Fp8Cache
from dsv4.integrations import sglang
from dsv4.integrations.sglang import rows

PAGE, EPS = 64, 1e-6


@pytest.fixture
def angles():
    """fp64 [positions, 32]."""
    return torch.arange(300)[:, None] * 10000.0 ** (-torch.arange(32) / 32).double()


@pytest.fixture
def pages():
    """Return pages like SGLang's: 64 rows, padded to a multiple of 576 bytes."""
    return torch.zeros(4, -(-PAGE * 584 // 576) * 576, dtype=torch.uint8)


def exact(kv, weight, angles):
    """fp64: RMSNorm, then the last 64 columns turned pair by pair."""
    x = kv.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()
    even, odd = x[:, 448::2], x[:, 449::2]
    turned = [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()]
    return torch.cat([x[:, :448], torch.stack(turned, -1).flatten(-2)], -1)


def assert_packed(pages, slots, wanted):
    """Those rows, and no byte of another row."""
    cache = Fp8Cache.from_pages(pages[:, : PAGE * 584].unflatten(1, (PAGE, 584)))
    packed = cache.unpack(torch.float64)[slots]
    # Half a step of e4m3; half of the least number of a scale at most twice what the largest value needs.
    largest = wanted[:, :448].unflatten(1, (7, 64)).abs().amax(-1).repeat_interleave(64, 1)
    allowed = wanted[:, :448].abs() * (2**-4 + 2**-20) + largest * 2 / 448 * 2**-10
    assert ((packed - wanted)[:, :448].abs() <= allowed).all()
    assert ((packed - wanted)[:, 448:].abs() <= wanted[:, 448:].abs() * 2**-8 + 1e-6).all()
    touched = pages.clone()
    for slot in slots.tolist():
        page, row = divmod(slot, PAGE)
        touched[page, row * 576 : row * 576 + 576] = 0
        touched[page, PAGE * 576 + row * 8 : PAGE * 576 + row * 8 + 8] = 0
    assert not touched.any()


def complex_table(angles):
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("softsm", marks=pytest.mark.compile)])
def test_rows_are_normed_rotated_and_packed(backend, angles, pages):
    """One slot is -1, so its row is not written. The rows are columns of a wider projection, as in SGLang."""
    torch.manual_seed(0)
    kv, weight = torch.randn(5, 640)[:, 128:].bfloat16(), torch.rand(512).bfloat16() + 0.5
    positions, slots = torch.tensor([4, 299, 0, 1, 7]), torch.tensor([130, -1, 5, 255, 64], dtype=torch.int32)
    rows.store(kv, weight, EPS, complex_table(angles), positions, slots, pages, PAGE, backend)
    kept = slots >= 0
    assert_packed(pages, slots[kept].long(), exact(kv, weight, angles[positions])[kept])


def test_insertion_takes_the_pages_of_the_layer(angles, pages):
    torch.manual_seed(0)
    kv, weight = torch.randn(2, 512), torch.ones(512)
    pool = SimpleNamespace(
        uniform_fp8=False, kv_layout="v4", swa_page_size=PAGE, get_swa_raw_buffer=lambda layer: {3: pages}[layer]
    )
    sglang.calls.clear()
    positions, slots = torch.tensor([10, 11]), torch.tensor([70, 71])
    rows.insert(pool, 3, slots, kv, weight, EPS, complex_table(angles), positions)
    assert_packed(pages, slots, exact(kv, weight, angles[positions]))
    assert sglang.calls == {"insert": 1}
    for change, name in ((dict(uniform_fp8=True), "trtllm"), (dict(kv_layout="v41"), "got v41; accepted: v4")):
        other = SimpleNamespace(**(vars(pool) | change))
        with pytest.raises(ValueError, match=f"{name}.*DSV4_SGLANG=0 gives"):
            rows.insert(other, 3, slots, kv, weight, EPS, complex_table(angles), positions)
    with pytest.raises(ValueError, match="queries that are rotated in the same launch"):
        rows.insert(pool, 3, slots, kv, weight, EPS, complex_table(angles), positions, kv)


class Plan(tuple):
    """SGLang's plan: (ratio, entries of 16 bytes)."""

    compress_ratio, is_decode = property(lambda self: self[0]), property(lambda self: self[2])


@pytest.mark.parametrize("decode", [True, False])
def test_the_compressor_packs_a_row_for_each_entry_that_ends_a_group(decode, angles, pages):
    """Of the tokens so far, 8 and 128 end a group of 4, 7 does not, -1 is padding of a graph. In prefill an entry names
    a token of the step, whose slot is meant; half of the word is something else."""
    torch.manual_seed(0)
    seen = torch.tensor([8, 7, 128, -1])
    kv, weight = torch.randn(4, 512), torch.rand(512) + 0.5
    kv[1], kv[3] = float("nan"), float("nan")  # never written
    token = torch.tensor([5, 2, 9, 0])
    slots = torch.arange(200, 212)
    entries = torch.stack([seen, token + (3 << 16), seen, seen], 1).int().view(torch.uint8)
    given = dict(
        norm_weight=weight,
        norm_eps=EPS,
        freq_cis=complex_table(angles),
        out_loc=slots[:4] if decode else slots,
        kvcache=pages,
        page_size=PAGE,
    )
    sglang.calls.clear()
    rows.compressed(None, kv, Plan((4, entries, decode)), **given)
    kept = torch.tensor([0, 2])
    places = slots[kept] if decode else slots[token[kept]]
    assert_packed(pages, places, exact(kv[kept], weight, angles[seen[kept] - 4]))
    assert sglang.calls == {"compress": 1}
    with pytest.raises(ValueError, match="rows of the unified layout"):
        rows.compressed(None, kv, Plan((4, entries, decode)), **given, bf16_store=True)


def test_keys_of_the_indexer_stay_sglangs(angles, pages):
    passed = []
    given = dict(
        norm_weight=torch.ones(128),
        norm_eps=EPS,
        freq_cis=complex_table(angles),
        out_loc=torch.arange(3),
        kvcache=pages,
        page_size=PAGE,
    )
    sglang.calls.clear()
    kv = torch.zeros(3, 128)
    rows.compressed(lambda *a, **options: passed.append((a, options)), kv, "plan", **given, use_fp4=True)
    ((arguments, options),) = passed
    assert arguments == (kv, "plan") and options["use_fp4"] is True and options["out_loc"] is given["out_loc"]
    assert not sglang.calls


def test_a_table_of_angles_is_turned_around_once_and_goes_with_it(angles):
    table = complex_table(angles)
    assert rows._cos_sin(table) is rows._cos_sin(table)
    torch.testing.assert_close(rows._cos_sin(table)[7], torch.cat([angles[7].cos(), angles[7].sin()]).float())
    before = len(rows.tables)
    del table
    assert len(rows.tables) == before - 1
