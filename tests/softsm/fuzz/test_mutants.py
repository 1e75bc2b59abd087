"""A share of `make fuzz`: mutants of a fixed seed, in a separate process so that a crash is reported as one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MUTANTS, SEED = 30, 20260


def test_mutants_meet_only_named_errors(tmp_path, record_property) -> None:
    record = tmp_path / "record.json"
    options = ["--most", str(MUTANTS), "--seed", str(SEED), "--record", str(record)]
    command = [sys.executable, str(HERE / "mutants.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(record.read_text())
    assert result["mutants"] == MUTANTS and result["problems"] == []
    counted = [c for name, c in result["counts"].items() if name in COUNTED]
    named, total = sum(c.get("named", 0) for c in counted), sum(sum(c.values()) for c in counted)
    record_property("mutants named", f"{named} of {total}")
    assert named > 0.8 * total, done.stdout  # `make fuzz` records the share; this notices a checker that went blind


COUNTED = ("removed wait or fence", "removed arrive", "swapped phase", "off-by-one column", "wrong count or bytes")
SPIN = "LOOP:\nmbarrier.try_wait.parity.shared::cta.b64 %p11, [full], 0;\n@!%p11 bra LOOP;\n"


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import mutants

    return mutants


def test_mutators_do_what_they_are_called(mutants) -> None:
    rng = random.Random(0)
    assert mutants.removed_wait("a;\n" + SPIN + "b;", rng) == "a;\nb;"
    assert mutants.removed_wait("bar.sync 0;\nmov.u32 %r1, 0;", rng) == "mov.u32 %r1, 0;"
    assert ", 1;" in mutants.swapped_phase(SPIN, rng)
    assert mutants.removed_arrive("tcgen05.commit.cta_group::1 [%r1];", rng) == ""
    moved = mutants.shifted_column("tcgen05.wait;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r9 + 4], {%r1};", rng)
    assert "[%r9 + 5]" in moved or "[%r9 + 65540]" in moved
    assert mutants.wrong_count("@%p0 mbarrier.init.shared::cta.b64 [full], 1;", rng)[-3:] in (" 0;", " 2;")
    for name, (mutate, _) in mutants.MUTATORS.items():
        assert name == "mangled text" or mutate("", rng) is None
