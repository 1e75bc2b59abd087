"""torch operators in the namespace ``dsv4``: what torch.compile, export, dispatch modes and the profiler see.

For each public function X of calls.Operation there are two operators::

    torch.ops.dsv4.X(..., return_lse) -> (Tensor out, Tensor lse)       lse has size 0 when return_lse is False
    torch.ops.dsv4.X_out(..., scratch, capacities, out, lse) -> ()      writes out, and lse unless its size is 0

Both call `calls.run`. Neither has a gradient: if one will be needed, `call` uses the training operators instead
(gradients.py), and operations without one reject inputs that require grad.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dsv4.runtime import calls, checks, warmup
from dsv4.runtime import plan as plans
from dsv4.runtime.calls import Given, Operation
from dsv4.runtime.options import schema
from dsv4.runtime.plan import Plan

LIBRARY = torch.library.Library("dsv4", "DEF")


class Training(NamedTuple):
    """How an operation is called when gradients are needed (gradients.py)."""

    differentiable: tuple[int, ...]  # places of the tensors that have a gradient
    call: Callable  # (operation, tensors, options, backend, plain) -> (out, lse), which autograd records


TRAINING: dict[str, Training] = {}  # by name of the operation


def define(schema: str, kernel: Callable, fake: Callable) -> list[str]:
    """Register one operator of this namespace: real kernel, fake kernel, error for grad -> names of its arguments.

    Autograd falls through to the kernel, which sees grad mode and requires_grad as the caller left them; that is one
    dispatcher step less than an autograd kernel of our own.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    arguments = [a.name for a in getattr(torch.ops.dsv4, name).default._schema.arguments]

    def forward_only(function: Callable) -> Callable:
        def checked(*args, **kwargs):
            if checks.derivatives():
                checks.forward_only(**dict(zip(arguments, args)), **kwargs)
            return function(*args, **kwargs)

        return checked

    LIBRARY.impl(name, forward_only(kernel), "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"dsv4::{name}", forward_only(fake), lib=LIBRARY)
    return arguments


def define_operation(op: Operation) -> None:
    """Register both operators of an operation."""
    parts = {name: f"Tensor {name}" for name in op.tensors[: op.required]}
    first = [*parts, *op.positional]
    parts |= {name: f"Tensor? {name}=None" for name in op.tensors[op.required :]}
    parts |= {name: x for name, x in schema(op.options).items() if name not in op.without}
    rest = [x for name, x in parts.items() if name not in first]
    inputs = ", ".join([*(parts[name] for name in first), "*", *rest, "str backend='auto'"])
    flag = f"return_{op.second}"
    defaults: dict[str, Any] = {}

    def named(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of the operator except backend; torch omits those that have their default."""
        return defaults | dict(zip(defaults, args)) | kwargs

    def given(args: tuple, kwargs: dict[str, Any], *rest: Any) -> Given:
        by_name = named(args, kwargs)
        tensors = [by_name.pop(name) for name in op.tensors]
        return Given(tensors, op.options(**by_name), *rest)

    def kernel(*args, backend="auto", **kwargs):
        want = kwargs.pop(flag, False)
        out, second = calls.run(op, given(args, kwargs, (True, want), (None, None)), backend)
        assert out is not None
        if second is None:
            second = torch.empty(0, dtype=op.shapes(named(args, kwargs))[1][1], device=out.device)
        return out, second

    def fake(*args, backend="auto", **kwargs):
        want = kwargs.pop(flag, False)
        arguments = named(args, kwargs)
        op.build(**arguments)
        return tuple(op.empty(arguments, (True, want)))

    def provided(args: tuple, kwargs: dict[str, Any]) -> Given:
        out, second = kwargs.pop("out"), kwargs.pop(op.second)
        scratch, capacities = kwargs.pop("scratch", None), kwargs.pop("capacities", None)
        want = second.shape != (0,)
        capacities = None if capacities is None else tuple(capacities)
        return given(args, kwargs, (True, want), (out, second if want else None), scratch, capacities)

    def kernel_out(*args, backend="auto", **kwargs):
        calls.run(op, provided(args, kwargs), backend)

    def fake_out(*args, backend="auto", **kwargs):
        calls.checked_outputs(op, provided(args, kwargs), op.build(**named(args, kwargs)))

    define(f"{op.name}({inputs}, bool {flag}=False) -> (Tensor, Tensor)", kernel, fake)
    arguments = getattr(torch.ops.dsv4, op.name).default._schema.arguments
    defaults.update({a.name: a.default_value for a in arguments if a.name not in ("backend", flag)})
    more = f"Tensor(c!)? scratch=None, SymInt[]? capacities=None, Tensor(a!) out, Tensor(b!) {op.second}"
    define(f"{op.name}_out({inputs}, {more}) -> ()", kernel_out, fake_out)
    if op.plan is not None:
        plans.RULES[op.name] = op.plan
    if op.warmup is not None:
        warmup.CALLS[op.name] = op.warmup


def call(
    op: Operation,
    tensors: Sequence[Any],
    options: Any,
    want_second: bool,
    out: Tensor | None,
    plan: Plan | None,
    backend: str,
) -> Any:
    """Run the public function, after its checks of numbers and flags -> out, or (out, second output).

    tensors, options: the operator's arguments except backend, in the operation's order. A call of plain tensors that
    nothing else has to see continues directly; others go through the operator, whose kernel is the same `calls.run`.
    """
    if out is not None:
        if not checks.is_tensor(out):
            checks.fail("out", checks.describe(out), "None or a tensor")
        checks.holds_its_values("out", out)
    scratch, capacities = None, None
    if plan is not None:
        if not isinstance(plan, Plan):
            checks.fail("plan", checks.describe(plan), "None or a Plan from dsv4.plan")
        if plan.operation != op.name:
            checks.fail("plan", f"a plan for {plan.operation}", f"a plan for {op.name}")
        scratch, capacities = plan.scratch, plan.capacities
    plain = not observed() and all_plain(tensors, op.required) and not tensors[0].is_meta
    derivatives = checks.derivatives()
    if plain and (out is None or all_plain((out,))) and not (derivatives and _differentiable(tensors, out)):
        given = Given(tensors, options, (True, want_second), (out, None), scratch, capacities)
        made, second = calls.run(op, given, backend)
        return (made, second) if want_second else made
    if not plain:
        op.build(**op.named(tensors, options))  # ValueError where one that should be a tensor is none
    if derivatives:
        training = TRAINING.get(op.name) if out is None and plan is None and torch.is_grad_enabled() else None
        if training is not None and any(_wants_gradient(tensors[n]) for n in training.differentiable):
            if len(training.differentiable) < len(tensors):
                places = training.differentiable
                checks.forward_only(**{op.tensors[n]: x for n, x in enumerate(tensors) if n not in places})
            checks.no_tangents(**dict(zip(op.tensors, tensors)))
            made, second = training.call(op, tensors, options, backend, plain)
            return (made, second) if want_second else made
        checks.forward_only(**dict(zip(op.tensors, tensors)), out=out)
    arguments = op.named(tensors, options)
    if out is None and plan is None:
        operator = getattr(torch.ops.dsv4, op.name).default
        made, second = operator(**arguments, backend=backend, **{f"return_{op.second}": want_second})
        return (made, second) if want_second else made
    if arguments[op.tensors[0]].ndim not in op.ranks:
        op.build(**arguments)  # this error names what is wrong
    made, second = op.empty(arguments, (True, want_second), out)
    planned = {} if plan is None else dict(scratch=scratch, capacities=capacities)
    operator = getattr(torch.ops.dsv4, f"{op.name}_out").default
    operator(**arguments, **planned, backend=backend, out=made, **{op.second: second})
    return (made, second) if want_second else made


def all_plain(tensors: Sequence[Any], required: int = 0) -> bool:
    """Return whether all are None, or tensors that are neither a subclass nor a lazy view. The first `required` must be
    given. A tensor that is nested, sparse or on another device is rejected where the call is prepared."""
    for x in tensors[:required]:
        if type(x) not in TENSORS or x.is_neg():
            return False
    for x in tensors[required:]:
        if x is not None and (type(x) not in TENSORS or x.is_neg()):
            return False
    return True


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _differentiable(tensors: Sequence[Tensor | None], out: Tensor | None) -> bool:
    """Return whether one of them may need a derivative."""
    if forward_ad._current_level >= 0 or out is not None and out.requires_grad:
        return True
    for x in tensors:
        if x is not None and x.requires_grad:
            return True
    return False


TENSORS = (Tensor, torch.nn.Parameter)


def observed() -> bool:
    """Return whether something has to see the operator: a compiler, a dispatch mode, a transform of torch.func."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
