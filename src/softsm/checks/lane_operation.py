"""What the interpreter calls for memory and exchange between lanes when races are checked: every access is followed."""

from __future__ import annotations

import functools

from softsm.checks import byte_ranges, clocks, global_shadow, shadow, stored_values, tmem_shadow
from softsm.engine.interpreter import Watch, lane_by_lane
from softsm.engine.native import ready

checked = lane_by_lane(
    Watch(
        note=global_shadow.note,
        quiet=stored_values.quiet,
        collide=stored_values.collide,
        keep_lines=byte_ranges.keep_lines,
        register_lines=byte_ranges.register_lines,
        answer_wait=clocks.answer_wait,
        members=clocks.members,
        tick=clocks.tick,
        access=tmem_shadow.access,
        wait=tmem_shadow.wait,
        product=tmem_shadow.product,
    )
)


@functools.cache
def lane_operation() -> int:
    """Returns the address of the operation. What Python calls is made ready as well, before a launch is divided
    among processes.
    """
    ready(clocks, shadow, global_shadow, byte_ranges, tmem_shadow)
    return checked.address
