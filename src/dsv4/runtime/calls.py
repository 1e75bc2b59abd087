"""Runs one call of an operation: key -> prepared launches -> run(tensors). The first call and the thousandth run the
same code.

The key holds everything that validation and `prepare` look at: the options, and the shape, strides, dtype, device and
alignment of every tensor. `prepare` is a pure function of the key (program.py ensures that), so its result is cached.
Every call checks what the key cannot hold: values of tensors, where they may be read, and whether an output overlaps an
input in memory.

`run` is for operations, which are validated, allocate their outputs, and have torch code as well as kernels. `launch`
is for single kernels inside dsv4 (rows into caches, norms, the compressor), whose callers do this themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.runtime import checks, dispatch, plan, structs
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Changing, Launch, Layout, Program, rounded, tensors_of

MOST = 4096  # prepared calls kept; the oldest goes first
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


def like(names: Sequence[str]) -> Callable[[dict[str, Any]], Shapes]:
    """Returns the `shapes` of gradients: those of the tensors of these names; size 0 for one that is None."""

    def shapes(arguments: dict[str, Any]) -> Shapes:
        given = (arguments[name] for name in names)
        return [((0,), torch.float32) if x is None else (x.shape, x.dtype) for x in given]

    return shapes


@dataclass(frozen=True)
class Operation:
    """Describes an operation to the runtime. Its problem has a field for each output."""

    name: str  # name of the public function and of the torch operator
    folder: str  # dsv4.<folder>.cpu, dsv4.<folder>.kernels.<arch>.entry; or backward_cpu, backward
    tensors: tuple[str, ...]  # the tensor arguments; the first is never None, and its device is that of the call
    required: int  # how many of them, counted from the first, must not be None
    options: Any  # class of the other arguments (options.py)
    outputs: tuple[str, ...]  # a forward operation always computes the first
    shapes: Callable[[dict[str, Any]], Shapes]  # (arguments) -> shape and dtype of each output
    build: Callable[..., Any]  # (**arguments) -> problem; reads no values
    check_values: Callable[[Any], None] | None = None
    ranks: tuple[int, ...] = ()  # ranks of q that `shapes` accepts
    same: tuple[tuple[str, str, str], ...] = ()  # (field of the problem, two arguments): whether they share memory
    plan: Callable[..., tuple[int, int]] | None = None  # computes what a plan reserves (plan.RULES)
    warmup: Callable[..., Any] | None = None  # makes the calls that compile its kernels (warmup.CALLS)
    falls_back: bool = False  # backend "auto" runs torch code if no kernel supports the problem
    backward: bool = False
    positional: tuple[str, ...] = ()  # positional arguments of the operator after the required tensors
    without: tuple[str, ...] = ()  # options that it does not accept

    same_places: tuple[tuple[int, int], ...] = field(init=False)  # positions of the arguments of `same` in `tensors`

    def __post_init__(self):
        places = ((self.tensors.index(a), self.tensors.index(b)) for _, a, b in self.same)
        object.__setattr__(self, "same_places", tuple(places))

    @property
    def second(self) -> str:
        """Return the name of the optional output of a forward operation."""
        return self.outputs[1]

    def named(self, tensors: Sequence[Any], options: Any) -> dict[str, Any]:
        """Return all arguments by name."""
        found = dict(zip(self.tensors, tensors, strict=True)) | options._asdict()
        for name in self.without:
            del found[name]
        return found

    def empty(self, arguments: dict[str, Any], wanted: Sequence[bool], out: Tensor | None = None) -> list[Tensor]:
        """Allocate the outputs; an output that is not wanted has size 0."""
        device = arguments[self.tensors[0]].device
        made = [
            torch.empty(shape if want else (0,), dtype=dtype, device=device)
            for (shape, dtype), want in zip(self.shapes(arguments), wanted)
        ]
        return made if out is None else [out, *made[1:]]


class Given(NamedTuple):
    """The arguments of one call: those of the operator except backend and outputs, and what the caller provides."""

    tensors: Sequence[Any]  # tensors in the order of the operation
    options: Any  # an instance of `Operation.options`, which is a tuple
    wanted: tuple[bool, ...]  # outputs
    outputs: tuple[Tensor | None, ...]  # buffers that the caller provides
    scratch: Tensor | None = None
    capacities: tuple[int, ...] | None = None  # capacities of the plan that owns the scratch memory


class Call(NamedTuple):
    """What `_prepare` made for a key."""

    allocated: list[tuple[int, int, Layout]]  # (output, the tensor whose layout it has or -1, its layout)
    spans: list[int] | None  # bytes of the tensors and provided outputs; None if no output is provided
    ready: Any  # launch.Ready; None: torch code


_calls: dict[tuple, Any] = {}


def forget() -> None:
    """Empty the cache, for tests that change a constant."""
    _calls.clear()


def run(op: Operation, given: Given, backend: str) -> list[Tensor | None]:
    """Return the outputs, None for each that is not wanted."""
    device = given.tensors[0].device
    found = dispatch.resolve(backend, device)
    if found == "cpu":
        problem = _problem(op, given)
        if op.check_values is not None:
            op.check_values(problem)
        call = Call(*_outputs_of(op, given), None)
        layouts, addresses = _layouts((*given.tensors, *given.outputs))
        return _in_torch(op, problem, _allocated(op, call, given, addresses, device))
    if found == "cuda" and torch.cuda.current_device() == device.index:
        return run_on(op, given, backend, dispatch.cuda_target(device), device)
    with dispatch.entered(found, device) as target:
        return run_on(op, given, backend, target, device)


def run_on(op: Operation, given: Given, backend: str, target: Target, device: torch.device) -> list[Tensor | None]:
    """Do the same on a target that is already active."""
    problem = None
    if op.check_values is not None and checks.values_checked(given.tensors[0]):
        given = _distinct(given)
        problem = _problem(op, given)
        op.check_values(problem)
    tensors, options, wanted, provided, scratch, capacities = given
    try:
        layouts, addresses = _layouts((*tensors, *provided, scratch))
    except RuntimeError:  # a tensor without strides or address; validating the problem names it
        _problem(op, given)
        raise
    same = [addresses[a] == addresses[b] for a, b in op.same_places]
    key = (op.name, backend, target, wanted, capacities, options, *same, *layouts)
    call = _calls.get(key)
    if call is None:
        if problem is None:
            given = _distinct(given)
            problem = _problem(op, given)
        call = _kept(key, _prepare(op, given, problem, backend, target, device))
    outputs = _allocated(op, call, given, addresses, device)
    if call.ready is None:
        return _in_torch(op, problem or _problem(op, given), outputs)
    call.ready.run([*tensors, *outputs, scratch], addresses)
    return outputs


def launch(one: Launch) -> None:
    """Launch one kernel on the current device, with tensors and numbers. Its outputs are among the tensors."""
    known: list[Any] = []
    memory: list[Any] = []
    addresses: list[int] = []
    for x in structs.members(one.arguments):
        if isinstance(x, Tensor):
            address = x.data_ptr()
            known.append((x.dtype, address & 15))
            memory.append(x)
            addresses.append(address)
        elif type(x) is Changing:
            known.append(Changing)
            memory.append(x)
            addresses.append(x)
        else:
            known.append(x)
    device = memory[0].device
    target = dispatch.cuda_target(device) if dispatch.resolve("auto", device) == "cuda" else dispatch.softsm_target()
    key = (one.kernel.fn, target, device, one.grid, *known, *one.constants.items())
    ready = _calls.get(key)
    if ready is None:
        from dsv4.runtime.launch import Ready

        program = Program({f"argument {n}": x if isinstance(x, Tensor) else None for n, x in enumerate(memory)}, device)
        program.steps.append(replace(one, arguments=program.stand_ins(one.arguments)))
        ready = _kept(key, Ready(program, target))
    ready.run(memory, addresses)


def _kept(key: tuple, prepared: Any) -> Any:
    if len(_calls) >= MOST:
        del _calls[next(iter(_calls))]
    _calls[key] = prepared
    return prepared


def _layouts(tensors: Sequence[Any]) -> tuple[list[tuple | None], list[int]]:
    """Return (what the key holds of each tensor, its address or 0)."""
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    return [
        None if x is None else (x.shape, x.stride(), x.dtype, x.device, address & 15)
        for x, address in zip(tensors, addresses)
    ], addresses


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Return whether two arguments share memory: their address, which is in the key, and their layout are equal."""
    return b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def _problem(op: Operation, given: Given) -> Any:
    """Return the validated problem, with the buffers that the caller provides for its results."""
    problem = op.build(**op.named(given.tensors, given.options))
    checked_outputs(op, given, problem)
    changes: dict[str, Any] = {}
    if given.capacities is not None:
        changes["num_splits"] = given.capacities[0]
    if given.scratch is not None:
        changes["scratch"] = given.scratch
    for (name, *_), (a, b) in zip(op.same, op.same_places):
        changes[name] = _same(given.tensors[a], given.tensors[b])
    return replace(problem, **changes)


def checked_outputs(op: Operation, given: Given, problem: Any) -> None:
    """Raise ValueError unless the provided outputs and the plan's memory fit the problem. Reads no values."""
    shapes = op.shapes(op.named(given.tensors, given.options))
    for name, x, (shape, dtype) in zip(op.outputs, given.outputs, shapes):
        if x is not None:
            partial = [torch.float32] if name == "out" and op.second == "lse" else []  # see merge_states
            checks.output(name, x, shape, [dtype, *partial], {"q": problem.q})
    if given.scratch is not None:
        if given.scratch.device != problem.q.device:
            checks.fail("plan", f"a plan on {given.scratch.device}", f"a plan on {problem.q.device}, the device of q")
        checks.tensor("scratch", given.scratch, ("n",), (torch.float32,))
    if given.capacities is not None:
        plan.check(op.name, problem, list(given.capacities))


def _outputs_of(op: Operation, given: Given) -> tuple[list[tuple[int, int, Layout]], list[int] | None]:
    """Return (the outputs that a call allocates, the bytes of each tensor), as `Call` holds them."""
    allocated = []
    for n, (shape, dtype) in enumerate(op.shapes(op.named(given.tensors, given.options))):
        if given.wanted[n] and given.outputs[n] is None:
            layout = Layout.contiguous(shape, dtype)
            like = (n for n, x in enumerate(given.tensors) if x is not None and layout == Layout.of(x))
            allocated.append((n, next(like, -1), layout))
    if all(x is None for x in given.outputs):
        return allocated, None
    return allocated, [0 if x is None else checks.span(x) for x in (*given.tensors, *given.outputs)]


def _allocated(
    op: Operation, call: Call, given: Given, addresses: list[int], device: torch.device
) -> list[Tensor | None]:
    """Return all outputs and adds their addresses. Checks that provided ones share no memory with an input or with
    each other."""
    outputs, first = list(given.outputs), len(given.tensors)
    if call.spans is not None:
        for place in range(first, first + len(outputs)):
            begin, end = addresses[place], addresses[place] + call.spans[place]
            for other in range(place if begin < end else 0):
                if begin < addresses[other] + call.spans[other] and addresses[other] < end:
                    names = (*op.tensors, *op.outputs)
                    checks.fail(names[place], f"memory that overlaps {names[other]}", "memory that overlaps no input")
    for n, like, layout in call.allocated:
        # torch.empty_like is faster
        x = outputs[n] = torch.empty_like(given.tensors[like]) if like >= 0 else layout.empty(device)
        addresses[first + n] = x.data_ptr()
    return outputs


def _prepare(op: Operation, given: Given, problem: Any, backend: str, target: Target, device: torch.device) -> Call:
    allocated, spans = _outputs_of(op, given)
    refused: Any = None
    try:
        module = dispatch.kernel_module(op.folder, target.capability, op.backward)
    except RuntimeError as why:
        if not (op.falls_back and backend == "auto"):
            raise
        refused = why
    if refused is None:
        if not op.falls_back and problem.q.dtype not in checks.LOW_PRECISION:
            accepted = "bfloat16, float16; float32 on backend 'cpu'"
            checks.fail("q", f"dtype {problem.q.dtype} on backend {target.backend!r}", accepted)
        refused = module.supports(problem)
    if refused is not None:
        if op.falls_back and backend == "auto":
            return Call(allocated, spans, None)
        what = "compute these gradients" if op.backward else f"run this {op.folder} problem"
        raise ValueError(f"backend: {target.backend!r} cannot {what}: {refused}")
    from dsv4.runtime.launch import Ready

    results = dict(zip(op.outputs, given.outputs))
    for n, _, layout in allocated:
        results[op.outputs[n]] = layout.empty(torch.device("meta"))
    tensors = dict(zip(op.tensors, given.tensors)) | results | {"scratch": given.scratch}
    program = program_of(replace(problem, **results), target, tensors, device)
    return Call(allocated, spans, Ready(program, target))


def _distinct(given: Given) -> Given:
    """Make a separate object of every tensor. A problem distinguishes its tensors by identity, and the key does not
    record which arguments are the same tensor."""
    seen: set[int] = set()
    tensors = []
    for x in given.tensors:
        if isinstance(x, Tensor) and id(x) in seen:
            x = x.detach()
        seen.add(id(x))
        tensors.append(x)
    return given._replace(tensors=tensors)


def launches_of(problem: Any, target: Target, **options: Any) -> list[Launch]:
    """Return the launches of a problem that has its outputs, without compiling or running. options: of `prepare`."""
    program = Program(tensors_of(problem), problem.q.device)
    module = dispatch.kernel_module(problem.operation, target.capability, problem.backward)
    module.prepare(program.slots_of(problem), target, program, **options)
    return program.launches


def workspace_of(problem: Any, target: Target) -> int:
    """Return the bytes of workspace that the launches of a problem with outputs need."""
    program = Program(tensors_of(problem), problem.q.device)
    dispatch.kernel_module(problem.operation, target.capability, problem.backward).prepare(
        program.slots_of(problem), target, program
    )
    return sum(rounded(x.bytes) for x in program.buffers)


def program_of(problem: Any, target: Target, tensors: dict[str, Tensor | None], device: torch.device) -> Program:
    """Return the steps of a problem whose tensors are among those given, without compiling or running."""
    program = Program(tensors, device)
    slots = program.slots_of(problem)
    if slots.no_keys():
        for name, empty in slots.empty_outputs.items():
            if getattr(slots, name) is not None:
                program.fill(getattr(slots, name), empty)
        return program
    dispatch.kernel_module(slots.operation, target.capability, slots.backward).prepare(slots, target, program)
    return program


def _in_torch(op: Operation, problem: Any, outputs: list[Tensor | None]) -> list[Tensor | None]:
    """Run the CPU backend; a GPU uses it too, for problems without a kernel."""
    problem = replace(problem, **dict(zip(op.outputs, outputs)))
    if problem.no_keys():
        for name, empty in problem.empty_outputs.items():
            if getattr(problem, name) is not None:
                getattr(problem, name).fill_(empty)
        return outputs
    with torch.autocast(problem.q.device.type, enabled=False):  # products in fp32 must stay fp32
        if op.backward:
            importlib.import_module(f"dsv4.{op.folder}.backward_cpu").backward(problem)
        else:
            importlib.import_module(f"dsv4.{op.folder}.cpu").forward(problem)
    return outputs
