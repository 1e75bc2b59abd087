"""A call like an earlier one makes the launches of the earlier one again, with other addresses.

The first call with given shapes, strides, types, alignments and options takes the long way: checks, operator, problem,
launches. All that it finds out depends on those alone, so a call that agrees in them needs no more than memory for its
results and the launches, whose arguments differ in their addresses. What depends on addresses is looked at each time:
inputs that share memory must share it again, and ``out`` must lie apart from the inputs.

Only plain tensors on the current CUDA device, called eagerly: torch.compile, dispatch modes, functorch, the profiler
and DSV4_CHECK=1 see the long way.
"""

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.runtime.plan import Plan

MOST = 1024  # calls that are remembered
TYPES = (Tensor, torch.nn.Parameter)


class Launch(NamedTuple):
    """One launch: ``run(*arguments, stream=...)`` after the addresses were put into their places."""

    run: Callable
    arguments: list
    places: list[tuple[int, int, int]]  # (place among the arguments, number of the tensor, bytes from its begin)
    by_number: bool  # addresses are passed as numbers, not as tensors


class Repeat(NamedTuple):
    launches: list[Launch]
    shared: list[tuple[int, int]]  # tensors that must begin at the same address
    extents: list[int]  # bytes from the first element of each tensor to its end
    out: tuple  # shape, dtype, device
    lse: tuple[int, ...] | None  # shape
    scratch: int  # floats


class Watch:
    """What the long way does: its launches, and the scratch memory that it allocates."""

    def __init__(self) -> None:
        self.launches: list[tuple[Callable, list, bool]] = []  # run, arguments, by_number
        self.scratch: Tensor | None = None


class _Current(threading.local):
    watch: Watch | None = None


current = _Current()
_made: dict[tuple, Repeat | None] = {}  # None: this call cannot be repeated
_constants: dict[int, Tensor] = {}  # by address: tensors that stay for ever
_plain: set[int] = set()  # dispatch keys of ordinary tensors on a GPU


def constant(x: Tensor) -> Tensor:
    """Say that x stays for ever, so that launches may be repeated with its address."""
    _constants[x.data_ptr()] = x
    return x


def forget() -> None:
    """Every kind of call takes the long way once more."""
    _made.clear()


def key_of(name: str, tensors: tuple, options: tuple, pair: tuple[int, int] = (0, 0)) -> tuple | None:
    """What the long way depends on but for addresses; None where a call cannot be repeated.

    tensors: q first; out and a plan's scratch memory last. pair: tensors that it matters for whether they begin at the
    same address.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or type(q) is not Tensor or not _eager(q):
        return None
    key: list[Any] = [name, options, torch.is_grad_enabled(), os.environ.get("DSV4_PAIR")]
    for x in tensors:
        if x is None:
            key.append(None)
            continue
        if type(x) not in TYPES:
            return None
        keys = torch._C._dispatch_keys(x).raw_repr()
        if keys not in _plain:
            return None
        key += (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.requires_grad)
    a, b = tensors[pair[0]], tensors[pair[1]]
    if a is None or b is None:
        return None
    key.append(a.data_ptr() == b.data_ptr())
    return tuple(key)


def _eager(q: Tensor) -> bool:
    """Nothing stands between the caller and the launch."""
    if (
        not q.is_cuda
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
        or os.environ.get("DSV4_CHECK", "0") == "1"
        or q.get_device() != torch._C._cuda_getDevice()
    ):
        return False
    if not _plain:
        for mode in (False, True):
            with torch.inference_mode(mode):
                _plain.add(torch._C._dispatch_keys(torch.empty(1, device=q.device)).raw_repr())
    return True


def plain(flags: tuple, numbers: tuple) -> bool:
    """Options that compare equal are the same, as far as the checks see them: True is not 1."""
    return all(type(x) is bool for x in flags) and all(type(x) in (int, float, NoneType) for x in numbers)


def of_plan(plan: Plan | None) -> tuple | None:
    """What counts of a plan, but for its buffer."""
    if plan is None:
        return None
    return (plan.operation, plan.batch, plan.q_heads, plan.kv_heads, plan.head_dim, plan.max_seqlen_q,
            plan.max_seqlen_k, plan.num_splits)  # fmt: skip


def known(key: tuple) -> bool:
    """Such a call was watched before."""
    return key in _made


def again(key: tuple, tensors: tuple, out: Tensor | None) -> Any:
    """The result of the call, or None: take the long way. out: the last but one of the tensors."""
    made = _made.get(key)
    if made is None or current.watch is not None:
        return None
    begins = [0 if x is None else x.data_ptr() for x in tensors]
    for a, b in made.shared:
        if begins[a] != begins[b]:
            return None
    shape, dtype, device = made.out
    every = list(tensors)
    if out is None:
        result = torch.empty(shape, dtype=dtype, device=device)
    else:
        result = out
        begin = out.data_ptr()
        end = begin + made.extents[-1]
        for other, extent in zip(begins[:-2], made.extents):
            if other < end and begin < other + extent:
                return None
    lse = None if made.lse is None else torch.empty(made.lse, dtype=torch.float32, device=device)
    scratch = torch.empty(made.scratch, dtype=torch.float32, device=device) if made.scratch else None
    for x in (result, lse, scratch):
        every.append(x)
        begins.append(0 if x is None else x.data_ptr())
    stream = _stream(device)
    for run, template, places, by_number in made.launches:
        arguments = template.copy()
        for place, number, offset in places:
            described = arguments[place]
            if described is not None:
                described = copy.copy(described)
                described.base = every[number]
                arguments[place] = described
            else:
                arguments[place] = begins[number] + offset if by_number else _at(every[number], offset)
        run(*arguments, stream=stream)
    return result if lse is None else (result, lse)


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def _at(x: Tensor, offset: int) -> Tensor:
    return x if offset == 0 else x[offset // x.element_size() :]


@contextmanager
def watching() -> Iterator[Watch]:
    """What happens within is written down, also for a call around this one that is being watched."""
    outer = current.watch
    current.watch = watch = Watch()
    try:
        yield watch
    finally:
        current.watch = outer
        if outer is not None:
            outer.launches += watch.launches
            outer.scratch = watch.scratch


def remember(key: tuple, tensors: tuple, watch: Watch, out: Tensor, lse: Tensor | None) -> None:
    """Keep what the long way did, if it consisted of launches alone, whose addresses are all known."""
    if len(_made) >= MOST:
        _made.clear()
    _made[key] = None
    every = (*tensors, out, lse, watch.scratch)
    begins = [0 if x is None else x.data_ptr() for x in every]
    shared: set[tuple[int, int]] = set()
    launches = []
    for run, arguments, by_number in watch.launches:
        template, places = list(arguments), []
        for place, x in enumerate(arguments):
            described = hasattr(x, "block_shape")
            if not described and not isinstance(x, Tensor):
                continue
            begin = (x.base if described else x).data_ptr()
            numbers = [n for n, b in enumerate(begins) if b == begin and every[n] is not None]
            offset = 0
            if not numbers:  # the second part of scratch memory, the plan's or fresh
                numbers = [n for n in (len(tensors) - 1, len(every) - 1) if _within(begin, every[n])]
                offset = begin - begins[numbers[0]] if numbers else 0
            if numbers:
                places.append((place, numbers[0], offset))
                shared.update((numbers[0], n) for n in numbers[1:] if n < len(tensors))
                template[place] = _without_tensor(x) if described else None
            elif begin not in _constants:  # a copy, made because a kernel cannot read the tensor as it is
                return
            elif by_number and not described:
                template[place] = begin
        launches.append(Launch(run, template, places, by_number))
    if launches:
        extents = [0 if x is None else _extent(x) for x in (*tensors, out)]
        shape = None if lse is None else tuple(lse.shape)
        size = 0 if watch.scratch is None else watch.scratch.numel()
        _made[key] = Repeat(launches, sorted(shared), extents, (out.shape, out.dtype, out.device), shape, size)


def _without_tensor(described: Any) -> Any:
    """A descriptor that keeps nobody's memory alive."""
    described = copy.copy(described)
    described.base = None
    return described


def _within(begin: int, x: Tensor | None) -> bool:
    return x is not None and x.data_ptr() <= begin < x.data_ptr() + x.nbytes


def _extent(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()
