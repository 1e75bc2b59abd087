"""Problems of V4 attention, and running them on the Blackwell kernels through softsm with races checked."""

import launches
import torch
from agreement import assert_agrees
from v41_problem import numbers

import dsv4
from dsv4 import reference

NAN = float("nan")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 512).bfloat16()


def run(order: str = "eager", seed: int = 11, **arguments):
    """(out, lse) of the kernel, races checked, and what the definition is asked."""
    out = torch.full_like(arguments["q"], NAN)
    with launches.race_free("sm_100a", order=order, seed=seed):
        got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
    return got, {name: x for name, x in arguments.items() if name not in ("plan", "deterministic")}


def compare(got, arguments) -> None:
    assert_agrees(got, reference.v4_attention, **arguments)


def plain(queries: int = 1, heads: int = 80, window: int = 70, compressed: int = 150) -> dict:
    """Two lists of plain rows, the last block of each in part; rows of the second pool are 576 apart, NaN where none
    is named."""
    pool = torch.full((90, 576), NAN).bfloat16()[:, :512]
    pool[:60] = rows(60)
    return dict(
        q=torch.randn(queries, heads, 512).bfloat16(),
        window=rows(100),
        sink=torch.randn(heads),
        window_indices=numbers(queries, window, of=100),
        compressed=pool,
        compressed_indices=numbers(queries, compressed, of=60),
        inverse_rope=(reference.rope_table(50, 64), torch.randint(0, 50, (queries,), dtype=torch.int32)),
    )


def in_fp16(problem: dict) -> dict:
    return problem | {name: problem[name].half() for name in ("q", "window", "compressed")}


def fp8() -> dict:
    """Three requests of 1, 0 and 2 queries; the last query belongs to none. Pages of two rows, NaN where none are."""
    window = dsv4.Fp8Cache.pack(rows(64), rows_per_page=64)
    compressed = dsv4.Fp8Cache.empty(80, 2)
    compressed.storage.fill_(255)
    compressed.write(torch.arange(150), rows(150))
    return dict(
        q=torch.randn(4, 16, 512).bfloat16(),
        window=window,
        window_indices=numbers(4, 60, of=64),
        window_lengths=torch.tensor([60, 0, 7, 33], dtype=torch.int32),
        compressed=compressed,
        compressed_block_table=torch.randint(0, 75, (3, 40), dtype=torch.int32),
        compressed_lengths=torch.tensor([80, 70, 0, 80], dtype=torch.int32),
        request_starts=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
    )
