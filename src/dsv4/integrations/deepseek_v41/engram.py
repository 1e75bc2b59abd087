"""Engram: rows of a table, found by the last tokens, added to the residual streams of some layers.

A token has a number in a smaller vocabulary, in which tokens that differ in case, accents or spaces alone are one. The
last 2, 3, .. of these numbers are hashed, each of the n-grams by several heads, and every (n-gram, head) has a range of
rows of its own, a prime number of them.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dsv4.runtime import checks

from .configuration import DeepseekV41Config
from .weights import BLOCK, Fp8Linear, wide

LEAST = 1e-6  # least size of a match whose root is taken


class Table(nn.Module):
    """Rows of e4m3, a scale e8m0 for 32 values."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn)
        scales = torch.empty(rows, width // BLOCK, dtype=torch.float8_e8m0fnu)
        self.weight, self.scale = (nn.Parameter(x, requires_grad=False) for x in (codes, scales))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up rows [...] -> [..., width]."""
        codes = self.weight.view(torch.uint8)[rows].view(torch.float8_e4m3fn).float()
        scales = self.scale.view(torch.uint8)[rows].view(torch.float8_e8m0fnu).float()
        return (codes.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2).to(dtype)

    @torch.no_grad()
    def fill(self, std: float) -> None:
        """Fill it at random, for a model without a checkpoint."""
        self.weight.copy_(torch.randn(self.weight.shape).to(torch.float8_e4m3fn))
        self.scale.copy_(torch.full(self.scale.shape, std).to(torch.float8_e8m0fnu))


class Engram(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        d, s = config.hidden_size, config.hc_mult
        self.width, self.eps = d, config.rms_norm_eps
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = Table(rows, config.engram_head_dim)
        self.wkv = Fp8Linear(columns * config.engram_head_dim, d * (s + 1))
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(s, d), requires_grad=False) for _ in "qk")

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """Add the rows [B, T, columns] to streams [B, T, s, D], weighted by how well they match each stream."""
        h = streams.to(wide(streams.dtype))
        made = self.wkv(self.embed(rows, streams.dtype).flatten(-2)).to(h.dtype)
        key, value = made[..., : -self.width].unflatten(-1, (-1, self.width)), made[..., -self.width :]
        match = (h * key * (self.q_weight.to(h.dtype) * self.k_weight.to(h.dtype))).sum(-1) * self.width**-0.5
        for x in (h, key):
            match = match * torch.rsqrt(x.square().mean(-1) + self.eps)
        gate = torch.copysign(match.abs().clamp_min(LEAST).sqrt(), match).sigmoid()
        return (h + gate[..., None] * value[:, :, None]).to(streams.dtype)


class NGrams:
    """The rows of all tables that tokens find. :meth:`bind` must be called before: the smaller vocabulary follows from
    the tokenizer, and is not in the checkpoint."""

    def __init__(self, config: DeepseekV41Config) -> None:
        self.config = config
        self.numbers: Tensor | None = None
        bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
        self.factors: dict[int, list[int]] = {}
        self.primes: dict[int, list[list[int]]] = {}
        used: set[int] = set()
        for layer in config.engram_layer_ids:
            drawn = numpy.random.default_rng(10007 * layer).integers(
                0, bound, config.engram_max_ngram_size, numpy.int64
            )
            self.factors[layer] = (2 * drawn + 1).tolist()
            self.primes[layer] = [self._primes(used) for _ in range(config.engram_max_ngram_size - 1)]

    def _primes(self, used: set[int]) -> list[int]:
        n = self.config.engram_vocab_size - 1
        found: list[int] = []
        while len(found) < self.config.engram_n_heads:
            n += 1
            if n not in used and _is_prime(n):
                found.append(n)
        used.update(found)
        return found

    def bind(self, numbers: Tensor) -> None:
        """Set the numbers of all tokens, int64 [vocab_size], which :func:`smaller_vocabulary` makes."""
        c = self.config
        checks.tensor("numbers", numbers, (c.vocab_size,), (torch.int64,))
        checks.in_range("numbers", numbers, 0, c.engram_compressed_vocab_size - 1)
        self.numbers = numbers

    def __call__(self, ids: Tensor, steps: Any) -> dict[int, Tensor]:
        """Return rows [B, T, columns] by layer of tokens [B, T]. The first token follows engram_pad_token_id."""
        if self.numbers is None:
            raise ValueError("ngrams: got no smaller vocabulary; call model.ngrams.bind(smaller_vocabulary(tokenizer))")
        c, t = self.config, ids.shape[1]
        steps.ids = torch.cat([steps.ids, ids], 1)
        back = c.engram_max_ngram_size - 1
        before = torch.full((len(ids), back), c.engram_pad_token_id, device=ids.device)
        known = self.numbers.to(ids.device)[torch.cat([before, steps.ids], 1)[:, -(t + back) :]]
        found = {}
        for layer in c.engram_layer_ids:
            hashed, rows, start = known[:, back:] * self.factors[layer][0], [], 0
            for n, primes in enumerate(self.primes[layer], 1):
                hashed = hashed ^ (known[:, back - n : back - n + t] * self.factors[layer][n])
                for prime in primes:
                    rows.append(hashed % prime + start)
                    start += prime
            found[layer] = torch.stack(rows, -1)
        return found


def smaller_vocabulary(tokenizer: Any) -> Tensor:
    """Return the number of every token, for NGrams.bind: numbers are given in the order in which texts first appear.
    The text of a token is compared without case, accents and outer spaces; a token that is not a whole character is
    itself.
    """
    from tokenizers import Regex, normalizers

    space = "\ue000"  # keeps a token of spaces alone from being stripped
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), space)]
    steps += [normalizers.Strip(), normalizers.Replace(space, " ")]
    plain, numbers = normalizers.Sequence(steps), []
    known: dict[str, int] = {}
    for token in range(len(tokenizer)):
        text = tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        broken = "\ufffd" in text
        key = tokenizer.backend_tokenizer.id_to_token(token) if broken else plain.normalize_str(text) or text
        numbers.append(known.setdefault(key, len(known)))
    return torch.tensor(numbers)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
