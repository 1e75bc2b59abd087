"""Operators with gradients: how a forward operator, its backward operator and autograd are tied together.

Inference does not come here. A public function that sees grad mode and an input that requires grad calls

    torch.ops.dsv4.X_training(...)   the forward pass, with what backward needs as outputs
    torch.ops.dsv4.X_backward(...)   the gradients, called by autograd

Both are operators with fake kernels, so torch.compile sees both graphs and checkpointing can name them. Their way
through torch takes longer than the kernels of a small model: where the tensors are plain and nobody has to see the
operators, `forward` and `backward` below run their kernels without them. The gradient of a gradient is refused by name,
and so are tangents (forward mode), which torch would silently drop.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import dispatch, operators
from dsv4.runtime.operators import LIBRARY
from dsv4.runtime.settings import settings

# Name of an operation -> its two operators as one function of autograd; the kernel of its backward operator.
_functions: dict[str, type[torch.autograd.Function]] = {}
_backward_kernels: dict[str, Callable] = {}


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
    for suffix, schema, (kernel, fake) in (
        ("training", f"({arguments}) -> {outputs}", forward),
        ("backward", f"({backward_arguments}) -> {backward_outputs}", backward),
    ):
        LIBRARY.define(f"{name}_{suffix}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
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
    _backward_kernels[name] = backward[0]


def forward(name: str, plain: bool, *arguments: Any) -> Any:
    """X_training(*arguments). plain: of tensors that are plain, and nobody has to see the operator."""
    if plain:
        return _functions[name].apply(*arguments)
    if torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling():
        instead = "use .backward() or torch.autograd.grad"
        raise NotImplementedError(f"dsv4.{name}: torch.func (grad, vjp, ...) is not supported; {instead}")
    return getattr(torch.ops.dsv4, f"{name}_training")(*arguments)


def backward(name: str, tensors: tuple, *rest: Any) -> Any:
    """X_backward(*tensors, *rest), for autograd; the third tensor is q. In grad mode somebody may ask for the gradient
    of this gradient."""
    plain = operators.all_plain(tensors) and not tensors[2].is_meta
    if torch.is_grad_enabled() or operators.observed() or not plain:
        return getattr(torch.ops.dsv4, f"{name}_backward")(*tensors, *rest)
    return _backward_kernels[name](*tensors, *rest)


def run(request: Any, device: torch.device, backend: str, torch_module: str) -> None:
    """Fill the gradients of a request: by the kernels of the backend, or by torch where there are none.

    Kernels are in ``dsv4.<operation>.kernels.<arch>.backward``: ``supports(request)``, ``backward(request)``.
    """
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            run(request, device, backend, torch_module)
        return
    found = dispatch.resolve(backend, device)
    kernels = None if found == "cpu" else _kernels(request, device, found)
    if isinstance(kernels, str) and backend != "auto":
        raise ValueError(f"backend: {backend!r} cannot compute these gradients: {kernels}")
    if kernels is None or isinstance(kernels, str):
        importlib.import_module(torch_module).backward(request)
    elif found == "cuda" and torch.cuda.current_device() == device.index:
        kernels.backward(request)
    else:
        with dispatch.entered(found, device):
            kernels.backward(request)


def _kernels(request: Any, device: torch.device, found: str) -> Any:
    """The module, or why there is none for this request."""
    if found == "cuda":
        capability = dispatch.cuda_target(device).capability
    else:
        arch = dispatch.softsm_arch()
        capability = next((c for c, entry in dispatch.ARCHITECTURES.items() if entry[1] == arch), (0, 0))
    if capability not in dispatch.ARCHITECTURES:
        return "there are no kernels for this GPU"
    package, arch, oldest = dispatch.ARCHITECTURES[capability]
    version = dispatch.triton_version()
    if version is None or version < oldest and not (found == "cuda" and _written()):
        return f"they need triton >= {oldest[0]}.{oldest[1]}, or DSV4_AOT with what `dsv4 compile --arch {arch}` wrote"
    module = _module(package, request.operation)
    return f"there are no such kernels for {arch} yet" if module is None else module.supports(request) or module


@cache
def _module(package: str, operation: str) -> Any:
    name = f"dsv4.{operation}.kernels.{package}.backward"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _written() -> bool:
    """Compiled kernels of gradients are there; one that is missing is an error then, as in the forward pass."""
    return settings.aot is not None and next(settings.aot.glob("backward_*.json"), None) is not None


def gradient_like(x: Tensor | None, want: bool) -> Tensor:
    """Room for the gradient of x; size 0 where nobody asks, because an operator returns tensors."""
    if x is None or not want:
        return torch.empty(0, device=None if x is None else x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def or_none(x: Tensor, want: bool) -> Tensor | None:
    return x if want else None
