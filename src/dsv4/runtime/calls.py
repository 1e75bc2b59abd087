"""One call of an operation: key -> prepared launches -> run(tensors). The same code the first time and the thousandth.

The key is everything that validation and `prepare` look at: the options, and the shape, strides, dtype, device and
alignment of every tensor. Preparing is a pure function of it (program.py sees to that), so what was prepared for a key
is kept. What a key cannot hold is looked at in every call: values of tensors where they may be read, and whether the
memory of an output lies apart from the inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.runtime import checks, dispatch, plan
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Launch, Layout, Program, tensors_of

MOST = 4096  # prepared calls kept; the oldest goes first


class Outputs(NamedTuple):
    out: tuple[int, ...]
    dtype: torch.dtype
    second: tuple[int, ...]  # fp32

    def layouts(self) -> tuple[Layout, Layout]:
        return Layout.contiguous(self.out, self.dtype), Layout.contiguous(self.second, torch.float32)


@dataclass(frozen=True)
class Operation:
    """What the runtime knows of an operation. Its problem has fields ``out`` and ``second`` names."""

    name: str  # of the public function and of the torch operator
    folder: str  # dsv4.<folder>.cpu, dsv4.<folder>.kernels.<arch>.entry
    tensors: tuple[str, ...]  # its arguments that are tensors, q first, ...
    required: int  # ... of which the first so many must be there
    options: tuple[str, ...]  # the others
    ranks: tuple[int, ...]  # of q
    outputs: Callable[[dict[str, Any]], Outputs]  # (arguments) -> shapes of the outputs, for a q of such a rank
    build: Callable[..., Any]  # (**arguments) -> problem; reads no values
    check_values: Callable[[Any], None]
    second: str = "lse"  # the optional output
    same: tuple[str, str, str] | None = None  # field of the problem: whether these two arguments are the same memory
    falls_back: bool = False  # backend "auto" runs torch code where no kernel serves the problem

    same_places: tuple[int, ...] = field(init=False)  # of those two among the tensors

    def __post_init__(self):
        object.__setattr__(self, "same_places", tuple(self.tensors.index(name) for name in (self.same or ())[1:]))

    def named(self, tensors: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """All arguments by their names."""
        return dict(zip(self.tensors, tensors, strict=True)) | dict(zip(self.options, options, strict=True))

    def empty(self, arguments: dict[str, Any], want: bool, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs, to be written; of size 0 where the second is not wanted."""
        outputs = self.outputs(arguments)
        device = arguments["q"].device
        if out is None:
            out = torch.empty(outputs.out, dtype=outputs.dtype, device=device)
        return out, torch.empty(outputs.second if want else (0,), dtype=torch.float32, device=device)


class Given(NamedTuple):
    """The arguments of one call: those of the operator, but for backend and outputs, and what the caller provides."""

    tensors: Sequence[Any]  # in the order of the operation
    options: tuple  # likewise
    want_second: bool
    out: Tensor | None = None
    second: Tensor | None = None
    scratch: Tensor | None = None
    capacities: tuple[int, ...] | None = None  # of the plan that the scratch memory belongs to


class Call(NamedTuple):
    """What is prepared for a key."""

    layouts: tuple[Layout, Layout]  # of the outputs
    like_q: bool  # whether the first has the layout of q: torch.empty_like takes less time
    ready: Any  # launch.Ready; None: torch code


_calls: dict[tuple, Call] = {}


def forget() -> None:
    """Drop what is prepared; for tests that change a constant."""
    _calls.clear()


def run(op: Operation, given: Given, backend: str) -> tuple[Tensor, Tensor | None]:
    """-> (out, second output or None)."""
    device = given.tensors[0].device
    found = dispatch.resolve(backend, device)
    if found == "cpu":
        problem = _problem(op, given)
        op.check_values(problem)
        _apart(op, given)
        layouts = op.outputs(op.named(given.tensors, given.options)).layouts()
        return _in_torch(op, problem, _allocated(layouts, False, given, device))
    if found == "cuda" and torch.cuda.current_device() == device.index:
        return _run(op, given, backend, dispatch.cuda_target(device), device)
    with dispatch.entered(found, device) as target:
        return _run(op, given, backend, target, device)


def _run(
    op: Operation, given: Given, backend: str, target: Target, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    problem = None
    if checks.values_checked(given.tensors[0]):
        given = _distinct(given)
        problem = _problem(op, given)
        op.check_values(problem)
    try:
        key, addresses = _key(op, given, backend, target)
    except RuntimeError:  # a tensor without strides or an address: what it is says the problem
        _problem(op, given)
        raise
    call = _calls.get(key)
    if call is None:
        if problem is None:
            given = _distinct(given)
            problem = _problem(op, given)
        call = _prepare(op, given, problem, backend, target, device)
        if len(_calls) >= MOST:
            del _calls[next(iter(_calls))]
        _calls[key] = call
    _apart(op, given)
    outputs = _allocated(call.layouts, call.like_q, given, device)
    if call.ready is None:
        return _in_torch(op, problem or _problem(op, given), outputs)
    out, second = outputs
    addresses[-3] = out.data_ptr()
    if second is not None:
        addresses[-2] = second.data_ptr()
    call.ready.run([*given.tensors, out, second, given.scratch], addresses)
    return outputs


def _key(op: Operation, given: Given, backend: str, target: Target) -> tuple[tuple, list[int]]:
    """(key, addresses of the tensors, of the outputs as far as they are provided, and of the plan's memory)."""
    tensors, options, want_second, *provided, capacities = given
    layouts: list[tuple | None] = []
    addresses: list[int] = []
    for x in (*tensors, *provided):
        if x is None:
            layouts.append(None)
            addresses.append(0)
        else:
            address = x.data_ptr()
            layouts.append((x.shape, x.stride(), x.dtype, x.device, address & 15))
            addresses.append(address)
    begin = op.same is not None and addresses[op.same_places[0]] == addresses[op.same_places[1]]
    return (op.name, backend, target, want_second, capacities, begin, options, *layouts), addresses


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Whether two arguments are the same memory: one address, which is in the key, and one layout."""
    return b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def _problem(op: Operation, given: Given) -> Any:
    """The validated problem, with what the caller provides for its results."""
    problem = op.build(**op.named(given.tensors, given.options))
    checked_outputs(op, given, problem)
    changes: dict[str, Any] = {}
    if given.capacities is not None:
        changes["num_splits"] = given.capacities[0]
    if op.same is not None:
        changes[op.same[0]] = _same(*(given.tensors[place] for place in op.same_places))
    return replace(problem, scratch=given.scratch, **changes)


def checked_outputs(op: Operation, given: Given, problem: Any) -> None:
    """ValueError unless the outputs and the plan's memory that the caller provides fit the problem. Reads no values."""
    outputs = op.outputs(op.named(given.tensors, given.options))
    if given.out is not None:
        # a partial result in fp32 (see merge_states)
        partial = op.second == "lse" and checks.is_tensor(given.out) and given.out.dtype == torch.float32
        checks.output("out", given.out, outputs.out, torch.float32 if partial else outputs.dtype, {"q": problem.q})
    if given.second is not None:
        checks.output(op.second, given.second, outputs.second, torch.float32, {"q": problem.q})
    if given.scratch is not None:
        if given.scratch.device != problem.q.device:
            checks.fail("plan", f"a plan on {given.scratch.device}", f"a plan on {problem.q.device}, the device of q")
        checks.tensor("scratch", given.scratch, ("n",), (torch.float32,))
    if given.capacities is not None:
        plan.check(op.name, problem, list(given.capacities))


def _apart(op: Operation, given: Given) -> None:
    """Outputs that the caller provides share no memory with an input, nor with each other."""
    if given.out is None and given.second is None:
        return
    inputs = dict(zip(op.tensors, given.tensors))
    for name, x in (("out", given.out), (op.second, given.second)):
        if x is not None:
            checks.apart(name, x, inputs)
            inputs[name] = x


def _allocated(
    layouts: tuple[Layout, Layout], like_q: bool, given: Given, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    out, second = given.out, given.second
    if out is None:
        out = torch.empty_like(given.tensors[0]) if like_q else layouts[0].empty(device)
    if second is None and given.want_second:
        second = layouts[1].empty(device)
    return out, second


def _prepare(op: Operation, given: Given, problem: Any, backend: str, target: Target, device: torch.device) -> Call:
    layouts = op.outputs(op.named(given.tensors, given.options)).layouts()
    q = given.tensors[0]
    like_q = layouts[0] == (tuple(q.shape), q.stride(), q.dtype)
    module = dispatch.kernel_module(op.folder, target.capability)
    if not op.falls_back and problem.q.dtype not in checks.LOW_PRECISION:
        accepted = "bfloat16, float16; float32 on backend 'cpu'"
        checks.fail("q", f"dtype {problem.q.dtype} on backend {target.backend!r}", accepted)
    reason = module.supports(problem)
    if reason is not None:
        if op.falls_back and backend == "auto":
            return Call(layouts, like_q, None)
        raise ValueError(f"backend: {target.backend!r} cannot run this {op.folder} problem: {reason}")
    from dsv4.runtime.launch import Ready

    stand_ins = _allocated(layouts, False, given, torch.device("meta"))  # for those not provided
    results = dict(zip(("out", op.second), stand_ins))
    tensors = dict(zip(op.tensors, given.tensors))
    program = program_of(replace(problem, **results), target, tensors | results | {"scratch": given.scratch}, device)
    return Call(layouts, like_q, Ready(program, target))


def _distinct(given: Given) -> Given:
    """With an object of its own for every tensor: a program tells tensors by identity, and which arguments are the same
    tensor is not in the key."""
    seen: set[int] = set()
    tensors = []
    for x in given.tensors:
        if isinstance(x, Tensor) and id(x) in seen:
            x = x.detach()
        seen.add(id(x))
        tensors.append(x)
    return given._replace(tensors=tensors)


def launches_of(problem: Any, target: Target, **options: Any) -> list[Launch]:
    """The launches of a problem that has its outputs. Nothing is compiled, nothing runs. options: of `prepare`."""
    tensors = tensors_of(problem)
    program = Program(tensors, problem.q.device)
    module = dispatch.kernel_module(problem.operation, target.capability)
    module.prepare(program.slots_of(problem), target, program, **options)
    return program.launches


def program_of(problem: Any, target: Target, tensors: dict[str, Tensor | None], device: torch.device) -> Program:
    """The steps of this problem, whose tensors are among those given. Nothing is compiled, nothing runs."""
    program = Program(tensors, device)
    slots = program.slots_of(problem)
    if slots.out.numel() == 0:
        return program
    if slots.no_keys():
        for name, empty in slots.nothing_seen.items():
            if getattr(slots, name) is not None:
                program.fill(getattr(slots, name), empty)
        return program
    dispatch.kernel_module(slots.operation, target.capability).prepare(slots, target, program)
    return program


def _in_torch(op: Operation, problem: Any, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The CPU backend, or what a GPU runs where there is no kernel for a problem."""
    out, second = outputs
    problem = replace(problem, **{"out": out, op.second: second})
    if out.numel() == 0:
        return outputs
    if problem.no_keys():
        for name, empty in problem.nothing_seen.items():
            if getattr(problem, name) is not None:
                getattr(problem, name).fill_(empty)
        return outputs
    with torch.autocast(out.device.type, enabled=False):  # an fp32 product inside stays one
        importlib.import_module(f"dsv4.{op.folder}.cpu").forward(problem)
    return outputs
