"""The arguments of moe and moe_route that are not tensors."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from dsv4.runtime import checks

Activations = Literal["fp8_128", "fp8_32", "fp8_token", "nvfp4", "bf16"]
ACTIVATIONS: tuple[str, ...] = get_args(Activations)
FORMATS = ("mxfp4", "nvfp4", "bf16")  # formats of weights


class MoeOptions(NamedTuple):
    activations: str = "fp8_128"
    limit: float = 10.0
    format: str = "mxfp4"
    spread: int = 0  # greatest spread of the exponents in a row of weights
    deterministic: bool = False
    layout: str = "sm90"  # layout of tiles of FP4 weights
    fused: bool = False  # one kernel for the whole layer

    @classmethod
    def checked(
        cls, activations: Any, limit: Any, format: str, spread: int, deterministic: Any, layout: str, fused: Any
    ) -> MoeOptions:
        checks.one_of("activations", activations, ACTIVATIONS)
        limit = checks.number("limit", limit, "a finite number > 0")
        if limit <= 0:
            checks.fail("limit", limit, "a finite number > 0")
        deterministic, fused = checks.flag("deterministic", deterministic), checks.flag("fused", fused)
        return cls(activations, limit, format, spread, deterministic, layout, fused)


class RouteOptions(NamedTuple):
    topk: int = 6
    scale: float = 1.5
    eps: float = 1e-20

    @classmethod
    def checked(cls, topk: Any, scale: Any, eps: Any) -> RouteOptions:
        eps = checks.number("eps", eps, "a finite number >= 0")
        if eps < 0:
            checks.fail("eps", eps, "a finite number >= 0")
        return cls(checks.at_least(1, "topk", topk), checks.number("scale", scale), eps)
