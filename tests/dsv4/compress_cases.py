"""Problems for the compress kernel and for rows into pages; shared by the tests of all architectures."""

import launches
import torch
from compress_inputs import BOUND, KINDS, by_hand, inputs, some

import dsv4
from dsv4 import Fp8Cache, IndexCache
from dsv4.caches.kernels.pack import write_rows


def kernel(arch, **arguments):
    with launches.race_free(arch):
        got = dsv4.compress(**arguments, backend="softsm")
    return got


def assert_any_steps(arch, kind, tokens, ends, dtype=torch.bfloat16, batch=()):
    """The rows are right, the steps give the bits of one call, and the states are those of the torch code."""
    args = inputs(kind, tokens, dtype=dtype, batch=batch)
    once, state = kernel(arch, **args, dtype=torch.float32)
    _, want_state = dsv4.compress(**args)
    for line in [()] if not batch else [(b,) for b in range(batch[0])]:
        want = by_hand(kind, **args | some(args, *line))
        assert once[line].shape == want.shape
        assert not len(want) or (once[line] - want).abs().max() <= BOUND
    parts, steps, begin = [], None, 0
    for end in [*ends, tokens]:
        part = some(args, ..., slice(begin, end), slice(None))
        rows, steps = kernel(arch, **args | part, state=steps, dtype=torch.float32)
        parts.append(rows)
        begin = end
    assert torch.equal(torch.cat(parts, -2), once)
    for got in (state, steps):
        assert got.tokens == tokens
        assert torch.equal(got.kv, want_state.kv) and torch.equal(got.gate, want_state.gate)


def assert_into_pages(arch, page, stride):
    """Row numbers are in any order, one row is dropped, pages are at odd addresses; the bytes are those of the torch
    code."""
    args = inputs("csa", 21, dtype=torch.bfloat16, batch=(2,))
    slots = torch.tensor([[5, -1, 0, 1, 2], [9, 3, 8, 7, 4]])
    got, want = (Fp8Cache.empty(12, page, page_stride=stride) for _ in "ab")
    assert kernel(arch, **args, out=got, slots=slots)[0] is got
    rows, _ = kernel(arch, **args)
    want.write(slots.flatten(), rows.flatten(0, 1))
    assert torch.equal(got.storage, want.storage)
    plain, by_rows = (torch.full((12, page, 512), 7.0) for _ in "ab")
    kernel(arch, **args, out=plain, slots=slots.int())
    dsv4.caches.kv.write_rows(by_rows, slots.flatten(), rows.flatten(0, 1))
    assert torch.equal(plain, by_rows)


def assert_index_keys(arch, page, stride):
    """The same into pages of 132-byte index keys."""
    args = inputs("indexer", 21, dtype=torch.bfloat16, batch=(2,))
    slots = torch.tensor([[5, -1, 0, 1, 2], [9, 3, 8, 7, 4]])
    got, want, by_torch = (IndexCache.empty(12, page, page_stride=stride) for _ in "abc")
    assert kernel(arch, **args, out=got, slots=slots)[0] is got
    rows, _ = kernel(arch, **args)
    want.write(slots.flatten(), rows.flatten(0, 1))
    assert torch.equal(got.storage, want.storage) and want.scale_view().any()
    assert dsv4.compress(**args, out=by_torch, slots=slots)[0] is by_torch
    rows, _ = dsv4.compress(**args)
    want.write(slots.flatten(), rows.flatten(0, 1))
    assert torch.equal(by_torch.storage, want.storage)


def assert_write(arch, page, stride):
    """Tiles of zeros, of tiny and of huge values, of powers of two and next to them; a NaN and an infinity."""
    rows = torch.randn(12, 512)
    rows[1, :64] = 0
    rows[2] *= 1e-30
    rows[3] *= 1e30
    rows[4, :448] = 448 * 2.0 ** torch.arange(7).repeat_interleave(64)
    rows[5] = rows[4].nextafter(torch.tensor(float("inf")))
    rows[6] = rows[4].nextafter(torch.tensor(0.0))
    rows[7, 100], rows[8, 200], rows[8, 500] = float("nan"), float("-inf"), float("inf")
    slots = torch.tensor([3, 0, 11, -1, 7, 10, 4, 5, 9, 1, 2, 8])
    got, want = (Fp8Cache.empty(6, page, page_stride=stride) for _ in "ab")
    with launches.race_free(arch):
        write_rows(got, slots, rows)
    want.write(slots, rows)
    finite = torch.ones(want.rows, dtype=torch.bool)
    finite[[5, 9]] = False  # of NaN only the meaning is fixed
    a, b = got.unpack(torch.float32), want.unpack(torch.float32)
    assert torch.equal(a[finite], b[finite]) and torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(1, 2, 3), b.nan_to_num(1, 2, 3))
    assert torch.equal(got.scale_view(), want.scale_view())


__all__ = ["KINDS", "assert_any_steps", "assert_index_keys", "assert_into_pages", "assert_write", "kernel"]
