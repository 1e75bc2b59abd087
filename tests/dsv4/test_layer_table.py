"""benchmarks/layer.py: the table of docs/benchmarks.md is that of the record."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "benchmarks" / "layer.py"


def test_the_table_of_the_documents():
    spec = importlib.util.spec_from_file_location("layer", PATH)
    layer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layer)
    record = json.loads((ROOT / "benchmarks/results/layer-h200.json").read_text())
    assert all(one["finite"] and not one["refused"] for one in record["batches"].values())
    assert layer.markdown(record["batches"]) in (ROOT / "docs/benchmarks.md").read_text()
