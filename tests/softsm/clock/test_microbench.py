"""The microbenchmarks are legal programs: assembled for sm_90a, and run to their end by softsm."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmarks" / "microbench"


def test_a_group_is_assembled_and_runs_in_softsm() -> None:
    command = [sys.executable, str(FOLDER), "--check", "--groups", "clock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout and done.stdout.rstrip().endswith("kernels, 0 failures")
