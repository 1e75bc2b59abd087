"""The notebook for a free CPU runtime: its cells run, in order, without the one that installs."""

import json
import runpy
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_every_cell_runs(tmp_path: Path) -> None:
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    installing = [cell for cell in cells if "%pip" in cell]
    assert len(installing) == 1 and "ADDRESS" in installing[0]
    file = tmp_path / "cells.py"  # Triton reads the source of a kernel
    file.write_text("\n\n".join(cell for cell in cells if cell not in installing))
    found = runpy.run_path(str(file))
    assert found["counts"].tolist() == [8] * 8
