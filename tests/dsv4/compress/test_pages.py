"""Compressed rows from states in an engine's pages: many requests in one call, on a CPU."""

import paged_states
import pytest
import torch

from dsv4 import Fp8Cache
from dsv4.compress.pages import compress_pages


@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_rows_are_those_of_every_request_alone(kind):
    paged_states.assert_rows(kind, compress_pages)


@pytest.mark.parametrize("kind", ["csa", "indexer"])
def test_a_call_in_which_nothing_is_finished_writes_nothing(kind):
    given, out, _ = paged_states.call(kind, [(4, 7), (0, 3)])
    before = out.storage.clone()
    compress_pages(**given)
    assert torch.equal(out.storage, before)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(out=torch.zeros(3, 512)), "out: got .* accepted: a dsv4.Fp8Cache or a dsv4.IndexCache"),
        (dict(out=Fp8Cache.empty(1, 64)), "states: got lines of 512; accepted: 1024 .HCA. or 2048 .CSA."),
        (dict(slots=torch.zeros(2, dtype=torch.int64)), "slots"),
        (dict(block_table=torch.zeros(2, 2)), "block_table"),
        (dict(norm_weight=torch.zeros(64)), "norm_weight"),
        (dict(ratio=0), "ratio: got int 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given, _, _ = paged_states.call("indexer", [(0, 4)])
    with pytest.raises(ValueError, match=message):
        compress_pages(**given | change)
