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
    learned = Learned(name, op, forward)
    options = ", ".join(schema(op.options, defaults=False).values())
    outputs = ", ".join(["Tensor"] * len(op.outputs))
    define(
        name,
        f"{tensors}, {options}, str backend",
        "(Tensor, Tensor)",
        (learned.kernel, learned.fake),
        f"Tensor? dout, Tensor? dlse, {tensors}, Tensor out, Tensor lse, {options}, str backend, bool[] asked",
        f"({outputs})",
        (learned.backward_kernel, learned.backward_fake),
        learned.save,
        learned.gradients,
    )
    for one in public:
        places = tuple(n for n, x in enumerate(one.tensors) if x in op.tensors[: len(op.outputs)])
        operators.TRAINING[one.name] = operators.Training(places, learned.call)


class Learned:
    """The functions of `define_operation`. The arguments of X_training are all tensors, the options and the backend."""

    def __init__(self, name: str, op: Operation, forward: Callable[[dict[str, Any]], Operation]):
        self.name, self.op, self.forward = name, op, forward
        self.count, self.made = len(op.tensors) - 4, len(op.outputs)
        self.nothing = (None,) * self.made
        self.recorded = _recorded(self)

    def call(self, one: Operation, tensors: Sequence, options: Any, backend: str, plain: bool) -> tuple:
        ordered = [tensors[one.tensors.index(x)] if x in one.tensors else None for x in self.op.tensors[: self.count]]
        if plain:
            return self.recorded.apply(one, options, backend, *ordered)
        return training(self.name, plain, *ordered, *options, backend)

    # ---- the forward pass ----

    def run(self, one: Operation, tensors: Sequence, options: Any, backend: str) -> tuple:
        given = Given(self.of(one, tensors), options, (True, True), (None, None))
        return tuple(calls.run(one, given, backend))

    def of(self, one: Operation, tensors: Sequence) -> list[Tensor | None]:
        """Return the tensors of this operation. Missing ones have no gradient, and are None."""
        by_name = dict(zip(self.op.tensors, tensors))
        return [by_name.get(name) for name in one.tensors]

    def parted(self, inputs: Sequence) -> tuple[Operation, Sequence, Any]:
        """Return the operation of the forward pass, all tensors and the options of an operator's arguments."""
        tensors = inputs[: self.count]
        one = self.forward(dict(zip(self.op.tensors, tensors)))
        return one, tensors, self.op.options(*inputs[self.count : -1])

    def kernel(self, *inputs: Any) -> tuple:
        return self.run(*self.parted(inputs), inputs[-1])

    def fake(self, *inputs: Any) -> tuple:
        one, tensors, options = self.parted(inputs)
        arguments = one.named(self.of(one, tensors), options)
        one.build(**arguments)
        return tuple(one.empty(arguments, (True, True)))

    def keep(self, ctx: Any, tensors: Sequence, output: tuple, options: Any, backend: str) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.options, ctx.backend = options, backend

    def save(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        self.keep(ctx, inputs[: self.count], output, self.op.options(*inputs[self.count : -1]), inputs[-1])

    # ---- the backward pass ----

    def gradients(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        rest = (None,) * (self.count - self.made + len(self.op.options._fields) + 1)
        return *self.gradients_of(ctx, dout, dlse, ctx.needs_input_grad[: self.made]), *rest

    def gradients_of(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, asked: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if dout is None and dlse is None:
            return self.nothing
        options, saved = ctx.options, ctx.saved_tensors
        if torch.are_deterministic_algorithms_enabled():
            options = options._replace(deterministic=True)
        plain = operators.all_plain(saved) and operators.all_plain((dout, dlse)) and not saved[0].is_meta
        # In grad mode a program may request the gradient of this gradient.
        if torch.is_grad_enabled() or operators.observed() or not plain:
            operator = getattr(torch.ops.dsv4, f"{self.name}_backward")
            found = operator(dout, dlse, *saved, *options, ctx.backend, list(asked))
            return [or_none(x, want) for x, want in zip(found, asked)]
        return self.backward(dout, dlse, saved, options, ctx.backend, asked)

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        saved: Sequence,
        options: Any,
        backend: str,
        asked: Sequence[bool],
    ) -> list[Tensor | None]:
        dout = torch.zeros_like(saved[self.count]) if dout is None else dout
        return calls.run(self.op, Given((*saved, dout, dlse), options, tuple(asked), self.nothing), backend)

    def backward_kernel(self, dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *saved, backend, asked = rest
        tensors, options = saved[: self.count + 2], self.op.options(*saved[self.count + 2 :])
        found = self.backward(dout, dlse, tensors, options, backend, asked)
        return tuple(torch.empty(0, device=saved[0].device) if x is None else x for x in found)

    def backward_fake(self, dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *saved, _, asked = rest
        tensors, options = saved[: self.count + 2], self.op.options(*saved[self.count + 2 :])
        return tuple(self.op.empty(self.op.named((*tensors, dout, dlse), options), asked))


def _recorded(learned: Learned) -> type[torch.autograd.Function]:
    """Return both operators as one function of autograd, for plain tensors; torch inspects each of its arguments."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, one: Operation, options: Any, backend: str, *tensors: Any) -> tuple:
            output = learned.run(one, tensors, options, backend)
            learned.keep(ctx, tensors, output, options, backend)
            return output

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
            found = learned.gradients_of(ctx, dout, dlse, ctx.needs_input_grad[3 : 3 + learned.made])
            return None, None, None, *found, *(None,) * (learned.count - learned.made)

    return Recorded


def gradient_like(x: Tensor | None, want: bool) -> Tensor:
    """Allocate the gradient of x; size 0 if it is not wanted, because an operator returns tensors."""
    if x is None or not want:
        return torch.empty(0, device=None if x is None else x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def or_none(x: Tensor, want: bool) -> Tensor | None:
    return x if want else None
