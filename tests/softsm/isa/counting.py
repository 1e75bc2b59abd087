"""A pytest plugin that notes which instructions each test loads: `pytest -p counting --instructions file.json`.

The kernels are looked at when softsm loads them, so texts that a test puts together count as what they are; an
instruction that is rejected does not count. `isa_page.py` makes `docs/isa.md` from it.
"""

import collections
import json
import pathlib

import pytest

FOUND: dict[str, set[str]] = collections.defaultdict(set)  # test -> forms
FILES: dict[str, set[str]] = collections.defaultdict(set)  # form -> chapters whose functions do it at run time
CURRENT = [""]


def pytest_addoption(parser):
    parser.addoption("--instructions", type=pathlib.Path, help="write the instructions of each test to this file")


def pytest_configure(config):
    if config.getoption("--instructions") is None:
        return
    from softsm.engine import launch

    load = launch.Kernel.__init__

    def watched(self, module, *args, **kwargs):
        load(self, module, *args, **kwargs)
        for function in module.functions.values():
            FOUND[CURRENT[0]].update(x.name for x in function.body if hasattr(x, "opcode"))
        for macro in self.program.macros:
            if macro.function.__module__.startswith("softsm.isa."):
                FILES[macro.instruction.name].add(macro.function.__module__.rsplit(".", 1)[1])

    launch.Kernel.__init__ = watched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.config.getoption("--instructions") is not None:
        from softsm.engine import launch

        launch.load.cache_clear()  # a text that an earlier test has loaded counts again
        CURRENT[0] = item.nodeid.split("[")[0]
        FOUND[CURRENT[0]].update()
    return (yield)


def pytest_sessionfinish(session):
    path = session.config.getoption("--instructions")
    if path is None:
        return
    import isa_page

    tests = {name: sorted({isa_page.instruction(f) for f in forms}) for name, forms in sorted(FOUND.items()) if name}
    modifiers, files = collections.defaultdict(set), collections.defaultdict(set)
    for form in set().union(*FOUND.values()):
        name = isa_page.instruction(form)
        modifiers[name].update(isa_page.modifiers(form, name))
        files[name].update(FILES.get(form, ()))
    known = {
        "tests": tests,
        "modifiers": {k: sorted(v) for k, v in sorted(modifiers.items())},
        "files": {k: sorted(v) for k, v in sorted(files.items()) if v},
    }
    lines = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "}"
        for name, part in known.items()
    ]
    path.write_text("{" + ",\n".join(lines) + "}\n")
