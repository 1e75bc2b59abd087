"""What machine instructions cost in a run."""

from softsm.timing_model import costs, machine, sass
from softsm.timing_model.parameters import GPUS


def test_spills_that_l1_does_not_hold_come_from_l2() -> None:
    def one(op: str) -> sass.Sass:
        return sass.Sass(index=0, opcode=op, text="", line=1, guarded=False)

    code = sass.Code([one("LDL.64"), one("STL"), one("FADD")], [range(3)], 255, 4096)
    held, lost = (costs.costs_of(code, GPUS["h200"], {}, spilled=share) for share in (0.0, 0.5))
    units, extra = held.values[:3, machine.UNITS].tolist(), held.values[:3, machine.EXTRA].tolist()
    assert (units, extra) == ([0, 0, 0], [0, 0, 0])
    assert lost.values[:3, machine.UNITS].tolist() == [256, 64, 0]  # of a load that misses; of every store
    assert lost.values[0, machine.EXTRA] == 0.5
