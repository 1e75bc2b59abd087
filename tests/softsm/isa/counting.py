"""A pytest plugin that notes which instructions each test loads: `pytest -p counting --forms docs/isa-tests.json`.

`docs/isa.md` counts tests per instruction by it. The kernels are looked at when softsm loads them, so texts that a test
puts together count as what they are.
"""

import collections
import json
import pathlib

import pytest

FOUND: dict[str, set[str]] = collections.defaultdict(set)
CURRENT = [""]


def pytest_addoption(parser):
    parser.addoption("--forms", type=pathlib.Path, help="write the instructions of each test to this file")


def pytest_configure(config):
    if config.getoption("--forms") is None:
        return
    from softsm.engine import launch

    load = launch.Kernel.__init__

    def watched(self, module, *args, **kwargs):
        load(self, module, *args, **kwargs)  # what is refused does not count
        for function in module.functions.values():
            FOUND[CURRENT[0]].update(x.name for x in function.body if hasattr(x, "opcode"))

    launch.Kernel.__init__ = watched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.config.getoption("--forms") is not None:
        from softsm.engine import launch

        launch.load.cache_clear()  # a text that an earlier test has loaded counts again
        CURRENT[0] = item.nodeid.split("[")[0]
    return (yield)


def pytest_sessionfinish(session):
    path = session.config.getoption("--forms")
    if path is not None:
        lines = {name: sorted(forms) for name, forms in sorted(FOUND.items()) if forms and name}
        path.write_text(json.dumps(lines, indent=0) + "\n")
