"""How well softsm's timing model predicts an H200.

    python benchmarks/timing.py --measure --json FILE     # on the GPU: the development cases, with clocks
    python benchmarks/timing.py --predict --json FILE     # anywhere: the same cases in softsm
    python benchmarks/timing.py --table MEASURED PREDICTED
    python benchmarks/timing.py --seed N --predict ...    # the same with cases drawn at random (softsm_time/drawn):
                                                          # a fresh seed is predicted and committed, then measured
    python benchmarks/timing.py --predict --gpu b200 --json FILE     # the sm_100a kernels; then --blackwell FILE
    python benchmarks/timing.py --gpu b200 --published FOLDER --predict --json FILE  # tutorials with published figures;
                                                                     # then without --predict: the table

Measured: median of CUDA-graph replays between events, the L2 emptied before each (as dsv4 bench does). The clock of the
multiprocessors is read by a kernel that follows the replay on the same stream.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from softsm_time import measure as measuring
from softsm_time import tables
from softsm_time.case import Case
from softsm_time.users import SETS

MEASURED_WITH = "3.6"  # the Triton of the GPU's machine: the code of another is another kernel


def cases(given: argparse.Namespace) -> list[Case]:
    """Those that the options name."""
    if given.seed:
        from softsm_time.drawn import draw

        every = [case for seed in given.seed for case in draw(seed, given.families)]
    elif given.published:
        import softsm
        from softsm_time import published

        with softsm.use("sm_100a", cuda_shim=True):  # they ask for the GPU while they are imported
            every = published.cases(given.published)
    elif given.set:
        every = importlib.import_module(f"softsm_time.users.{given.set}").CASES
    elif given.own:
        from softsm_time import own

        every = own.draw(given.own)
    elif given.parts:
        from softsm_time import parts

        every = parts.cases()
    elif given.tune:
        from softsm_time import tune

        every = tune.cases()
    else:
        from softsm_time import development

        every = development.CASES if given.gpu == "h200" else development.BLACKWELL
    return [c for c in every if re.search(given.only, c.name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("timing.json"))
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", help="cases drawn at random")
    parser.add_argument("--families", type=int, metavar="N", help="with --seed: so many families, chosen by the seed")
    parser.add_argument("--tune", action="store_true", help="tiles of one matrix product (softsm_time/tune.py)")
    parser.add_argument("--set", choices=SETS, help="kernels as users bring them (softsm_time/users)")
    parser.add_argument(
        "--own", type=int, metavar="N", help="this library's kernels, shapes of seed N (softsm_time/own.py)"
    )
    parser.add_argument("--parts", action="store_true", help="parts of kernels (softsm_time/parts.py)")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit", type=float, default=120, help="seconds, for --measure")
    parser.add_argument(
        "--compiled", action="store_true", help="with --measure: Triton's cache has all kernels already"
    )
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th case from the k-th on, for --predict")
    parser.add_argument("--gpu", choices=("h200", "b200"), default="h200", help="for --predict")
    parser.add_argument("--traces", type=Path, help="folder that keeps what --predict emulated")
    parser.add_argument("--table", type=Path, nargs=2, metavar=("MEASURED", "PREDICTED"))
    parser.add_argument("--blackwell", type=Path, metavar="PREDICTED", help="the table of a run with --gpu b200")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="with --blackwell: into the page (docs/kernels.md)")
    parser.add_argument("--cost", action="store_true", help="what a timing run costs beside plain emulation")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="Triton's python/tutorials/gluon")
    given = parser.parse_args()
    if (given.seed or given.set or given.own) and given.predict:
        import triton

        if not triton.__version__.startswith(MEASURED_WITH):
            parser.error(
                f"predictions of kernels nobody has seen need Triton {MEASURED_WITH}: got {triton.__version__}"
            )
    if given.cost:
        from softsm_time.cost import cost

        print(cost(given.only))
    elif given.blackwell and given.write:
        tables.write_predictions(given.blackwell, given.write)
    elif given.blackwell:
        print(tables.blackwell(given.blackwell))
        print(tables.peers(given.blackwell))
    elif given.table:
        print(tables.table(cases(given), *given.table))
    elif given.predict:
        from softsm_time.predict import predict

        k, n = map(int, given.part.split("/"))
        predict(given.json, cases(given)[k::n], given.gpu, given.traces, given.published is not None)
    elif given.published:
        print(tables.published(cases(given), given.json))
    elif given.compile:
        measuring.compile_part(given.compile, cases(given))
    elif given.measure:
        others = [f"--{name}" for name in ("tune", "parts") if getattr(given, name)]
        one = {"--own": given.own, "--set": given.set}
        numbers = {"--seed": given.seed, **{option: [x] for option, x in one.items() if x}}
        drawn = next(([option, *map(str, n)] for option, n in numbers.items() if n), others)
        drawn += ["--families", str(given.families)] if given.families else []
        command = [sys.executable, __file__, *drawn, "--only", given.only, "--compile"]
        command = [] if given.compiled else command
        measuring.measure(given.json, cases(given), command, given.repeats, given.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
