"""`pytest --softsm`: every launch of a test is checked, and a test fails on any diagnostic.

Installed as an entry point, so pytest loads this file always; it imports nothing of the emulator before the flag is
given. A test that expects a diagnostic opens `softsm.checking` itself: the innermost block gets the findings.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("softsm")
    group.addoption("--softsm", action="store_true", help="check every softsm launch; fail a test on any diagnostic")
    group.addoption("--softsm-order", default="latest", choices=("eager", "latest", "random"),
                    help="completion of asynchronous operations under --softsm")  # fmt: skip
    group.addoption("--softsm-seed", type=int, default=0, help="of --softsm-order random")
    group.addoption("--softsm-strict", action="store_true", help="take PTX 9.4 to the letter (implies --softsm)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    option = item.config.option
    if not (option.softsm or option.softsm_strict):
        return (yield)
    from softsm.checks.checking import checking

    checks = checking(order=option.softsm_order, seed=option.softsm_seed, strict=option.softsm_strict)
    with checks as report:
        result = yield
    if any(not d.raised for d in report):  # what was raised fails the test by itself, or was expected
        pytest.fail(f"softsm found {len(report)} in {report.launches} launch(es)\n{report}", pytrace=False)
    return result
