"""The Hopper kernels are Python that the oldest Triton we accept understands, and Blackwell's have the names there that
files have. Everything else here runs under a newer one (make test-triton: all of it under this one, in minutes)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4
from dsv4.runtime import dispatch

pytest.importorskip("triton")
OLDEST = "3.6.0"
SIDE = Path(sys.prefix) / f"triton-{OLDEST}"  # make setup
KERNELS = Path(dsv4.__file__).parent / "kernels"
NOT_HERE = {"fmha_pair", "index_scores"}  # clusters of CTAs need Triton 3.9; Blackwell's


def entry_points():
    """Names of the kernels that a host launches: those that say which numbers are not to be compiled in."""
    text = "".join(path.read_text() for part in ("sm90", "shared") for path in sorted((KERNELS / part).rglob("*.py")))
    return set(re.findall(r"^@(?:gluon|triton)\.jit\((?:[^()]|\([^()]*\))*\)[^\n]*\ndef (\w+)", text, re.MULTILINE))


def oldest_triton():
    """An environment in which a process imports the oldest Triton."""
    environment = dict(os.environ)
    if dispatch.triton_version() != (3, 6):
        if not SIDE.exists():
            missing = f"there is no Triton {OLDEST} in {SIDE}, where `make setup` installs it"
            (pytest.fail if os.environ.get("DSV4_CI") else pytest.skip)(missing)
        environment["PYTHONPATH"] = os.pathsep.join([str(SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


@pytest.mark.parametrize("variants", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_every_hopper_kernel_passes_its_front_end(variants):
    script = Path(__file__).with_name("front_end.py")
    done = subprocess.run([sys.executable, script, str(variants)], env=oldest_triton(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"] == OLDEST
    assert not found["failed"], "\n\n".join(map(": ".join, found["failed"].items()))
    assert set(found["lowered"]) >= entry_points() - NOT_HERE


NAMES = """
import json, triton
from dsv4.commands import variants
from dsv4.runtime import aot, dispatch
dispatch.use_aot("anywhere")  # an older Triton plans such launches for files alone
launches = [x for part in variants.wanted(("v4", "index", "compress"), (512,), ("bf16",))
            for x in variants.launches(part, variants.Sizes(), "sm_100a")]
types = [[aot.argument_type(a) for a in x.arguments] for x in launches]
names = {aot.variant(x.kernel.__name__, t, x.constants, "sm_100a") for x, t in zip(launches, types)}
print(json.dumps([triton.__version__, sorted(names)]))
"""


def test_blackwell_kernels_have_the_same_names_under_every_triton():
    """Files that the newest one has written are looked for by an older one, which engines bring."""
    found = []
    for environment in (oldest_triton(), None):
        done = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (oldest, names), (_, here) = found
    assert oldest == OLDEST and names == here and len(names) > 10
