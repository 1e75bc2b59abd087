"""The Hopper kernels of V4 attention with DeepSeek-V4.1's rows of 528 and 288 bytes, on a CPU through softsm.

The window has one format and the compressed rows another: what the model has, and what one format does not show.
"""

import launches
import pytest
import torch
from agreement import assert_agrees
from v41_problem import problem

import dsv4
import softsm
from dsv4 import reference
from dsv4.caches.formats import FP8_584, MXFP8_528, MXFP8_528_INTERLEAVED, NVFP4_288, NVFP4_288_INTERLEAVED
from dsv4.runtime import calls, dispatch
from dsv4.v4 import problem as v4_problem
from dsv4.v4.kernels import unpack_pools
from dsv4.v4.kernels.sm90 import entry

NAN = float("nan")
ORDERS = ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))]
slow = pytest.mark.slow


@pytest.fixture
def check(monkeypatch):
    """What the kernel that is chosen gives, races checked, against the definition."""
    names = launches.launched(monkeypatch)

    def checked(
        kernel: str, arguments: dict, order: str = "latest", heads: int = 0, splits: int = 1, **more: bool
    ) -> None:
        def choice(p, target):
            if kernel == "v4_decode_swap_ab":
                options = next(o for o, _ in entry.SWAP_AB[0] if (o["HEADS"], o["KEYS"]) == (heads, 64))
                return entry.v4_decode_swap_ab, options, splits
            if kernel == "v4_decode_swap_ab_ws":
                options = next(options for options, *_ in entry.SWAP_AB_WS[2] if options["HEADS"] == heads)
                return entry.v4_decode_swap_ab_ws, options | more, splits
            return None

        monkeypatch.setattr(entry, "decode_kernel", choice)
        monkeypatch.setattr(unpack_pools, "pays", lambda p: kernel == "v4_unpack")
        calls.forget()
        out = torch.full_like(arguments["q"], NAN)
        with launches.race_free("sm_90a", order=order, seed=5):
            got = dsv4.v4_attention(**arguments, out=out, return_lse=True, backend="softsm")
        assert names[0] == kernel
        assert_agrees(got, reference.v4_attention, **arguments)

    return checked


@slow  # a kernel of roles: the one of few queries compiles in a third of its time
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
@pytest.mark.parametrize("staged", [False, True])
def test_few_heads(order, staged, check):
    check("v4_decode_swap_ab_ws", problem(MXFP8_528, NVFP4_288, 12), order, heads=16, STAGED=staged)


@slow
@pytest.mark.parametrize("splits", [1, 3])
def test_staged_rows_in_interleaved_pages(splits, check):
    formats = MXFP8_528_INTERLEAVED, NVFP4_288_INTERLEAVED
    check("v4_decode_swap_ab_ws", problem(*formats, 8), heads=16, splits=splits, STAGED=True)


@pytest.mark.compile
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("splits", [1, pytest.param(4, marks=slow)])
def test_few_queries(order, splits, check):
    check("v4_decode_swap_ab", problem(MXFP8_528, NVFP4_288, 20), order, heads=16, splits=splits)


@slow
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_64_heads(order, check):
    check("v4_sparse", problem(MXFP8_528, NVFP4_288, 70), order)


PAIRS = [
    (NVFP4_288, MXFP8_528),
    (MXFP8_528_INTERLEAVED, NVFP4_288_INTERLEAVED),
    (MXFP8_528, MXFP8_528),
    (NVFP4_288, NVFP4_288),
    (FP8_584, NVFP4_288),
    (MXFP8_528, FP8_584),
]


@slow
@pytest.mark.parametrize("formats", PAIRS, ids=lambda x: "-".join(f.name for f in x))
@pytest.mark.parametrize("kernel, heads", [("v4_sparse", 0), ("v4_decode_swap_ab", 32), ("v4_decode_swap_ab_ws", 32)])
def test_other_pairs_of_formats(formats, kernel, heads, check):
    check(kernel, problem(*formats, 20), heads=heads)


@slow
@pytest.mark.parametrize("more", [8, 3])
@pytest.mark.parametrize("kernel, heads", [("v4_sparse", 0), ("v4_decode_swap_ab_ws", 16)])
def test_pages_at_other_addresses(more, kernel, heads, check):
    check(kernel, problem(MXFP8_528, NVFP4_288_INTERLEAVED, 20, more=more), heads=heads)


@slow
@pytest.mark.parametrize("kernel, heads", [("v4_sparse", 0), ("v4_decode_swap_ab_ws", 16)])
def test_by_block_table(kernel, heads, check):
    check(kernel, problem(MXFP8_528, NVFP4_288, 20, table=True), heads=heads)


@slow
@pytest.mark.parametrize("kernel, heads", [("v4_sparse", 0), ("v4_decode_swap_ab", 16), ("v4_decode_swap_ab_ws", 16)])
def test_the_greatest_and_the_least_scales(kernel, heads, check):
    """Rows come times 2^-8 and scales with up to 2^127: here scales of the window are 2^15, and those that its writer
    gives to zeros; the compressed rows' are 448 and 2^-9."""
    arguments = problem(MXFP8_528, NVFP4_288, 20)
    rows = torch.randn(100, 512)
    rows[::2] *= 2.0**23 / rows[::2].abs().amax()
    rows[1::4] *= 2.0**-24
    arguments["window"].write(torch.arange(100), rows)
    assert arguments["window"].scale_view()[:3].max() == 142
    rows = torch.randn(320, 512)
    rows[::2] *= 2688 / rows[::2].abs().amax(-1, keepdim=True)
    rows[1::2] *= 2.0**-8
    arguments["compressed"].write(torch.arange(320), rows)
    arguments["q"] = arguments["q"] * 2.0**-20
    check(kernel, arguments, heads=heads)


@slow
def test_unpacked_first(check):
    check("v4_unpack", problem(MXFP8_528_INTERLEAVED, NVFP4_288, 20))


@slow
@pytest.mark.parametrize("formats", [(MXFP8_528, NVFP4_288), (NVFP4_288, MXFP8_528)], ids=["528-288", "288-528"])
def test_a_query_gives_the_same_bits_in_every_batch(formats):
    arguments = problem(*formats, 8)
    with softsm.use("sm_90a"):
        whole = dsv4.v4_attention(**arguments, deterministic=True, backend="softsm")
        per_query = ("q", "window_indices", "window_lengths", "compressed_indices", "compressed_lengths")
        for n in (0, 2):
            one = arguments | {name: arguments[name][n : n + 1] for name in per_query}
            one["inverse_rope"] = (arguments["inverse_rope"][0], arguments["inverse_rope"][1][n : n + 1])
            assert torch.equal(dsv4.v4_attention(**one, deterministic=True, backend="softsm")[0], whole[n])


CHOICES = {  # queries, heads -> kernel, heads of a CTA, splits, whether rows are staged; as measured on an H200
    (1, 64): ("v4_decode_swap_ab", 16, 10, False),
    (3, 64): ("v4_decode_swap_ab_ws", 16, 10, False),
    (4, 64): ("v4_decode_swap_ab_ws", 16, 5, False),
    (6, 64): ("v4_decode_swap_ab_ws", 16, 5, False),
    (8, 64): ("v4_decode_swap_ab_ws", 32, 5, False),
    (32, 64): ("v4_decode_swap_ab_ws", 32, 2, False),
    (64, 64): ("v4_decode_swap_ab_ws", 32, 1, False),
    (128, 64): None,
    (32, 8): ("v4_decode_swap_ab_ws", 16, 4, False),
    (128, 16): ("v4_decode_swap_ab_ws", 16, 1, True),
    (128, 32): ("v4_decode_swap_ab_ws", 32, 1, False),
}


@pytest.mark.parametrize("queries, heads", CHOICES)
def test_which_kernel_is_chosen(queries, heads):
    lists = [torch.zeros(queries, n, dtype=torch.int32) for n in (128, 512)]
    p = v4_problem.build(
        torch.zeros(queries, heads, 512, dtype=torch.bfloat16),
        dsv4.Mxfp8Cache.empty(4, 32),
        lists[0],
        dsv4.Nvfp4Cache.empty(4, 64),
        lists[1],
    )
    found = entry.decode_kernel(p, dispatch.compile_target("sm_90a"))
    if found is not None:
        kernel, options, splits = found
        found = kernel.__name__, options["HEADS"], splits, options.get("STAGED", False)
    assert found == CHOICES[queries, heads]
