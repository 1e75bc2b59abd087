"""Stores to the address of a load in flight, which exchange words, as in a scan in place. L2 delays everything behind
such a store until device memory has answered the load."""

from __future__ import annotations

import re

from softsm.timing_model.follow import ADDRESS, REGISTER, statements_of
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sources import Source
from softsm.timing_model.trace import LaunchTrace

_LABEL = re.compile(r"^\s*[$%\w]+:")


def exchanges_of(source: str) -> set[int]:
    """Returns the PTX lines of loads to whose address a later store of the same block writes a value that does not
    depend on the load, so that the store does not wait for it."""
    labels = {n for n, text in enumerate(source.splitlines(), 1) if _LABEL.match(text)}
    out: set[int] = set()
    under_way: dict[str, tuple[int, set[str]]] = {}  # address -> load, registers that depend on it
    last = 0
    for s in statements_of(source):
        if labels & set(range(last + 1, s.line + 1)) or s.name.startswith(("bra", "bar")):
            under_way.clear()
        last = s.line
        address = ADDRESS.search(s.rest)
        place = address[1].replace(" ", "") if address else ""
        if s.name.startswith("ld.global") and address:
            under_way[place] = s.line, set(REGISTER.findall(s.rest[: address.start()]))
        elif s.name.startswith("st.global") and address and place in under_way:
            line, known = under_way.pop(place)
            if not known & set(REGISTER.findall(s.rest[address.end() :])):
                out.add(line)
        else:
            read = set(REGISTER.findall(s.rest[len(s.target) :]))
            for _, known in under_way.values():
                if known & read:
                    known |= set(REGISTER.findall(s.target))
    return out


def held_up_ns(trace: LaunchTrace, sources: list[Source], gpu: Gpu, running: int) -> float:
    """Returns how much longer every load waits while `running` CTAs run concurrently."""
    warps = -(-trace.threads // 32)
    lines = share = 0.0
    for a in map(trace.access.get, exchanges_of(trace.source) if "st.global" in trace.source else ()):
        if a is not None and a.looks and a.tensors:
            tensor = max(a.tensors, key=lambda n: a.tensors[n])
            lines += running * warps * a.lines / a.looks
            share = max(share, sources[tensor].device if 0 <= tensor < len(sources) else 0.0)
    return share * (gpu["exchange"] + gpu["exchange.line"] * lines) if lines else 0.0
