"""Two levels: index_blocks keeps the best blocks of rows, index_topk looks into them alone."""

import pytest
import torch
import v41_index

import dsv4

LENGTHS = (700, 683, 129, 9, 1, 0)  # 64 blocks of 8 are kept: 512 rows


def mask_of(blocks, rows):
    mask = torch.zeros(len(blocks), -(-rows // 8) + 1, dtype=torch.bool)
    mask.scatter_(1, blocks.long() % mask.shape[1], True)  # -1: the last column
    return mask[:, :-1]


@pytest.mark.parametrize("bf16", [False, True])
def test_blocks_and_lists_are_those_of_the_definition(bf16):
    arguments, q, keys = v41_index.problem(6, 700, lengths=LENGTHS, topk=40)
    lens = arguments["lengths"]
    lists, blocks = dsv4.index_blocks(**arguments, topk_blocks=64, bf16_scores=bf16)
    assert torch.equal(lists, dsv4.index_topk(**arguments, bf16_scores=bf16))
    full = v41_index.scores_of(arguments, q.bfloat16() if bf16 else q, keys.bfloat16() if bf16 else keys, bf16)
    want = v41_index.candidate_blocks(full, lens, 64)
    got = mask_of(blocks, 700)
    assert blocks.shape == (6, 64) and torch.equal(got.sum(1), want.sum(1))
    best = full.masked_fill(torch.arange(full.shape[1]) >= lens[:, None], -torch.inf).unflatten(1, (-1, 8)).amax(-1)
    for n in range(6):
        kept = blocks[n][blocks[n] >= 0]
        assert (kept.diff() > 0).all() and (blocks[n, len(kept) :] == -1).all()
        if LENGTHS[n]:
            assert got[n, (LENGTHS[n] - 1) // 8]
        other = got[n] != want[n, : got.shape[1]]  # only ties may differ
        assert len(best[n, : got.shape[1]][other].unique()) <= 1


def test_consumers_look_into_the_blocks_alone():
    source, _, _ = v41_index.problem(6, 700, lengths=LENGTHS, topk=40)
    _, blocks = dsv4.index_blocks(**source, topk_blocks=32)
    consumer, q, keys = v41_index.problem(6, 700, lengths=LENGTHS, topk=40)
    other, q, _ = v41_index.problem(6, 700, lengths=LENGTHS, topk=40, seed=5)
    consumer |= {name: other[name] for name in ("q", "q_scales", "weights")}
    lists, scores = dsv4.index_topk(**consumer, blocks=blocks, return_scores=True)
    full = v41_index.scores_of(consumer, q, keys)
    mask = mask_of(blocks, 700).repeat_interleave(8, 1)
    mask = torch.nn.functional.pad(mask, (0, full.shape[1] - mask.shape[1]))
    want = v41_index.select(full, consumer["lengths"], 40, mask)
    assert torch.equal(lists.sort(-1, descending=True).values, want.sort(-1, descending=True).values)
    assert (scores[:, 1:] <= scores[:, :-1]).all() and (scores[lists < 0] == -torch.inf).all()
    pool = dsv4.index_topk(**consumer | dict(request_rows=False), blocks=blocks)
    rows, table = lists[0].long(), consumer["block_table"][0].long()
    assert torch.equal(table[rows // 64] * 64 + rows % 64, pool[0].long())


def test_all_blocks_change_nothing():
    """This holds as long as no more rows are visible than there is room for."""
    arguments, _, _ = v41_index.problem(6, 700, lengths=LENGTHS, topk=40, whole=True, heads=3)
    lists, blocks = dsv4.index_blocks(**arguments, topk_blocks=100)
    assert blocks[0].tolist() == [*range(88), *[-1] * 12]
    assert torch.equal(dsv4.index_topk(**arguments, blocks=blocks), lists)


def test_ties_keep_the_lower_block():
    arguments, _, _ = v41_index.problem(1, 700, whole=True, heads=3)
    arguments["weights"] = torch.zeros(1, 3)  # all scores are equal
    _, blocks = dsv4.index_blocks(**arguments, topk_blocks=5)
    assert blocks.tolist() == [[0, 1, 2, 3, 87]]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_other_keys_have_blocks_too(kind):
    import index_cases

    arguments = index_cases.ragged() if kind == "bf16" else index_cases.fp8_ragged()
    lists, blocks = dsv4.index_blocks(**arguments, topk_blocks=64)
    assert torch.equal(lists, dsv4.index_topk(**arguments))
    assert torch.equal(lists, dsv4.index_topk(**arguments, blocks=blocks))
    assert (blocks[1] >= 0).sum() == 25 and (blocks[-1] == -1).all()


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(topk=0), "topk"),
        (dict(topk_blocks=0), "topk_blocks"),
        (dict(topk_blocks=2.5), "topk_blocks"),
        (dict(q=torch.zeros(1, 6, 32, 128).to(torch.float8_e4m3fn), q_scales=None), "q"),
        (dict(out=torch.zeros(6, 3, dtype=torch.int32)), "out"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, words):
    arguments, _, _ = v41_index.problem(6, 700, lengths=LENGTHS, topk=40)
    with pytest.raises(ValueError, match=f"^{words}: got .*; accepted: "):
        dsv4.index_blocks(**(arguments | dict(topk_blocks=16) | change))
