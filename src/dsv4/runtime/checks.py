"""Validation shared by every public operation.

An error is a ValueError of one form: ``argument: got VALUE; accepted: VALUES``. Functions here look at
shapes, dtypes, devices and strides, which costs nothing and is safe under torch.compile; the functions that read
tensor values say so and run only where :func:`values_checked` allows.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.runtime.settings import settings

HEAD_DIMS = (64, 128, 256, 512)
Backend = Literal["auto", "cuda", "softsm", "cpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)
LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (*LOW_PRECISION, torch.float32)  # fp32 only on the cpu backend
E4M3 = torch.float8_e4m3fn
CACHED = (*FLOATS, E4M3)  # of keys and values
NO_BOUND = 1 << 30  # no sequence is longer; kernels add positions and bounds in 32 bits


def fail(argument: str, got: Any, accepted: str) -> NoReturn:
    if torch.jit.is_tracing():  # sizes are tensors there, and no check of a number passes
        argument, got, accepted = "torch.jit.trace", "a call of dsv4", "torch.compile or torch.export"
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


def describe(x: Any) -> str:
    """A value in words, for an error text."""
    if isinstance(x, Tensor) and x.is_nested:
        return "a nested tensor"
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    # Values of tensors in a container are not printed: they fill the screen, and on a GPU they synchronise.
    if isinstance(x, dict):
        return f"a dict with the keys {', '.join(map(repr, x))}"[:160]
    if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
        return f"a {type(x).__name__} of {', '.join(map(describe, x))}"[:160]
    return f"{type(x).__name__} {x!r}"[:80]


def is_tensor(x: Any) -> bool:
    """A tensor whose shape, strides and dtype may be asked for: a nested one answers with errors of its own."""
    return isinstance(x, Tensor) and not x.is_nested


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
    if not is_tensor(x):
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


def int32(name: str, x: Any, shape: Sequence[int | str], like: tuple[str, Tensor]) -> Tensor:
    """An int32 tensor on the device of ``like``, e.g. lengths, indices, block tables."""
    return tensor(name, x, shape, (torch.int32,), like=like)


def head_dim(name: str, d: int) -> int:
    if whole(d) is None or d not in HEAD_DIMS:
        fail(name, f"head dim {d}"[:80], "head dim " + ", ".join(map(str, HEAD_DIMS)))
    return d


def head_ratio(hq: int, hkv: int, name: str = "q") -> None:
    if hkv == 0 and hq == 0:
        return
    if hkv == 0 or hq % hkv:
        fail(name, f"{hq} query heads on {hkv} KV heads", "a whole multiple of the number of KV heads")


def sink(x: Any, heads: int, like: tuple[str, Tensor]) -> Tensor | None:
    """None, or one fp32 logit per query head."""
    return None if x is None else tensor("sink", x, (heads,), (torch.float32,), like=like)


def number(name: str, x: Any, accepted: str = "a finite number") -> float:
    """A finite number, as a float."""
    return finite(name, real(name, x, accepted), accepted)


def real(name: str, x: Any, accepted: str) -> float:
    """A number, as a float; an int that no float holds is infinite."""
    if isinstance(x, bool) or not isinstance(x, (int, float, numbers.Real)):
        fail(name, describe(x), accepted)
    try:
        return float(x)
    except OverflowError:
        return math.inf


LARGEST = torch.finfo(torch.float32).max  # kernels and the CPU path compute with numbers of 32 bits


def finite(name: str, x: float, accepted: str = "a finite number") -> float:
    if not -LARGEST <= x <= LARGEST:
        fail(name, describe(x), f"{accepted}, in fp32")
    return x


SCALE = "None or a finite number"


def scale(x: Any) -> float | None:
    """A softmax scale: None or a number, as a float. softmax_scale() checks that it is finite."""
    return None if x is None else real("softmax_scale", x, SCALE)


def softmax_scale(x: float | None, d: int) -> float:
    """The softmax scale of a head dim; None = head dim ** -0.5."""
    return d**-0.5 if x is None else finite("softmax_scale", x, SCALE)


def dtype(name: str, x: Any, accepted: Sequence[torch.dtype]) -> torch.dtype:
    if not isinstance(x, torch.dtype) or x not in accepted:
        fail(name, describe(x), ", ".join(map(str, accepted)))
    return x


def device(name: str, x: Any) -> torch.device:
    try:
        found = torch.device(x)
    except (RuntimeError, TypeError, ValueError):
        fail(name, describe(x), "a torch.device or its name, as 'cpu' or 'cuda:0'")
    if found.type == "cuda" and not torch.cuda.is_available():
        fail(name, describe(x), "a device that torch has here; it has no GPU")
    return found


WINDOW = "(left, right), two ints >= 0 or -1 for no bound"


def window(x: Any, causal: bool = False) -> tuple[int, int]:
    """(left, right) with causal folded in; -1 = no bound."""
    left, right = window_bounds(*two_ints(x))
    return left, 0 if causal else right


def two_ints(x: Any) -> tuple[int, int]:
    """A window as two ints, for an operator; window_bounds checks their values."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        fail("window", describe(x), WINDOW)
    left, right = whole(x[0]), whole(x[1])
    if left is None or right is None or left < -NO_BOUND or right < -NO_BOUND:
        fail("window", describe(x), WINDOW)
    return -1 if left > NO_BOUND else left, -1 if right > NO_BOUND else right


def window_bounds(left: int, right: int) -> tuple[int, int]:
    """Both >= 0, or -1 for no bound; one that bounds nothing is -1."""
    if left < -1 or right < -1:
        fail("window", describe((left, right)), WINDOW)
    return -1 if left > NO_BOUND else left, -1 if right > NO_BOUND else right


BOUND = "None or an int >= 0"


def bound(name: str, x: Any) -> int | None:
    """A bound on a length, None or an int; one that bounds nothing is None. The problem rejects a negative one."""
    number = whole(x)
    if x is not None and (number is None or number < -NO_BOUND):
        fail(name, describe(x), BOUND)
    return None if x is None or number > NO_BOUND else number


def at_least(low: int, name: str, x: Any, accepted: str = "") -> int:
    """An int that is not less than low."""
    number = whole(x)
    if number is None or number < low:
        fail(name, describe(x), accepted or f"an int >= {low}")
    if number >= 1 << 63:
        fail(name, describe(x), "an int of 64 bits")
    return number


def whole(x: Any) -> Any:
    """x as an int, also from NumPy's integers and torch.compile's symbolic ones; None if it is not one."""
    if isinstance(x, bool):
        return None
    if isinstance(x, (int, torch.SymInt)):
        return x
    return int(x) if isinstance(x, numbers.Integral) else None


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool):
        fail(name, describe(x), "True or False")
    return x


def one_of(name: str, x: Any, accepted: Sequence[str]) -> str:
    if not isinstance(x, str) or x not in accepted:
        fail(name, describe(x), ", ".join(map(repr, accepted)))
    return x


def backend(x: Any) -> str:
    return one_of("backend", x, BACKENDS)


def derivatives() -> bool:
    """Whether torch may be asked for a derivative now."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def forward_only(**tensors: Tensor | None) -> None:
    """Reject an input that requires a derivative, for an operation that has none."""
    if not derivatives():
        return
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.requires_grad:
                accepted = "tensors without grad, or a call under torch.no_grad(); this call has no gradient"
                fail(name, "a tensor that requires grad", accepted)
    no_tangents(**tensors)


def no_tangents(**tensors: Tensor | None) -> None:
    """There are no forward-mode derivatives; torch would silently drop them."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            fail(name, "a tensor with a tangent (forward-mode derivative)", "tensors without one")


def output(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, inputs: dict[str, Tensor]) -> Tensor:
    """A tensor that may be written: right shape and dtype, every element its own, in memory of its own."""
    like = next(iter(inputs.items()))
    tensor(name, x, tuple(shape), (dtype,), like=like, unit_last=is_tensor(x) and x.ndim > 0)
    holds_its_values(name, x)
    if _overlaps_itself(x):
        fail(name, f"strides {list(x.stride())} (elements share memory)", "a tensor whose elements do not overlap")
    return x


def holds_its_values(name: str, x: Tensor) -> None:
    """The dispatcher cannot resolve a lazy view in an output."""
    if not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj()):  # two questions that cannot be traced
        fail(name, "a lazily negated or conjugated view", "a tensor that holds its own values")


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


def span(x: Tensor) -> int:
    """Bytes from the address of a tensor to the end of its last element."""
    if x.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def values_checked(x: Tensor) -> bool:
    """Whether checks may read tensor values: always on a CPU; on a GPU, where it costs a sync, with DSV4_CHECK=1.

    Code that torch.compile traces has no values yet; the operators check theirs when they run. Nor has a CUDA graph
    while it is captured.
    """
    if x.is_cuda and not settings.check_values or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing() if x.is_cuda else x.device.type == "cpu"


def in_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Reads values: every entry lies in low .. high, both included."""
    if x.numel() == 0:
        return
    least, most = (int(e) for e in torch.aminmax(x))
    if least < low or most > high:
        fail(name, f"values from {least} to {most}", f"values from {low} to {high}")


def request_starts(x: Any, requests: int, queries: int, like: tuple[str, Tensor]) -> None:
    """Check the request starts of a block table: they are needed unless it has one line for each query."""
    if x is not None:
        int32("request_starts", x, (requests + 1,), like)
    elif requests != queries:
        accepted = f"int32 [{requests + 1}], needed when the block table has not one line per query ({queries})"
        fail("request_starts", None, accepted)


def page_numbers(name: str, table: Tensor, page: int, rows: Tensor, pages: int, seen: str) -> None:
    """Reads values: rows [R] of each line of a block table are in pages that exist. seen: which pages these are."""
    first_row = torch.arange(table.shape[1], device=table.device) * page
    bad = (first_row < rows[:, None]) & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        r, j = (int(e) for e in bad.nonzero()[0])
        accepted = f"page numbers from 0 to {pages - 1} in the pages that {seen}"
        fail(name, f"{int(table[r, j])} at [{r}, {j}]", accepted)


def cumulative(name: str, x: Tensor, total: int, total_name: str) -> None:
    """Reads values: starts at 0, never falls, ends within the tensor it divides."""
    if int(x[0]) != 0:
        fail(name, f"first entry {int(x[0])}", "0 as the first entry")
    if bool((x[1:] < x[:-1]).any()):
        fail(name, "decreasing entries", "entries that never decrease")
    if int(x[-1]) > total:
        fail(name, f"last entry {int(x[-1])}", f"at most {total}, the rows of {total_name}")
