"""Groups of copies: who committed what, lane by lane."""

from softsm.engine.in_flight import Groups


def test_groups_count_lane_by_lane():
    mine = Groups()
    mine.add(0b01, "a")
    mine.add(0b11, "b")
    mine.commit(0b01)  # lane 0: a, b
    mine.add(0b11, "c")
    mine.commit(0b11)  # lane 0: c; lane 1: b, c
    assert mine.take(0b01, 1) == ["a", "b"]
    assert mine.take(0b10, 1) == []
    assert mine.take(0b10, 0) == ["b", "c"]
    assert "c" in mine.take_all(0b01)
    assert not mine.open and not mine.closed


def test_completed_copies_are_not_looked_at_again_where_nothing_commits_them():
    class Copy:
        looks = 0

        @property
        def done(self):
            self.looks += 1
            return True

    groups, copies = Groups(), [Copy() for _ in range(50)]
    for copy in copies:
        groups.add(1, copy)
        assert groups.in_flight(1) == ()
    assert max(copy.looks for copy in copies) == 1
    assert groups.take_all(1) == copies  # a wait still sees them all
