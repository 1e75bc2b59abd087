"""What the environment says, read once, when dsv4 is imported. A call reads it here: os.environ takes a microsecond."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Settings:
    check_values: bool  # on a GPU too: values of indices, lengths and starts
    pair: bool  # Hopper's kernel of two CTAs, where it serves the problem
    aot: Path | None  # compiled kernels are taken from here (aot.py) ...
    aot_only: bool = False  # ... and from nowhere else


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "0") == "1"


settings = Settings(
    check_values=_switched_on("DSV4_CHECK"),
    pair=_switched_on("DSV4_PAIR"),
    aot=Path(os.environ["DSV4_AOT"]) if os.environ.get("DSV4_AOT") else None,
)
