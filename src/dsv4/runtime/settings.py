"""Environment variables, read once, when dsv4 is imported. A call reads them here: os.environ needs a microsecond."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Settings:
    check_values: bool  # on a GPU too: values of indices, lengths and starts
    aot: Path | None  # compiled kernels are taken from here (aot.py) ...
    aot_only: bool = False  # ... and from nowhere else
    cubins: bool = True  # without aot: kernels are taken from the wheel dsv4-cubins, if it is installed


def switched_on(name: str, default: str = "0") -> bool:
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        raise ValueError(f"{name}: got {value!r}; accepted: 0, 1")
    return value == "1"


settings = Settings(
    check_values=switched_on("DSV4_CHECK"),
    aot=Path(os.environ["DSV4_AOT"]) if os.environ.get("DSV4_AOT") else None,
    cubins=switched_on("DSV4_CUBINS", "1"),
)
