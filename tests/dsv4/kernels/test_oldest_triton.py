"""The Hopper kernels are Python that the oldest Triton we accept understands, and Blackwell's have the names there that
files have. Everything else here runs under a newer one (make test-triton: all of it under this one, in minutes)."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4
from dsv4.commands import variants
from dsv4.runtime import dispatch

pytest.importorskip("triton")
OLDEST = "3.6.0"
SIDE = Path(sys.prefix) / f"triton-{OLDEST}"  # make setup
PACKAGE = Path(dsv4.__file__).parent
SCRIPT = Path(__file__).with_name("front_end.py")
NOT_HERE = {"fmha_forward_pair", "index_scores"}  # clusters of CTAs need Triton 3.9; Blackwell's


def entry_points():
    """Return the names of the kernels that a host launches: they list the numbers that are not specialised."""
    files = sorted(path for path in PACKAGE.glob("**/kernels/**/*.py") if "sm100" not in path.parts)
    text = "".join(path.read_text() for path in files)
    return set(re.findall(r"^@(?:gluon|triton)\.jit\((?:[^()]|\([^()]*\))*\)[^\n]*\ndef (\w+)", text, re.MULTILINE))


def run_beside(*arguments):
    """Run Python with these arguments and the oldest Triton."""
    environment = dict(os.environ)
    if dispatch.triton_version() != (3, 6):
        if not SIDE.exists():
            missing = f"there is no Triton {OLDEST} in {SIDE}, where `make setup` installs it"
            (pytest.fail if os.environ.get("DSV4_CI") else pytest.skip)(missing)
        environment["PYTHONPATH"] = os.pathsep.join([str(SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def front_end(most, dtypes):
    """Return what the script prints with the oldest Triton."""
    done = run_beside(SCRIPT, most, *dtypes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"] == OLDEST
    return found


@pytest.fixture(scope="module")
def beside():
    """The one variant of each kernel that adds most; the others are slow."""
    return front_end(1, ["bf16"])


def assert_lowered(found):
    assert not found["failed"], "\n\n".join(map(": ".join, found["failed"].items()))
    assert set(found["lowered"]) >= entry_points() - NOT_HERE


@pytest.mark.compile
def test_every_hopper_kernel_passes_its_front_end(beside):
    assert_lowered(beside)


FP4_SCORES = """
import runpy, sys
lower = runpy.run_path(sys.argv[1])["lower"]
from dsv4.commands import v41_variants
from dsv4.runtime import calls, dispatch
problem = next(v41_variants.index_problems(4, 64, 512, 4096))
for launch in calls.launches_of(problem, dispatch.compile_target("sm_90a")):
    lower(launch)
"""


@pytest.mark.compile
def test_fp4_scores_of_64_heads_pass_its_front_end():
    """Two products for four queries: it aborted at a slice of slots of shared memory."""
    done = run_beside("-c", FP4_SCORES, SCRIPT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_variant_passes_its_front_end():
    assert_lowered(front_end(100, variants.DTYPES))


@pytest.mark.compile
def test_blackwell_kernels_have_the_same_names_under_every_triton(beside):
    """Files that the newest one has written are looked for by an older one, which engines bring."""
    here = runpy.run_path(str(SCRIPT))["names_for_blackwell"]()
    assert beside["names"] == here and len(here) > 10


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    [
        # It kept the ticket of a CTA and what the roles are given in one word, without a barrier: a deadlock.
        "moe/kernels/sm90/test_products.py::test_experts_with_many_rows_with_few_and_with_none",
        # It has no fence between the queries' cp.async and the tensor cores: a race.
        "v4/kernels/sm90/test_decode_swap_ab_ws.py::test_32_heads_split_and_merged[latest]",
    ],
)
def test_its_code_runs_in_softsm(name):
    """What only its code has shown. The same tests run with that of the newest one."""
    test = Path(__file__).parents[1] / name
    done = run_beside("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", test)
    assert done.returncode == 0, done.stdout
