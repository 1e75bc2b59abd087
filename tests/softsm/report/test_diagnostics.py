"""The report: causes first, each finding once, and warnings that are not findings."""

import pytest

from softsm.report.diagnostics import Diagnostic, Party, Report


def race(line, who="warp 0 of CTA (0, 0, 0)"):
    parties = [Party(who, n, f"st {n}", f"k.py:{line}", "writes") for n in (line, line + 1)]
    return Diagnostic("race", "two accesses are not ordered", tuple(parties))


def test_causes_come_before_what_they_lead_to():
    report = Report()
    for found in (race(1), Diagnostic("deadlock", "stuck"), race(5), Diagnostic("barrier-tx", "9 bytes too many")):
        report.add(found)
    assert report.codes() == ["barrier-tx", "race", "race", "deadlock"]
    assert [d.parties[0].ptx_line for d in report if d.parties] == [1, 5], "else in the order they were found"
    assert str(report).startswith("barrier-tx")


def test_the_fix_of_a_code_reads_like_the_others():
    assert str(Diagnostic("tmem-leak", "columns are left")).endswith("fix: add tcgen05.dealloc before the exit")


def test_what_is_found_again_is_counted_where_it_is_shown():
    report = Report()
    report.add(race(1))
    again = Diagnostic(
        "race", "", tuple(Party(p.who, p.ptx_line + 7, p.instruction, p.source, p.what) for p in race(1).parties)
    )
    report.add(Diagnostic("barrier-tx", "9 bytes too many"))
    report.add(again)
    assert report.again() == {1: 1} and str(report).endswith("and 1 more between the same source lines")


@pytest.mark.parametrize("issued", [False, True])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_a_finding_replaces_the_same_one_between_nearer_parties(first, second, issued):
    """What orders the lanes of a warp does not order warps, and so on. Which warp of a CTA issued an operation makes no
    difference."""
    places = [f"warp {w} of CTA ({c}, 0, 0) of GPU {g}" for w, c, g in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    report, issuer = Report(), "TMA load issued by " if issued else ""
    for k in (first, second):
        here, there = race(1, f"warp 0 (load) of CTA (0, 0, 0) of GPU 0, lane {k}").parties
        report.add(Diagnostic("race", str(k), (here, Party(issuer + places[k], *vars_of(there)))))
    nearer = second <= first or issued and (first, second) == (0, 1)
    assert [d.message for d in report] == [str(first if nearer else second)]


def vars_of(party):
    return party.ptx_line, party.instruction, party.source, party.what


def test_a_warning_is_no_finding():
    report = Report()
    for _ in range(2):
        report.warn(Diagnostic("barrier-overwritten", "overwritten without mbarrier.inval"))
    assert not report and len(report) == 0 and len(report.warnings) == 1
    assert str(report).splitlines()[:2] == [
        "nothing found in 0 launches",
        "warning: barrier-overwritten: overwritten without mbarrier.inval",
    ]
