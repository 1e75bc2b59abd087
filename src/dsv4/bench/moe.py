"""The suite `moe` times a layer of FP4 experts, Humming's, and torch's grouped products of the same weights in bf16.

Layers have the sizes of V4-Flash, V4-Pro and V4.1. A layer is what dsv4.moe does: activations to FP8, both products,
SwiGLU, the weighted sum; routing is drawn, evenly or by Zipf's law, and given. FLOP = 6 x slots x hidden x inner; bytes
= FP4 weights, with their scales, of the experts that tokens are expected to choose. A result is right if it is not
farther from the layer with unrounded activations than 1.5 times what the recipe costs, for a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

import dsv4
from dsv4.bench import peers
from dsv4.moe import cpu, problem

TOPK, CHECKED = 6, 4  # slots of a token; tokens that are compared


class Layer(NamedTuple):
    name: str
    experts: int
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * 17 // 32  # a code of 4 bits, and a byte for 32 of them


FLASH, PRO, V41 = Layer("flash", 256, 4096, 2048), Layer("pro", 384, 7168, 3072), Layer("v4.1", 384, 5120, 2304)


@dataclass(frozen=True)
class MoeCase:
    layer: Layer
    tokens: int
    zipf: bool = False

    @property
    def name(self) -> str:
        return f"moe {self.layer.name} {self.tokens} tokens{', zipf' if self.zipf else ''}"

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * TOPK * self.layer.hidden * self.layer.inner

    @property
    def bytes(self) -> float:
        chosen = 1 - (1 - shares(self.layer.experts, self.zipf)) ** (self.tokens * TOPK)
        return float(chosen.sum()) * self.layer.expert_bytes

    def on_device(self, aot: Path | None = None) -> MoeContest:
        return MoeContest(self)


def shares(experts: int, zipf: bool) -> Tensor:
    """Return the share of the slots that each expert has."""
    share = 1 / torch.arange(1, experts + 1).double() if zipf else torch.ones(experts).double()
    return share / share.sum()


@lru_cache(maxsize=1)
def weights_of(layer: Layer) -> dsv4.Fp4Experts:
    """Draw random codes, and scales such that the outputs are about as large as x."""
    e, h, i = layer[1:]
    given = []
    for rows, columns in ((i, h), (i, h), (h, i)):
        given.append(torch.randint(0, 256, (e, rows, columns // 2), dtype=torch.uint8, device="cuda"))
        given.append(torch.randint(116, 122, (e, rows, columns // 32), dtype=torch.uint8, device="cuda"))
    return dsv4.Fp4Experts.pack(*given)


@lru_cache(maxsize=1)
def bf16_weights(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the same for torch: [E, H, 2 I] and [E, I, H], as its grouped product expects them."""
    w13, w2 = weights_of(layer).dequantize(torch.bfloat16)
    return w13.mT, w2.mT


@lru_cache(maxsize=2)
def humming_weights(layer: Layer, scales: int) -> Any:
    """Return the same for Humming, which has a layout for each recipe of activations."""
    from dsv4.bench.humming import Humming  # imports Triton, which a machine without a GPU may not have

    return Humming(weights_of(layer).unpack(), scales)


class MoeContest:
    def __init__(self, case: MoeCase) -> None:
        self.case, self.experts = case, weights_of(case.layer)
        n, e = case.tokens, case.layer.experts
        self.x = torch.randn(n, case.layer.hidden, device="cuda").bfloat16()
        likely = shares(e, case.zipf).float().cuda()[torch.randperm(e, device="cuda")]
        self.ids = torch.multinomial(likely.expand(n, e), TOPK).int()
        self.weights = torch.rand(n, TOPK, device="cuda") * 0.5

    def contenders(self) -> peers.Calls:
        out = torch.empty_like(self.x)
        yield "dsv4", lambda: dsv4.moe(self.x, self.experts, self.ids, self.weights, out=out, backend="cuda")
        if peers.module("Humming") is not None:
            for scales, name in ((128, "per 128"), (0, "per token")):
                for form in ("grouped_contiguous", "indexed"):
                    yield f"Humming, scales {name}, {form}", self._humming(scales, form)
        yield "torch, bf16 weights", self._torch()

    def _humming(self, scales: int, form: str) -> Callable[[], Tensor]:
        made: list[Callable[[], Tensor]] = []

        def call() -> Tensor:
            if not made:  # the first call compiles Humming's kernels
                weights = humming_weights(self.case.layer, scales)
                made.append(weights.call(self.x, self.ids, self.weights, form))
            return made[0]()

        return call

    def _torch(self) -> Callable[[], Tensor]:
        case = self.case
        order = self.ids.flatten().argsort(stable=True)
        token = order // TOPK
        ends = torch.bincount(self.ids.flatten(), minlength=case.layer.experts).cumsum(0).int()
        scale = self.weights.flatten()[order, None]

        def call() -> Tensor:
            w13, w2 = bf16_weights(case.layer)
            gate, up = torch._grouped_mm(self.x[token], w13, offs=ends).chunk(2, -1)
            h = silu(gate.float().clamp(max=10)) * up.float().clamp(-10, 10) * scale
            y = torch._grouped_mm(h.bfloat16(), w2, offs=ends)
            return torch.zeros_like(self.x).index_add_(0, token, y)

        return call

    def error(self, name: str, result: Any) -> float:
        """Return the error of the last tokens."""
        some = slice(-CHECKED, None)
        truth, rounded = (self._plain(some, recipe).double() for recipe in ("bf16", "fp8_128"))
        cost = (rounded - truth).norm()
        return float((result[some].double() - truth).norm() / (1.5 * cost))

    def _plain(self, some: slice, recipe: str) -> Tensor:
        x = self.x[some]
        chosen = dict(ids=self.ids[some], weights=self.weights[some])
        p = problem.build(x, **chosen, **self.experts.tensors, activations=recipe)
        out = torch.empty_like(x)
        cpu.forward(replace(p, out=out))
        return out


TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
CASES: list[Any] = [
    *(MoeCase(FLASH, n) for n in TOKENS),
    *(MoeCase(FLASH, n, True) for n in (128, 2048)),
    *(MoeCase(layer, n) for layer in (PRO, V41) for n in (1, 32, 512, 4096)),
]
