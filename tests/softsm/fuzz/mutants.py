"""Mutants of correct kernels: `make fuzz`, or `python tests/softsm/fuzz/mutants.py --seconds 300 --seed 1`.

The subjects are the corrected twins of the museum. A mutant is one of them with one thing changed; it is run with
strict checks and a budget of instructions. Whatever it does, softsm must answer with a result, a diagnostic or a named
error: any other exception, a hang or a crash is a bug of softsm. For changes of synchronisation and addresses the share
that softsm names is counted:

    named          a diagnostic or a named error
    wrong values   the result is wrong and softsm said nothing
    no effect      the result is right and softsm said nothing: the change may have been harmless
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer

BUDGET = 300_000  # warp instructions; the subjects need a few thousand
PATIENCE = 60  # seconds of CPU time for one mutant, with compilation of the engine behind it

WAITS = re.compile(
    r"(?:@!?%p\d+ )?(bar\.sync|barrier\.sync|barrier\.cluster\.wait|tcgen05\.wait|tcgen05\.fence|fence\.|"
    r"wgmma\.wait_group|wgmma\.fence|cp\.async\.wait|cp\.async\.bulk\.wait)"
)
ARRIVES = re.compile(
    r"(?:@!?%p\d+ )?(mbarrier\.arrive|mbarrier\.expect_tx|tcgen05\.commit|wgmma\.commit_group|"
    r"cp\.async\.(bulk\.)?commit)"
)
SPIN = re.compile(r"(\w+):\nmbarrier\.try_wait[^\n]*\n@!%p\d+ bra \1;\n")
INSTRUCTION = re.compile(r"(?:@!?%p\d+ )?[a-z][\w.:]*( [^;]*)?;")


def pick_line(text: str, rng: random.Random, fits: Callable[[str], object]) -> int | None:
    lines = text.split("\n")
    found = [i for i, line in enumerate(lines) if fits(line)]
    return rng.choice(found) if found else None


def edit_line(text: str, at: int, new: str | None) -> str:
    lines = text.split("\n")
    lines[at : at + 1] = [] if new is None else [new]
    return "\n".join(lines)


def removed_wait(text: str, rng: random.Random) -> str | None:
    spins = list(SPIN.finditer(text))
    lines = [i for i, line in enumerate(text.split("\n")) if WAITS.match(line)]
    which = rng.randrange(len(spins) + len(lines)) if spins or lines else -1
    if which < 0:
        return None
    if which < len(spins):
        return text[: spins[which].start()] + text[spins[which].end() :]
    return edit_line(text, lines[which - len(spins)], None)


def removed_arrive(text: str, rng: random.Random) -> str | None:
    at = pick_line(text, rng, ARRIVES.match)
    return None if at is None else edit_line(text, at, None)


def swapped_phase(text: str, rng: random.Random) -> str | None:
    at = pick_line(text, rng, lambda line: re.search(r"(try|test)_wait\.parity.*, [01];", line))
    if at is None:
        return None
    line = text.split("\n")[at]
    return edit_line(text, at, re.sub(r", ([01]);", lambda m: f", {1 - int(m[1])};", line))


def shifted_column(text: str, rng: random.Random) -> str | None:
    """A tensor-memory address one column (or one lane) off."""
    at = pick_line(text, rng, lambda line: re.search(r"tcgen05\.(ld|st|mma|cp)[^\[]*[^;]*\[%r\d+", line))
    if at is None:
        return None
    step = rng.choice((1, 1, 1, 65536))
    line = text.split("\n")[at]

    def moved(m: re.Match) -> str:
        return f"[{m[1]} + {int(m[2] or 0) + step}]"

    return edit_line(text, at, re.sub(r"\[(%r\d+)(?:\s*\+\s*(\d+))?\]", moved, line, count=1))


def wrong_count(text: str, rng: random.Random) -> str | None:
    at = pick_line(text, rng, lambda line: re.search(r"mbarrier\.(init|arrive\.expect_tx|expect_tx).*, \d+;", line))
    if at is None:
        return None
    line = text.split("\n")[at]
    step = rng.choice((-1, 1)) * (16 if "expect_tx" in line else 1)
    return edit_line(text, at, re.sub(r", (\d+);", lambda m: f", {max(int(m[1]) + step, 0)};", line))


def changed_number(text: str, rng: random.Random) -> str | None:
    at = pick_line(text, rng, lambda line: INSTRUCTION.match(line) and re.search(r"[ \[+]\d+", line))
    if at is None:
        return None
    line = text.split("\n")[at]
    numbers = list(re.finditer(r"(?<=[ \[+])\d+", line))
    if not numbers:
        return None
    m = rng.choice(numbers)
    value = int(m[0])
    new = rng.choice((value + 1, max(value - 1, 0), value ^ 1 << rng.randrange(20), 0))
    return edit_line(text, at, line[: m.start()] + str(new) + line[m.end() :])


def removed_instruction(text: str, rng: random.Random) -> str | None:
    at = pick_line(text, rng, INSTRUCTION.match)
    return None if at is None else edit_line(text, at, None)


def swapped_lines(text: str, rng: random.Random) -> str | None:
    lines = text.split("\n")
    found = [i for i in range(len(lines) - 1) if INSTRUCTION.match(lines[i]) and INSTRUCTION.match(lines[i + 1])]
    if not found:
        return None
    i = rng.choice(found)
    lines[i], lines[i + 1] = lines[i + 1], lines[i]
    return "\n".join(lines)


def mangled_text(text: str, rng: random.Random) -> str | None:
    """Tokens dropped, doubled, swapped or taken from elsewhere."""
    tokens = re.findall(r"\s+|[\w$%.:]+|\S", text)
    for _ in range(rng.choice((1, 1, 2, 5))):
        i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        what = rng.randrange(5)
        if what == 0:
            tokens[i] = ""
        elif what == 1:
            tokens[i] += tokens[i]
        elif what == 2:
            tokens[i], tokens[j] = tokens[j], tokens[i]
        elif what == 3:
            tokens[i] = tokens[j]
        elif tokens[i]:
            k = rng.randrange(len(tokens[i]))
            tokens[i] = tokens[i][:k] + chr(rng.randrange(32, 127)) + tokens[i][k + 1 :]
    return "".join(tokens)


# name -> (mutator, does the share that softsm names count?)
MUTATORS: dict[str, tuple[Callable[[str, random.Random], str | None], bool]] = {
    "removed wait or fence": (removed_wait, True),
    "removed arrive": (removed_arrive, True),
    "swapped phase": (swapped_phase, True),
    "off-by-one column": (shifted_column, True),
    "wrong count or bytes": (wrong_count, True),
    "changed number": (changed_number, False),
    "removed instruction": (removed_instruction, False),
    "swapped lines": (swapped_lines, False),
    "mangled text": (mangled_text, False),
}


def subjects() -> dict[int, object]:
    """The museum's corrected twins that are PTX with a known result."""
    from softsm.museum.exhibits import EXHIBITS, Program

    folder = Path(importlib.import_module("softsm.museum").__file__).parent
    for path in sorted(folder.glob("*.py")):
        importlib.import_module(f"softsm.museum.{path.stem}")
    made = {number: e.make("") for number, e in sorted(EXHIBITS.items())}
    return {n: p for n, p in made.items() if isinstance(p, Program) and p.right is not None}


def outcome(program, text: str) -> str:
    """'named', 'wrong values' or 'no effect'; raises where softsm did neither."""
    import softsm
    from softsm.engine.launch import load
    from softsm.engine.options import options
    from softsm.errors import SoftsmError
    from softsm.museum.exhibits import on_boundary

    arrays = [on_boundary(a) if isinstance(a, np.ndarray) else a for a in program.args]
    given = [a(arrays) if callable(a) else a for a in arrays]
    try:
        with options(budget=BUDGET), softsm.checking(strict=True) as report:
            load.__wrapped__(text).launch(program.grid, program.block, given, cluster=program.cluster)
    except SoftsmError:
        return "named"
    except ValueError as error:
        if re.match(r"\w+: ", str(error)):  # an argument of the launch that the mutated kernel does not accept
            return "named"
        raise
    if report:
        return "named"
    with np.errstate(all="ignore"):
        return "no effect" if program.right(arrays) else "wrong values"


def _too_long(signum, frame):
    raise TimeoutError(f"a mutant ran for more than {PATIENCE} s")


def fuzz(seconds: float, seed: int, only: str = "", most: int = 0) -> dict:
    """Runs mutants until the time is over, or `most` of them, if given, whatever the time. A crash of the process
    leaves the mutant's number on the last line."""
    rng = random.Random(seed)
    programs = subjects()
    counts: dict[str, Counter] = defaultdict(Counter)
    problems: list[str] = []
    signal.signal(signal.SIGVTALRM, _too_long)
    for number, program in programs.items():
        first = outcome(program, program.text)
        if first != "no effect":
            problems.append(f"exhibit {number} unchanged: {first}")
    end = time.monotonic() + seconds
    done = 0
    while done < most if most else time.monotonic() < end:
        mutant_seed = rng.randrange(1 << 30)
        own = random.Random(mutant_seed)
        name = only or own.choice(list(MUTATORS))
        number = own.choice(list(programs))
        program = programs[number]
        text = MUTATORS[name][0](program.text, own)
        if text is None or text == program.text:
            continue
        sys.stderr.write(f"\r{done} {name}, exhibit {number}, seed {mutant_seed}    ")
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
        try:
            counts[name][outcome(program, text)] += 1
        except Exception as error:  # noqa: BLE001 - every other exception is what is looked for
            problems.append(f"{name}, exhibit {number}, seed {mutant_seed}: {type(error).__name__}: {error}")
            counts[name]["problem"] += 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        done += 1
    sys.stderr.write("\n")
    return {"seed": seed, "seconds": seconds, "subjects": len(programs), "mutants": done, "problems": problems,
            "counts": {name: dict(counts[name]) for name in MUTATORS if name in counts}}  # fmt: skip


def share(result: dict, name: str | None = None) -> tuple[int, int]:
    """(named, all) over the mutators that count, or over one."""
    chosen = [c for n, c in result["counts"].items() if n == name or (name is None and MUTATORS[n][1])]
    return sum(c.get("named", 0) for c in chosen), sum(sum(c.values()) for c in chosen)


def one(seed: int) -> None:
    """Print a mutant, from the seed that a problem names, and run it."""
    own = random.Random(seed)
    name = own.choice(list(MUTATORS))
    programs = subjects()
    program = programs[own.choice(list(programs))]
    text = MUTATORS[name][0](program.text, own)
    print(text)
    print(f"{name}: {outcome(program, text)}")


def main(
    seconds: float = 300, seed: int = 0, only: str = "", record: Path | None = None, mutant: int = -1, most: int = 0
) -> None:
    from rich.console import Console
    from rich.table import Table

    faulthandler.enable()
    if mutant >= 0:
        return one(mutant)
    result = fuzz(seconds, seed, only, most)
    title = f"{result['mutants']} mutants of {result['subjects']} kernels, seed {seed}"
    table = Table(title=title, title_justify="left")
    for column in ("mutation", "mutants", "named", "wrong values", "no effect", "share named"):
        table.add_column(column, justify="left" if column == "mutation" else "right")
    for name, c in result["counts"].items():
        total = sum(c.values())
        cells = [str(c.get(k, 0)) for k in ("named", "wrong values", "no effect")]
        table.add_row(name, str(total), *cells, f"{c.get('named', 0) / total:.0%}" if MUTATORS[name][1] else "")
    Console(width=110).print(table)
    named, total = share(result)
    print(f"changes of synchronisation and addresses: {named} of {total} mutants named ({named / max(total, 1):.1%})")
    for problem in result["problems"]:
        print("PROBLEM", problem)
    if record is not None:
        record.write_text(json.dumps(result, indent=1) + "\n")
    raise typer.Exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    typer.run(main)
