"""The choice of the best rows, and blocks of rows, of some queries, as launches: from the scores, with their maxima, to
the lists. All architectures share this file."""

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.index.kernels.arguments import (
    BlockLists,
    Chosen,
    IndexScores,
    KeyLists,
    Owners,
    ScoreSource,
    TablePages,
    TopKLists,
)
from dsv4.index.kernels.blocks import index_blocks_kernel
from dsv4.index.kernels.choose import index_choose
from dsv4.index.kernels.gather import index_gather, index_rank
from dsv4.index.kernels.select import index_select
from dsv4.index.problem import IndexProblem
from dsv4.index.sizes import (
    BLOCK,
    GROUP,
    HELD,
    HELD_KEYS,
    INDEX_PIECE,
    LINE_UNIT,
    MAX_TOPK_BY_GROUPS,
    MOST_EACH,
    block_words,
    cut_by_rows,
    index_candidates,
    index_each,
    index_groups,
    index_kept,
    index_line,
    index_list_words,
    index_room,
    index_shares,
    power_of_two,
)
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Null, Program, Slot


@dataclass
class Part:
    """Queries first .. first + count - 1 of a problem. Their scores begin at the first word of scratch."""

    p: IndexProblem
    target: Target
    program: Program
    owner: int
    owners: Owners
    scratch: Slot
    first: int
    count: int

    def __post_init__(self):
        self.line = index_line(self.p.columns)
        self.shares = index_shares(self.count, self.target.num_sms, self.p.columns, self.p.topk, self.p.topk_blocks)
        # The data that the choice of blocks reads and keeps lies behind all others.
        self.behind = 0
        if self.p.topk_blocks:
            self.behind = (self.scratch.numel() - self.count * block_words(self.p.columns, self.p.topk_blocks)) // 4 * 4
        self.maxima = self.scratch.words(self.count * self.line, self.count * self.line // GROUP, torch.float32)
        self.after = self.count * (self.line + self.line // GROUP)  # the first word behind the maxima

    @property
    def block_maxima(self) -> Slot:
        return self.scratch.words(self.behind, self.count * (self.line // BLOCK), torch.float32)

    @property
    def rows(self) -> TopKLists:
        """The lists of rows."""
        p = self.p
        assert p.out is not None
        return TopKLists(
            ptr=p.out,
            line=p.out.stride(0),
            scores_ptr=Null(torch.float32) if p.scores is None else p.scores,
            scores_line=0 if p.scores is None else p.scores.stride(0),
            want_scores=int(p.scores is not None),
            topk=p.topk,
            pages=TablePages(p.k.shape[0], p.k.shape[1]),
        )

    @property
    def blocks(self) -> BlockLists:
        """The lists of blocks."""
        if not self.p.topk_blocks:
            return BlockLists(Null(torch.int32), 0, 0)
        assert self.p.blocks is not None
        return BlockLists(self.p.blocks, self.p.blocks.stride(0), self.p.topk_blocks)

    def scores(self, lists: KeyLists | None) -> IndexScores:
        return IndexScores(
            ptr=self.scratch,
            line=self.line,
            maxima_ptr=self.maxima,
            maxima_line=self.line // GROUP,
            blocks_ptr=self.block_maxima if self.p.topk_blocks else Null(torch.float32),
            blocks_line=self.line // BLOCK,
            counts_ptr=Null(torch.int32) if lists is None else lists.counts_ptr,
            counted=int(lists is not None),
        )

    def key_lists(self) -> KeyLists | None:
        """Return key lists behind the maxima, if several CTAs choose the rows of a query and there is room."""
        p, at, count, shares = self.p, self.after, self.count, self.shares
        words = count * index_list_words(p.columns, shares, p.topk, p.topk_blocks)
        room = self.behind or self.scratch.numel()
        if shares == 1 or at + words > room or index_groups(p.columns) > MOST_EACH * INDEX_PIECE:
            return None  # a plan for other problems may have reserved less room
        sizes = [index_room(p.columns, p.topk), shares * index_kept(p.columns, p.topk)]
        if p.topk_blocks:
            sizes += [index_room(p.columns, p.topk_blocks, BLOCK), shares * index_kept(p.columns, p.topk_blocks)]
        counts = self.scratch.words(at, 2 * count, torch.int32)
        at += 4 * count
        keys: list[Any] = [Null(torch.int64)] * 4
        for i, size in enumerate(sizes):
            keys[i] = self.scratch.words(at, count * size, torch.int64)
            at += 2 * count * size
        lines = *sizes, 0, 0
        return KeyLists(
            self.first, counts, rows_ptr=keys[0], rows_line=lines[0], blocks_ptr=keys[2], blocks_line=lines[2],
            keep_ptr=keys[1], keep_blocks_ptr=keys[3], topk=p.topk, most=p.topk_blocks,
        )  # fmt: skip

    def choose(self, scores: IndexScores, lists: KeyLists | None) -> None:
        """Add the launches that choose rows and blocks."""
        if lists is not None:
            self._gather(scores, lists)
            return
        columns, topk = self.p.columns, self.p.topk
        few = self.line // GROUP <= INDEX_PIECE or index_candidates(columns, topk) > 0
        if topk <= MAX_TOPK_BY_GROUPS and few:
            self._by_groups()
        else:
            self._select()
        if self.p.topk_blocks:
            self._keep_blocks()

    def _gather(self, scores: IndexScores, lists: KeyLists) -> None:
        """Choose the rows of few queries, and their blocks, in two launches."""
        p = self.p
        groups, kept = index_groups(p.columns), index_kept(p.columns, p.topk)
        each, block_each = index_each(p.columns, p.topk), index_each(p.columns, max(p.topk_blocks, 1))
        grid = (self.count, self.shares, 2 if p.topk_blocks else 1)
        same = dict(OWNER=self.owner, AMONG=p.among is not None, SHARES=self.shares, KEPT=kept)
        self.program.launch(
            index_gather, grid, dict(source=scores, lists=lists, owners=self.owners),
            UNITS=groups // each, EACH=each, BLOCK_UNITS=groups // block_each if p.topk_blocks else 0,
            BLOCK_EACH=block_each, AT_ONCE=min(INDEX_PIECE // GROUP, 2 * kept), SINGLE=cut_by_rows(p.columns, p.topk),
            num_warps=16, launch_pdl=True, **same,
        )  # fmt: skip
        self.program.launch(
            index_rank, grid, dict(lists=lists, owners=self.owners, to=self.rows, to_blocks=self.blocks),
            POOL=not p.options.request_rows, WIDTH=max(kept, power_of_two(p.topk)),
            BLOCKS_KEPT=index_kept(p.columns, p.topk_blocks) if p.topk_blocks else 0,
            BLOCKS_WIDTH=power_of_two(p.topk_blocks), HELD=HELD_KEYS, num_warps=16, launch_pdl=True, **same,
        )  # fmt: skip

    def _by_groups(self) -> None:
        """Choose the best rows of the groups that have the greatest maxima, in one launch, or in two if there are very
        many groups. The kept rows lie behind the maxima."""
        p, count, at = self.p, self.count, self.after
        kept, candidates = index_kept(p.columns, p.topk), index_candidates(p.columns, p.topk)
        maxima, numbers = self.maxima, Null(torch.int32)
        if candidates:
            maxima, numbers = self._best_groups(candidates)
            at += 2 * count * candidates
        size = count * kept
        # With few queries the latency of one matters, with many how many run per SM.
        warps, high = (32 if kept > 2048 else 16, 8) if count <= self.target.num_sms else (8, 4)
        form = dict(
            GROUPS=power_of_two(candidates) if candidates else index_groups(p.columns), KEPT=kept,
            WIDTH=max(kept, power_of_two(p.topk)), HIGH=high, HELD=HELD, CANDIDATES=candidates > 0,
            num_warps=warps if kept > 128 else 4,
            # Launched early, the choice waits for the scores. With lists of 1024, or more CTAs than SMs, it would
            # occupy room that they need.
            launch_pdl=count <= self.target.num_sms and kept <= 1024,
        )  # fmt: skip
        source = ScoreSource(self.scratch, self.line // LINE_UNIT, maxima, candidates, numbers)
        self._launch(index_choose, (count,), source, Chosen(self.first, *self._kept(at, size, kept)), form)

    def _best_groups(self, candidates: int) -> tuple[Slot, Slot]:
        """Choose the best groups of every piece -> (maxima as ordered bits, numbers of the groups)."""
        groups, size, each = self.line // GROUP, INDEX_PIECE // 2, index_kept(self.p.columns, self.p.topk)
        kept, _, numbers = self._kept(self.after, self.count * candidates, each)
        source = ScoreSource(self.maxima, groups, Null(torch.float32), groups, Null(torch.int32))
        form = dict(FIRST=True, LAST=False, SIZE=size, KEPT=each, WIDTH=each, ROWS=GROUP)
        form["num_warps"] = 16 if size >= 4096 else 4
        grid = (self.count, candidates // each)
        self._launch(index_select, grid, source, Chosen(self.first, kept, each, numbers), form)
        return kept, numbers

    def _select(self) -> None:
        """Choose the best of pieces, until one piece is left. What each round keeps lies behind the scores."""
        items, line, at = self.p.columns, self.line, self.after
        source, numbers = self.scratch, Null(torch.int32)
        kept = power_of_two(min(self.p.topk, items))
        while True:
            size = max(kept, min(power_of_two(items), INDEX_PIECE), 128)
            pieces = -(-items // size)
            last = pieces == 1
            words = self.count * pieces * kept
            chosen = Chosen(self.first, *self._kept(at, words, kept))
            at += 2 * words
            form = dict(
                FIRST=source is self.scratch, LAST=last, SIZE=size, KEPT=kept,
                WIDTH=max(kept, power_of_two(self.p.topk)), ROWS=1, num_warps=min(max(size // 2048, 4), 8),
            )  # fmt: skip
            taken = ScoreSource(source, line, Null(torch.float32), items, numbers)
            self._launch(index_select, (self.count, pieces), taken, chosen, form)
            if last:
                return
            items = line = pieces * kept
            source, numbers = chosen.kept_ptr, chosen.numbers_ptr

    def _launch(self, kernel: Any, grid: tuple[int, ...], source: ScoreSource, chosen: Chosen, form: dict) -> None:
        p = self.p
        arguments = dict(source=source, chosen=chosen, owners=self.owners, lists=self.rows)
        named = dict(OWNER=self.owner, POOL=not p.options.request_rows, AMONG=p.among is not None)
        self.program.launch(kernel, grid, arguments, **named, **form)

    def _kept(self, at: int, words: int, size: int) -> tuple[Slot, int, Slot]:
        """Return the last members of Chosen, for items that are kept from word `at` on."""
        kept, numbers = (self.scratch.words(at + n * words, words, torch.int32) for n in (0, 1))
        return kept, size, numbers

    def _keep_blocks(self) -> None:
        """Choose the best blocks of pieces, until one is left. What each round keeps lies behind the blocks' maxima."""
        items = line = self.line // BLOCK
        source, numbers, at = self.block_maxima, Null(torch.int32), self.behind + self.count * items
        most = self.p.topk_blocks
        kept, started = max(power_of_two(min(most, items)), 4), False
        while True:
            size = max(kept, min(power_of_two(items), INDEX_PIECE), 128)
            pieces = -(-items // size)
            last = pieces == 1
            words = 0 if last else self.count * pieces * kept
            chosen = Chosen(self.first, *self._kept(at, words, kept))
            at += 2 * words
            taken = ScoreSource(source, line, Null(torch.float32), items, numbers)
            self.program.launch(
                index_blocks_kernel,
                (self.count, pieces),
                dict(source=taken, chosen=chosen, owners=self.owners, lists=self.blocks),
                OWNER=self.owner,
                FIRST=not started,
                LAST=last,
                SIZE=size,
                KEPT=power_of_two(most) if last else kept,
                num_warps=32 if size > 4096 else 4,
            )
            if last:
                return
            items = line = pieces * kept
            source, numbers, started = chosen.kept_ptr, chosen.numbers_ptr, True
