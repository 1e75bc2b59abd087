"""A call of one public operation, with a poisoned output, and the rules that judge its result.

The output is handed in as `out=`, filled with NaN, inside a larger buffer of a known value: an element that is not
written shows as NaN, one written outside shows in the buffer around it. Inputs are compared bit for bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu

from .case import Check, Where

GUARD = 1024.0  # exact in every dtype used here
GUARD_ELEMENTS = 2048  # elements before and after: more than one row of any tile, and a multiple of 16 bytes


@dataclass(frozen=True)
class Rule:
    """How far a result may be from the fp64 oracle.

    norm   ||o - ref|| / ||ref|| over the whole result <= max(1.5 x the same of the rounded oracle, floor).
    row    the worst single row likewise, 3 x and four times the floor: a lost row drowns in the norm of a large case.
    cosine of the whole result at least this.

    Below 100 rows the norm of the rounding errors is itself random. A kernel that rounds P relative to another maximum
    than the oracle (an earlier tile's, a split's) draws other errors, and the oracle's largest P is exactly 1. Over
    10^5 draws of one row that sees two keys the ratio of the two errors is 4/3 on average, with a standard deviation of
    1/3; with more keys both are less. So R rows may have 4/3 + 5 standard deviations of 1/3 / sqrt(R), and the norm of
    one row has the bound of a row.
    """

    cosine: float | None = None
    floor: float | None = None  # None: a quarter of the dtype's epsilon, 2^-9 for bf16 and 2^-12 for fp16
    rows: bool = True


SEEDS = Rule(cosine=0.999996, floor=2.0**-9, rows=False)
FEATURES = Rule()
# fp32 scores, exp2 and log2 are off by a few 2^-20; a denominator summed from a P rounded to bf16 is off by 2^-9.
LSE_BOUND = 2.0**-12


def relative(error: Tensor, reference: Tensor) -> float:
    """Return ||error|| / ||reference||: 0 where both vanish, inf where only the reference does."""
    size, scale = error.norm().item(), reference.norm().item()
    return size / scale if scale > 0 else (0.0 if size == 0 else float("inf"))


def judge(got: Tensor, ref: Tensor, low: Tensor, rule: Rule, reach: float = 1.0) -> list[Check]:
    """Measure `got` against the fp64 oracle `ref` and its twin `low` with P rounded to got's dtype. All [..., D].

    reach: how large an output can be before it is divided by the sum of its weights."""
    if got.shape != ref.shape:
        return [Check(f"shape {tuple(got.shape)} for {tuple(ref.shape)}", 1.0, 0.0)]
    dtype, got, ref, low = got.dtype, got.double().cpu(), ref.double().cpu(), low.to(got.dtype).double().cpu()
    if got.numel() == 0:
        return [Check("norm", 0.0, 0.0)]
    if got.isnan().any():
        return [Check("NaN elements", float(got.isnan().sum()), 0.0)]
    eps = torch.finfo(dtype).eps
    floor = eps / 4 if rule.floor is None else rule.floor
    few = max(int((ref != 0).any(-1).sum()), 1) ** -0.5
    bound = max(max(1.5, 4 / 3 + 5 / 3 * few) * relative(low - ref, ref), max(1, 4 * few) * floor)
    checks = [Check("norm", relative(got - ref, ref), bound)]
    if rule.cosine is not None:
        cosine = torch.nn.functional.cosine_similarity(got.flatten(), ref.flatten(), dim=0).item()
        checks.append(Check("cosine", cosine, rule.cosine, at_least=True))
    if rule.rows:
        # A row below the dtype's normal range is held to the absolute error of that range, not to a relative one; and
        # fp32 on a GPU is 0 below its own: a factor that a large sink makes so small loses `reach` times as much.
        flushed = torch.finfo(torch.float32).tiny * max(reach, 1.0)
        tiny = max(torch.finfo(dtype).tiny, flushed / floor) * ref.shape[-1] ** 0.5
        scale = ref.norm(dim=-1).clamp_min(tiny)
        worst, worst_low = (((x - ref).norm(dim=-1) / scale).max().item() for x in (got, low))
        checks.append(Check("row", worst, max(3 * worst_low, 4 * floor)))
        dead = (ref == 0).all(-1)  # sees nothing, or a sink of +inf: exactly zero
        checks.append(Check("dead rows", got[dead].abs().max().item() if dead.any() else 0.0, 0.0))
    return checks


def judge_lse(got: Tensor, ref: Tensor) -> list[Check]:
    """Judge the LSE: fp32, natural log, the oracle's shape, -inf exactly where nothing is seen."""
    if got.shape != ref.shape or got.dtype != torch.float32:
        return [Check(f"lse {got.dtype} {tuple(got.shape)} for float32 {tuple(ref.shape)}", 1.0, 0.0)]
    got, ref = got.double().cpu(), ref.double().cpu()
    live = ref.isfinite()
    checks = [Check("lse -inf", float((got.isneginf() != ref.isneginf()).sum()), 0.0)]
    if live.any():
        bound = LSE_BOUND * max(1.0, ref[live].abs().max().item())
        checks.append(Check("lse", (got - ref)[live].abs().max().item(), bound))
    return checks


def rounded(oracle: Callable, args: dict[str, Any], dtype: torch.dtype, sink_last: bool = False) -> Tensor:
    """Return the oracle's output with P rounded to the dtype. sink_last: the output too, before the sink is applied."""
    if not sink_last or args.get("sink") is None:
        return oracle(**args, p_dtype=dtype)[0]
    out, lse = oracle(**{**args, "sink": None}, p_dtype=dtype)
    return reference.merge_states([out.to(dtype)], [lse], args["sink"])[0]


def tensors(value: Any) -> Iterator[Tensor]:
    """Return all tensors in an argument: itself, a tuple's, an Fp8Cache's storage."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "storage") and isinstance(value.storage, Tensor):
        yield value.storage


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the whole storage beneath a tensor, so that views are compared with what lies between
    them."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass
class Guarded:
    """An output of the given shape inside a guard buffer. `strides` in elements; None = contiguous."""

    buffer: Tensor
    out: Tensor

    @staticmethod
    def like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pad: int = 0) -> Guarded:
        """Allocate with `pad` extra elements after every row of the last dimension: a strided output."""
        rows, width = torch.Size(shape[:-1]).numel(), shape[-1]
        size = rows * (width + pad) + 2 * GUARD_ELEMENTS
        buffer = torch.full((size,), GUARD, dtype=dtype, device=device)
        inner = buffer[GUARD_ELEMENTS : size - GUARD_ELEMENTS].view(*shape[:-1], width + pad)
        out = inner[..., :width]
        out.fill_(float("nan"))
        return Guarded(buffer, out)

    def spilled(self) -> int:
        """Count the elements outside the output that were written. This destroys the output."""
        self.out.fill_(GUARD)
        return int((self.buffer != GUARD).sum())


@dataclass
class Call:
    """`dsv4.<op>(**args)`: run it into a guarded output, and judge it by the oracle of the same name."""

    op: str
    args: dict[str, Any]
    rule: Rule = FEATURES
    lse: bool = True
    out_pad: int = 0
    repeat: bool = False  # run twice with deterministic=True: the bits must be equal
    extra: dict[str, Any] = field(default_factory=dict)  # keywords that the oracle does not accept
    sink_last: bool = False  # set by run: see rounded

    def run(self, where: Where) -> tuple[Tensor, Tensor | None, list[Check]]:
        before = [raw_bytes(t).clone() for t in self._inputs()]
        self.sink_last = where.backend == "cpu" and self.op != "v4_attention" and cpu.sink_last(self.args["q"].dtype)
        out, lse, spilled = self._once(where)
        checks = [Check("spilled elements", spilled, 0.0)]
        if self.repeat:
            again, lse_again, _ = self._once(where)
            changed = int((out != again).sum())
            if lse is not None and lse_again is not None:
                changed += int((lse != lse_again).sum())
            checks.append(Check("elements that changed on repeat", changed, 0.0))
        touched = sum(int((raw_bytes(t) != b).sum()) for t, b in zip(self._inputs(), before, strict=True))
        checks.append(Check("input bytes changed", touched, 0.0))
        return out, lse, checks

    def _inputs(self) -> list[Tensor]:
        return [t for value in self.args.values() for t in tensors(value)]

    def _once(self, where: Where) -> tuple[Tensor, Tensor | None, int]:
        q = self.args["q"]
        guarded = Guarded.like(tuple(q.shape), q.dtype, q.device, self.out_pad)
        more = {**self.extra, "deterministic": True} if self.repeat else self.extra
        with where.context():
            result = getattr(dsv4, self.op)(
                **self.args, **more, out=guarded.out, return_lse=self.lse, backend=where.backend
            )
        returned, lse = result if self.lse else (result, None)
        if returned.data_ptr() != guarded.out.data_ptr():
            raise AssertionError("the operation returned another tensor than the out= it was given")
        copy = guarded.out.clone()
        return copy, lse, guarded.spilled()

    def _reach(self) -> float:
        """Return the rows that can be seen times the largest value in them, where there is a sink."""
        if self.args.get("sink") is None:
            return 1.0
        names = ("window", "compressed") if self.op == "v4_attention" else ("v", "v_pages")
        pools = [self.args[name] for name in names if self.args.get(name) is not None]
        values = [x if isinstance(x, Tensor) else x.unpack() for x in pools]
        largest = max((x.float().nan_to_num(0, 0, 0).abs().max().item() for x in values if x.numel()), default=0.0)
        return largest * sum(x.numel() // x.shape[-1] for x in values)

    def check(self, got: tuple[Tensor, Tensor | None, list[Check]]) -> list[Check]:
        out, lse, checks = got
        oracle = getattr(reference, self.op)
        ref, ref_lse = oracle(**self.args)
        low = rounded(oracle, self.args, out.dtype, self.sink_last)
        checks = judge(out, ref, low, self.rule, self._reach()) + checks
        return checks if lse is None else checks + judge_lse(lse, ref_lse)
