"""moe on sm_100a: there is no kernel yet."""

from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program


def supports(p: MoeProblem | RouteProblem) -> str | None:
    return "experts have kernels for sm_90a only so far"


def prepare(p: MoeProblem, target: Target, program: Program) -> None:
    raise AssertionError(supports(p))
