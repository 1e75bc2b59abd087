"""One record for a block of words says what a record for each of them would."""

import numpy as np
import pytest

from softsm.checks import byte_ranges
from softsm.checks import shadow as sh
from softsm.checks.clocks import HEAD, WORDS
from softsm.checks.order import address_of
from softsm.checks.views import SharedShadow, SpareShadows, zeros
from softsm.engine import program as pg

BLOCKS, WARPS, SLOTS = 6, 3, 4
BYTES = 32 * BLOCKS - 8  # the last block is not whole


class Memory:
    """The shadow of a small shared memory, and warps that know something of each other."""

    def __init__(self, shadow: SharedShadow, clocks: np.ndarray):
        self.shadow, self.clocks, self.spans = shadow, clocks, byte_ranges
        self.layout = np.zeros(pg.LAYOUT, np.int64)
        self.layout[: pg.LOG] = 1, 2 * SLOTS, 2, WORDS
        self.races = np.zeros(sh.CLUSTERS + SLOTS, np.int64)
        self.parts = np.zeros((SLOTS, sh.PARTS_KEPT, 2), np.uint32)
        self.races[sh.PARTS] = address_of(self.parts)
        self.site = np.array([shadow.address, shadow.reads_address, BYTES // 4, WARPS, 0], np.int64)
        self.states = np.zeros(WARPS, pg.WARP_STATE).view(np.int64).reshape(WARPS, -1)
        for warp, S in enumerate(self.states):
            clock = address_of(clocks[warp])
            S[pg.S_RACES : pg.S_WARPS + 1] = (
                address_of(self.races), shadow.address, 0, clock, clock + 8 * SLOTS, address_of(self.layout), warp, 0,
                warp, WARPS,
            )  # fmt: skip
            S[pg.S_READS], S[pg.S_SHARED_SIZE] = shadow.reads_address, BYTES

    def operation(self, number: int, warp: int, pieces: list, write: int, generic: int) -> None:
        table = np.array(pieces, np.int64)
        self.layout[pg.NEWEST] = number + 1
        self.spans.asynchronous(
            address_of(self.site), address_of(self.layout), address_of(self.races), address_of(table), len(table),
            write, number, generic, address_of(self.clocks[warp]), 0, number, warp, warp, 0,
        )  # fmt: skip

    def access(self, warp: int, low: int, high: int, write: int, pc: int) -> None:
        self.spans.span(address_of(self.states[warp]), low, high, write, 0, pc, -1)

    def findings(self) -> list[int]:
        found = self.races[: 1 + sh.RACE_FIELDS * self.races[0]].tolist()
        self.races[0] = 0
        return found

    def records(self) -> np.ndarray:
        own = self.shadow.split[:BLOCKS].astype(bool).repeat(sh.BLOCK)[:, None]
        return np.where(own, self.shadow.of_words, self.shadow.of_blocks.repeat(sh.BLOCK, 0))[: BYTES // 4]

    def separate(self) -> None:
        for block in range(BLOCKS):
            self.shadow.word(sh.BLOCK * block)


def new_clocks() -> np.ndarray:
    clocks = np.zeros((WARPS, HEAD + 2 * SLOTS + 2 * WORDS), np.uint32)[:, HEAD:]
    clocks[range(WARPS), range(WARPS)] = 1
    return clocks


def pieces_of(random: np.random.Generator) -> list[tuple[int, int]]:
    if random.random() < 0.3:
        low = int(random.integers(BYTES - 1))
        return [(low, int(random.integers(low + 1, BYTES + 1)))]
    first, count = random.integers(BLOCKS - 1), random.integers(1, 4)
    return [(32 * int(b), 32 * int(b) + 32) for b in range(first, min(first + count, BLOCKS - 1))]


@pytest.mark.parametrize("seed", range(8))
def test_blocks_say_what_their_words_would(seed):
    random = np.random.default_rng(seed)
    clocks = new_clocks()
    blocks, words = (Memory(SharedShadow(BYTES // 4, WARPS), clocks) for _ in range(2))
    found, alike = 0, 0
    for number in range(1, 80):
        clocks[:, : 2 * SLOTS] = np.maximum(clocks[:, : 2 * SLOTS], random.integers(0, number, (WARPS, 2 * SLOTS)))
        clocks[range(WARPS), range(WARPS)] = 2 * number + 1  # its own epoch
        clocks[:, 2 * SLOTS :] |= random.integers(0, 1 << 32, clocks[:, 2 * SLOTS :].shape, np.uint32)
        clocks[:, 2 * SLOTS + (number + 1) // 32 :: WORDS] &= (1 << (number + 1) % 32) - 1  # not of those to come
        warp, write, generic = (int(random.integers(n)) for n in (WARPS, 2, 2))
        pieces = pieces_of(random)
        words.separate()
        for memory in (blocks, words):
            if number % 10:
                memory.operation(number, warp, pieces, write, generic)
            else:
                memory.access(warp, *pieces[0], write, number)
        np.testing.assert_array_equal(blocks.records(), words.records())
        said = blocks.findings()
        assert said == words.findings()
        found, alike = found + said[0], alike + int((blocks.shadow.split[:BLOCKS] == 0).sum())
    assert found > 10 and 50 < alike < 400, "both ways were taken"


def test_a_shadow_that_is_used_again_remembers_nothing():
    clocks = new_clocks()
    spare = SpareShadows(1)
    used = Memory(spare.take(BYTES // 4, WARPS), clocks)
    for warp in range(WARPS):
        used.access(warp, 0, BYTES, 1, 5)
        used.access(warp, 0, BYTES, 0, 6)
    used.operation(1, 0, [(0, BYTES)], 1, 0)
    spare.give_back(used.shadow)
    again = Memory(spare.take(BYTES // 4, WARPS), clocks)
    assert again.shadow is used.shadow
    fresh = Memory(SharedShadow(BYTES // 4, WARPS), clocks)
    for memory in (again, fresh):
        memory.access(1, 4, 8, 1, 7)
        memory.operation(2, 2, [(0, 64)], 1, 0)
        memory.access(1, 64, 72, 0, 8)
    assert again.findings() == fresh.findings()
    np.testing.assert_array_equal(again.records(), fresh.records())


def test_a_shadow_may_be_larger_than_the_machine():
    """That of an array of 2.6 GB, where an index exceeds 32 bits, has 42 GB."""
    shadow = zeros((1 << 40,))
    shadow[-1] = 1
    assert shadow[-2] == shadow[0] == 0
