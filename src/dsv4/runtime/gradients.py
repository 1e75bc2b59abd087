"""Operators with gradients: how a forward operator, its backward operator and autograd are tied together.

Inference does not come here. A public function that sees grad mode and an input that requires grad calls

    torch.ops.dsv4.X_training(...)   the forward pass, with what backward needs as outputs
    torch.ops.dsv4.X_backward(...)   the gradients, called by autograd

Both are operators with fake kernels, so torch.compile sees both graphs and checkpointing can name them. Their way
through torch takes longer than the kernels of a small model: where the tensors are plain and nobody has to see the
operators, their kernels run without them. The gradient of a gradient is rejected by name, and so are tangents (forward
mode), which torch would silently drop.
"""

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
        LIBRARY.impl(f"{name}_{suffix}", kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsv4::{name}_{suffix}", fake, lib=LIBRARY)

    def no_second(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"dsv4.{name}: double backward is not supported")

    torch.library.register_autograd(f"dsv4::{name}_training", gradients, setup_context=save, lib=LIBRARY)
    torch.library.register_autograd(f"dsv4::{name}_backward", no_second, lib=LIBRARY)

    def run_and_save(ctx: Any, *inputs: Any) -> Any:
        output = forward[0](*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(run_and_save), "backward": staticmethod(gradients)}
    _functions[name] = type(name, (torch.autograd.Function,), methods)


def training(name: str, plain: bool, *arguments: Any) -> Any:
    """X_training(*arguments). plain: of tensors that are plain, and nobody has to see the operator."""
    if plain:
        return _functions[name].apply(*arguments)
    if torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling():
        instead = "use .backward() or torch.autograd.grad"
        raise NotImplementedError(f"dsv4.{name}: torch.func (grad, vjp, ...) is not supported; {instead}")
    return getattr(torch.ops.dsv4, f"{name}_training")(*arguments)


def define_operation(
    name: str, op: Operation, tensors: str, forward: Callable[[dict[str, Any]], Operation], public: Sequence[str]
) -> None:
    """Register X_training and X_backward for attention, whose gradients are an operation of calls.py.

    op: its tensors are those of X_training, then out, lse, dout and dlse; the first of them have gradients, which are
    its outputs; its options are those of the forward pass. tensors: their schema. forward: from the tensors by name to
    the operation of the forward pass, one of the `public` ones.
    """
    count, made = len(op.tensors) - 4, len(op.outputs)
    deterministic = op.options._fields.index("deterministic")
    nothing = (None,) * made

    def given(inputs: tuple) -> tuple[Operation, Given]:
        by_name = dict(zip(op.tensors, inputs[:count]))
        one = forward(by_name)
        return one, Given([by_name[x] for x in one.tensors], op.options(*inputs[count:-1]), (True, True), (None, None))

    def kernel(*inputs: Any) -> tuple:
        return tuple(calls.run(*given(inputs), inputs[-1]))

    def fake(*inputs: Any) -> tuple:
        one, (of_one, options, wanted, *_) = given(inputs)
        arguments = one.named(of_one, options)
        one.build(**arguments)
        return tuple(one.empty(arguments, wanted))

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.options, ctx.backend = inputs[count:-1], inputs[-1]

    def backward(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> list[Tensor | None]:
        *saved, backend, asked = rest
        tensors, options = saved[: count + 2], op.options(*saved[count + 2 :])
        dout = torch.zeros_like(tensors[count]) if dout is None else dout
        return calls.run(op, Given((*tensors, dout, dlse), options, tuple(asked), nothing), backend)

    def backward_kernel(*rest: Any) -> tuple[Tensor, ...]:
        found, device = backward(*rest), rest[2].device
        return tuple(torch.empty(0, device=device) if x is None else x for x in found)

    def backward_fake(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *saved, _, asked = rest
        tensors, options = saved[: count + 2], op.options(*saved[count + 2 :])
        return tuple(op.empty(op.named((*tensors, dout, dlse), options), asked))

    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        rest = (None,) * (count - made + len(op.options._fields) + 1)
        if dout is None and dlse is None:
            return *nothing, *rest
        asked, options = ctx.needs_input_grad[:made], ctx.options
        if torch.are_deterministic_algorithms_enabled():
            options = (*options[:deterministic], True, *options[deterministic + 1 :])
        inputs = (dout, dlse, *ctx.saved_tensors)
        plain = operators.all_plain(inputs) and not inputs[2].is_meta
        # In grad mode somebody may ask for the gradient of this gradient.
        if torch.is_grad_enabled() or operators.observed() or not plain:
            operator = getattr(torch.ops.dsv4, f"{name}_backward")
            found = operator(*inputs, *options, ctx.backend, list(asked))
            return *(or_none(x, want) for x, want in zip(found, asked)), *rest
        return *backward(*inputs, *options, ctx.backend, asked), *rest

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

    def call(arguments: dict[str, Any], options: Any, backend: str, plain: bool) -> tuple:
        return training(name, plain, *(arguments.get(x) for x in op.tensors[:count]), *options, backend)

    for one in public:
        operators.TRAINING[one] = op.tensors[:made], call


def gradient_like(x: Tensor | None, want: bool) -> Tensor:
    """Memory for the gradient of x; size 0 where nobody asks, because an operator returns tensors."""
    if x is None or not want:
        return torch.empty(0, device=None if x is None else x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def or_none(x: Tensor, want: bool) -> Tensor | None:
    return x if want else None
