"""Small layers of experts: weights as a checkpoint has them, tokens, and the comparison with the oracle."""

from typing import NamedTuple

import launches
import pytest
import torch
from torch import Tensor

import dsv4
from dsv4 import Fp4Experts, reference
from dsv4.runtime.program import Layout


class Layer(NamedTuple):
    given: dict[str, Tensor]  # what Fp4Experts.pack accepts
    experts: Fp4Experts


def layer(
    e: int = 4, h: int = 256, i: int = 128, nvfp4: bool = False, low: int = 118, high: int = 126, layout: str = "sm90"
) -> Layer:
    """Codes and scales; every value may occur."""
    given = {}
    for name, rows, columns in (("w1", i, h), ("w3", i, h), ("w2", h, i)):
        given[name] = torch.randint(0, 256, (e, rows, columns // 2), dtype=torch.uint8)
        if nvfp4:
            given[f"{name}_scale"] = (torch.rand(e, rows, columns // 16) + 0.1).to(torch.float8_e4m3fn)
            given[f"{name}_global"] = torch.rand(e) * 0.05 + 0.01
        else:
            given[f"{name}_scale"] = torch.randint(low, high, (e, rows, columns // 32), dtype=torch.uint8)
    return Layer(given, Fp4Experts.pack(**given, layout=layout))


def tokens(t: int, h: int = 256, e: int = 4, k: int = 3, dtype=torch.bfloat16) -> dict[str, Tensor]:
    """x, ids (different ones of a token) and weights."""
    ids = torch.rand(t, e).argsort(-1)[:, :k].int()
    return dict(x=torch.randn(t, h).to(dtype), ids=ids, weights=torch.rand(t, k) * 0.7 + 0.1)


def poison(monkeypatch, byte: int) -> None:
    """Memory that calls allocate has this byte everywhere; 0xFF is NaN in every type of float, and -1."""
    plain = Layout.empty
    monkeypatch.setattr(Layout, "empty", lambda self, device: filled(plain(self, device), byte))


def filled(x: Tensor, byte: int) -> Tensor:
    x.view(torch.uint8).fill_(byte)
    return x


def relative(x: Tensor, want: Tensor) -> float:
    return float((x.double() - want).norm() / want.norm())


def assert_right(out: Tensor, slots: Tensor | None, experts: Fp4Experts, given: dict, recipe="fp8_128", **more) -> None:
    """Not farther from the truth than the oracle that rounds where the model does, and next to that one: what rounds
    elsewhere, or not at all, is as far from it as it is from the truth."""
    w13, w2 = experts.dequantize(torch.float64)
    arguments = (given["x"], w13, w2, given["ids"], given["weights"])
    truth = reference.moe(*arguments, **more)
    low = reference.moe(*arguments, dtype=given["x"].dtype, recipe=recipe, **more)
    pairs = [(out, low[0].to(out.dtype).double(), truth[0])]
    pairs += [] if slots is None else [(slots, low[1], truth[1])]
    for got, rounded, exact in pairs:
        cost = relative(rounded, exact)
        assert relative(got, exact) <= 1.5 * cost, f"off by {relative(got, exact):.2e}, the oracle by {cost:.2e}"
        assert relative(got, rounded) <= 0.3 * cost, (
            f"{relative(got, rounded):.2e} from the oracle, whose cost is {cost:.2e}"
        )


def check_many_rows_few_and_none(kernel, experts: Fp4Experts, given: dict, some: list[int]) -> None:
    """Experts 0 and 3 have all rows but one, which has no expert and expert 1; expert 2 has none. The tokens `some`
    have their bits in another batch."""
    given["ids"][:] = torch.tensor([0, 3])
    given["ids"][4] = torch.tensor([-1, 1])
    out, slots = kernel(experts, given, return_slots=True)
    assert_right(out, slots, experts, given)
    assert not slots[4, 0].any()
    alone = kernel(experts, {name: x[some] for name, x in given.items()}, order="latest")
    assert torch.equal(alone, out[some])


def kernel(arch: str, experts: Fp4Experts, given: dict, order: str = "random", sms: int | None = None, **options):
    """dsv4.moe through softsm: races checked; all memory that is written was NaN before."""
    out = torch.full_like(given["x"], float("nan"))
    with launches.race_free(arch, sms=sms, order=order), pytest.MonkeyPatch.context() as patch:
        poison(patch, 0xFF)
        return dsv4.moe(**given, experts=experts, out=out, backend="softsm", **options)
