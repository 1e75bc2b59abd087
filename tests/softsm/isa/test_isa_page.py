"""docs/isa.md is what isa_page.py makes of today's code, and its counts are of today's tests."""

import ast
import json

import isa_page


def test_the_page_is_up_to_date():
    assert isa_page.PAGE.read_text() == isa_page.page(), "run python tests/softsm/isa/isa_page.py"


def test_every_test_has_been_counted():
    found = set()
    for folder in isa_page.FOLDERS:
        for path in sorted((isa_page.ROOT / folder).glob("test_*.py")):
            if path.name == "test_isa_page.py":
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    found.add(f"{folder}/{path.name}::{node.name}")
    counted = {name for name in json.loads(isa_page.TESTS.read_text())["tests"] if "test_isa_page" not in name}
    assert found == counted, "run python tests/softsm/isa/isa_page.py"


def test_names_of_instructions():
    assert isa_page.instruction("add.rn.f32") == "add"
    assert isa_page.instruction("cp.async.bulk.tensor.2d.shared::cta.global") == "cp.async.bulk.tensor"
    assert isa_page.instruction("bar.cta.sync") == "bar.sync"
    assert isa_page.instruction("barrier.cluster.arrive.aligned") == "barrier.cluster.arrive"
