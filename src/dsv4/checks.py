"""Validation shared by every public operation.

An error is a ValueError of one form: ``argument: got what came; accepted: what is accepted``. Functions here look at
shapes, dtypes, devices and strides, which costs nothing and is safe under torch.compile; the functions that read
tensor values say so and run only where :func:`values_checked` allows.
"""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256, 512)
BACKENDS = ("auto", "cuda", "softsm", "cpu")
LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (*LOW_PRECISION, torch.float32)  # fp32 only on the cpu backend


def fail(argument: str, got: Any, accepted: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


def describe(x: Any) -> str:
    """What came, in words for an error text."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"[:80]


def tensor(
    name: str,
    x: Any,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    *,
    like: tuple[str, Tensor] | None = None,
    unit_last: bool = True,
) -> Tensor:
    """x is a tensor of this shape (str entries are free sizes and name themselves), dtype, and device.

    like = (name, tensor) demands the same device. unit_last demands stride 1 in the last dimension; all other
    strides are honoured as they are.
    """
    if not isinstance(x, Tensor):
        fail(name, describe(x), f"a tensor {_in_brackets(shape)}")
    if x.ndim != len(shape) or any(isinstance(s, int) and s != have for s, have in zip(shape, x.shape)):
        fail(name, f"shape {list(x.shape)}", f"shape {_in_brackets(shape)}")
    if x.layout != torch.strided:
        fail(name, f"layout {x.layout}", "a dense strided tensor")
    if x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        fail(name, f"dtype {str(x.dtype).removeprefix('torch.')}", names)
    if like is not None and x.device != like[1].device:
        fail(name, f"a tensor on {x.device}", f"the device of {like[0]}, {like[1].device}")
    if unit_last and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(name, f"strides {list(x.stride())}", "stride 1 in the last dimension (call .contiguous())")
    return x


def _in_brackets(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def int32(
    name: str, x: Any, shape: Sequence[int | str], like: tuple[str, Tensor], *, contiguous: bool = False
) -> Tensor:
    """An int32 tensor on the device of ``like``, e.g. lengths, indices, block tables."""
    tensor(name, x, shape, (torch.int32,), like=like)
    if contiguous and not x.is_contiguous():
        fail(name, f"strides {list(x.stride())}", "a contiguous tensor")
    return x


def head_dim(name: str, d: int) -> int:
    if d not in HEAD_DIMS:
        fail(name, f"head dim {d}", "head dim " + ", ".join(map(str, HEAD_DIMS)))
    return d


def head_ratio(hq: int, hkv: int) -> None:
    if hkv == 0 and hq == 0:
        return
    if hkv == 0 or hq % hkv:
        fail("q", f"{hq} query heads on {hkv} KV heads (k)", "a whole multiple of the number of KV heads")


def sink(x: Any, heads: int, like: tuple[str, Tensor]) -> Tensor | None:
    """None, or one fp32 logit per query head."""
    return None if x is None else tensor("sink", x, (heads,), (torch.float32,), like=like)


def scale(x: Any, d: int) -> float:
    """The softmax scale; None = d ** -0.5."""
    if x is None:
        return d**-0.5
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        fail("softmax_scale", describe(x), "None or a number")
    if not -float("inf") < x < float("inf"):
        fail("softmax_scale", x, "a finite number")
    return float(x)


def window(x: Any, causal: bool) -> tuple[int, int]:
    """(left, right) with causal folded in; -1 = no bound."""
    accepted = "(left, right), two ints >= 0 or -1 for no bound"
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        fail("window", describe(x), accepted)
    for bound in x:
        if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)) or bound < -1:
            fail("window", describe(x), accepted)
    return x[0], 0 if causal else x[1]


def bound(name: str, x: Any) -> None:
    """A bound on a length: None or an int >= 0."""
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)) or x < 0):
        fail(name, describe(x), "None or an int >= 0")


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool):
        fail(name, describe(x), "True or False")
    return x


def backend(x: Any) -> str:
    if x not in BACKENDS:
        fail("backend", describe(x), ", ".join(map(repr, BACKENDS)))
    return x


def forward_only(**tensors: Tensor | None) -> None:
    """There is no backward pass, so an input that wants one is refused instead of silently cut off."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            fail(name, "a tensor that requires grad", "tensors without grad, or a call under torch.no_grad()")


def output(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, inputs: dict[str, Tensor]) -> Tensor:
    """A tensor that may be written: right shape and dtype, every element its own, apart from the inputs."""
    like = next(iter(inputs.items()))
    tensor(
        name, x, tuple(shape), (dtype,), like=like, unit_last=x.ndim > 0 if isinstance(x, Tensor) else False
    )
    if _overlaps_itself(x):
        fail(
            name,
            f"strides {list(x.stride())} (elements share memory)",
            "a tensor whose elements do not overlap",
        )
    return x


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may share memory: some dimension steps less far than the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size != 1):
        if size == 0:
            return False
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def apart(name: str, x: Tensor, inputs: dict[str, Tensor | None]) -> None:
    """Reads addresses: refuse an output whose memory range touches an input's."""
    begin, end = _range(x)
    for other_name, other in inputs.items():
        if other is None:
            continue
        other_begin, other_end = _range(other)
        if begin < other_end and other_begin < end:
            fail(name, f"memory that overlaps {other_name}", "memory apart from every input")


def _range(x: Tensor) -> tuple[int, int]:
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def values_checked(x: Tensor) -> bool:
    """Whether checks may read tensor values: always on a CPU; on a GPU, where it costs a sync, with DSV4_CHECK=1."""
    return x.device.type == "cpu" or (x.device.type == "cuda" and os.environ.get("DSV4_CHECK", "0") == "1")


def in_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Reads values: every entry lies in low .. high, both included."""
    if x.numel() == 0:
        return
    least, most = (int(e) for e in torch.aminmax(x))
    if least < low or most > high:
        fail(name, f"values from {least} to {most}", f"values from {low} to {high}")


def cumulative(name: str, x: Tensor, total: int, total_name: str) -> None:
    """Reads values: starts at 0, never falls, ends within the tensor it divides."""
    if int(x[0]) != 0:
        fail(name, f"first entry {int(x[0])}", "0 as the first entry")
    if bool((x[1:] < x[:-1]).any()):
        fail(name, "entries that fall", "entries that never fall")
    if int(x[-1]) > total:
        fail(name, f"last entry {int(x[-1])}", f"at most {total}, the rows of {total_name}")
