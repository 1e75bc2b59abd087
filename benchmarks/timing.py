"""How well softsm's timing model predicts an H200.

    python benchmarks/timing.py --measure --json FILE     # on the GPU: the development cases, with clocks
    python benchmarks/timing.py --predict --json FILE     # anywhere: the same cases in softsm
    python benchmarks/timing.py --table MEASURED PREDICTED
    python benchmarks/timing.py --seed N --predict ...    # the same with cases drawn at random (timing_drawn.py):
                                                          # a fresh seed is predicted and committed, then measured
    python benchmarks/timing.py --predict --gpu b200 --json FILE     # the sm_100a kernels; then --blackwell FILE

Measured: median of CUDA-graph replays between events, the L2 emptied before each (as dsv4 bench does). The clock of the
multiprocessors is read by a kernel that follows the replay on the same stream.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]  # benchmarks/softsm.py is not the package
sys.path.append(str(HERE))

WORKERS, COMPILING = 14, 45  # processes that compile, seconds at most


def cases(seeds: list[int] | None, gpu: str = "h200") -> list:
    if seeds:
        from timing_drawn import draw

        return [case for seed in seeds for case in draw(seed)]
    import timing_cases

    return timing_cases.CASES if gpu == "h200" else timing_cases.BLACKWELL


def measure(path: Path, seeds: list[int] | None, only: str, repeats: int, limit: float) -> None:
    import torch

    sys.path.append(str(HERE / "microbench"))
    import device as devices
    from synchronisation import spin

    begin = time.time()
    drawn = ["--seed", *map(str, seeds)] if seeds else []
    command = [sys.executable, __file__, *drawn, "--only", only, "--compile"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = [subprocess.Popen([*command, f"{k}/{WORKERS}"], **quiet) for k in range(WORKERS)]
    for w in workers:
        try:
            w.wait(max(1, COMPILING - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            w.kill()
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    gpu = devices.Gpu()
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    probe = spin()
    found: dict[str, dict] = {}
    for case in (c for c in cases(seeds) if re.search(only, c.name)):
        if time.time() - begin > limit:
            found[case.name] = {"error": "no time left"}
            continue
        try:
            found[case.name] = one(torch, gpu, flush, probe, case.make("cuda"), repeats)
        except Exception as why:  # one case must not lose the others
            found[case.name] = {"error": f"{type(why).__name__}: {why}"[:200]}
        torch.cuda.empty_cache()
        path.write_text(json.dumps({"device": gpu.device, "cases": found}, indent=0))
        print(
            f"{case.name:60s} {found[case.name].get('us', 0):10.1f} us  {found[case.name].get('mhz', 0):7.0f} MHz  "
            f"{found[case.name].get('error', '')}",
            flush=True,
        )


def one(torch, gpu, flush, probe: str, call, repeats: int) -> dict:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times, clocks = [], []
    for n in range(repeats + 2):
        flush.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        gpu.stamps[: 32 * 4].zero_()
        gpu.launch(probe, 1, 32, 0, 0, 30000, 0, b"")
        if n >= 2:
            times.append((begin, end))
        torch.cuda.synchronize()
        stamps = gpu.stamps[:4].cpu().tolist()
        clocks.append((stamps[2] - stamps[0]) / max(stamps[3] - stamps[1], 1) * 1e3)
    us = sorted(b.elapsed_time(e) * 1e3 for b, e in times)
    hot = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        hot.append((begin, end))
    torch.cuda.synchronize()
    warm = statistics.median(b.elapsed_time(e) * 1e3 for b, e in hot)
    return {
        "us": statistics.median(us),
        "low": us[0],
        "high": us[-1],
        "mhz": statistics.median(clocks[2:]),
        "warm_us": warm,
    }


def compile_part(part: str, seeds: list[int] | None, only: str) -> None:
    k, n = map(int, part.split("/"))
    for case in [c for c in cases(seeds) if re.search(only, c.name)][k::n]:
        try:
            case.make("cuda")()
        except Exception as why:  # the measuring process will say so
            print(case.name, why)


def predict(path: Path, seeds: list[int] | None, only: str, gpu: str, part: str, traces: Path | None) -> None:
    """Without a GPU. Results are added to the file, so that a run may be cut short and taken up again. Traces that are
    kept make the next run with another model a matter of a second each."""
    import torch

    import softsm
    from softsm.timing_model.parameters import GPUS
    from softsm.timing_model.timer import Timer

    sms = int(GPUS[gpu]["sms"])
    if not seeds:
        import timing_cases

        timing_cases.SMS = sms
    k, n = map(int, part.split("/"))
    found: dict[str, dict] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case in [c for c in cases(seeds, gpu) if re.search(only, c.name)][k::n]:
        if case.name in found:
            continue
        begin = time.time()
        kept = traces / f"{gpu} {case.name.replace('/', ' ')}.pickle" if traces else None
        try:
            if kept is not None and kept.exists():
                timer = Timer(gpu)
                for trace in pickle.loads(kept.read_bytes()):
                    timer.traced(trace)
            else:
                torch.manual_seed(0)  # paths that depend on values are the same in every run
                with softsm.use(GPUS[gpu].arch, sms=sms), softsm.timing(gpu, values=case.values) as timer:
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
    heavy = max(timer.predictions, key=lambda p: p.body_us)
    return {
        "us": round(timer.us, 2),
        "kernels": len(timer.predictions),
        "longest": heavy.kernel,
        "bound": heavy.bound,
        "cycles": round(sum(p.cycles for p in timer.predictions)),
        "mhz": round(heavy.clock * 1e3),
        "busy": {k: round(float(v), 2) for k, v in heavy.busy.items() if v >= 0.005},
    }


LAUNCH_BOUND = 20.0  # us: below it the worst case does not count


def judged(measured: dict, predicted: dict, seeds: list[int] | None) -> tuple[list[tuple], dict]:
    """-> rows (case, measured, predicted, error), figures"""
    rows = []
    for case in cases(seeds):
        m, p = measured.get(case.name, {}), predicted.get(case.name, {})
        if "us" in m and "us" in p:
            rows.append((case, m["us"], p["us"], p["us"] / m["us"] - 1, p.get("bound", "")))
    errors = sorted(abs(r[3]) for r in rows)
    long = [r for r in rows if r[1] >= LAUNCH_BOUND]
    agree = pairs = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if a[0].variants and a[0].variants == b[0].variants and abs(a[1] / b[1] - 1) > 0.05:
                pairs += 1
                agree += 1 if (a[1] < b[1]) == (a[2] < b[2]) else -1
    return rows, {
        "cases": len(rows),
        "mean": sum(errors) / len(errors),
        "nine_of_ten": errors[int(0.9 * len(errors))],
        "within_10": sum(e <= 0.10 for e in errors) / len(errors),
        "bias": sum(r[3] for r in rows) / len(rows),
        "worst": max(abs(r[3]) for r in long),
        "worst_case": max(long, key=lambda r: abs(r[3]))[0].name,
        "tau": agree / pairs if pairs else 0.0,
        "pairs": pairs,
    }


def table(measured: Path, predicted: Path, seeds: list[int] | None) -> str:
    rows, figures = judged(*(json.loads(f.read_text())["cases"] for f in (measured, predicted)), seeds)
    lines = ["| case | measured, us | predicted, us | error | bound by |", "|---|---:|---:|---:|---|"]
    lines += [f"| {c.name} | {m:.1f} | {p:.1f} | {e:+.1%} | {b} |" for c, m, p, e, b in rows]
    groups: dict[str, list[float]] = {}
    for c, _, _, e, _ in rows:
        groups.setdefault(c.group, []).append(abs(e))
    lines += ["", "| group | cases | mean error | worst |", "|---|---:|---:|---:|"]
    lines += [f"| {g} | {len(e)} | {sum(e) / len(e):.1%} | {max(e):.1%} |" for g, e in groups.items()]
    f = figures
    lines += [
        "",
        f"{f['cases']} cases: mean absolute error {f['mean']:.1%}, bias {f['bias']:+.1%}, {f['within_10']:.0%} within "
        f"10 %, nine of ten within {f['nine_of_ten']:.0%}; worst with at least {LAUNCH_BOUND:.0f} us {f['worst']:.0%} "
        f"({f['worst_case']}); Kendall's tau {f['tau']:.2f} over {f['pairs']} pairs of variants over 5 % apart.",
    ]
    return "\n".join(lines) + "\n"


def blackwell(predicted: Path) -> str:
    """Two digits: nothing here was run on silicon."""

    def two(x: float) -> str:
        return f"{float(f'{x:.2g}'):g}"

    names = ("tensor core", "exp", "shared memory", "L2", "device memory")
    lines = [
        f"| problem | launches | longest | k cycles | us | band, us | {' | '.join(names)} | bound by |",
        f"|---|---:|---|---:|---:|---:|{'---:|' * len(names)}---|",
    ]
    for name, r in json.loads(predicted.read_text())["cases"].items():
        if "us" in r:
            shares = " | ".join(f"{r['busy'].get(k, 0):.0%}" for k in names)
            lines.append(
                f"| {name} | {r['kernels']} | {r['longest']} | {two(r['cycles'] / 1e3)} | {two(r['us'])} "
                f"| {two(r['us'] / 1.3)} to {two(r['us'] * 1.3)} | {shares} | {r['bound']} |"
            )
    return "\n".join(lines) + "\n"


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
        lines.append(f"| {case.name} | {n} | {len(trace.clusters)} | {len(run.order)} | {plain:.1f} | {first:.0f} "
                     f"| {again:.1f} | {again / plain:.1f} |")  # fmt: skip
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


HEADING = "## Predicted times\n"


def write_predictions(predicted: Path, page: Path) -> None:
    """The last section of docs/kernels.md."""
    kept = page.read_text().partition(f"\n{HEADING}")[0]
    text = f"""
These times are predicted by softsm's timing model ([timing.md](timing.md)) and were never measured on a B200. The
rate of tensor memory and the clock under load are assumptions; the rate of TMA gathers is a bound. Every kernel has
at least one problem; forward and backward passes have the times of all launches. Where this table and the budget
differ, it is because the table also includes waits, latencies, and the start and end of CTAs.

{blackwell(predicted)}"""
    page.write_text(f"{kept}\n{HEADING}{text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("timing.json"))
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", help="cases drawn at random")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit", type=float, default=120, help="seconds, for --measure")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th case from the k-th on, for --predict")
    parser.add_argument("--gpu", choices=("h200", "b200"), default="h200", help="for --predict")
    parser.add_argument("--traces", type=Path, help="folder that keeps what --predict emulated")
    parser.add_argument("--table", type=Path, nargs=2, metavar=("MEASURED", "PREDICTED"))
    parser.add_argument("--blackwell", type=Path, metavar="PREDICTED", help="the table of a run with --gpu b200")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="with --blackwell: into the page (docs/kernels.md)")
    parser.add_argument("--cost", action="store_true", help="what a timing run costs beside plain emulation")
    given = parser.parse_args()
    if given.cost:
        print(cost(given.only))
    elif given.blackwell and given.write:
        write_predictions(given.blackwell, given.write)
    elif given.blackwell:
        print(blackwell(given.blackwell))
    elif given.table:
        print(table(*given.table, given.seed))
    elif given.predict:
        predict(given.json, given.seed, given.only, given.gpu, given.part, given.traces)
    elif given.compile:
        compile_part(given.compile, given.seed, given.only)
    elif given.measure:
        measure(given.json, given.seed, given.only, given.repeats, given.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
