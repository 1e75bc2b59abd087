"""The options of fmha, fmha_varlen and fmha_paged: all arguments but tensors. A new option is a field here."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.runtime.plan import Plan


class FmhaKeywords(TypedDict, total=False):
    """The keyword arguments of the public functions. return_lse is missing because the return type depends on it."""

    causal: bool
    window: tuple[int, int]
    sink: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    softmax_scale: float | None
    softcap: float | None
    out: Tensor | None
    plan: Plan | None
    deterministic: bool
    backend: Backend


class VarlenKeywords(FmhaKeywords, total=False):
    max_seqlen_q: int | None
    max_seqlen_k: int | None


# The part of the docstrings about these arguments.
DOCS = """
        causal, window: see above; both count from the bottom right corner.
        softcap: scores are softcap * tanh(softmax_scale * (q . k) / softcap), before masks and sink (Gemma 2); None and
            0 leave them as they are.
        k_scale, v_scale: of k and v in float8_e4m3fn: fp32 tensors of one number, or of one for each KV head, by which
            k and v are multiplied; None is 1. Greater than 0.
        return_lse: return ``(out, lse)``, lse in fp32.
        out: tensor to write to and return; its last stride is 1, and it overlaps no input. Its dtype is q's,
            or fp32 for partial results that are merged (dsv4.merge_states) and rounded once.
        plan: a :class:`dsv4.Plan` from :func:`dsv4.plan`, with preallocated buffers (CUDA graphs). With a plan and
            out= nothing is allocated if strides are multiples of 16 bytes; other tensors are copied.
        deterministic: a sequence gives the same bits in every run and every batch, and on a CPU with any number of
            threads (it uses one).
        backend: "auto" (by the device of q), "cuda", "softsm" (the GPU kernels, emulated), "cpu".
"""


UNBOUNDED = (-1, -1)
SOFTCAP = "None or a finite number >= 0, where 0 is None"


class FmhaOptions(NamedTuple):
    causal: bool = False  # the public functions fold it into the window
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float | None = None
    softcap: float | None = None  # never 0
    deterministic: bool = False
    max_seqlen_q: int | None = None  # varlen
    max_seqlen_k: int | None = None

    @classmethod
    def of(cls, window: tuple[int, int] = (-1, -1), **others: Any) -> FmhaOptions:
        """Return the options from an operator's arguments, in which the window is two numbers, not a tuple."""
        return cls(window_left=window[0], window_right=window[1], **others)

    @classmethod
    def checked(
        cls,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        /,
        causal: Any = False,
        window: Any = UNBOUNDED,
        softmax_scale: Any = None,
        softcap: Any = None,
        deterministic: Any = False,
    ) -> FmhaOptions:
        """Check the types of numbers and flags, which the key of a call cannot tell apart; ValueError if one is
        wrong. `resolved` looks at their values."""
        left, right = UNBOUNDED if window is UNBOUNDED else checks.two_ints(window)
        if causal is not False and checks.flag("causal", causal) and left >= -1 and right >= -1:
            right = 0  # else it is rejected as it was given
        if deterministic is not False:
            checks.flag("deterministic", deterministic)
        if softmax_scale is not None:
            softmax_scale = checks.scale(softmax_scale)
        if softcap is not None:
            softcap = checks.real("softcap", softcap, SOFTCAP)
        if max_seqlen_q is not None:
            max_seqlen_q = checks.bound("max_seqlen_q", max_seqlen_q)
        if max_seqlen_k is not None:
            max_seqlen_k = checks.bound("max_seqlen_k", max_seqlen_k)
        numbers = (softmax_scale, softcap, deterministic, max_seqlen_q, max_seqlen_k)
        return tuple.__new__(cls, (False, left, right, *numbers))  # same result as cls(...), in half the time

    def resolved(self, head_dim: int) -> FmhaOptions:
        """Return the options with every default filled in, as backends read them. ValueError if a value is wrong."""
        left, right = checks.window_bounds(self.window_left, self.window_right)
        return self._replace(
            causal=False,
            window_left=left,
            window_right=0 if self.causal else right,
            softmax_scale=checks.softmax_scale(self.softmax_scale, head_dim),
            softcap=_softcap(self.softcap),
        )


def _softcap(x: float | None) -> float | None:
    if x is None:
        return None
    if checks.finite("softcap", x, SOFTCAP) < 0:
        checks.fail("softcap", checks.describe(x), SOFTCAP)
    return x or None
