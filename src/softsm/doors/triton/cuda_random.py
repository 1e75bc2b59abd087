"""torch.cuda's generators: CPU generators that also count Philox offsets, which kernels with dropout need."""

from __future__ import annotations

import torch

GPU = torch.device("cuda", 0)


class Generator(torch.Generator):
    """torch.Generator(device="cuda"): numbers come from the CPU's generator; the state is (seed, offset), 16 bytes.

    Reading or setting the state starts the stream that belongs to it, so that what follows both is the same.
    """

    def __new__(cls, device: object = "cpu"):
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]

    def __init__(self, device: object = "cpu"):
        super().__init__()
        self._seed, self._offset = super().initial_seed(), 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed)
        self._seed, self._offset = super().initial_seed(), 0
        return self

    def seed(self) -> int:
        self._seed, self._offset = super().seed(), 0
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        if offset % 4:
            raise RuntimeError(f"offset: got {offset}; accepted: multiples of 4")
        self._offset = int(offset)
        return self

    def get_state(self) -> torch.Tensor:
        state = torch.tensor([_signed(self._seed), self._offset]).view(torch.uint8)
        self._start()
        return state

    def set_state(self, state: torch.Tensor) -> Generator:
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError(f"state: got {state.numel()} x {state.dtype}; accepted: the 16 bytes of get_state()")
        seed, offset = state.contiguous().view(torch.int64).tolist()
        self._seed, self._offset = seed % 2**64, offset
        self._start()
        return self

    def clone_state(self) -> Generator:
        return Generator().set_state(self.get_state())

    def _start(self) -> None:
        super().manual_seed((self._seed * 0x9E3779B97F4A7C15 + self._offset) % 2**63)
        self._offset += 4


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


class DefaultGenerator(Generator):
    """torch.cuda.default_generators[0]: seeded with torch's own, as torch.manual_seed seeds all devices."""

    def __init__(self) -> None:
        super().__init__()
        self.manual_seed(torch.default_generator.initial_seed())


def answers() -> dict[str, object]:
    """Returns torch.cuda's functions for random numbers. Without a generator, the CPU's default one is used."""
    default = DefaultGenerator()

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        default.manual_seed(seed)

    return {
        "default_generators": (default,),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": default.initial_seed,
        "seed": default.seed,
        "seed_all": default.seed,
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state": lambda state, *_: torch.default_generator.set_state(state) and None,
        "set_rng_state_all": lambda states: torch.default_generator.set_state(states[0]) and None,
    }
