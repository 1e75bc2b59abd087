"""moe_route on sm_100a, by the shared kernels. For moe there is no kernel yet."""

from dsv4.moe.kernels.prepare import prepare_route, supports_route
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Program


def supports(p: MoeProblem | RouteProblem) -> str | None:
    return supports_route(p) if isinstance(p, RouteProblem) else "experts have kernels for sm_90a only so far"


def prepare(p: RouteProblem, target: Target, program: Program) -> None:
    prepare_route(p, program)
