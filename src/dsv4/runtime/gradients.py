"""Operators with gradients: how a forward operator, its backward operator and autograd are connected.

Inference does not use this module. A public function that sees grad mode and an input that requires grad calls

    torch.ops.dsv4.X_training(...)   the forward pass, with what backward needs as outputs
    torch.ops.dsv4.X_backward(...)   the gradients, called by autograd

Both are operators with fake kernels, so torch.compile sees both graphs and checkpointing can name them. Their way
through torch costs more time than the kernels of a small model: if the tensors are plain and nothing has to see the
operators, their kernels run without them. The gradient of a gradient is rejected by name, and so are tangents (forward
mode), which torch would silently drop.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import calls, operators
from dsv4.runtime.calls import Given, Operation
from dsv4.runtime.operators import LIBRARY
from dsv4.runtime.options import schema

# Name of an operation -> its two operators as one function of autograd.
_functions: dict[str, type[torch.autograd.Function]] = {}


def define(
    name: str,
    arguments: str,
    outputs: str,
    forward: tuple[Callable, Callable],
    backward_arguments: str,
    backward_outputs: str,
    backward: tuple[Callable, Callable],
    save: Callable,
    gradients: Callable,
) -> None:
    """Register X_training and X_backward. forward, backward: (kernel, fake kernel); save(ctx, inputs, output)."""
    for suffix, text, (kernel, fake) in (
        ("training", f"({arguments}) -> {outputs}", forward),
        ("backward", f"({backward_arguments}) -> {backward_outputs}", backward),
    ):
        LIBRARY.define(f"{name}_{suffix}{text}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(f"{name}_{suffix}", without_autocast(kernel), "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsv4::{name}_{suffix}", fake, lib=LIBRARY)

    def no_second(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"dsv4.{name}: double backward is not supported")

    torch.library.register_autograd(f"dsv4::{name}_training", gradients, setup_context=save, lib=LIBRARY)
    torch.library.register_autograd(f"dsv4::{name}_backward", no_second, lib=LIBRARY)

    def run_and_save(ctx: Any, *inputs: Any) -> Any:
        output = without_autocast(forward[0])(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(run_and_save), "backward": staticmethod(gradients)}
    _functions[name] = type(name, (torch.autograd.Function,), methods)


def without_autocast(kernel: Callable) -> Callable:
    """Return the kernel with autocast off: products in fp32 must stay fp32."""

    @functools.wraps(kernel)
    def called(*inputs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return kernel(*inputs)

    return called


def training(name: str, plain: bool, *arguments: Any) -> Any:
    """Call X_training(*arguments). plain: the tensors are plain, and nothing has to see the operator."""
    if plain:
        return _functions[name].apply(*arguments)
    if torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling():
        instead = "use .backward() or torch.autograd.grad"
        raise NotImplementedError(f"dsv4.{name}: torch.func (grad, vjp, ...) is not supported; {instead}")
    return getattr(torch.ops.dsv4, f"{name}_training")(*arguments)


def define_operation(
    name: str, op: Operation, tensors: str, forward: Callable[[dict[str, Any]], Operation], public: Sequence[Operation]
) -> None:
    """Register X_training and X_backward for attention, whose gradients are an operation of calls.py.

    op: its tensors are those of X_training, then out, lse, dout and dlse; the first of them have gradients, which are
    its outputs; its options are those of the forward pass. tensors: their schema. forward: from the tensors by name to
    the operation of the forward pass, one of the `public` ones.
    """
    count, made = len(op.tensors) - 4, len(op.outputs)
    nothing = (None,) * made

    def run(one: Operation, tensors: Sequence, options: Any, backend: str) -> tuple:
        by_name = dict(zip(op.tensors, tensors))
        of_one = [by_name.get(name) for name in one.tensors]  # missing tensors have no gradient, and are None
        return tuple(calls.run(one, Given(of_one, options, (True, True), (None, None)), backend))

    def kernel(*inputs: Any) -> tuple:
        tensors = inputs[:count]
        return run(forward(dict(zip(op.tensors, tensors))), tensors, op.options(*inputs[count:-1]), inputs[-1])

    def fake(*inputs: Any) -> tuple:
        by_name = dict(zip(op.tensors, inputs[:count]))
        one = forward(by_name)
        arguments = one.named([by_name.get(x) for x in one.tensors], op.options(*inputs[count:-1]))
        one.build(**arguments)
        return tuple(one.empty(arguments, (True, True)))

    def keep(ctx: Any, tensors: Sequence, output: tuple, options: Any, backend: str) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.options, ctx.backend = options, backend

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        keep(ctx, inputs[:count], output, op.options(*inputs[count:-1]), inputs[-1])

    def backward(
        dout: Tensor | None, dlse: Tensor | None, saved: Sequence, options: Any, backend: str, asked: Sequence[bool]
    ) -> list[Tensor | None]:
        dout = torch.zeros_like(saved[count]) if dout is None else dout
        return calls.run(op, Given((*saved, dout, dlse), options, tuple(asked), nothing), backend)

    def backward_kernel(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *saved, backend, asked = rest
        found = backward(dout, dlse, saved[: count + 2], op.options(*saved[count + 2 :]), backend, asked)
        return tuple(torch.empty(0, device=saved[0].device) if x is None else x for x in found)

    def backward_fake(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *saved, _, asked = rest
        tensors, options = saved[: count + 2], op.options(*saved[count + 2 :])
        return tuple(op.empty(op.named((*tensors, dout, dlse), options), asked))

    def gradients_of(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, asked: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if dout is None and dlse is None:
            return nothing
        options, saved = ctx.options, ctx.saved_tensors
        if torch.are_deterministic_algorithms_enabled():
            options = options._replace(deterministic=True)
        plain = operators.all_plain(saved) and operators.all_plain((dout, dlse)) and not saved[0].is_meta
        # In grad mode a program may request the gradient of this gradient.
        if torch.is_grad_enabled() or operators.observed() or not plain:
            operator = getattr(torch.ops.dsv4, f"{name}_backward")
            found = operator(dout, dlse, *saved, *options, ctx.backend, list(asked))
            return [or_none(x, want) for x, want in zip(found, asked)]
        return backward(dout, dlse, saved, options, ctx.backend, asked)

    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        rest = (None,) * (count - made + len(op.options._fields) + 1)
        return *gradients_of(ctx, dout, dlse, ctx.needs_input_grad[:made]), *rest

    class Recorded(torch.autograd.Function):
        """Both operators as one function of autograd, for plain tensors; torch inspects each of its arguments."""

        @staticmethod
        def forward(ctx: Any, one: Operation, options: Any, backend: str, *tensors: Any) -> tuple:
            output = run(one, tensors, options, backend)
            keep(ctx, tensors, output, options, backend)
            return output

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
            found = gradients_of(ctx, dout, dlse, ctx.needs_input_grad[3 : 3 + made])
            return None, None, None, *found, *(None,) * (count - made)

    options = ", ".join(schema(op.options, defaults=False).values())
    outputs = ", ".join(["Tensor"] * made)
    define(
        name,
        f"{tensors}, {options}, str backend",
        "(Tensor, Tensor)",
        (kernel, fake),
        f"Tensor? dout, Tensor? dlse, {tensors}, Tensor out, Tensor lse, {options}, str backend, bool[] asked",
        f"({outputs})",
        (backward_kernel, backward_fake),
        save,
        gradients,
    )

    def call(one: Operation, tensors: Sequence, options: Any, backend: str, plain: bool) -> tuple:
        ordered = [tensors[one.tensors.index(x)] if x in one.tensors else None for x in op.tensors[:count]]
        if plain:
            return Recorded.apply(one, options, backend, *ordered)
        return training(name, plain, *ordered, *options, backend)

    for one in public:
        places = tuple(n for n, x in enumerate(one.tensors) if x in op.tensors[:made])
        operators.TRAINING[one.name] = operators.Training(places, call)


def gradient_like(x: Tensor | None, want: bool) -> Tensor:
    """Allocate the gradient of x; size 0 if it is not wanted, because an operator returns tensors."""
    if x is None or not want:
        return torch.empty(0, device=None if x is None else x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def or_none(x: Tensor, want: bool) -> Tensor | None:
    return x if want else None
