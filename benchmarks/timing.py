"""How well softsm's timing model predicts an H200.

    python benchmarks/timing.py --measure --json FILE     # on the GPU: the development cases, with clocks
    python benchmarks/timing.py --predict --json FILE     # anywhere: the same cases in softsm
    python benchmarks/timing.py --table MEASURED PREDICTED
    python benchmarks/timing.py --seed N --predict ...    # the same with cases drawn at random (timing_drawn.py):
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
import json
import pickle
import re
import sys
import time
from pathlib import Path

import timing_measure as measuring
import timing_tables as tables

SETS = ("user", "second", "third", "fourth", "fifth")  # by hand, each predicted and committed before it was measured
MEASURED_WITH = "3.6"  # the Triton of the GPU's machine: the code of another is another kernel


def cases(given) -> list:
    """Those that the options name."""
    if given.seed:
        from timing_drawn import draw

        every = [case for seed in given.seed for case in draw(seed, families=given.families)]
    elif given.published:
        import timing_published

        import softsm

        with softsm.use("sm_100a", cuda_shim=True):  # they ask for the GPU while they are imported
            every = timing_published.cases(given.published)
    elif given.set:
        found = importlib.import_module(f"timing_{given.set}")
        every = found.cases() if hasattr(found, "cases") else found.CASES
    elif given.own:
        import timing_own

        every = timing_own.draw(given.own)
    elif given.parts:
        import timing_parts

        every = timing_parts.cases()
    elif given.tune:
        import timing_tune

        every = timing_tune.cases()
    else:
        import timing_cases

        every = timing_cases.CASES if given.gpu == "h200" else timing_cases.BLACKWELL
    return [c for c in every if re.search(given.only, c.name)]


def predict(path: Path, cases: list, gpu: str, traces: Path | None, shim: bool) -> None:
    """Without a GPU. Results are added to the file, so that a run may be cut short and taken up again. Traces that are
    kept make the next run with another model a matter of a second each. shim: the programs ask for CUDA tensors."""
    import timing_cases
    import torch

    import softsm
    from softsm.timing_model.parameters import GPUS
    from softsm.timing_model.timer import Timer

    found: dict[str, dict] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case in cases:
        if case.name in found:
            continue
        begin = time.time()
        kind = getattr(case, "gpu", gpu)
        sms = timing_cases.SMS = int(GPUS[kind]["sms"])
        kept = traces / f"{kind} {case.name.replace('/', ' ')}.pickle" if traces else None
        try:
            if kept is not None and kept.exists():
                timer = Timer(kind)
                for trace in pickle.loads(kept.read_bytes()):
                    timer.traced(trace)
            else:
                torch.manual_seed(0)  # paths that depend on values are the same in every run
                use = softsm.use(GPUS[kind].arch, sms=sms, cuda_shim=shim)
                with use, softsm.timing(kind, values=case.values) as timer:
                    case.make("cpu")()
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_bytes(pickle.dumps([p.trace for p in timer.predictions]))
            found[case.name] = row(timer)
        except Exception as why:  # one case must not lose the others
            found[case.name] = {"error": f"{type(why).__name__}: {why}"[:300]}
        found[case.name]["seconds"] = round(time.time() - begin, 1)
        path.write_text(json.dumps({"cases": found}, indent=0) + "\n")
        made = found[case.name]
        print(f"{case.name:60s} {made.get('us', 0):10.1f} us {made.get('error', '')}", flush=True)


def row(timer) -> dict:
    """The launches of a case together; shares are of the longest."""
    from softsm.timing_model.validated import band

    heavy = max(timer.predictions, key=lambda p: p.body_us)
    low, high = band(heavy)
    return {
        "us": round(timer.us, 2),
        "band": [round(timer.us * low, 2), round(timer.us * high, 2)],
        "kernels": len(timer.predictions),
        "after_first": round(timer.us_from(1), 2),  # of a forward and backward pass the latter
        "longest": heavy.kernel,
        "bound": heavy.bound,
        "cycles": round(sum(p.cycles for p in timer.predictions)),
        "mhz": round(heavy.clock * 1e3),
        "busy": {k: round(float(v), 2) for k, v in heavy.busy.items() if v >= 0.005},
    }


def cost(only: str) -> str:
    """Milliseconds of the processor: a timing run, first with ptxas and nvdisasm, then with the machine code known, and
    the plain emulation of the CTAs that it looks at. Those are all that its replay runs on a multiprocessor, in a grid
    of more than one wave several in a row in each place; up to three of them are emulated, the others are like them.
    All in one process; compilation by Triton comes before all of this."""
    import os
    import resource

    import timing_cases

    import softsm

    os.environ["SOFTSM_PROCESSES"] = "1"  # plain runs, too

    def seconds() -> float:
        return sum(
            u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    def took(work, times: int = 12) -> float:
        def once() -> float:
            begin = seconds()
            work()
            return seconds() - begin

        return 1e3 * min(once() for _ in range(times))

    lines = [
        "| program | CTAs | emulated | covered | plain, ms | timed, ms | timed again, ms | again / plain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    grids = [(of, n) for of, numbers in timing_cases.COSTS for n in numbers]
    for of, n in grids:
        case = of(n)
        if not re.search(only, case.name):
            continue
        call = case.make("cpu")
        timers = []

        def timed(call=call, timers=timers) -> None:
            with softsm.timing("h200") as timer:
                call()
            timers[:] = [timer]

        with softsm.use("sm_90a", sms=132):
            of(1).make("cpu")()  # compiled by Triton, lowered by softsm
            first, again = took(timed, 1), took(timed)
            run, trace = timers[0].predictions[0].run, timers[0].predictions[0].trace
            looked = of(len(run.order)).make("cpu")
            looked()
            plain = took(looked)
        lines.append(
            f"| {case.name} | {n} | {len(trace.clusters)} | {len(run.order)} | {plain:.1f} | {first:.0f} "
            f"| {again:.1f} | {again / plain:.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("timing.json"))
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", help="cases drawn at random")
    parser.add_argument("--families", type=int, metavar="N", help="with --seed: so many families, chosen by the seed")
    parser.add_argument("--tune", action="store_true", help="tiles of one matrix product (timing_tune.py)")
    parser.add_argument("--set", choices=SETS, help="kernels as users bring them (timing_user.py and so on)")
    parser.add_argument("--own", type=int, metavar="N", help="this library's kernels, shapes of seed N (timing_own.py)")
    parser.add_argument("--parts", action="store_true", help="parts of kernels (timing_parts.py)")
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
        print(cost(given.only))
    elif given.blackwell and given.write:
        tables.write_predictions(given.blackwell, given.write)
    elif given.blackwell:
        print(tables.blackwell(given.blackwell))
        print(tables.peers(given.blackwell))
    elif given.table:
        print(tables.table(cases(given), *given.table))
    elif given.predict:
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
