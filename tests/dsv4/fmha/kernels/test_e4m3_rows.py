"""FP8 caches in the kernels of both architectures, through softsm: every case, every order, every code."""

import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference, suites
from dsv4.runtime import dispatch

E4M3 = torch.float8_e4m3fn
SEED = 11
ARCHS = ["sm_90a"] + ["sm_100a"] * (dispatch.triton_version() >= (3, 9))
CASES = {str(case): case for case in suites.select("fmha", match="e4m3")}
QUICK = ("sm_90a", "fmha/e4m3-varlen-d64-bf16")
LONGEST = [("sm_90a", "fmha/e4m3-paged-12-d128-bf16"), ("sm_100a", "fmha/e4m3-paged-d64-fp16")]  # to compile


def marked(arch: str, name: str):
    key = (arch, name)
    mark = () if key == QUICK else pytest.mark.compile if key in LONGEST else pytest.mark.slow
    return pytest.param(arch, name, marks=mark)


@pytest.mark.parametrize("arch, name", [marked(arch, name) for arch in ARCHS for name in CASES])
def test_cases(arch, name):
    result = suites.run_case(CASES[name], suites.Where("softsm", arch), SEED)
    assert result.ok, result.why()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [2, 3])  # by decode.py on sm_90a, and by forward.py
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_order_and_no_race(arch, head_dim, queries):
    """More tiles than the ring has slots, by one CTA; some rows of the last are masked."""
    keys, page = 5 * 128 + 9, 24
    q = torch.randn(1, queries, 8, head_dim).bfloat16()
    pages = -(-keys // page)
    k, v = ((torch.randn(pages, page, 1, head_dim) * 2).to(E4M3) for _ in "kv")
    table, lengths = torch.randperm(pages).int()[None], torch.tensor([keys]).int()
    scales = dict(k_scale=torch.tensor([0.3]), v_scale=torch.tensor(1.7))
    for order, seed in (("eager", 0), ("latest", 0), ("random", 1)):
        with softsm.use(arch), softsm.checking(order=order, seed=seed) as report:
            got = dsv4.fmha_paged(
                q, k, v, table, lengths, causal=True, return_lse=True, deterministic=True, backend="softsm", **scales
            )
        assert report.launches > 0 and not report, f"{order} {seed}:\n{report}"
        assert_agrees(got, reference.fmha_paged, q, k, v, table, lengths, causal=True, **scales)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_code_is_converted_exactly(arch, dtype):
    """Every query sees one key, of another code: out is the value of its code exactly, lse that of the key nearly."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    every = every[every.float().isfinite()]
    q, k, v = (torch.zeros(1, len(every), 1, 64) for _ in "qkv")
    q[0, :, 0, 0] = 1
    k[0, :, 0, 0] = every.float()
    v[0, :, 0, :] = every.float()[:, None]
    q, k, v = q.to(dtype), k.to(E4M3), v.to(E4M3)
    options = dict(window=(0, 0), return_lse=True, softmax_scale=1.0, backend="softsm")
    for some in torch.arange(len(every)).split(100):
        with softsm.use(arch):
            out, lse = dsv4.fmha(q[:, some], k[:, some], v[:, some], **options)
        assert torch.equal(out[0, :, 0].float(), v[0, some, 0].float())
        torch.testing.assert_close(lse[0, 0], every[some].float())
