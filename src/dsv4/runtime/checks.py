"""Validation shared by every public operation.

Every error is a ValueError of the form ``argument: got VALUE; accepted: VALUES``. These functions read shapes, dtypes,
devices and strides, which is cheap and safe under torch.compile. The docstring of a function that reads tensor values
mentions it; such a function runs only where :func:`values_checked` allows it.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from dsv4.runtime.settings import settings

HEAD_DIMS = (64, 128, 256, 512)
Backend = Literal["auto", "cuda", "softsm", "cpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)
LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (*LOW_PRECISION, torch.float32)  # fp32 on the CPU backend only
E4M3 = torch.float8_e4m3fn
CACHED = (*FLOATS, E4M3)  # dtypes of keys and values
NO_BOUND = 1 << 30  # longer than any sequence; kernels add positions and bounds in 32 bits


def fail(argument: str, got: Any, accepted: str) -> NoReturn:
    if torch.jit.is_tracing():  # sizes are tensors while it traces, and every check of a number fails
        argument, got, accepted = "torch.jit.trace", "a call of dsv4", "torch.compile or torch.export"
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


def describe(x: Any) -> str:
    """Describe a value in words, for an error text."""
    if isinstance(x, Tensor) and x.is_nested:
        return "a nested tensor"
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    if hasattr(x, "dtype") and hasattr(x, "shape") and len(x.shape):  # an array: its values would fill several lines
        return f"{type(x).__name__} of {x.dtype} {list(x.shape)}"
    # Values of tensors in a container are not printed: they would fill the screen and synchronise a GPU.
    if isinstance(x, dict):
        return f"a dict with the keys {', '.join(map(repr, x))}"[:160]
    if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
        return f"a {type(x).__name__} of {', '.join(map(describe, x))}"[:160]
    return f"{type(x).__name__} {x!r}"[:80]


def is_tensor(x: Any) -> bool:
    """Return whether x is a tensor with a shape and strides, for which a nested tensor raises its own errors."""
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
    """Check that x is a tensor of this shape, dtype and device. A str in the shape names a size that is free.

    like = (name, tensor) requires the device of that tensor. unit_last requires stride 1 in the last dimension; all
    other strides are accepted.
    """
    if not is_tensor(x):
        fail(name, describe(x), f"a tensor {_in_brackets(shape)}")
    if x.ndim != len(shape) or any(isinstance(s, int) and s != have for s, have in zip(shape, x.shape)):
        fail(name, f"shape {list(x.shape)}", f"shape {_in_brackets(shape)}")
    if x.layout != torch.strided:
        fail(name, f"layout {x.layout}", "a dense strided tensor")
    if x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(dtypes))
        fail(name, f"dtype {str(x.dtype).removeprefix('torch.')}", names)
    if like is not None and x.device != like[1].device:
        fail(name, f"a tensor on {x.device}", f"the device of {like[0]}, {like[1].device}")
    if unit_last and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(name, f"strides {list(x.stride())}", "stride 1 in the last dimension (call .contiguous())")
    return x


def _in_brackets(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def int32(name: str, x: Any, shape: Sequence[int | str], like: tuple[str, Tensor]) -> Tensor:
    """Check an int32 tensor (lengths, indices, block tables) on the device of ``like``."""
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
    """Check a sink: None, or one fp32 logit per query head."""
    return None if x is None else tensor("sink", x, (heads,), (torch.float32,), like=like)


def number(name: str, x: Any, accepted: str = "a finite number") -> float:
    """Return a finite number as a float."""
    return finite(name, real(name, x, accepted), accepted)


def real(name: str, x: Any, accepted: str) -> float:
    """Return a number as a float; an int that no float can hold becomes infinite."""
    if isinstance(x, bool) or not isinstance(x, (int, float, numbers.Real)):
        fail(name, describe(x), accepted)
    try:
        return float(x)
    except OverflowError:
        return math.inf


LARGEST = torch.finfo(torch.float32).max  # kernels and the CPU path compute with 32-bit numbers


def finite(name: str, x: float, accepted: str = "a finite number") -> float:
    if not -LARGEST <= x <= LARGEST:
        fail(name, describe(x), f"{accepted}, in fp32")
    return x


SCALE = "None or a finite number"


def scale(x: Any) -> float | None:
    """Return a softmax scale, None or a number, as a float. softmax_scale() checks that it is finite."""
    return None if x is None else real("softmax_scale", x, SCALE)


def softmax_scale(x: float | None, d: int) -> float:
    """Return the softmax scale; the default (None) is head dim ** -0.5."""
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
    """Return (left, right), in which causal sets right to 0 and -1 means no bound."""
    left, right = window_bounds(*two_ints(x))
    return left, 0 if causal else right


def two_ints(x: Any) -> tuple[int, int]:
    """Return a window as two ints, for an operator; window_bounds checks their values."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        fail("window", describe(x), WINDOW)
    left, right = whole(x[0]), whole(x[1])
    if left is None or right is None or left < -NO_BOUND or right < -NO_BOUND:
        fail("window", describe(x), WINDOW)
    return -1 if left > NO_BOUND else left, -1 if right > NO_BOUND else right


def window_bounds(left: int, right: int) -> tuple[int, int]:
    """Check that both are >= 0, or -1 for no bound. A bound longer than any sequence becomes -1."""
    if left < -1 or right < -1:
        fail("window", describe((left, right)), WINDOW)
    return -1 if left > NO_BOUND else left, -1 if right > NO_BOUND else right


BOUND = "None or an int >= 0"


def bound(name: str, x: Any) -> int | None:
    """Return a bound on a length, None or an int. A bound longer than any sequence becomes None; the problem rejects a
    negative one."""
    number = whole(x)
    if x is not None and (number is None or number < -NO_BOUND):
        fail(name, describe(x), BOUND)
    return None if x is None or number > NO_BOUND else number


def at_least(low: int, name: str, x: Any, accepted: str = "") -> int:
    """Return an int that is at least low."""
    number = whole(x)
    if number is None or number < low:
        fail(name, describe(x), accepted or f"an int >= {low}")
    if number >= 1 << 63:
        fail(name, describe(x), "an int of 64 bits")
    return number


def whole(x: Any) -> Any:
    """Return x as an int (NumPy's integers and torch.compile's symbolic ones too), or None if it is not an int."""
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
    """Return whether torch may compute a derivative of the call."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def forward_only(**tensors: Tensor | None) -> None:
    """Reject an input that requires a derivative, for an operation without one."""
    if not derivatives():
        return
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.requires_grad:
                accepted = "tensors without grad, or a call under torch.no_grad(); this call has no gradient"
                fail(name, "a tensor that requires grad", accepted)
    no_tangents(**tensors)


def no_tangents(**tensors: Tensor | None) -> None:
    """Reject forward-mode derivatives, which dsv4 does not have and torch would silently drop."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            fail(name, "a tensor with a tangent (forward-mode derivative)", "tensors without one")


def output(name: str, x: Any, shape: Sequence[int], dtypes: Sequence[torch.dtype], inputs: dict[str, Tensor]) -> Tensor:
    """Check that x can be written: it has this shape, one of these dtypes, the device of the first input, and its
    elements do not overlap. Whether it overlaps an input is for `apart`, or the runtime (calls.py)."""
    like = next(iter(inputs.items()))
    tensor(name, x, tuple(shape), dtypes, like=like, unit_last=is_tensor(x) and x.ndim > 0)
    return writable(name, x)


def writable(name: str, x: Tensor) -> Tensor:
    """Check that torch and the kernels can write x, element by element."""
    holds_its_values(name, x)
    inference = not torch.compiler.is_compiling() and x.is_inference()  # the compiler cannot trace is_inference
    if inference and not x.is_cuda and not torch.is_inference_mode_enabled():
        fail(name, "an inference tensor", "a tensor made outside torch.inference_mode, or a call inside it")
    if _overlaps_itself(x):
        fail(name, f"strides {list(x.stride())} (elements share memory)", "a tensor whose elements do not overlap")
    return x


def holds_its_values(name: str, x: Tensor) -> None:
    """Reject a lazy view (negated or conjugated) as an output: the dispatcher cannot resolve it."""
    if not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj()):  # the compiler cannot trace these two
        fail(name, "a lazily negated or conjugated view", "a tensor that holds its own values")


def apart(name: str, x: Tensor, inputs: dict[str, Tensor | None]) -> None:
    """Check that an output shares no memory with an input."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta:
        return
    if not all(y is None or torch._C._has_storage(y) for y in (x, *inputs.values())):  # batches of torch.vmap
        return
    begin, end = x.data_ptr(), x.data_ptr() + span(x)
    for other, y in inputs.items():
        if y is not None and begin < y.data_ptr() + span(y) and y.data_ptr() < end:
            fail(name, f"memory that overlaps {other}", "memory that overlaps no input")


def _overlaps_itself(x: Tensor) -> bool:
    """Return whether two elements may share memory: a stride is smaller than the extent of the dimensions below it."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size != 1):
        if size == 0:
            return False
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def span(x: Tensor) -> int:
    """Return the bytes from the address of a tensor to the end of its last element."""
    if x.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def values_checked(x: Tensor) -> bool:
    """Return whether checks may read tensor values: always on a CPU; on a GPU, which must synchronise, with
    DSV4_CHECK=1.

    While torch.compile traces, tensors have no values yet; the operators check them when they run. While a CUDA graph
    is captured, they have none either.
    """
    if x.is_cuda and not settings.check_values or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return not torch.cuda.is_current_stream_capturing() if x.is_cuda else x.device.type == "cpu"


def in_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Read values; checks that every entry is between low and high, both included."""
    if x.numel() == 0:
        return
    least, most = (int(e) for e in torch.aminmax(x))
    if least < low or most > high:
        fail(name, f"values from {least} to {most}", f"values from {low} to {high}")


def request_starts(x: Any, requests: int, queries: int, like: tuple[str, Tensor]) -> None:
    """Check the request starts of a block table. They are required unless it has one line for each query."""
    if x is not None:
        int32("request_starts", x, (requests + 1,), like)
    elif requests != queries:
        accepted = f"int32 [{requests + 1}], needed when the block table has not one line per query ({queries})"
        fail("request_starts", None, accepted)


def page_numbers(name: str, table: Tensor, page: int, rows: Tensor, pages: int, seen: str) -> None:
    """Read values; checks that the first rows [R] of each line of a block table are in existing pages. seen: words for
    these pages."""
    first_row = torch.arange(table.shape[1], device=table.device) * page
    bad = (first_row < rows[:, None]) & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        r, j = (int(e) for e in bad.nonzero()[0])
        accepted = f"page numbers from 0 to {pages - 1} in the pages that {seen}"
        fail(name, f"{int(table[r, j])} at [{r}, {j}]", accepted)


def cumulative(name: str, x: Tensor, total: int, total_name: str) -> None:
    """Read values; checks that x starts at 0, never decreases, and ends within the tensor that it divides."""
    if int(x[0]) != 0:
        fail(name, f"first entry {int(x[0])}", "0 as the first entry")
    if bool((x[1:] < x[:-1]).any()):
        fail(name, "decreasing entries", "entries that never decrease")
    if int(x[-1]) > total:
        fail(name, f"last entry {int(x[-1])}", f"at most {total}, the rows of {total_name}")
