"""The suites as data: `seeds()`, `fmha()`, `v4()`, `backward()` give lists of cases that tests and commands run alike.

from dsv4 import suites
for result in suites.run_cases(suites.seeds(), suites.Where("cpu").resolve(), seed=1):
    print(result.case, result.ok)
"""

from .backward_cases import backward
from .case import ARCHS, BACKENDS, Case, Check, Draw, Result, Unavailable, Where, gpu_arch, run_case, run_cases
from .fmha_cases import fmha
from .parallel import run_parallel
from .seed_cases import seeds
from .v4_cases import v4

SUITES = {"seeds": seeds, "fmha": fmha, "v4": v4, "backward": backward}


def select(suite: str = "all", match: str = "", head_dim: int | None = None) -> list[Case]:
    """Return the cases of a suite (or of all), those whose name contains `match`, at one head dim if given."""
    if suite != "all" and suite not in SUITES:
        raise ValueError(f"suite: got {suite!r}; accepted: {', '.join(SUITES)}, all")
    names = SUITES if suite == "all" else {suite: None}
    cases = [case for name in names for case in SUITES[name]()]
    return [case for case in cases if match in str(case) and head_dim in (None, case.head_dim)]


__all__ = [
    "ARCHS", "BACKENDS", "SUITES", "Case", "Check", "Draw", "Result", "Unavailable", "Where",
    "backward", "fmha", "gpu_arch", "run_case", "run_cases", "run_parallel", "seeds", "select", "v4",
]  # fmt: skip
