"""Tables of measured, published and predicted times."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

LAUNCH_BOUND = 20.0  # us: below it the worst case does not count


def concordance(rows: list[tuple], together) -> tuple[float, int]:
    """Kendall's tau over pairs of rows that differ by more than 5 %, and how many there are. Equal predictions are
    neither right nor wrong."""
    agree = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        if abs(a[1] / b[1] - 1) > 0.05 and together(a[0], b[0]):
            pairs += 1
            order = (a[2] > b[2]) - (a[2] < b[2])
            agree += order if a[1] > b[1] else -order
    return agree / max(pairs, 1), pairs


def regrets(rows: list[tuple]) -> list[float]:
    """How much longer than the fastest variant of a problem the one takes that is predicted to be the fastest."""
    problems: dict[str, list[tuple]] = {}
    for r in rows:
        problems.setdefault(r[0].variants, []).append(r)
    picked = [(min(found, key=lambda r: r[2]), found) for key, found in problems.items() if key and len(found) > 1]
    return [pick[1] / min(r[1] for r in found) - 1 for pick, found in picked]


def judged(cases: list, measured: dict, predicted: dict) -> tuple[list[tuple], dict]:
    """-> rows (case, measured, predicted, error, bound, whether it is within the band), figures"""
    rows = []
    for case in cases:
        m, p = measured.get(case.name, {}), predicted.get(case.name, {})
        if "us" in m and "us" in p:
            low, high = p.get("band", (0.0, 1e9))
            error = p["us"] / m["us"] - 1
            rows.append((case, m["us"], p["us"], error, p.get("bound", ""), low <= m["us"] <= high))
    errors = sorted(abs(r[3]) for r in rows)
    long = [r for r in rows if r[1] >= LAUNCH_BOUND] or rows
    tau, pairs = concordance(rows, lambda a, b: a.variants and a.variants == b.variants)
    every, _ = concordance(rows, lambda a, b: True)
    regret = regrets(rows) or [0.0]
    return rows, {
        "cases": len(rows),
        "mean": sum(errors) / len(errors),
        "nine_of_ten": errors[int(0.9 * len(errors))],
        "within_10": sum(e <= 0.10 for e in errors) / len(errors),
        "within_20": sum(e <= 0.20 for e in errors) / len(errors),
        "in_band": sum(r[5] for r in rows) / len(rows),
        "bias": sum(r[3] for r in rows) / len(rows),
        "worst": max(abs(r[3]) for r in long),
        "worst_case": max(long, key=lambda r: abs(r[3]))[0].name,
        "tau": tau,
        "pairs": pairs,
        "tau_all": every,
        "regret": sum(regret) / len(regret),
        "worst_regret": max(regret),
    }


def table(cases: list, measured: Path, predicted: Path) -> str:
    rows, figures = judged(cases, *(json.loads(f.read_text())["cases"] for f in (measured, predicted)))
    lines = ["| case | measured, us | predicted, us | error | bound by |", "|---|---:|---:|---:|---|"]
    for c, m, p, e, b, inside in rows:
        lines.append(f"| {c.name} | {m:.1f} | {p:.1f} | {e:+.1%}{'' if inside else ', outside its band'} | {b} |")
    groups: dict[str, list[float]] = {}
    for c, _, _, e, *_ in rows:
        groups.setdefault(c.group, []).append(abs(e))
    lines += ["", "| group | cases | mean error | worst |", "|---|---:|---:|---:|"]
    lines += [f"| {g} | {len(e)} | {sum(e) / len(e):.1%} | {max(e):.1%} |" for g, e in groups.items()]
    f = figures
    lines += [
        "",
        f"{f['cases']} cases: mean absolute error {f['mean']:.1%}, bias {f['bias']:+.1%}, {f['within_10']:.0%} within "
        f"10 %, {f['within_20']:.0%} within 20 %, nine of ten within {f['nine_of_ten']:.0%}; {f['in_band']:.0%} within "
        f"their bands; worst with at least {LAUNCH_BOUND:.0f} us {f['worst']:.0%} "
        f"({f['worst_case']}); Kendall's tau {f['tau']:.2f} over {f['pairs']} pairs of variants over 5 % apart "
        f"({f['tau_all']:.2f} over all pairs); the variant that is predicted to be the fastest of its problem takes "
        f"{f['regret']:.1%} longer than the fastest on average, {f['worst_regret']:.0%} at most.",
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
            low, high = map(two, r["band"])
            lines.append(
                f"| {name} | {r['kernels']} | {r['longest']} | {two(r['cycles'] / 1e3)} | {two(r['us'])} "
                f"| {low} to {high} | {shares} | {r['bound']} |"
            )
    return "\n".join(lines) + "\n"


def _dense(products: int, d: int, causal: bool) -> float:
    """Operations of 4 x 16 x 8192."""
    return 2.0 * products * 4 * 16 * 8192**2 * d / (1 + causal)


def _listed(products: int, heads: int, rows: int, queries: int = 4096) -> float:
    """Operations with head dim 512."""
    return 2.0 * products * queries * heads * rows * 512


FA4 = "FlashAttention-4"
PAIR = f"{FA4}, pair of CTAs"
# Our case, what of it, its operations, who publishes TFLOP/s for the same.
PEERS = [
    ("fmha prefill hd128 4 x 16 x 8192", "us", _dense(2, 128, False), FA4, 1535),
    ("fmha prefill hd128 4 x 16 x 8192 causal", "us", _dense(2, 128, True), FA4, 1418),
    ("fmha prefill hd64 4 x 16 x 8192", "us", _dense(2, 64, False), f"{FA4} (784 to 1225)", 1200),
    ("fmha forward and backward hd128 4 x 16 x 8192", "after_first", _dense(5, 128, False), FA4, 1248),
    ("fmha forward and backward hd128 4 x 16 x 8192", "after_first", _dense(5, 128, False), PAIR, 1360),
    ("fmha forward and backward hd128 4 x 16 x 8192 causal", "after_first", _dense(5, 128, True), FA4, 1118),
    ("fmha forward and backward hd128 4 x 16 x 8192 causal", "after_first", _dense(5, 128, True), PAIR, 1209),
    ("v4 bf16 4096 x 128 x 1024 of 8192", "us", _listed(2, 128, 1024), "FlashMLA, V3.2's rows", 1450),
    ("v4 fp8 256 x 128 x 2048 of 200000", "us", _listed(2, 128, 2048, 256), "FlashMLA, V3.2's rows", 700),
    ("v4 forward and backward 4096 x 64 x 512 of 8192", "after_first", _listed(5, 64, 512), "cuDNN frontend", 557),
]


def peers(predicted: Path) -> str:
    """Our kernels, predicted, beside what others publish for theirs."""
    found = json.loads(predicted.read_text())["cases"]
    lines = [
        "| problem | others | TFLOP/s | us | ours, predicted: TFLOP/s | us | times theirs | within 30 % |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, key, flops, who, rate in PEERS:
        us, mine = flops / rate * 1e-6, found.get(name, {}).get(key)
        if mine:
            what = name.replace("forward and backward", "backward")
            lines.append(
                f"| {what} | {who} | {rate} | {us:.0f} | {flops / mine * 1e-6:.0f} | {mine:.0f} | {mine / us:.2f} "
                f"| {'yes' if mine <= 1.3 * us else 'no'} |"
            )
    return "\n".join(lines) + "\n"


def published(cases: list, predicted: Path) -> str:
    """Beside figures of others: the half that parameters were fitted on, and the other."""
    found = json.loads(predicted.read_text())["cases"]
    lines = ["| kernel | GPU | published, us | predicted, us | error | bound by |", "|---|---|---:|---:|---:|---|"]
    errors: dict[bool, list[float]] = {True: [], False: []}
    groups: dict[str, list[float]] = {}
    for c in cases:
        p = found.get(c.name, {})
        if "us" not in p:
            lines.append(f"| {c.name} | {c.gpu.upper()} | {c.us:.1f} | | | {p.get('error', 'not run')[:80]} |")
            continue
        e = p["us"] / c.us - 1
        errors[c.fitted].append(e)
        groups.setdefault(f"{c.group}{', fitted' * c.fitted}", []).append(e)
        lines.append(f"| {c.name} | {c.gpu.upper()} | {c.us:.1f} | {p['us']:.1f} | {e:+.0%} | {p['bound']} |")
    lines += ["", "| tutorial | figures | mean error | bias | worst |", "|---|---:|---:|---:|---:|"]
    for name, es in [*groups.items(), *((("test", "fitted")[k] + " half", v) for k, v in errors.items())]:
        if es:
            mean, worst = sum(map(abs, es)) / len(es), max(es, key=abs)
            lines.append(f"| {name} | {len(es)} | {mean:.0%} | {sum(es) / len(es):+.0%} | {worst:+.0%} |")
    return "\n".join(lines) + "\n"


HEADING = "## Predicted times\n"


def write_predictions(predicted: Path, page: Path) -> None:
    """The last section of docs/kernels.md."""
    kept = page.read_text().partition(f"\n{HEADING}")[0]
    text = f"""
These times are predicted by softsm's timing model ([timing.md](timing.md)) and were never measured on a B200. The
rate of tensor memory and the clock under load are assumptions; the rate of TMA gathers is a bound. Forward and
backward passes have the times of all launches. Where this table and the budget differ, it is because the table also
includes waits, latencies, and the start and end of CTAs.

{blackwell(predicted)}
The same predictions compared with what others publish for a B200 (their kernels, measured by them):

{peers(predicted)}"""
    page.write_text(f"{kept}\n{HEADING}{text}")
